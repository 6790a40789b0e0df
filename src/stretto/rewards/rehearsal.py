"""Tries rewards before anything heavy is loaded: an import in every worker, a reference answer and an empty one.

A function that cannot be imported, that cannot be called, or that raises on these answers would cost a run its first
step and all that was loaded for it. What the verdicts are does not matter here; `stretto task check` looks at that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.errors import DeadlineError, Problem, RecipeError, StrettoError, VerdictError
from stretto.rewards.combine import Rewards, finite
from stretto.types import Conversation, Outcome, Prompt, Trajectory

MEND = "mend the function; stretto task check RECIPE tries it without a model"


def pretended(prompt: Prompt, answer: str, *, tokens: int | None = None) -> Trajectory:
    """A trajectory of one turn in which the model said this, in as many tokens as characters unless it is told."""
    count = len(answer) if tokens is None else tokens
    said = np.ones(count, dtype=np.bool_)
    conversation = Conversation(
        tokens=np.zeros(1 + count, dtype=np.int64),
        trained=np.concatenate([[False], said]),
        logprobs=np.zeros(1 + count),
        stop="stop",
        version=0,
    )
    return Trajectory(
        prompt=prompt,
        visit=0,
        attempt=0,
        conversations=(conversation,),
        outcome=Outcome(answer=answer, signals={"tokens": float(count), "truncated": 0.0}),
    )


async def rehearse(rewards: Rewards, prompts: Sequence[Prompt]) -> None:
    """RecipeError with every part that fails with each of the prompts: one odd row refuses no run. DeadlineError where
    one cannot be imported in time.

    Without `prompts` functions are only imported: where an environment gives signals that nobody can pretend.
    """
    problems: list[Problem] = []
    for index, name in rewards.functions.items():
        try:
            await rewards.load(name)
            await _try_until_one_succeeds(rewards, name, prompts)
        except DeadlineError:
            raise
        except StrettoError as error:
            problems.append(Problem(field=f"rewards.{index}.kind", reason=str(error), fix=MEND))
    if problems:
        raise RecipeError(*problems)


async def _try_until_one_succeeds(rewards: Rewards, name: str, prompts: Sequence[Prompt]) -> None:
    failures: list[VerdictError] = []
    for prompt in prompts:
        try:
            return await _try(rewards, name, prompt)
        except VerdictError as error:
            failures.append(error)
    if failures:
        raise failures[0]


async def _try(rewards: Rewards, name: str, prompt: Prompt) -> None:
    """A reference answer and an empty one; what sees a whole group gets them as one."""
    told = {"the reference answer": prompt.reference, "an empty answer": ""}
    made = {what: pretended(prompt, text) for what, text in told.items() if text is not None}
    alone = {what: [trajectory] for what, trajectory in made.items()}
    for what, group in ({" and ".join(made): [*made.values()]} if rewards.is_together(name) else alone).items():
        try:
            for score in await rewards.judge_part(name, group):
                if score is not None:
                    finite(score, name)
        except VerdictError as error:
            raise VerdictError(
                f"{error}\n    tried with {what} to the prompt {prompt.id}, before anything is loaded"
            ) from error
