"""A sample that makes a step not finite is found and named."""

import numpy as np
import pytest

from stretto.algorithms.base import build
from stretto.recipe.schema import AlgorithmSection
from stretto.training.trainer import Trainer
from tiny import SETTINGS, Recorder, sample, scratch_policy


def trained(samples, **settings):
    policy = scratch_policy()
    trainer = Trainer(policy, build(AlgorithmSection()), Recorder(), **(SETTINGS | settings))
    try:
        trainer.accumulate(samples)
        return trainer.apply(), trainer
    finally:
        trainer.close()


def batch(**bad):
    return [sample([1, 6, 7, 8, 3], [2, 3, 4], name="p", attempt=i, **(bad if i == 2 else {})) for i in range(4)]


@pytest.mark.parametrize("advantage", [np.nan, np.inf])
def test_the_sample_is_named_and_nothing_is_left_accumulated(advantage):
    report, trainer = trained(batch(advantage=advantage))
    assert not report.applied
    assert report.suspects == (("p", 0, 2, 0),)
    assert trainer.accumulators == {}
    assert trainer.ledger == []


def test_a_step_that_is_finite_is_not_searched():
    report, _ = trained(batch())
    assert report.applied
    assert report.suspects == ()


def test_where_every_sample_would_be_one_a_few_are_named():
    bad = [sample([1, 6, 7], [2], name="p", attempt=i, advantage=np.nan) for i in range(9)]
    assert len(trained(bad)[0].suspects) == 3
