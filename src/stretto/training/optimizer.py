"""AdamW over fp32 masters, and the course of the learning rate.

Modules may compute in bf16; an update of one part in a thousand would drown in its rounding. So the optimizer steps a
master copy in fp32 (fp64 where the module is) and rounds once. Parameters that already are fp32 are their own
masters. Optimizers whose state takes less memory are in `narrow_adamw`. An optimizer may have a part of the parameters
only (`training.parallel.zero1`), or slices of them: of gradients and states it then takes what belongs to these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stretto.errors import CheckpointError
from stretto.kernels.bits import joined
from stretto.models.logprob_head import accum_dtype
from stretto.models.parameter_cut import ParameterCut
from stretto.recipe.schema import UpdateSection as Section


def learning_rate(section: Section, *, update: int, updates: int) -> float:
    """The rate of update number `update` (from 0) out of `updates`."""
    if update < section.warmup:
        return section.peak * (update + 1) / section.warmup
    if section.schedule == "constant":
        return section.peak
    course = (update - section.warmup) / max(1, updates - section.warmup)
    return section.peak * 0.5 * (1 + math.cos(math.pi * min(1.0, course)))


EPS = 1e-8
"""What Adam adds below; torch's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in a parameter a slice of it lies."""

    shape: torch.Size
    """Of all of the parameter."""
    cut: ParameterCut | None = None
    """The part of it that this slice is of, where matrices are shared."""
    first: int = 0
    """The first row of that which is here."""
    told: bool = True
    """False if another process has the same slice, and writes it."""

    def numbers(self, rows: slice, device: torch.device) -> Tensor:
        """Where in the flat parameter the numbers of some rows of the slice lie."""
        found = torch.zeros((), dtype=torch.int64, device=device)
        for dim, count in enumerate(self.shape):
            cut = self.cut if self.cut is not None and self.cut.dim == dim else None
            index = torch.arange(count, device=device) if cut is None else cut.numbers(count, device)
            if dim == 0:
                index = index[self.first + rows.start : self.first + rows.stop]
            found = found[..., None] * count + index
        return found


Places = Mapping[str, Place]
"""Parameter -> where its slice lies."""


class MasterAdamW:
    """AdamW whose state and masters are wide, whatever the modules compute in."""

    name = "optimizer"
    masters: Mapping[str, Tensor]

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], section: Section, *, updates: int, places: Places | None = None
    ) -> None:
        """`places` says of slices where they lie."""
        self.parameters = dict(parameters)
        self.section = section
        self.updates = updates
        self.update = 0
        self.places = places or {}
        self._prepare()

    def _prepare(self) -> None:
        """Makes what an update goes on from."""
        self.masters = {
            name: weight
            if weight.dtype == accum_dtype(weight.dtype)
            else nn.Parameter(weight.detach().to(accum_dtype(weight.dtype)))
            for name, weight in self.parameters.items()
        }
        groups = [{"params": list(self.masters.values())}]  # told as a group, which may be empty
        settings: dict[str, Any] = {"betas": self.section.betas, "weight_decay": self.section.weight_decay, "eps": EPS}
        self.adamw = torch.optim.AdamW(groups, fused=True, lr=self.section.peak, **settings)

    def step(self, gradients: Mapping[str, Tensor]) -> float:
        """One update along `gradients`; returns the learning rate it used."""
        rate = learning_rate(self.section, update=self.update, updates=self.updates)
        self._move(gradients, rate)
        self.update += 1
        return rate

    def _move(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        """Changes the parameters."""
        for group in self.adamw.param_groups:
            group["lr"] = rate
        for name, master in self.masters.items():
            master.grad = gradients[name]
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, master in self.apart().items():
                self.parameters[name].copy_(master)

    def rehearse(self) -> None:
        """Takes the memory of an update, and makes none; an optimizer that has made updates would not be as it was."""
        assert self.update == 0
        zeros = {
            name: torch.zeros_like(weight, dtype=accum_dtype(weight.dtype)) for name, weight in self.parameters.items()
        }
        self._move(zeros, 0.0)
        self._prepare()

    def apart(self) -> Mapping[str, Tensor]:
        """Masters that are not the parameters themselves."""
        return {name: master for name, master in self.masters.items() if master is not self.parameters[name]}

    def tensors(self) -> Iterator[Tensor]:
        """What only an update reads: moments, and masters that are not the parameters themselves."""
        yield from self.apart().values()
        for moments in self.adamw.state.values():
            yield from (value for value in moments.values() if isinstance(value, Tensor))

    def nbytes(self) -> int:
        """Bytes of that, with moments that the first update makes."""
        return sum(each.nbytes for each in self.apart().values()) + 2 * sum(
            each.nbytes for each in self.masters.values()
        )

    def state(self) -> dict[str, Any]:
        """Masters, moments and the number of updates made. The tensors themselves, which the next update changes."""
        return {
            "update": self.update,
            "kind": self.section.name,
            "masters": {name: self.masters[name].detach() for name in self.told()},
            "moments": {name: dict(self.adamw.state[self.masters[name]]) for name in self.told()},
            "cuts": self.cuts(),
        }

    def told(self) -> list[str]:
        """Parameters whose state is this process's to write."""
        return [name for name in self.parameters if name not in self.places or self.places[name].told]

    def cuts(self) -> dict[str, dict[str, int]]:
        """Which part of a parameter a slice is of, where matrices are shared."""
        return {name: asdict(place.cut) for name, place in self.places.items() if place.cut is not None}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts masters, moments and modules back exactly."""
        self._refuse_others(state)
        self.update = state["update"]
        for name, master in self.masters.items():
            master.copy_(wide_master(state["masters"][name]))
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
        for name, weight in self.parameters.items():
            found = shape_of(held[name]) if name in held else None
            if found != weight.shape:
                there = "lacks it" if found is None else f"has it as {tuple(found)}"
                raise CheckpointError(
                    f"{name} is trained with shape {tuple(weight.shape)}, and the checkpoint {there}; go on with the "
                    "run's own model.adapter, or begin a new run from the checkpoint's model"
                )


def wide_master(stored: Tensor | Mapping[str, Tensor]) -> Tensor:
    """A master as a state has it, in one tensor or in two halves."""
    return stored if isinstance(stored, Tensor) else joined(stored["high"], stored["low"])


def shape_of(stored: Tensor | Mapping[str, Tensor]) -> torch.Size:
    """The shape of a master as a state has it."""
    return stored.shape if isinstance(stored, Tensor) else stored["high"].shape


def _copied(value: Any, device: torch.device) -> Any:
    """A tensor of its own there; numbers as they are."""
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
