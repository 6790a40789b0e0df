"""What a network amounts to: its weights as if there had never been an adapter around its layers, nor few bits in them.

Names are those that the network has without either. A weight in few bits is what the trainer reads there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from stretto.models.quantised import QuantisedExperts, QuantisedLinear

BASE_LAYER = "base_layer"
"""What PEFT puts into the names of what an adapter is around, for each adapter."""


def adapted_layers(network: nn.Module) -> dict[str, Any]:
    """Name of a parameter -> PEFT's layer that adapts it. Experts have one for each of their parameters."""
    return {
        plain_name(f"{name}.{getattr(layer, 'parameter_name', 'weight')}"): layer
        for name, layer in network.named_modules()
        if isinstance(layer, LoraLayer)
    }


def plain_name(name: str) -> str:
    """A parameter's name without adapters."""
    return ".".join(part for part in name.split(".") if part != BASE_LAYER)


def narrow_layers(network: nn.Module) -> dict[str, QuantisedLinear | QuantisedExperts]:
    """Name of a parameter -> what holds it in few bits."""
    return {
        plain_name(f"{name}.weight" if isinstance(layer, QuantisedLinear) else name): layer
        for name, layer in network.named_modules()
        if isinstance(layer, QuantisedLinear | QuantisedExperts)
    }


def wide_shape(layer: QuantisedLinear | QuantisedExperts) -> tuple[int, ...]:
    """(O, I), or (E, O, I) of experts."""
    return layer.shape if isinstance(layer, QuantisedLinear) else (len(layer.weight), *layer.shape)


def wide(layer: QuantisedLinear | QuantisedExperts, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same in a type to compute in."""
    if isinstance(layer, QuantisedLinear):
        return layer.wide(dtype)
    return torch.stack([layer[index].wide(dtype) for index in range(len(layer.weight))])


def narrow_tensors(network: nn.Module) -> frozenset[str]:
    """Names of what stores weights in few bits: numbers and their scales."""
    return frozenset(
        f"{name}.{part}"
        for name, layer in network.named_modules()
        if isinstance(layer, QuantisedLinear | QuantisedExperts)
        for part in ("weight", "scales")
    )


def in_files(network: nn.Module, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
    """What a model's files have of a parameter, by their names: each expert by itself, and what a family has renamed
    since under the old name."""
    found: Mapping[str, Tensor] = revert_weight_conversion(cast(PreTrainedModel, network), {name: tensor})
    return found


def merged(network: nn.Module) -> Mapping[str, Tensor]:
    """All weights in fp32, each with what its own adapter adds."""
    narrow = narrow_tensors(network)
    found = {name: wide(layer) for name, layer in narrow_layers(network).items()}
    for name, tensor in network.state_dict().items():
        if "lora_" not in name and name not in narrow:
            found[plain_name(name)] = tensor.detach().float()
    for name, layer in adapted_layers(network).items():
        found[name] = found[name] + layer.get_delta_weight("default").detach().float()
    return found
