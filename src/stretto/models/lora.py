"""LoRA in the format everyone loads, kept apart from the weights it adapts.

Never merged: rounding a young adapter into bf16 weights loses most of its update. The reference policy is the same
model with the adapter switched off, so it costs no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import load_peft_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.errors import RecipeError
from stretto.kernels.cpu.backward import take_over_adapters
from stretto.models.adapter_folder import AdapterFacts
from stretto.models.load_errors import reading_model
from stretto.models.lora_targets import Targets, target_problems, targets_of
from stretto.models.quantised import QuantisedExperts
from stretto.recipe.schema import Adapter


def base_of(layer: Any) -> Any:
    """The layer below its adapters: experts have one for each of their parameters."""
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    return layer


def adapters_of(layer: Any) -> Iterator[Any]:
    """PEFT's layers around a layer, the outermost first."""
    while hasattr(layer, "base_layer"):
        yield layer
        layer = layer.base_layer


def active_pairs(layer: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """(down, up, scale) of each adapter of a linear layer that is switched on."""
    for each in adapters_of(layer):
        for name in each.active_adapters if not each.disable_adapters else ():
            if name in each.lora_A:
                yield each.lora_A[name].weight, each.lora_B[name].weight, each.scaling[name]


def add_adapter(network: PreTrainedModel, section: Adapter, *, seed: int) -> Any:
    """Puts LoRA layers inside the network and returns PEFT's wrapper; the adapter computes in the network's type."""
    head = network.get_output_embeddings()
    if problems := target_problems(section.targets, network, head):
        raise RecipeError(*problems)
    targets = targets_of(section.targets, network, head)
    with _drawing(seed):
        config = targets.config(section.rank, section.alpha, "CAUSAL_LM")
        adapted: Any = get_peft_model(network, config, autocast_adapter_dtype=False)
        _add_hidden(network, section, targets)
    written = adapted.peft_config["default"]
    written.target_modules, written.target_parameters = set(targets.modules), targets.parameters or None
    _settle(network, section, targets)
    return adapted


def inject_adapter(decoder: PreTrainedModel, section: Adapter, *, seed: int) -> None:
    """The same inside a decoder that has no head of a language model; nothing is wrapped around it."""
    if problems := target_problems(section.targets, decoder, None):
        raise RecipeError(*problems)
    targets = targets_of(section.targets, decoder, None)
    with _drawing(seed):
        inject_adapter_in_model(targets.config(section.rank, section.alpha, None), decoder)
        _add_hidden(decoder, section, targets)
    _settle(decoder, section, targets)


def _add_hidden(network: nn.Module, section: Adapter, targets: Targets) -> None:
    """Adapters for layers that PEFT would take for others; it renames only what it knows to be of transformers."""
    if targets.hidden:
        holder = nn.Module()
        holder.network = network
        names = tuple(f"network.{name}" for name in targets.hidden)
        plain = Targets(modules=names, hidden={}, experts=(), left=None)
        inject_adapter_in_model(plain.config(section.rank, section.alpha, None), holder)


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """An adapter's random start depends on the seed alone."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield


def _settle(network: PreTrainedModel, section: Adapter, targets: Targets) -> None:
    """Brings adapters to the network's type, and their layers to our backward."""
    for name, weight in network.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(network.dtype)
    take_over_adapters(network)
    few = section.targets == "all-linear" and any(isinstance(module, QuantisedExperts) for module in network.modules())
    if few or targets.left:
        which = "in few bits" if few else f"stored as in {targets.left}"
        warnings.warn(f"experts {which} stay as they are; all other linear layers are adapted", stacklevel=3)


def fill_adapter(adapted: Any, facts: AdapterFacts) -> None:
    """Gives a fresh adapter the weights of a saved one of its kind, all of them, in the type of the network."""
    with reading_model(str(facts.folder), failing="cannot be read", fix="get the adapter's files again"):
        weights = load_peft_weights(str(facts.folder), device="cpu")
        found = set_peft_model_state_dict(adapted, weights)
    missing = [name for name in found.missing_keys if "lora_" in name]
    if names := missing or list(found.unexpected_keys):
        of = "no weights for" if missing else "weights for no layer of"
        reason = f"the adapter {facts.folder} has {of} {len(names)} names ({names[0]})"
        raise RecipeError.of("model.adapter", reason, f"write {facts.written}, or train a new adapter")


def changes_in_forward(network: nn.Module) -> bool:
    """True if a forward changes the network's modules, so that nobody may walk through them meanwhile: PEFT's adapters
    of experts put themselves between a parameter and its module for as long as that computes."""
    return any(isinstance(module, ParamWrapper) for module in network.modules())
