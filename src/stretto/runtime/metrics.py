"""A step in numbers and in rows: what metrics.jsonl and the samples file hold beside the trainer's own report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.algorithms.base import Algorithm
from stretto.environments.render import Renderer
from stretto.models.memory import peak_gb
from stretto.recipe.schema import BatchSection as BatchSection
from stretto.rewards.base import sampled_tokens
from stretto.rewards.score import Scored
from stretto.runtime.batch import StepBatch
from stretto.types import Conversation, Reward, Sample, Trajectory, trajectory_key

Credited = tuple[Sample, NDArray[np.float32] | None]
"""A sample, and the trainer's log-probabilities of its trained tokens where it was trained on."""


def step_metrics(batch: StepBatch, section: BatchSection, algorithm: Algorithm, *, contrasts: bool) -> dict[str, float]:
    """Rewards, lengths, groups and memory of a step, over everything it sampled. Groups can only be dead where
    `contrasts` teach, or where the algorithm drops them."""
    scored = batch.scored
    rewards = [reward for group in scored.groups for reward in group.rewards]
    trajectories = [trajectory for group in scored.groups for trajectory in group.trajectories]
    lengths = np.array([sampled_tokens(trajectory) for trajectory in trajectories]) if trajectories else np.zeros(1)
    alike = [np.ptp([reward.value for reward in group.rewards]) == 0 for group in scored.groups]
    dead = sum(algorithm.drop(g) or (contrasts and same) for g, same in zip(scored.groups, alike, strict=True))
    truncated = [t.full > 0 or any(c.stop == "length" for c in t.conversations) for t in trajectories]
    return {
        **_verdicts(rewards),
        **_kept(trajectories),
        "length/mean": float(lengths.mean()),
        "length/truncated": float(np.mean(truncated)) if truncated else 0.0,
        "groups/used": len(batch.accepted),
        "groups/dead": float(dead),
        "groups/infra": float(batch.launched - len(scored.groups)),
        "trajectories/failed": len(scored.failed),
        "trajectories/costly": sum(bool(reward.costly) for reward in rewards),
        "trajectories/launched": batch.launched * section.samples,
        "conversations/rewritten": sum(trajectory.rewritten for trajectory in [*trajectories, *scored.failed]),
        "conversations/full": sum(trajectory.full for trajectory in [*trajectories, *scored.failed]),
        "tokens/generated": float(sum(map(sampled_tokens, [*trajectories, *scored.failed]))),
        "memory/peak_gb": peak_gb(),
    }


def _verdicts(rewards: Sequence[Reward]) -> dict[str, float]:
    """What answers were worth; nothing where nobody judges."""
    if rewards and not any(reward.judged for reward in rewards):
        return {}
    values = np.array([reward.value for reward in rewards]) if rewards else np.zeros(1)
    return {
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std()),
        "reward/outcome": float(np.mean([reward.outcome for reward in rewards])) if rewards else 0.0,
        **{f"reward/part/{name}": mean for name, mean in part_means(rewards).items()},
    }


def part_means(rewards: Sequence[Reward]) -> dict[str, float]:
    """Mean score of each part of the reward, over the answers that the part applies to."""
    parts: dict[str, list[float]] = {}
    for reward in rewards:
        for name, score in reward.parts.items():
            parts.setdefault(name, []).append(score)
    return {name: float(np.mean(scores)) for name, scores in parts.items()}


