"""A frozen base in few bits: linear layers whose weights are made wide for the moment of a product.

NF4 is bitsandbytes' (Dettmers et al. 2023): four bits, a scale for every 64 weights, and these in 8 bits. int8 and fp8
have a scale for every row. The products are ours, for three reasons. A weight that was made wide is not kept for the
backward, which makes it again. bitsandbytes' own layer is repacked in place by one forward in eval mode, after which
gradients are wrong without a sound; here there is no such mode. And everything that is stored is bytes, so a change of
the network's type, a move to another device and slices over several devices (FSDP2) leave it as it is.

Engine and trainer compute with the same module, so an answer is sampled from the very weights that are trained on. What
quantisation itself changes is for evidence to say (`scripts/evidence/quantised`). The head, the embedding and the norms
stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from stretto.errors import Problem, RecipeError
from stretto.extras import install
from stretto.models.converted import settle
from stretto.models.layers import expert_names, has_plain_experts, is_plain, linear_layers

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


class Reading(Protocol):
    """How bytes are read."""

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Bytes -> (O, I) in fp32, or rounded from that to another type."""
        ...


class Format(Reading, Protocol):
    """How weights are stored."""

    def store(self, weight: Tensor) -> Stored:
        """(O, I) fp32 -> bytes."""
        ...


class Nf4:
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


class Int8:
    """Whole numbers from -127 to 127."""

    def store(self, weight: Tensor) -> Stored:
        """To the nearest."""
        scales = row_scales(weight, 127)
        return Stored(as_bytes((weight / scales).round_().to(torch.int8)), as_bytes(scales))

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Back."""
        return scaled(stored.weight.view(torch.int8).view(shape), stored.scales, dtype)


class Fp8:
    """Floating point with four bits of exponent and three of mantissa."""

    def store(self, weight: Tensor) -> Stored:
        """To the nearest."""
        scales = row_scales(weight, LARGEST_FP8)
        return Stored(as_bytes((weight / scales).to(torch.float8_e4m3fn)), as_bytes(scales))

    def wide(self, stored: Stored, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Back."""
        return scaled(stored.weight.view(torch.float8_e4m3fn).view(shape), stored.scales, dtype)


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


