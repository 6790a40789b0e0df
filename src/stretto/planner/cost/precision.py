"""Types that weights are stored in, and what each takes."""

from __future__ import annotations

from typing import Literal

Precision = Literal["float64", "float32", "bfloat16", "float16", "fp8", "int8", "nf4"]

BYTES: dict[Precision, float] = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.03,
    "int8": 1.03,
    "nf4": 0.53,
}
"""Bytes of a stored weight, scales included: fp32 ones per 128 weights, or fewer, for 8 bits, doubly quantised ones per
64 for NF4."""

UNAIDED: dict[Precision, float] = {"float32": 1 / 16, "float64": 1 / 32}
"""Of a GPU's bf16 products, what it reaches where tensor cores do not help: 67 and 34 of an H100's 989 TFLOP/s."""


def width(precision: Precision) -> float:
    """Bytes of one number of a hidden vector or a cache: those of the model where it is not quantised."""
    return max(BYTES[precision], 2.0)
