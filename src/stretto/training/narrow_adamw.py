"""AdamW in little memory: moments of 16 or 8 bits, and masters that share the weights' own bits.

A weight in bf16 is the upper half of its fp32 master, rounded; the lower half is kept beside it in 16 bits, so that a
master takes 4 bytes together with its weight and not 6, and nothing is lost (but for the last bit of a master that lies
exactly between two weights). Moments are bf16, or 8 bits with a scale for every block of a row: the first by its square
root and the second by its fourth root, because most numbers of a block are far smaller than its largest. What does not
fit is rounded up or down at random (stochastic rounding), or slow averages would stand still. The mean of the rounded
moment is the moment; only a second moment below its smallest code, 2e-10 of its block's largest, is rounded up to that.
The noise follows from the update and from a number's place in the whole parameter, and blocks lie within rows. So every
layout of a model over devices makes the same state, and slices of it are put together and cut like the parameters.

An update goes through a parameter piece by piece, each made wide for as long as torch's own AdamW works on it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from stretto.errors import RecipeError
from stretto.kernels.bits import joined, noise_of, parted
from stretto.kernels.cuda import fused_adamw
from stretto.recipe.schema import UpdateSection as Section
from stretto.training.narrow_blocks import LEAST, SMALL, block_of, cut_block
from stretto.training.optimizer import EPS, MasterAdamW, Place, Places, wide_master

PIECE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Numbers that are wide at once: on a CPU what its cache holds."""

Moments = dict[str, Tensor]
"""What an average is stored as, by names that begin with the average's."""


class Average(NamedTuple):
    """One of Adam's two averages."""

    name: str
    """As torch calls it."""
    power: int
    """Its root is taken so many times over before it is rounded to 8 bits."""
    codes: tuple[int, int]
    """Smallest and largest code of 8 bits."""
    dtype: torch.dtype
    """The type of codes."""


FIRST = Average("exp_avg", 2, (-127, 127), torch.int8)
SECOND = Average("exp_avg_sq", 4, (0, 255), torch.uint8)


class Storage(Protocol):
    """How an average is stored."""

    def fresh(self, average: Average, shape: torch.Size, device: torch.device) -> Moments:
        """Zeros."""
        ...

    def read(self, average: Average, stored: Moments, rows: slice) -> Tensor:
        """Some rows, in fp32."""
        ...

    def write(self, average: Average, stored: Moments, rows: slice, wide: Tensor, noise: Tensor) -> None:
        """The same rows; `noise` are numbers from 0 to 1."""
        ...


class Wide:
    """As it is."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def fresh(self, average: Average, shape: torch.Size, device: torch.device) -> Moments:
        """Zeros."""
        return {average.name: torch.zeros(shape, dtype=self.dtype, device=device)}

    def read(self, average: Average, stored: Moments, rows: slice) -> Tensor:
        """In place."""
        return stored[average.name][rows]

    def write(self, average: Average, stored: Moments, rows: slice, wide: Tensor, noise: Tensor) -> None:
        """It is there already."""


class Half:
    """bf16."""

    def fresh(self, average: Average, shape: torch.Size, device: torch.device) -> Moments:
        """Zeros."""
        return {average.name: torch.zeros(shape, dtype=torch.bfloat16, device=device)}

    def read(self, average: Average, stored: Moments, rows: slice) -> Tensor:
        """Wide."""
        return stored[average.name][rows].float()

    def write(self, average: Average, stored: Moments, rows: slice, wide: Tensor, noise: Tensor) -> None:
        """Adds noise below the last bit that is kept, and cuts."""
        bits = wide.view(torch.int32) + (noise * 65536).to(torch.int32).clamp_(max=65535)
        stored[average.name][rows] = (bits >> 16).to(torch.int16).view(torch.bfloat16)


class Quarter:
    """8 bits, and scales of blocks."""

    def __init__(self, block: int) -> None:
        self.block = block

    def fresh(self, average: Average, shape: torch.Size, device: torch.device) -> Moments:
        """Zeros."""
        scales = torch.zeros((*shape[:-1], shape[-1] // self.block), device=device)
        return {average.name: torch.zeros(shape, dtype=average.dtype, device=device), f"{average.name}_scale": scales}

    def read(self, average: Average, stored: Moments, rows: slice) -> Tensor:
        """Scale times a power of the code's share."""
        codes, scales = stored[average.name][rows], stored[f"{average.name}_scale"][rows]
        share = codes.float().div_(average.codes[1]).unflatten(-1, (-1, self.block))
        wide = share * share.abs()  # keeps the sign
        if average.power == 4:
            wide.square_()
        return wide.mul_(scales[..., None]).flatten(-2)

    def write(self, average: Average, stored: Moments, rows: slice, wide: Tensor, noise: Tensor) -> None:
        """The code below the root of each share or the one above it, by its noise, so that the mean of what `read`
        makes of them is the share; no number above 0 becomes 0 in the second average."""
        blocks = wide.unflatten(-1, (-1, self.block))
        scales = blocks.abs().amax(-1)
        share = blocks / torch.where(scales > 0, scales, 1.0)[..., None]
        root = share.abs().sqrt_()
        if average.power == 4:
            root.sqrt_()
        root.mul_(average.codes[1])
        low = root.floor()
        above = root - low
        # (root^2 - low^2) / ((low + 1)^2 - low^2) without cancellation; of fourth powers, times another factor.
        chance = above.mul_(root + low).div_(2 * low + 1)
        if average.power == 4:
            square = low * low
            chance.mul_(root.square_().add_(square)).div_(2 * (square + low) + 1)
        codes = low.add_(noise.unflatten(-1, (-1, self.block)) < chance).copysign_(share).flatten(-2)
        if average.power == 4:  # or an update would be divided by nothing
            codes = torch.where(wide > 0, codes.clamp(min=1), codes)
        stored[average.name][rows] = codes.clamp_(*average.codes).to(average.dtype)
        stored[f"{average.name}_scale"][rows] = scales


