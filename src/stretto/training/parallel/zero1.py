"""One optimizer for several training cells: parameters are dealt to them, and each has masters and moments of its own.

This is the first stage of ZeRO (Rajbhandari et al. 2020), with whole parameters. Every cell has all gradients, updates
what it was dealt and hands that to the others (`workers.worker`). Nobody is told who has what: the rule gives
everybody the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.parameter_cut import ParameterCut

HELD = ("masters", "moments")
"""What of an optimizer's state belongs to parameters."""


def partition(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
    """As many parts, one after the other as the parameters are; a parameter belongs where its middle falls.

    A part is larger than an equal one by no more than a parameter; where one is large or there are few, some are empty.
    """
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(count)]
    numbers, before = sum(weight.numel() for weight in parameters.values()), 0
    for name, weight in parameters.items():
        middle = 2 * before + weight.numel()
        parts[middle * count // (2 * numbers)][name] = weight
        before += weight.numel()
    return parts


class JoinedParts(Mapping[str, Any]):
    """What several processes hold of each parameter as one. A parameter is put together when it is asked for."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], cuts: Sequence[Mapping[str, Any]]) -> None:
        """`cuts` are those of each process: parameter -> which part of it its slices are of."""
        self.parts, self.cuts = parts, cuts
        self.names = list(dict.fromkeys(name for part in parts for name in part))

    def __getitem__(self, name: str) -> Any:
        held = [(part[name], cut.get(name)) for part, cut in zip(self.parts, self.cuts, strict=True) if name in part]
        if held[0][1] is None:
            return _joined([part for part, _ in held], _below)
        of = [(part, ParameterCut(**cut)) for part, cut in held if cut is not None]
        _, first = of[0]
        parts = [_joined([part for part, cut in of if cut.rank == rank], _below) for rank in range(first.size)]
        return _joined(parts, first.whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _joined(found: Sequence[Any], join: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """One thing from its parts; numbers are the same in all of them."""
    first = found[0]
    if len(found) == 1:
        return first
    if isinstance(first, Mapping):
        return {key: _joined([each[key] for each in found], join) for key in first}
    return join(found) if isinstance(first, Tensor) and first.dim() else first


def _below(slices: Sequence[Tensor]) -> Tensor:
    """Slices of rows one below the other."""
    return torch.cat(list(slices))


def merge_states(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The optimizer's state of one device, from those that hold it together, in the order of their parts: each has
    whole parameters, or slices of all."""
    cuts = [part.get("cuts", {}) for part in parts]
    whole = {key: value for key, value in parts[0].items() if key != "cuts"}
    return {**whole, **{kind: JoinedParts([part[kind] for part in parts], cuts) for kind in HELD}}
