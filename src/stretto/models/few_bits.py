"""How a weight is stored in few bits, and what a product multiplies by.

NF4 is bitsandbytes' (Dettmers et al. 2023): four bits, a scale for every 64 weights, and these in 8 bits. int8 and fp8
have a scale for every row, by which in bfloat16 not the weights are multiplied but what comes out. Everything that is
stored is bytes, so a change of the network's type, a move to another device and slices over several devices (FSDP2)
leave it as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.errors import RecipeError
from stretto.extras import install

BLOCK, NESTED = 64, 256
"""Weights of NF4 that share a scale, and scales that share one of their own."""

LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
"""448."""


class Stored(NamedTuple):
    """A weight in few bits."""

    weight: Tensor
    """Its bytes, flat."""
    scales: Tensor
    """Its scales, as bytes."""


class Factors(NamedTuple):
    """A weight as a product multiplies by it."""

    matrix: Tensor
    """(O, I) in the type of the product."""
    scales: Tensor | None = None
    """(O) in fp32, by which what comes out is multiplied; None: the matrix is the weight."""


class Reading(Protocol):
    """How bytes are read."""

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Bytes -> (O, I) in fp32, or rounded from that to another type."""
        ...

    def factors(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Factors:
        """Bytes -> what a product in a type multiplies by: the weight, unless a row has one scale."""
        return Factors(self.wide(stored, shape, dtype))


class Format(Reading, Protocol):
    """How weights are stored."""

    def store(self, weight: Tensor) -> Stored:
        """(O, I) fp32 -> bytes."""
        ...


class Nf4(Format):
    """Four bits, whose sixteen values lie as a normal distribution does."""

    def store(self, weight: Tensor) -> Stored:
        """As bitsandbytes does."""
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True)
        parts = [as_bytes(state.state2.absmax), as_bytes(state.offset), as_bytes(state.absmax)]
        return Stored(packed.flatten(), pad(torch.cat(parts), (0, -state.absmax.numel() % 4)))  # words stay words

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """As bitsandbytes does."""
        count = shape[0] * shape[1]
        largest, offset, narrow = scales_of_scales(stored.scales, count)
        narrow, code = narrow[: -(-count // BLOCK)], dynamic_code(narrow.device)
        scales = torch.ops.bitsandbytes.dequantize_blockwise(narrow, largest, code, NESTED, torch.float32).add_(offset)
        return read_nf4(stored.weight, scales, shape, dtype)


class RowScaled(Format, Protocol):
    """A number in 8 bits for each weight, and a scale for each row."""

    def numbers(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """(O, I) of them. Every type of floating point can say what they say."""
        ...

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers times the scale of their row."""
        by_row = stored.scales.view(torch.float32)[:, None]
        return self.numbers(stored, shape, torch.float32).mul_(by_row).to(dtype)

    def factors(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Factors:
        """In bf16 both, so that no weight is written twice. Sums of such numbers pass the largest of fp16, and in wider
        types the product is that of the wide weight to the bit."""
        if dtype == torch.bfloat16:
            return Factors(self.numbers(stored, shape, dtype), stored.scales.view(torch.float32))
        return super().factors(stored, shape, dtype)


class Int8(RowScaled):
    """Whole numbers from -127 to 127."""

    def store(self, weight: Tensor) -> Stored:
        """To the nearest."""
        scales = row_scales(weight, 127)
        return Stored(as_bytes((weight / scales).round_().to(torch.int8)), as_bytes(scales))

    def numbers(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """As they are stored."""
        return stored.weight.view(torch.int8).view(shape).to(dtype)


class Fp8(RowScaled):
    """Floating point with four bits of exponent and three of mantissa."""

    def store(self, weight: Tensor) -> Stored:
        """To the nearest."""
        scales = row_scales(weight, LARGEST_FP8)
        return Stored(as_bytes((weight / scales).to(torch.float8_e4m3fn)), as_bytes(scales))

    def numbers(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """As they are stored."""
        if stored.weight.device.type == "cpu":
            return fp8_by_bits(stored.weight.view(shape)).to(dtype)
        return stored.weight.view(torch.float8_e4m3fn).view(shape).to(dtype)


FORMATS: Mapping[str, Format] = {"nf4": Nf4(), "int8": Int8(), "fp8": Fp8()}
"""`model.quantize` -> how weights are stored."""


def scales_of_scales(scales: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the scales of so many weights in NF4 are scaled by, what is added to all of them, and they themselves, as
    bytes."""
    nested = -(-count // (BLOCK * NESTED))
    largest, offset = scales[: 4 * nested + 4].view(torch.float32).split([nested, 1])
    return largest, offset, scales[4 * nested + 4 :]


def read_nf4(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """(O, I) of two codes in a byte, and a scale for each block of them.

    bitsandbytes is told of rows that are whole blocks: where a processor has AVX-512, it takes the scales of each row
    to begin with that row.
    """
    count = shape[0] * shape[1]
    whole = (count // BLOCK, BLOCK) if count % BLOCK == 0 else (1, count + count % 2)
    rows = shape if shape[1] % BLOCK == 0 else whole
    through = dtype if rounds_alike(dtype, codes.device) else torch.float32
    read: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", rows, through)
    return read.flatten()[:count].view(shape).to(dtype)


@cache
def rounds_alike(dtype: torch.dtype, device: torch.device) -> bool:
    """True if bitsandbytes reads NF4 straight into a type to the bits that it comes to by way of fp32, which takes
    several times as long. What it runs for that depends on the processor, so it is tried once."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    draw, blocks = torch.Generator().manual_seed(0), 256
    codes = torch.randint(256, (blocks * BLOCK // 2,), generator=draw).to(device, torch.uint8)
    scales = torch.rand(blocks, generator=draw).to(device)
    straight, wide = (
        torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", (blocks, BLOCK), each)
        for each in (dtype, torch.float32)
    )
    return torch.equal(straight, wide.to(dtype))


@cache
def dynamic_code(device: torch.device) -> Tensor:
    """The 256 values that scales of NF4 are rounded to."""
    from bitsandbytes.functional import create_dynamic_map

    code: Tensor = create_dynamic_map().to(device)
    return code


def fp8_by_bits(codes: Tensor) -> Tensor:
    """Bytes of fp8 (e4m3, no NaN) -> bfloat16, many times as fast as torch's own conversion on CPUs.

    With the exponent's and the mantissa's bits where bfloat16 has them, a number is 2^120 times too small, for its
    exponent counts from 7 and not from 127.
    """
    wide = codes.to(torch.int16)
    bits = (wide & 0x7F).bitwise_left_shift_(4).bitwise_or_((wide & 0x80).bitwise_left_shift_(8))
    return bits.view(torch.bfloat16).mul_(2.0**120)


def row_scales(weight: Tensor, most: float) -> Tensor:
    """(O, 1) what the largest number of a row is divided by to become `most`; 1 where all are 0."""
    largest = weight.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, largest / most, 1.0)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat."""
    return tensor.contiguous().flatten().view(torch.uint8)


def refuse_missing() -> None:
    """Whoever has not installed bitsandbytes is told how."""
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels on a hub that nobody asked for
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise RecipeError.of(
            "model.quantize", f"nf4 needs bitsandbytes ({error})", f"{install('quant')}, or use int8"
        ) from error
