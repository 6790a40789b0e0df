"""Which experts the routers of a mixture choose: noted while an engine generates, followed while a trainer computes.

An engine's batches round otherwise than a trainer's rows. Where two experts are nearly tied, rounding makes another one
the choice, and the trainer then computes with experts that had no part in the answer: a few tokens with very different
log-probabilities. To follow the engine's choice takes that away (router replay).

A router of transformers chooses with `topk`. Only the choice is replaced: what a family makes of it (a softmax before
or after, sigmoids, groups, scaling) stays its own, and gradients reach the router through the values of the experts
that were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.errors import RecipeError
from stretto.types import ANY_EXPERT

FIELD = "engine.router_replay"


class ExpertChoices:
    """What all routers of a network choose in a forward."""

    def __init__(self) -> None:
        self.routers = 0
        # (T, routers, K): what is to be chosen for each token, in this forward and when a backward repeats it.
        self.followed: Tensor | None = None
        self.noted: dict[int, Tensor] | None = None

    def taken(self) -> NDArray[np.int16]:
        """(T, routers, K) what has been chosen in the forward just made, while it is noted."""
        assert self.noted is not None
        table = torch.stack([self.noted[router] for router in range(self.routers)], dim=1)
        self.noted = {}
        found: NDArray[np.int16] = table.to(torch.int16).cpu().numpy()
        return found

    def choice(self, router: int, own: Tensor) -> Tensor:
        """(T, K) what a router chooses that would have chosen `own`."""
        if self.noted is not None:
            self.noted[router] = own.detach()
            return own
        if self.followed is None:
            return own
        told = self.followed[:, router]
        return torch.where(told == ANY_EXPERT, own, told)


@contextmanager
def noting(choices: ExpertChoices | None) -> Iterator[ExpertChoices | None]:
    """Notes what is chosen in here, where anybody asks for that; `taken` returns it."""
    if choices is not None:
        choices.noted = {}
    try:
        yield choices
    finally:
        if choices is not None:
            choices.noted = None


class FollowingRouter(nn.Module):
    """What a router becomes beside what it was."""

    choices: ExpertChoices
    place: int
    top_k: int
    weight: Tensor

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """As it was, but for the choice."""
        with FollowedTopk(self):
            return super().forward(*arguments, **keywords)


class FollowedTopk(TorchFunctionMode):
    """Replaces what `topk` chooses among a router's experts."""

    def __init__(self, router: FollowingRouter) -> None:
        super().__init__()
        self.router = router

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return found
        among, chosen = args[0], found[1]
        if among.shape[-1] != len(self.router.weight) or chosen.shape[-1] != self.router.top_k:
            return found  # of groups of experts
        followed = self.router.choices.choice(self.router.place, chosen)
        return found if followed is chosen else (among.gather(-1, followed), followed)


def follow_choices(network: nn.Module) -> ExpertChoices:
    """Lets what a network's routers choose be noted and followed. RecipeError for one without routers."""
    choices = ExpertChoices()
    for module in network.modules():
        if is_router(module):
            kind = type(module)
            module.__class__ = type(kind.__name__, (FollowingRouter, kind), {})
            vars(module).update(choices=choices, place=choices.routers)
            choices.routers += 1
    if not choices.routers:
        raise RecipeError.of(FIELD, "has no effect, because the model has no experts to choose among", "leave it out")
    return choices


def is_router(module: nn.Module) -> bool:
    """True for what chooses among experts, in all of transformers' mixtures."""
    weight = getattr(module, "weight", None)
    sized = isinstance(weight, Tensor) and weight.dim() == 2 and isinstance(getattr(module, "top_k", None), int)
    return sized and type(module).__name__.endswith("Router")
