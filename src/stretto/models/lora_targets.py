"""What an adapter adapts: linear layers and experts by name, in terms that PEFT reads alike on any machine.

PEFT takes some names for those that layers of mixtures had in older versions of transformers: `gate_proj` is then half
of what all experts hold, and a layer that is really called so cannot be named. Such layers get adapters past this, and
are written down by their weight, which PEFT does not rename. What chooses among experts is never adapted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from peft import LoraConfig
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from stretto.errors import Problem
from stretto.models.adapter_folder import FUSED
from stretto.models.layers import expert_names, has_plain_experts, linear_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is adapted."""

    modules: tuple[str, ...]
    """Ends of the names of layers."""
    hidden: Mapping[str, str]
    """Name of a layer that PEFT cannot be told by name -> the end of it."""
    experts: tuple[str, ...]
    """Names of parameters that hold experts."""
    left: str | None
    """Class of experts that are not adapted though all layers should be; none if there are none."""

    def config(self, rank: int, alpha: float, task: str | None) -> LoraConfig:
        """As PEFT is told it. Without hidden layers."""
        times = {rf".*\.{name}": FUSED[name] for name in self.experts if name in FUSED}
        return LoraConfig(
            r=rank,
            lora_alpha=alpha,
            # An adapter may have hidden layers alone.
            target_modules=list(self.modules) if self.modules or self.experts else DUMMY_TARGET_MODULES,
            target_parameters=list(self.experts) or None,
            rank_pattern={name: count * rank for name, count in times.items()},
            alpha_pattern={name: count * alpha for name, count in times.items()},
            lora_dropout=0.0,
            bias="none",
            task_type=task,
        )

    @property
    def parameters(self) -> list[str]:
        """All that is written down by the name of a parameter."""
        return [*self.experts, *sorted({f"{end}.weight" for end in self.hidden.values()})]


def targets_of(chosen: str | Iterable[str], network: nn.Module, head: nn.Module | None) -> Targets:
    """What `model.adapter.targets` means for a network."""
    linear = linear_layers(network, head)
    wanted = {name for name in linear if _is_chosen(name, chosen)}
    others = {name for name, _ in network.named_modules()} - wanted
    ends = {name: shortest_end(name, others) for name in wanted}
    renamed = {leaf for leaf in {name.rpartition(".")[2] for name in wanted} if _is_renamed(leaf, network)}
    hidden = {name: end for name, end in ends.items() if name.rpartition(".")[2] in renamed}
    held = (
        [(network.get_submodule(name), each) for name, each in expert_names(network)] if chosen == "all-linear" else []
    )
    plain = sorted({each for layer, each in held if has_plain_experts(layer)})
    return Targets(
        modules=tuple(sorted({end for name, end in ends.items() if name not in hidden})),
        hidden=hidden,
        experts=tuple(plain),
        left=next((type(layer).__name__ for layer, _ in held if not has_plain_experts(layer)), None),
    )


def _is_chosen(name: str, chosen: str | Iterable[str]) -> bool:
    if chosen == "all-linear":
        return True
    if chosen == "attention":
        return any("attn" in part or "attention" in part for part in name.split(".")[:-1])
    return any(name == each or name.endswith(f".{each}") for each in chosen)


def shortest_end(name: str, others: Collection[str]) -> str:
    """The fewest last parts of a name that no other name ends with."""
    parts = name.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1))
    return next((end for end in ends if not any(each == end or each.endswith(f".{end}") for each in others)), name)


def _is_renamed(leaf: str, network: nn.Module) -> bool:
    """True if PEFT takes a name for that of something else in this family."""
    probe = LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(probe, network, None)
    except ValueError:  # it would be one part of several
        return True
    return set(probe.target_modules or ()) != {leaf}


def target_problems(targets: str | Iterable[str], network: nn.Module, head: nn.Module | None) -> list[Problem]:
    """A target that matches no layer would train nothing without a word, and so would the head.

    The head is left out because log-probabilities are taken from its weight, past any adapter around it.
    """
    full = linear_layers(network, head)
    if targets == "attention" and not any(_is_chosen(name, targets) for name in full):
        reason = "the model has no linear layers that are called attention"
        return [Problem(field="model.adapter.targets", reason=reason, fix="use all-linear, or name layers")]
    if isinstance(targets, str):
        return []
    known = sorted({name.rpartition(".")[2] for name in full})
    return [
        Problem(
            field="model.adapter.targets",
            reason=f"{target!r} matches no linear layer of the model",
            fix=f"use all-linear, or some of {', '.join(known)}",
        )
        for target in targets
        if not any(_is_chosen(name, (target,)) for name in full)
    ]
