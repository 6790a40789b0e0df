"""What products with a base in few bits move, where the engine makes each matrix wide first, as the native one does."""

from __future__ import annotations

from stretto.placement.devices import DeviceKind

WIDENED = {"fp8": 9.0, "int8": 5.0, "nf4": 4.6}
"""Bytes per weight: read, written in the type of the product, and read; fp8 is written in that before it is scaled."""

HELD = {"fp8": 4.0, "int8": 2.0, "nf4": 2.0}
"""Bytes per weight of the matrix that is wide at the moment, in the type of the product; of fp8 before scaling, too."""

IN_FP32, HELD_IN_FP32 = 21.0, 6.0
"""Both of 8 bits on CPUs, which are written and scaled in fp32 first."""


def widened_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes that a product moves per weight; 0 where nothing is made wide."""
    return IN_FP32 if _in_fp32(precision, kind) else WIDENED.get(precision, 0.0)


def held_bytes(precision: str, kind: DeviceKind) -> float:
    """Bytes per weight of the matrix that is wide at the moment; 0 where nothing is made wide."""
    return HELD_IN_FP32 if _in_fp32(precision, kind) else HELD.get(precision, 0.0)


def _in_fp32(precision: str, kind: DeviceKind) -> bool:
    return precision in ("fp8", "int8") and not kind.has_matrix_units
