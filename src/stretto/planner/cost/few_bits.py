"""What products with a base in few bits move, where the engine makes each matrix wide first, as the native one does."""

from __future__ import annotations

from stretto.placement.devices import DeviceKind

WIDENED = {"fp8": 5.0, "int8": 5.0, "nf4": 4.6}
"""Bytes per weight: read, written in the type of the product, and read."""

BY_TABLE = 8.0
"""Of nf4 on GPUs, as if so many were moved: its kernel looks each weight up. Measured on one H200, 5.2 ms a decode step
longer than in bf16 for 2.8 billion weights, 9.6 for 6.5."""

WIDE = 2.0
"""Bytes per weight of a wide matrix, in bfloat16."""

BY_BITS, BITS_HELD = 30.0, 4.0
"""Of fp8 on CPUs, which cannot read it: bytes that are moved, since its bits are one after the other, ten times the
work of int8; and those that lie beside the wide matrix meanwhile."""


def widened_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes that a product moves per weight; 0 where nothing is made wide."""
    if precision == "nf4" and kind.has_matrix_units:
        return BY_TABLE
    return BY_BITS if _by_bits(precision, kind) else WIDENED.get(precision, 0.0)


def held_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes per weight that making a matrix wide takes for a product; 0 where none is, and where there is a place for
    it that stays: a CPU's."""
    if kind.has_matrix_units:
        return WIDE if precision in WIDENED else 0.0
    return BITS_HELD if precision == "fp8" else 0.0


def _by_bits(precision: str, kind: DeviceKind) -> bool:
    return precision == "fp8" and not kind.has_matrix_units
