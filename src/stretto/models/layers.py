"""Which layers of a model are products with a matrix, which hold experts, and which choose among experts.

Families write them in several ways, so what a layer is follows from its class and from what stands beside it. Routers
are not among the layers to adapt or to store in few bits: which experts compute a token is decided by small differences
between a few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from stretto.models.adapter_folder import CHOICES

ROUTERS = ("Router", "Gating")
"""How names of classes end that choose experts."""
SAME_PRODUCT = ("FalconLinear",)
"""Subclasses of a linear layer that compute the same in another way."""


def router_names(network: nn.Module) -> set[str]:
    """Names of the modules that choose among experts, with all that is inside them."""
    found, layers = list[str](), dict(network.named_modules())
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        kind = type(layer).__name__
        beside = any("experts" in each for each, _ in layers[parent].named_children()) if name else False
        if kind.endswith(ROUTERS) or (beside and (own in CHOICES or kind.endswith("Gate"))):
            found.append(name)
    return {name for name in layers if any(name == each or name.startswith(f"{each}.") for each in found)}


def linear_layers(network: nn.Module, head: nn.Module | None) -> Mapping[str, nn.Module]:
    """Layers that are a product with a matrix, by name; neither the head nor what chooses experts."""
    routers = router_names(network)
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head and name not in routers
    }


def is_plain(layer: nn.Module) -> bool:
    """True for a linear layer that computes as one, whatever its class; not where others read its weight past it."""
    kind = type(layer)
    if not isinstance(layer, nn.Linear) or kind is NonDynamicallyQuantizableLinear:
        return False
    return kind.forward is nn.Linear.forward or kind.__name__ in SAME_PRODUCT


def expert_names(network: nn.Module) -> list[tuple[str, str]]:
    """Modules that hold all experts of a layer, and the names of the parameters in which they do; none where nothing
    chooses among experts."""
    if not router_names(network):
        return []
    return [
        (name, each)
        for name, layer in network.named_modules()
        for each, weight in layer.named_parameters(recurse=False)
        if weight.dim() == 3 and not isinstance(layer, _ConvNd)
    ]


def has_plain_experts(layer: nn.Module) -> bool:
    """True where a product with an expert's rows is all that its parameters are for."""
    return not (getattr(layer, "is_transposed", True) or getattr(layer, "has_bias", True))