def storage_for(name: str, shape: torch.Size, dtype: torch.dtype) -> Storage:
    """How the averages of a parameter of this whole shape are stored."""
    if dtype == torch.float64 or len(shape) < 2 or shape.numel() < SMALL:
        return Wide(torch.float64 if dtype == torch.float64 else torch.float32)
    if name == "adamw16bit":
        return Half()
    block = block_of(shape[-1])
    return Quarter(block) if block >= LEAST else Wide(torch.float32)


@dataclass(slots=True, kw_only=True)
class NarrowState:
    """What an update of one parameter goes on from."""

    place: Place
    """Where it lies, if it is a slice."""
    storage: Storage
    """How its averages are stored."""
    moments: Moments
    """Its averages of gradients and of their squares."""
    rest: Tensor | None
    """Lower halves of the masters; none where the weights are wide."""


class SplitMasters(Mapping[str, Tensor]):
    """Masters that are put together when they are asked for; wide weights are their own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], states: Mapping[str, NarrowState]) -> None:
        self.parameters, self.states = parameters, states

    def __getitem__(self, name: str) -> Tensor:
        weight, rest = self.parameters[name], self.states[name].rest
        return weight if rest is None else joined(weight.detach(), rest)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


class NarrowAdamW(MasterAdamW):
    """`adamw16bit` and `adamw8bit`."""

    states: dict[str, NarrowState]

    def _prepare(self) -> None:
        self.states = {}
        for name, weight in self.parameters.items():
            place = self.places.get(name, Place(shape=weight.shape))
            storage = storage_for(self.section.name, place.shape, weight.dtype)
            refuse_cut_blocks(name, place, storage)
            moments = storage.fresh(FIRST, weight.shape, weight.device) | storage.fresh(
                SECOND, weight.shape, weight.device
            )
            narrow = weight.dtype == torch.bfloat16
            rest = torch.zeros(weight.shape, dtype=torch.int16, device=weight.device) if narrow else None
            self.states[name] = NarrowState(place=place, storage=storage, moments=moments, rest=rest)
        self.masters = SplitMasters(self.parameters, self.states)

    @torch.no_grad()
    def _move(self, gradients: Mapping[str, Tensor], rate: float) -> None:
        for name, weight in self.parameters.items():
            state, gradient = self.states[name], gradients[name]
            if self._in_one_kernel(name, weight.detach(), state, gradient, rate):
                continue
            rows = max(1, PIECE.get(weight.device.type, 1 << 18) // max(1, weight.shape[1:].numel()))
            for start in range(0, len(weight), rows):
                self._move_rows(name, weight, state, slice(start, min(start + rows, len(weight))), gradient, rate)

    def _in_one_kernel(self, name: str, weight: Tensor, state: NarrowState, gradient: Tensor, rate: float) -> bool:
        """An update of a parameter by a kernel for GPUs; False, and nothing happens, where there is none for it."""
        place, storage = state.place, state.storage
        plain = type(weight) is Tensor and weight.is_contiguous()
        if isinstance(storage, Wide) or place.cut is not None or not plain:
            return False
        if not fused_adamw.usable(weight.device, weight.dtype):
            return False
        section = self.section
        fused_adamw.update(
            weight, state.rest, gradient.contiguous(), state.moments,
            block=storage.block if isinstance(storage, Quarter) else None,
            first=place.first * place.shape[1:].numel(), seed=self._seed(name),
            step=fused_adamw.AdamStep(
                rate=rate, update=self.update, betas=section.betas, decay=section.weight_decay, eps=EPS
            ),
        )  # fmt: skip
        return True

    def _seed(self, name: str) -> int:
        """Of the noise of an update's rounding."""
        return zlib.crc32(f"{self.update} {name}".encode()) * 0x1E3779B1

    def _move_rows(
        self, name: str, weight: Tensor, state: NarrowState, rows: slice, gradient: Tensor, rate: float
    ) -> None:
        """An update of some rows of a parameter."""
        here, rest, section = weight.detach()[rows], state.rest, self.section
        master = here if rest is None else joined(here, rest[rows])
        first, second = (state.storage.read(average, state.moments, rows) for average in (FIRST, SECOND))
        slope, done = gradient[rows].to(master.dtype), torch.tensor(float(self.update), device=here.device)
        adamw(
            [master], [slope], [first], [second], [], [done], fused=True, amsgrad=False, lr=rate, maximize=False,
            beta1=section.betas[0], beta2=section.betas[1], weight_decay=section.weight_decay, eps=EPS,
        )  # fmt: skip
        if not isinstance(state.storage, Wide):
            noises = noise_of(state.place.numbers(rows, master.device), self._seed(name))
            for average, wide, noise in zip((FIRST, SECOND), (first, second), noises, strict=True):
                state.storage.write(average, state.moments, rows, wide, noise)
        if rest is not None:
            here[...], rest[rows] = parted(master)

    def tensors(self) -> Iterator[Tensor]:
        """What only an update reads."""
        for state in self.states.values():
            yield from state.moments.values()
            if state.rest is not None:
                yield state.rest

    def nbytes(self) -> int:
        """Bytes of that."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def apart(self) -> Mapping[str, Tensor]:
        """None: masters hold the weights' own bits."""
        return {}

    def state(self) -> dict[str, Any]:
        """Masters in two halves where they are, moments as they are stored, and the number of updates made."""
        told = self.told()
        halves = {
            name: weight.detach()
            if (rest := self.states[name].rest) is None
            else {"high": weight.detach(), "low": rest}
            for name, weight in self.parameters.items()
            if name in told
        }
        moments = {name: dict(self.states[name].moments) for name in told}
        return {
            "update": self.update,
            "kind": self.section.name,
            "masters": halves,
            "moments": moments,
            "cuts": self.cuts(),
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Puts masters, moments and modules back exactly."""
        self._refuse_others(state)
        self.update = state["update"]
        for name, weight in self.parameters.items():
            mine, stored = self.states[name], wide_master(state["masters"][name])
            if mine.rest is None:
                weight.copy_(stored)
            else:
                high, low = parted(stored.to(mine.rest.device, torch.float32))
                weight.copy_(high)
                mine.rest.copy_(low)
            for key, tensor in state["moments"][name].items():
                mine.moments[key].copy_(tensor)


def refuse_cut_blocks(name: str, place: Place, storage: Storage) -> None:
    """Numbers that share a scale must lie in one part, or the state would depend on how the model is cut."""
    cut = place.cut
    if not isinstance(storage, Quarter) or cut is None or cut.dim != len(place.shape) - 1:
        return
    if problem := cut_block(name, numbers=place.shape.numel(), width=place.shape[-1], run=cut.run(place.shape[-1])):
        raise RecipeError(problem)


def make_optimizer(
    parameters: Mapping[str, nn.Parameter], section: Section, *, updates: int, places: Places | None = None
) -> MasterAdamW:
    """The optimizer that a recipe names; `places` is as in `MasterAdamW`."""
    kind = MasterAdamW if section.name == "adamw" else NarrowAdamW
    return kind(parameters, section, updates=updates, places=places)