def _kept(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """From how many tokens each was drawn, where that was not the whole vocabulary."""
    counts = [talk.kept.counts for each in trajectories for talk in each.conversations if talk.kept is not None]
    return {"kept/mean": float(np.concatenate(counts).mean())} if counts else {}


def lag(batch: StepBatch, version: int) -> float:
    """How many versions what was trained on had fallen behind when `version` was made from it, on average."""
    return float(np.mean([version - 1 - sample.conversation.version for sample in batch.samples] or [0]))


def sample_rows(batch: StepBatch, *, renderer: Renderer, environment: str, step: int) -> Iterator[dict[str, Any]]:
    """One row per trajectory, judged ones first."""
    judged = (pair for group in batch.scored.groups for pair in zip(group.trajectories, group.rewards, strict=True))
    verdicts = [*judged, *((trajectory, None) for trajectory in batch.scored.failed)]
    by_key = {sample.key: (sample, batch.trained.get(sample.key)) for sample in batch.samples}
    credited = [
        (talk, by_key.get((*trajectory_key(trajectory), index)))
        for trajectory, _ in verdicts
        for index, talk in enumerate(trajectory.conversations)
    ]
    numbers = zip(credited, token_numbers(credited), strict=True)
    for trajectory, reward in verdicts:
        told = list(islice(numbers, len(trajectory.conversations)))
        yield {
            "step": step,
            "prompt": trajectory.prompt.id,
            "visit": trajectory.visit,
            "attempt": trajectory.attempt,
            "environment": environment,
            "messages": [dict(message) for message in trajectory.prompt.messages],
            "conversations": [conversation_row(talk, columns, renderer) for (talk, _), columns in told],
            "answer": trajectory.outcome.answer if trajectory.outcome else None,
            "reference": trajectory.prompt.reference,
            **_turn_rewards(trajectory),
            "reward": reward_row(reward) if reward and reward.judged else None,
            "failure": trajectory.failure,
            "used": all(found is not None for (_, found), _ in told) and bool(told),
        }


def heldout_rows(scored: Scored, *, renderer: Renderer, environment: str, step: int) -> Iterator[dict[str, Any]]:
    """One row per held-out answer, as `sample_rows` makes them; none of these answers is trained on."""
    batch = StepBatch(scored=scored, accepted=(), samples=(), launched=len(scored.groups), rounds=1)
    return sample_rows(batch, renderer=renderer, environment=environment, step=step)


def _turn_rewards(trajectory: Trajectory) -> dict[str, Any]:
    """What each call was worth, where the environment said so."""
    told = trajectory.outcome.turn_rewards if trajectory.outcome is not None else None
    return {"turn_rewards": list(told)} if told is not None else {}


def reward_row(reward: Reward) -> dict[str, Any]:
    """A verdict; which scorers gave up on the answer is said only where one did."""
    found = {"value": reward.value, "outcome": reward.outcome, "parts": dict(reward.parts)}
    return {**found, "costly": list(reward.costly)} if reward.costly else found


def conversation_row(
    conversation: Conversation, columns: Mapping[str, list[Any] | None], renderer: Renderer
) -> dict[str, Any]:
    """One conversation; its `columns` are numbers per token."""
    usual = ((0, conversation.sampled),)
    turns = {"turns": [list(turn) for turn in conversation.turns]} if conversation.turns not in ((), usual) else {}
    tokens = conversation.tokens.tolist()
    text = renderer.all_text(tokens)
    return {
        "tokens": tokens,
        **columns,
        "stop": conversation.stop,
        "version": conversation.version,
        "parent": conversation.parent,
        **turns,
        "text": text,
        "widths": renderer.widths(tokens, text),
    }


def token_numbers(
    credited: Sequence[tuple[Conversation, Credited | None]],
) -> Iterator[dict[str, list[Any] | None]]:
    """Of each conversation the columns that are aligned with its tokens; 0 where a token was not sampled.

    Made for all of them at once, because a step may have hundreds of short ones.
    """
    if not credited:
        return
    talks = [talk for talk, _ in credited]
    lengths = [len(talk.tokens) for talk in talks]
    of_sample = [np.zeros(talk.sampled) if found is None else found[0].advantage for talk, found in credited]
    of_trainer = [np.zeros(talk.sampled) if found is None or found[1] is None else found[1] for talk, found in credited]
    sampled = np.concatenate([talk.trained for talk in talks])
    engine = np.concatenate([talk.logprobs for talk in talks])
    advantages, trainer = (np.zeros(len(sampled)) for _ in range(2))
    advantages[sampled], trainer[sampled] = np.concatenate(of_sample), np.concatenate(of_trainer)
    whole = (sampled.astype(int), engine.round(6), advantages.round(6), trainer.round(5))
    columns = zip(*(_apart(each, lengths) for each in whole), strict=True)
    for (_, found), (mask, logprobs, advantage, told) in zip(credited, columns, strict=True):
        yield {
            "trained": mask,
            "logprobs": logprobs,
            "advantages": advantage,
            "trainer_logprobs": told if found is not None and found[1] is not None else None,
        }


def _apart(values: NDArray[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """One list for each length."""
    numbers, ends = values.tolist(), [*accumulate(lengths)]
    return [numbers[end - length : end] for end, length in zip(ends, lengths, strict=True)]