def scaled(narrow: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """(O, I) numbers times the scale of their row, in fp32 and then rounded. Processors are faster step by step."""
    by_row = scales.view(torch.float32)[:, None]
    return narrow.float().mul_(by_row).to(dtype) if narrow.device.type == "cpu" else in_one_pass(narrow, by_row, dtype)


def in_one_pass(narrow: Tensor, by_row: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits without a copy in fp32: products are made in it, and rounded as they are written. What 8 bits can
    say, every type of floating point with 16 can."""
    through = dtype if dtype.itemsize == 2 else torch.float32
    numbers = narrow if narrow.dtype == torch.int8 else narrow.to(through)  # torch multiplies no fp8
    return torch.mul(numbers, by_row, out=torch.empty(narrow.shape, dtype=dtype, device=narrow.device))


def row_scales(weight: Tensor, most: float) -> Tensor:
    """(O, 1) what the largest number of a row is divided by to become `most`; 1 where all are 0."""
    largest = weight.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, largest / most, 1.0)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, flat."""
    return tensor.contiguous().flatten().view(torch.uint8)


class _Product(torch.autograd.Function):
    """(states (..., I), layer) -> states times the layer's weight; the backward makes the weight again."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return nn.functional.linear(states, layer.wide(states.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (outgoing,) = gradients
        return outgoing @ ctx.layer.wide(outgoing.dtype), None


class QuantisedLinear(nn.Linear):
    """A frozen linear layer in few bits. Others take it for a linear layer, which it is."""

    scales: nn.Parameter

    def __init__(self, layer: nn.Linear, kind: str, device: torch.device) -> None:
        """Stored on a device, to which the wide weight goes alone."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        self.shape = (self.out_features, self.in_features)
        self.reading: Reading = FORMATS[kind]
        stored = FORMATS[kind].store(layer.weight.detach().to(device).float())
        self.weight = nn.Parameter(stored.weight, requires_grad=False)
        self.scales = nn.Parameter(stored.scales, requires_grad=False)
        self.bias = layer.bias

    def wide(self, dtype: torch.dtype) -> Tensor:
        """(O, I) the weight in a type to compute in."""
        stored = Stored(self.weight.detach(), self.scales.detach())
        return self.reading.wide(stored, self.shape, dtype)

    def forward(self, states: Tensor) -> Tensor:
        """States times the weight."""
        result: Tensor = _Product.apply(states, self)
        return result

    def extra_repr(self) -> str:
        """What it is, for whoever prints a model."""
        return f"{super().extra_repr()}, kind={self.kind}"


class ExpertMatrix:
    """One expert's weight, made wide by the product that it is asked for."""

    bias = None

    def __init__(self, stack: QuantisedExperts, index: int) -> None:
        self.stack, self.index = stack, index

    def wide(self, dtype: torch.dtype) -> Tensor:
        """(O, I) the weight in a type to compute in."""
        stored = Stored(self.stack.weight.detach()[self.index], self.stack.scales.detach()[self.index])
        return self.stack.reading.wide(stored, self.stack.shape, dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Stands where a tensor would in a product, and nowhere else."""
        if function is not nn.functional.linear or keywords or len(arguments) != 2:
            return NotImplemented
        return _Product.apply(*arguments)


class QuantisedExperts(nn.Module):
    """The weights of all experts of a layer in few bits, one expert after the other."""

    def __init__(self, weights: Tensor, kind: str, device: torch.device) -> None:
        """From (E, O, I), stored on a device."""
        super().__init__()
        self.kind, self.shape = kind, (weights.shape[1], weights.shape[2])
        self.reading: Reading = FORMATS[kind]
        stored = [FORMATS[kind].store(weight.to(device).float()) for weight in weights.detach()]
        self.weight = nn.Parameter(torch.stack([each.weight for each in stored]), requires_grad=False)
        self.scales = nn.Parameter(torch.stack([each.scales for each in stored]), requires_grad=False)

    def __getitem__(self, index: Any) -> ExpertMatrix:
        """One expert's weight."""
        return ExpertMatrix(self, int(index))


def quantise(network: Any, kind: str, device: torch.device) -> None:
    """Stores every linear layer of a network and all experts in few bits on a device, one after the other; neither the
    head nor what chooses among experts."""
    if kind == "nf4":
        refuse_missing()
    if problems := quantise_problems(network):
        raise RecipeError(*problems)
    for path, layer in linear_layers(network, network.get_output_embeddings()).items():
        if is_plain(layer):
            parent, _, name = path.rpartition(".")
            narrow = settle(QuantisedLinear(cast(nn.Linear, layer), kind, device))
            setattr(network.get_submodule(parent), name, narrow)
    for path, name in expert_names(network):
        parent = network.get_submodule(path)
        weights = getattr(parent, name)
        delattr(parent, name)
        setattr(parent, name, settle(QuantisedExperts(weights, kind, device)))
        network.set_experts_implementation("eager")  # one by one, as they are made wide


def refuse_missing() -> None:
    """Whoever has not installed bitsandbytes is told how."""
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of kernels on a hub that nobody asked for
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise RecipeError.of(
            "model.quantize", f"nf4 needs bitsandbytes ({error})", f"{install('quant')}, or use int8"
        ) from error


def quantise_problems(network: Any) -> list[Problem]:
    """Experts are most of a mixture's weights; those that are not plain products of one expert's rows are refused, and
    so is a model most of whose layers are something else."""
    held = [(network.get_submodule(path), name) for path, name in expert_names(network)]
    for module, _ in held:
        if not has_plain_experts(module):
            reason = (
                f"experts stored as in {type(module).__name__} are not quantised yet, and they are most of the model"
            )
            return [Problem(field="model.quantize", reason=reason, fix="use none, or another model")]
    linear = linear_layers(network, head := network.get_output_embeddings())
    narrow = sum(cast(Tensor, layer.weight).numel() for layer in linear.values() if is_plain(layer))
    narrow += sum(getattr(module, name).numel() for module, name in held)
    whole = sum(
        weight.numel()
        for module in network.modules()
        if module is not head and not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
        if weight.dim() > 1
    )
    if 2 * narrow > whole:
        return []
    others = sorted({type(layer).__name__ for layer in linear.values() if not is_plain(layer)})
    where = f", which are stored as in {', '.join(others)}" if others else ""
    reason = f"only {narrow / max(1, whole):.0%} of the weights of its layers can be quantised yet{where}"
    return [Problem(field="model.quantize", reason=reason, fix="use none, or another model")]
