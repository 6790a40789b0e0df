"""AdamW over fp32 masters, and the course of the learning rate.

Modules may compute in bf16; an update of one part in a thousand would drown in its rounding. So the optimizer steps a
master copy in fp32 (fp64 where the module is) and rounds once. Parameters that already are fp32 are their own
masters. `adamw8bit` keeps the two moments in 8 bits, a scale for every 256 numbers: 6 bytes less per weight, which
matters where all weights of a large model are trained. Masters stay wide. An optimizer may have a part of the
parameters only (`training.parallel.zero1`): of gradients and states it then takes what belongs to these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import CheckpointError, RecipeError
from stretto.extras import install
from stretto.models.logprob_head import accum_dtype
from stretto.recipe.schema import UpdateSection as Section


def learning_rate(section: Section, *, update: int, updates: int) -> float:
    """The rate of update number `update` (from 0) out of `updates`."""
    if update < section.warmup:
        return section.lr * (update + 1) / section.warmup
    if section.schedule == "constant":
        return section.lr
    course = (update - section.warmup) / max(1, updates - section.warmup)
    return section.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, course)))


class MasterAdamW:
    """AdamW whose state and masters are wide, whatever the modules compute in."""

    name = "optimizer"

    def __init__(self, parameters: Mapping[str, nn.Parameter], section: Section, *, updates: int) -> None:
        self.parameters = dict(parameters)
        self.section = section
        self.updates = updates
        self.update = 0
        self.masters = {
            name: weight
            if weight.dtype == accum_dtype(weight.dtype)
            else nn.Parameter(weight.detach().to(accum_dtype(weight.dtype)))
            for name, weight in self.parameters.items()
        }
        self.adamw = make_adamw(self.masters.values(), section)

    def step(self, gradients: Mapping[str, Tensor]) -> float:
        """One update along `gradients`; returns the learning rate it used."""
        rate = learning_rate(self.section, update=self.update, updates=self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        for name, master in self.masters.items():
            master.grad = gradients[name]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.update += 1
        with torch.no_grad():
            for name, master in self.masters.items():
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
        return rate

    def tensors(self) -> Iterator[Tensor]:
        """What only an update reads: moments, and masters that are not the parameters themselves."""
        yield from (master for name, master in self.masters.items() if master is not self.parameters[name])
        for moments in self.adamw.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))

    def state(self) -> dict[str, Any]:
        """Masters, moments and the number of updates made. The tensors themselves, which the next update changes."""
        return {
            "update": self.update,
            "kind": self.section.name,
            "masters": {name: master.detach() for name, master in self.masters.items()},
            "moments": {name: dict(self.adamw.state[master]) for name, master in self.masters.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts masters, moments and modules back exactly."""
        self._refuse_others(state)
        self.update = state["update"]
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state["masters"][name])
                if master is not self.parameters[name]:
                    self.parameters[name].copy_(master)
                moments = state["moments"].get(name, {})
                self.adamw.state[master] = {key: _copied(value, master.device) for key, value in moments.items()}

    def _refuse_others(self, state: Mapping[str, Any]) -> None:
        """Moments and masters of another optimizer, adapter or model would fit nothing."""
        if (kind := state.get("kind", self.section.name)) != self.section.name:
            told = f"the checkpoint holds the moments of {kind}, and optimizer.name is {self.section.name}"
            raise CheckpointError(f"{told}; go on with {kind}, or begin a new run from the checkpoint's model")
        held = state["masters"]
        for name, master in self.masters.items():
            if name not in held or held[name].shape != master.shape:
                there = "lacks it" if name not in held else f"has it as {tuple(held[name].shape)}"
                raise CheckpointError(
                    f"{name} is trained with shape {tuple(master.shape)}, and the checkpoint {there}; go on with the "
                    "run's own model.adapter, or begin a new run from the checkpoint's model"
                )


def make_adamw(masters: Iterable[nn.Parameter], section: Section) -> torch.optim.Optimizer:
    """Torch's own, or that of bitsandbytes, whose moments are narrow."""
    settings: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "weight_decay": section.weight_decay}
    groups = [{"params": list(masters)}]  # told as a group, which may be empty
    if section.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise RecipeError.of(
            "optimizer.name", f"adamw8bit needs bitsandbytes ({error})", f"{install('quant')}, or use adamw"
        ) from error
    return AdamW8bit(groups, **settings)


def _copied(value: Any, device: torch.device) -> Any:
    """A tensor of its own there; numbers as they are."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
