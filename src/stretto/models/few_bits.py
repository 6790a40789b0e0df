"""How a weight is stored in few bits, and what a product multiplies by.

NF4 is bitsandbytes' (Dettmers et al. 2023): four bits, a scale for every 64 weights, and these in 8 bits. int8 and fp8
have a scale for every row, by which in bfloat16 not the weights are multiplied but what comes out. Everything that is
stored is bytes, so a change of the network's type, a move to another device and slices over several devices (FSDP2)
leave it as it is.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from stretto.errors import RecipeError
from stretto.extras import install

BLOCK, NESTED = 64, 256
"""Weights of NF4 that share a scale, and scales that share one of their own."""

KERNELS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Type -> how bitsandbytes' functions for CPUs end that write it."""

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
        """Bytes -> what a product in a type multiplies by, and nobody after it: the weight, unless a row has one
        scale."""
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
        return read_nf4(stored.weight, self._scales(stored, shape), shape, dtype)

    def factors(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Factors:
        """The weight, on a CPU always in the same place."""
        scales, device = self._scales(stored, shape), stored.weight.device
        if device.type == "cpu" and shape[1] % BLOCK == 0 and (write := nf4_writer(through := type_of(dtype, device))):
            room = room_for(shape, through, device)
            write(stored.weight, scales, room)
            return Factors(room.to(dtype))
        return Factors(read_nf4(stored.weight, scales, shape, dtype))

    def _scales(self, stored: Stored, shape: tuple[int, int]) -> Tensor:
        """Of blocks, in fp32."""
        count = shape[0] * shape[1]
        largest, offset, narrow = scales_of_scales(stored.scales, count)
        narrow, code = narrow[: -(-count // BLOCK)], dynamic_code(narrow.device)
        wide: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(narrow, largest, code, NESTED, torch.float32)
        return wide.add_(offset)


class RowScaled(Format, Protocol):
    """A number in 8 bits for each weight, and a scale for each row."""

    def numbers(self, stored: Stored, into: Tensor) -> Tensor:
        """Writes them into (O, I), which is returned. Every type of floating point can say what they say."""
        ...

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers times the scale of their row."""
        return self._scaled(stored, stored.weight.new_empty(shape, dtype=torch.float32)).to(dtype)

    def factors(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype) -> Factors:
        """In bf16 both, so that no weight is written twice. Sums of such numbers pass the largest of fp16, and in wider
        types the product is that of the wide weight to the bit."""
        narrow = dtype == torch.bfloat16
        room = room_for(shape, dtype if narrow else torch.float32, stored.weight.device)
        if narrow:
            return Factors(self.numbers(stored, room), stored.scales.view(torch.float32))
        return Factors(self._scaled(stored, room).to(dtype))

    def _scaled(self, stored: Stored, into: Tensor) -> Tensor:
        return self.numbers(stored, into).mul_(stored.scales.view(torch.float32)[:, None])


class Int8(RowScaled):
    """Whole numbers from -127 to 127."""

    def store(self, weight: Tensor) -> Stored:
        """To the nearest."""
        scales = row_scales(weight, 127)
        return Stored(as_bytes((weight / scales).round_().to(torch.int8)), as_bytes(scales))

    def numbers(self, stored: Stored, into: Tensor) -> Tensor:
        """As they are stored."""
        return into.copy_(stored.weight.view(torch.int8).view(into.shape))


class Fp8(RowScaled):
    """Floating point with four bits of exponent and three of mantissa."""

    def store(self, weight: Tensor) -> Stored:
        """To the nearest."""
        scales = row_scales(weight, LARGEST_FP8)
        return Stored(as_bytes((weight / scales).to(torch.float8_e4m3fn)), as_bytes(scales))

    def numbers(self, stored: Stored, into: Tensor) -> Tensor:
        """As they are stored."""
        codes = stored.weight.view(into.shape)
        on_cpu = codes.device.type == "cpu"
        return into.copy_(fp8_by_bits(codes) if on_cpu else codes.view(torch.float8_e4m3fn))


class MatrixScratch(threading.local):
    """Memory of a thread, for one matrix at a time."""

    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}

    def of(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A matrix in it, until the next one is asked for."""
        count = shape[0] * shape[1]
        if dtype not in self.rooms or self.rooms[dtype].numel() < count:
            self.rooms[dtype] = torch.empty(count, dtype=dtype)
        return self.rooms[dtype][:count].view(shape)


SCRATCH = MatrixScratch()
"""Of each thread that multiplies on a CPU."""


def room_for(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Where a matrix is made wide for one product: on a CPU always in the same place. Between results that stay it
    would leave a hole each time, in which glibc finds no room for the next: to place a tensor on a cache line it asks
    for 96 bytes more than that has."""
    return SCRATCH.of(shape, dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)


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
    read = dequantized(codes, scales, rows, type_of(dtype, codes.device))
    return read.flatten()[:count].view(shape).to(dtype)


def dequantized(codes: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """By bitsandbytes, a new matrix."""
    read: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scales, BLOCK, "nf4", shape, dtype)
    return read


@cache
def nf4_writer(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """(codes, scales, a CPU's matrix that is there) -> what bitsandbytes makes of the codes, in that matrix.

    Its operation has no place for that, so the function behind it is called; none where there is none of that name that
    does the same.
    """
    from bitsandbytes.cextension import lib

    kernel = getattr(lib, f"cdequantize_blockwise_cpu_nf4_{KERNELS.get(dtype)}", None)
    if kernel is None:
        return None

    def write(codes: Tensor, scales: Tensor, into: Tensor) -> None:
        places = (ctypes.c_void_p(each.data_ptr()) for each in (codes, scales, into))
        kernel(*places, *map(ctypes.c_longlong, (BLOCK, *into.shape)))

    codes, scales = drawn_nf4(torch.device("cpu"))
    into = torch.zeros(len(scales) // 2, 2 * BLOCK, dtype=dtype)
    write(codes, scales, into)
    return write if torch.equal(into, dequantized(codes, scales, (len(into), 2 * BLOCK), dtype)) else None


def type_of(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What NF4 is read into on its way to a type."""
    return dtype if rounds_alike(dtype, device) else torch.float32


def drawn_nf4(device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of some blocks, to try on them how bitsandbytes reads."""
    draw, blocks = torch.Generator().manual_seed(0), 256
    codes = torch.randint(256, (blocks * BLOCK // 2,), generator=draw).to(device, torch.uint8)
    return codes, torch.rand(blocks, generator=draw).to(device)


@cache
def rounds_alike(dtype: torch.dtype, device: torch.device) -> bool:
    """True if bitsandbytes reads NF4 straight into a type to the bits that it comes to by way of fp32, which takes
    several times as long. What it runs for that depends on the processor, so it is tried once."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    codes, scales = drawn_nf4(device)
    straight, wide = (dequantized(codes, scales, (len(scales), BLOCK), each) for each in (dtype, torch.float32))
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
