"""A frozen base in few bits: linear layers whose weights are made wide for the moment of a product.

The products are ours, for two reasons. A weight that was made wide is not kept for the backward, which makes it again.
And bitsandbytes' own layer is repacked in place by one forward in eval mode, after which gradients are wrong without a
sound; here there is no such mode.

Engine and trainer compute with the same module, so an answer is sampled from the very weights that are trained on. What
quantisation itself changes is for evidence to say (`scripts/evidence/big_models error`). The head, the embedding and
the norms stay as they are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from stretto.errors import Problem, RecipeError
from stretto.models.converted import settle
from stretto.models.few_bits import FORMATS, Factors, Reading, Stored, refuse_missing
from stretto.models.layers import expert_names, has_plain_experts, is_plain, linear_layers
from stretto.models.logprob_head import chunks

PIECE = 1 << 18
"""Numbers that are scaled at once on a CPU: 1 MiB in fp32."""


class _Product(torch.autograd.Function):
    """(states (..., I), layer) -> states times the layer's weight; the backward makes the weight again."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return product(layer, states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return product_backward(ctx.layer, gradients[0]), None


def product(layer: QuantisedLinear | ExpertMatrix, states: Tensor) -> Tensor:
    """States (..., I) times a layer's weight, without a backward."""
    matrix, scales = layer.factors(states.dtype)
    if scales is None:
        return nn.functional.linear(states, matrix, layer.bias)
    out = nn.functional.linear(states, matrix)
    out = _scaled(out, scales, into=out)
    return out if layer.bias is None else out.add_(layer.bias)


def product_backward(layer: QuantisedLinear | ExpertMatrix, outgoing: Tensor) -> Tensor:
    """The gradient of the states, by that of what came out."""
    matrix, scales = layer.factors(outgoing.dtype)
    return (outgoing if scales is None else _scaled(outgoing, scales, into=outgoing.new_empty(outgoing.shape))) @ matrix


def _scaled(states: Tensor, scales: Tensor, *, into: Tensor) -> Tensor:
    """(..., O) each times its scale in fp32, and rounded; on a CPU in pieces, so that nothing as large is made wide."""
    if states.device.type != "cpu":
        return (states * scales).to(states.dtype)
    width = len(scales)
    rows, result = states.reshape(-1, width), into.view(-1, width)
    for part in chunks(len(rows), width, PIECE):
        result[part] = rows[part] * scales
    return into


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

    @property
    def stored(self) -> Stored:
        """The weight."""
        return Stored(self.weight.detach(), self.scales.detach())

    def wide(self, dtype: torch.dtype) -> Tensor:
        """(O, I) the weight in a type to compute in."""
        return self.reading.wide(self.stored, self.shape, dtype)

    def factors(self, dtype: torch.dtype) -> Factors:
        """The weight as a product in a type multiplies by it."""
        return self.reading.factors(self.stored, self.shape, dtype)

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

    @property
    def stored(self) -> Stored:
        """The weight."""
        return Stored(self.stack.weight.detach()[self.index], self.stack.scales.detach()[self.index])

    def wide(self, dtype: torch.dtype) -> Tensor:
        """(O, I) the weight in a type to compute in."""
        return self.stack.reading.wide(self.stored, self.stack.shape, dtype)

    def factors(self, dtype: torch.dtype) -> Factors:
        """The weight as a product in a type multiplies by it."""
        return self.stack.reading.factors(self.stored, self.stack.shape, dtype)

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
