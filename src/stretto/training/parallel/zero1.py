"""One optimizer for several training cells: parameters are dealt to them, and each has masters and moments of its own.

This is the first stage of ZeRO (Rajbhandari et al. 2020), with whole parameters. Every cell has all gradients, updates
what it was dealt and hands that to the others (`workers.worker`). Nobody is told who has what: the rule gives
everybody the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

HELD = ("masters", "moments")
"""What of an optimizer's state belongs to parameters."""


def deal(parameters: Mapping[str, nn.Parameter], count: int) -> list[dict[str, nn.Parameter]]:
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


def whole(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of one device, from those that hold one optimizer, in the order of their parts; some say nothing."""
    parts = [state["optimizer"] for state in states if state]
    held = {kind: {name: each for part in parts for name, each in part[kind].items()} for kind in HELD}
    return {**states[0], "optimizer": {**parts[0], **held}}
