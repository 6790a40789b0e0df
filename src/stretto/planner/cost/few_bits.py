"""What products with a base in few bits move, where the engine makes each matrix wide first, as the native one does."""

from __future__ import annotations

from stretto.placement.devices import DeviceKind

WIDENED = {"fp8": 5.0, "int8": 5.0, "nf4": 4.6}
"""Bytes per weight: read, written in the type of the product, and read."""

HELD = {"fp8": 2.0, "int8": 2.0, "nf4": 2.0}
"""Bytes per weight of the matrix that is wide at the moment, in the type of the product."""

FP8_BY_BITS = 30.0
"""Bytes per weight that take as long as reading fp8 on CPUs, which cannot: measured beside int8's 3."""


def widened_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes that a product moves per weight; 0 where nothing is made wide."""
    if precision == "fp8" and not kind.has_matrix_units:
        return FP8_BY_BITS
    return WIDENED.get(precision, 0.0)
