"""A gradient that is whitened at the end is the one of whitened advantages, in any order and on any number of cells."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.algorithms.base import build
from stretto.recipe.schema import AlgorithmSection, Kl
from stretto.runtime.minibatches import credit
from stretto.training import loss_counters
from stretto.training.whitening import WhiteningTrainer
from tiny import SETTINGS, Recorder, credited, distance, random_groups, scratch_policy, step

POLICY = scratch_policy()
KL = {"none": Kl(), "loss": Kl(coef=0.3, estimator="k2"), "reward": Kl(coef=0.3, where="reward")}


def unwhitened(algorithm, groups):
    """The samples before whitening, with the same random streams."""
    told = []
    credited(algorithm, groups)  # the streams are made from a seed
    rng = np.random.default_rng(0)
    keys = {
        (group.prompt.id, 0, trajectory.attempt, index): int(talk.trained.sum())
        for group in groups
        for trajectory in group.trajectories
        for index, talk in enumerate(trajectory.conversations)
    }
    streams = {
        name: {key: rng.uniform(-4, -0.5, keys[key]) for key in sorted(keys)} for name in sorted(algorithm.needs)
    }
    for group in groups:  # each by itself, as it finishes
        told += credit(algorithm, [group], streams, whitened=False)
    return told


@pytest.mark.parametrize("kl", KL)
@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
@settings(max_examples=3)
@given(order=st.integers(0, 1000), cells=st.integers(1, 3))
def test_streamed_gradients_are_those_of_whitened_credit(name, kl, order, cells):
    algorithm, groups = build(AlgorithmSection(name=name, kl=KL[kl])), random_groups(order)
    whole = step(POLICY, algorithm, credited(algorithm, groups))
    samples = unwhitened(algorithm, groups)
    shuffled = [samples[index] for index in np.random.default_rng(order).permutation(len(samples))]
    recorders = [Recorder() for _ in range(cells + 1)]  # one of them has no work
    trainers = [
        WhiteningTrainer(POLICY, algorithm, recorder, **SETTINGS | {"token_budget": 90}) for recorder in recorders
    ]
    for index, trainer in enumerate(trainers[:-1]):
        for other in trainers:
            other.close()
        hooked = [w.register_post_accumulate_grad_hook(trainer._collector(n)) for n, w in trainer.trained.items()]
        trainer.accumulate(shuffled[index::cells])
        for hook in hooked:
            hook.remove()
    sums = loss_counters.together(trainer.meter.sums for trainer in trainers)
    flats = [[] for _ in trainers]
    for mine, trainer in zip(flats, trainers, strict=True):
        trainer.reduce(mine.append, sums)
    for parts in zip(*flats, strict=True):
        total = torch.stack([part.clone() for part in parts]).sum(0)
        for part in parts:
            part.copy_(total)
    for recorder, trainer in zip(recorders, trainers, strict=True):
        report = trainer.apply()
        assert distance(whole.gradients, recorder.gradients) < 1e-10
        assert report.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-9, abs=1e-12)
