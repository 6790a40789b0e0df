"""LoRA in the format everyone loads, kept apart from the weights it adapts.

Never merged: rounding a young adapter into bf16 weights loses most of its update. The reference policy is the same
model with the adapter switched off, so it costs no memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.errors import Problem, RecipeError
from stretto.kernels.cpu.backward import take_over_adapters
from stretto.models.adapter_folder import AdapterFacts
from stretto.models.load_errors import reading_model
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


def linear_names(network: nn.Module, head: nn.Module | None) -> list[str]:
    """Last parts of the names of the linear layers, the head left out."""
    names = {
        name.rpartition(".")[2]
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    return sorted(names)


def attention_names(network: nn.Module) -> list[str]:
    """Last parts of the names of the linear layers inside attention."""
    paths = [name.split(".") for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    return sorted({path[-1] for path in paths if any("attn" in part or "attention" in part for part in path[:-1])})


def target_problems(targets: str | Iterable[str], network: nn.Module, head: nn.Module | None) -> list[Problem]:
    """A target that matches no layer would train nothing without a word, and so would the head.

    The head is left out because log-probabilities are taken from its weight, past any adapter around it.
    """
    if targets == "attention" and not attention_names(network):
        reason = "the model has no linear layers that are called attention"
        return [Problem(field="model.adapter.targets", reason=reason, fix="use all-linear, or name layers")]
    if isinstance(targets, str):
        return []
    known = linear_names(network, head)
    full = [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and module is not head]
    return [
        Problem(
            field="model.adapter.targets",
            reason=f"{target!r} matches no linear layer of the model",
            fix=f"use all-linear, or some of {', '.join(known)}",
        )
        for target in targets
        if not any(name == target or name.endswith(f".{target}") for name in full)
    ]


def add_adapter(network: PreTrainedModel, section: Adapter, *, seed: int) -> Any:
    """Puts LoRA layers inside the network and returns PEFT's wrapper; the adapter computes in the network's type."""
    problems = target_problems(section.targets, network, network.get_output_embeddings())
    if problems:
        raise RecipeError(*problems)
    with _drawing(seed):
        adapted = get_peft_model(network, _config(section, network, task="CAUSAL_LM"), autocast_adapter_dtype=False)
    _settle(network, section)
    return adapted


def inject_adapter(decoder: PreTrainedModel, section: Adapter, *, seed: int) -> None:
    """The same inside a decoder that has no head of a language model; nothing is wrapped around it."""
    if problems := target_problems(section.targets, decoder, None):
        raise RecipeError(*problems)
    with _drawing(seed):
        inject_adapter_in_model(_config(section, decoder, task=None), decoder)
    _settle(decoder, section)


def _config(section: Adapter, network: nn.Module, *, task: str | None) -> LoraConfig:
    chosen = section.targets
    targets = attention_names(network) if chosen == "attention" else chosen if chosen == "all-linear" else list(chosen)
    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type=task,
    )


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """An adapter's random start depends on the seed alone."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        yield


def _settle(network: PreTrainedModel, section: Adapter) -> None:
    """Brings adapters to the network's type, and their layers to our backward."""
    for name, weight in network.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(network.dtype)
    take_over_adapters(network)
    if section.targets == "all-linear" and any(isinstance(module, QuantisedExperts) for module in network.modules()):
        warnings.warn("experts in few bits stay as they are; all other linear layers are adapted", stacklevel=3)


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
