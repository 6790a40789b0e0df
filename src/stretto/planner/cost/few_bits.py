"""What products with a base in few bits move, where the engine makes each matrix wide first, as the native one does."""

from __future__ import annotations

from stretto.placement.devices import DeviceKind

WIDENED = {"fp8": 9.0, "int8": 5.0, "nf4": 4.6}
"""Bytes per weight: read, written in the type of the product, and read; fp8 is written in that before it is scaled."""

HELD = {"fp8": 4.0, "int8": 2.0, "nf4": 2.0}
"""Bytes per weight of the matrix that is wide at the moment, in the type of the product; of fp8 before scaling, too."""

IN_FP32 = 21.0
"""The same of 8 bits on CPUs, which are written and scaled in fp32 first."""


def widened_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes that a product moves per weight; 0 where nothing is made wide."""
    if precision in ("fp8", "int8") and not kind.has_matrix_units:
        return IN_FP32
    return WIDENED.get(precision, 0.0)
