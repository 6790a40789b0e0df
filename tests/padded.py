"""Random answers in two layouts: padded rectangles with a mask, as TRL and verl take them, and the rows of a
micro-batch.

Outside of the mask there are other random numbers, so that a peer or we would show it if they counted.
"""

import os
from collections import defaultdict
from dataclasses import dataclass, fields

import numpy as np
import torch

from stretto.algorithms.base import TokenStreams, build
from stretto.algorithms.kl import ESTIMATORS
from stretto.recipe.schema import AlgorithmSection
from stretto.types import Group, Outcome, Prompt, Reward, Trajectory
from tiny import conversation

GROUPS, SAMPLES, WIDTH = 3, 4, 11
ANSWERS = GROUPS * SAMPLES
INDEX = np.repeat(np.arange(GROUPS), SAMPLES)
"""The group of each answer."""


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Streams of ANSWERS x WIDTH numbers; `mask` is 1 where a token is trained."""

    mask: torch.Tensor
    advantage: torch.Tensor
    engine: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    reference: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor
    rewards: np.ndarray
    """One per answer."""

    @property
    def tokens(self):
        """How many are trained."""
        return int(self.mask.sum())

    def part(self, at):
        """The answers from one number up to another."""
        return Padded(**{field.name: getattr(self, field.name)[slice(*at)] for field in fields(self)})

    def flat(self, stream):
        """A stream as the rows of a micro-batch have it."""
        return stream[self.mask.bool()]

    def rows(self, **changes):
        """The streams as the terms of an algorithm get them."""
        lengths = self.mask.sum(1).long()
        names = ("advantage", "engine", "old", "reference", "values", "returns")
        places = torch.repeat_interleave(torch.arange(ANSWERS), lengths)
        streams = {name: self.flat(getattr(self, name)) for name in names}
        return TokenStreams(conversation=places, lengths=lengths, **(streams | changes))


def random_answers(seed, *, holes=False):
    """Answers of 1 to WIDTH tokens; with holes, a tool spoke between tokens that are trained."""
    rng = np.random.default_rng(seed)
    mask = np.arange(WIDTH) < rng.integers(1, WIDTH + 1, (ANSWERS, 1))
    if holes:
        mask &= rng.random((ANSWERS, WIDTH)) < 0.7
        mask[:, 0] |= ~mask.any(1)

    def numbers(scale):
        return torch.as_tensor(rng.normal(0, scale, (ANSWERS, WIDTH)))

    old = -torch.as_tensor(rng.gamma(2, 1, (ANSWERS, WIDTH)))
    per_answer = torch.as_tensor(rng.normal(size=(ANSWERS, 1))).expand(-1, WIDTH)
    return Padded(
        mask=torch.as_tensor(mask).double(),
        advantage=per_answer.clone(),
        engine=old + numbers(0.4),
        old=old,
        new=old + numbers(0.4),
        reference=old + numbers(0.5),
        values=numbers(1),
        returns=numbers(1),
        rewards=rng.random(ANSWERS).round(2),
    )


def groups_of(answers):
    """The answers as scored groups; the policy's log-probabilities are the engine's."""
    made = []
    for number in range(GROUPS):
        prompt = Prompt(id=f"p{number}", messages=({"role": "user", "content": "?"},))
        at = range(number * SAMPLES, (number + 1) * SAMPLES)
        trajectories = tuple(
            Trajectory(
                prompt=prompt,
                visit=0,
                attempt=row - at[0],
                conversations=(talk(answers, row),),
                outcome=Outcome(answer=""),
            )
            for row in at
        )
        values = answers.rewards[at].tolist()
        rewards = tuple(Reward(value=value, outcome=value, parts={}) for value in values)
        made.append(Group(prompt=prompt, trajectories=trajectories, rewards=rewards))
    return tuple(made)


def talk(answers, row):
    """An answer after a prompt of one token."""
    trained = 1 + np.flatnonzero(answers.mask[row])
    said = answers.engine[row][answers.mask[row].bool()].numpy()
    return conversation([0] * (1 + WIDTH), trained, logprobs=said)


def credited(answers, **section):
    """Advantages and returns (or none) per trained token, as an algorithm credits the answers."""
    algorithm = build(AlgorithmSection(**section))
    streams = {
        name: {
            (f"p{row // SAMPLES}", 0, row % SAMPLES, 0): stream[row][answers.mask[row].bool()].numpy()
            for row in range(ANSWERS)
        }
        for name, stream in (("values", answers.values), ("reference", answers.reference))
        if name in algorithm.needs
    }
    groups = groups_of(answers)
    samples = (
        algorithm.advantage(groups, streams)
        if algorithm.scope == "batch"
        else [sample for group in groups for sample in algorithm.advantage([group], streams)]
    )
    returns = None if samples[0].returns is None else np.concatenate([sample.returns for sample in samples])
    return np.concatenate([sample.advantage for sample in samples]), returns


def token_rewards(answers, *, coef=0.0, estimator="k1"):
    """Rewards as peers hold them: the verdict at the last trained token, a penalty at each, 0 elsewhere."""
    rewards = -coef * ESTIMATORS[estimator](answers.engine, answers.reference) * answers.mask
    last = WIDTH - 1 - answers.mask.flip(1).argmax(1)
    rewards[torch.arange(ANSWERS), last] += torch.as_tensor(answers.rewards)
    return rewards


def loss_and_gradient(answers, *, changes=None, **section):
    """The loss of an algorithm's terms, each divided by its own count, and its gradient in the padded layout."""
    algorithm = build(AlgorithmSection(**section))
    new = answers.new.clone().requires_grad_()
    counts = {"tokens": answers.tokens, "conversations": ANSWERS, "trajectories": ANSWERS, "constant": 1}
    rows = answers.rows(**(changes or {}))
    loss = sum(term.loss(answers.flat(new), rows).sum() / counts[term.denominator] for term in algorithm.terms)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient


GAPS = defaultdict(float)
"""Test -> the largest gap it has met, which `scripts/evidence/agreement` prints."""


def gap(one, other):
    """The largest difference of two numbers or arrays, relative to the largest number in either."""
    one, other = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    assert one.shape == other.shape
    found = float(np.abs(one - other).max() / max(np.abs(one).max(), np.abs(other).max(), 1e-300))
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].partition("[")[0].rpartition("/")[2]
    GAPS[test] = max(GAPS[test], found)
    return found
