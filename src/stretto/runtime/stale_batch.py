"""What a run has sampled and not yet trained on, where samplers may lag one version behind the trainer.

A checkpoint holds it, as plain values and tensors: the weights that sampled it are gone by then, so it could not be
made again, and a resumed run must learn from the same answers. A run that goes on under a plan without lag takes the
prompts back instead and asks them anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.rewards.score import Scored
from stretto.runtime.batch import StepBatch
from stretto.tasks.source import PromptSource
from stretto.types import Conversation, Group, KeptTokens, Outcome, Prompt, Reward, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedBatch:
    """A batch that waits for the next step."""

    batch: StepBatch
    """The batch, without credit."""
    cursor: Mapping[str, Any]
    """The prompts' state before it was drawn."""


class BatchBuffer:
    """The batch that waits, if there is one."""

    name = "ahead"

    def __init__(self, prompts: PromptSource, *, keeps: bool) -> None:
        """`keeps` says whether the plan lets samplers lag behind. Restored after `prompts`."""
        self.prompts, self.keeps = prompts, keeps
        self.waiting: BufferedBatch | None = None

    def state(self) -> Mapping[str, Any]:
        """Everything that judges, trains on or reports the batch."""
        if self.waiting is None:
            return {"batch": None}
        batch = self.waiting.batch
        return {
            "cursor": dict(self.waiting.cursor),
            "batch": {
                "groups": [plain(group) for group in batch.scored.groups],
                "failed": [plain(trajectory) for trajectory in batch.scored.failed],
                "accepted": [index for index, group in enumerate(batch.scored.groups) if group in batch.accepted],
                "launched": batch.launched,
                "rounds": batch.rounds,
                "old": [[list(key), plain(numbers)] for key, numbers in batch.old.items()],
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The batch is there again, or its prompts are asked anew."""
        self.waiting, told = None, state["batch"]
        if told is None:
            return
        if not self.keeps:
            self.prompts.restore(state["cursor"])
            return
        groups = tuple(_group(group) for group in told["groups"])
        batch = StepBatch(
            scored=Scored(groups=groups, failed=tuple(_trajectory(failed) for failed in told["failed"])),
            accepted=tuple(groups[index] for index in told["accepted"]),
            samples=(),
            launched=told["launched"],
            rounds=told["rounds"],
            # Checkpoints before there was such a thing have none; the engine's own log-probabilities then serve.
            old={_key(key): numbers.numpy() for key, numbers in told.get("old", ())},
        )
        self.waiting = BufferedBatch(batch=batch, cursor=state["cursor"])


def plain(value: Any) -> Any:
    """A record as mappings by field name, arrays as tensors."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(plain(item) for item in value)
    return value


def _key(told: Sequence[Any]) -> tuple[str, int, int, int]:
    prompt, visit, attempt, index = told
    return prompt, visit, attempt, index


def _group(told: Mapping[str, Any]) -> Group:
    return Group(
        prompt=Prompt(**told["prompt"]),
        trajectories=tuple(_trajectory(trajectory) for trajectory in told["trajectories"]),
        rewards=tuple(Reward(**reward) for reward in told["rewards"]),
    )


def _trajectory(told: Mapping[str, Any]) -> Trajectory:
    records = {
        "prompt": Prompt(**told["prompt"]),
        "conversations": tuple(_conversation(conversation) for conversation in told["conversations"]),
        "outcome": Outcome(**told["outcome"]) if told["outcome"] is not None else None,
    }
    return Trajectory(**{**told, **records})


def _conversation(told: Mapping[str, Any]) -> Conversation:
    arrays: dict[str, Any] = {name: item.numpy() for name, item in told.items() if isinstance(item, Tensor)}
    if told.get("kept") is not None:
        arrays["kept"] = KeptTokens(**{name: item.numpy() for name, item in told["kept"].items()})
    return Conversation(**{**told, **arrays})
