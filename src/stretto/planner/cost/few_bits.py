"""What products with a base in few bits move, where the engine makes each matrix wide first, as the native one does."""

from __future__ import annotations

from stretto.placement.devices import DeviceKind

WIDENED = {"fp8": 5.0, "int8": 5.0, "nf4": 4.6}
"""Bytes per weight: read, written in the type of the product, and read."""

BY_TABLE = 8.0
"""Of nf4 on GPUs, as if so many were moved: its kernel looks each weight up. Measured on one H200, 5.2 ms a decode step
longer than in bf16 for 2.8 billion weights, 9.6 for 6.5."""

HELD = {"fp8": 2.0, "int8": 2.0, "nf4": 2.0}
"""Bytes per weight of the matrix that is wide at the moment, in the type of the product."""

BY_BITS, HELD_BY_BITS = 30.0, 6.0
"""Both of fp8 on CPUs, which cannot read it: its bits are moved one after the other, ten times the work of int8."""


def widened_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes that a product moves per weight; 0 where nothing is made wide."""
    if precision == "nf4" and kind.has_matrix_units:
        return BY_TABLE
    return BY_BITS if _by_bits(precision, kind) else WIDENED.get(precision, 0.0)


def held_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes per weight of the matrix that is wide at the moment; 0 where nothing is made wide."""
    return HELD_BY_BITS if _by_bits(precision, kind) else HELD.get(precision, 0.0)


def _by_bits(precision: str, kind: DeviceKind) -> bool:
    return precision == "fp8" and not kind.has_matrix_units
