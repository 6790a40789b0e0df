"""A step of the trainer: what is let in, when weights move, how clipping acts, and what is reported."""

import copy
from contextlib import closing
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch

from stretto.algorithms.base import Algorithm, Term, build, keep
from stretto.errors import StaleSampleError
from stretto.recipe.schema import AlgorithmSection, Correction, Kl, Optimizer
from stretto.training.accumulators import square_sum
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer
from tiny import (
    SETTINGS,
    VOCABULARY,
    Recorder,
    credited,
    distance,
    random_groups,
    sample,
    scratch_policy,
    step,
)

RLOO = build(AlgorithmSection(name="rloo"))
LIKELY = -log(VOCABULARY)
"""Log-probability of any token where all are equally likely."""


def snapshot(policy):
    return {name: weight.detach().clone() for name, weight in policy.network.named_parameters()}


def unchanged(policy, before):
    return all(torch.equal(weight, before[name]) for name, weight in policy.network.named_parameters())


def learner(policy, *, algorithm=RLOO, lr=0.01, **settings):
    """A trainer with a real optimizer that takes its hooks off again."""
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=lr), updates=10)
    return closing(Trainer(policy, algorithm, optimizer, **(SETTINGS | settings)))


SAMPLES = credited(RLOO, random_groups(1))


@pytest.mark.parametrize("version", [-1, 1])
def test_a_sample_of_another_version_is_refused_before_anything_is_computed(version):
    policy = scratch_policy(layers=1)
    stale = sample([1, 2, 3], [2], version=version, attempt=4)
    with learner(policy) as trainer:
        with pytest.raises(StaleSampleError, match=rf"comes from weights {version}, not 0"):
            trainer.accumulate([*SAMPLES, stale])
        report = trainer.apply()
    assert report.metrics["tokens/trained"] == 0


def test_publishing_raises_the_version_and_the_samples_before_it_are_stale():
    policy = scratch_policy(layers=1)
    with learner(policy) as trainer:
        trainer.accumulate(SAMPLES)
        trainer.apply()
        trainer.accumulate(SAMPLES)  # a second update of the same step
        trainer.begin()
        weights = trainer.weights()
        assert (weights.version, weights.where, dict(weights.manifest)) == (1, "shared", {})
        with pytest.raises(StaleSampleError):
            trainer.accumulate(SAMPLES)
        trainer.accumulate([sample([1, 2, 3], [2], version=1)])


def test_weights_move_in_apply_alone():
    policy = scratch_policy()
    before = snapshot(policy)
    with learner(policy) as trainer:
        trainer.accumulate(SAMPLES)
        trainer.score([s.conversation for s in SAMPLES])
        assert unchanged(policy, before)
        assert all(weight.grad is None for weight in policy.trained().values())
        report = trainer.apply()
    assert report.applied
    assert not unchanged(policy, before)


def test_begin_forgets_what_was_accumulated():
    policy = scratch_policy()
    with closing(Trainer(policy, RLOO, Recorder(), **SETTINGS)) as trainer:
        trainer.accumulate(SAMPLES[:3])
        trainer.begin()
        trainer.accumulate(SAMPLES[3:])
        trainer.apply()
    expected = step(policy, RLOO, SAMPLES[3:])
    assert distance(expected.gradients, trainer.optimizer.gradients) < 1e-12


def test_a_step_ends_with_apply_and_the_next_one_starts_from_nothing():
    policy = scratch_policy()
    with closing(Trainer(policy, RLOO, Recorder(), **SETTINGS)) as trainer:
        trainer.accumulate(SAMPLES)
        first = trainer.apply()
        gradients = trainer.optimizer.gradients
        trainer.accumulate(SAMPLES)
        assert trainer.apply() == first
    assert distance(gradients, trainer.optimizer.gradients) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_not_applied(bad):
    policy = scratch_policy()
    before = snapshot(policy)
    broken = sample([1, 2, 3, 4], [2, 3], advantage=[1.0, bad], attempt=9)
    with learner(policy, clip=1.0) as trainer:
        trainer.accumulate([*SAMPLES, broken])
        report = trainer.apply()
        assert not report.applied
        assert unchanged(policy, before)
        assert trainer.optimizer.update == 0
        assert trainer.optimizer.state()["moments"]["model.norm.weight"] == {}
        trainer.accumulate(SAMPLES)
        assert trainer.apply().applied, "the next step does not inherit it"


@pytest.mark.parametrize(
    ("loss", "finite"),
    [
        (lambda lp, rows: (lp - lp.detach()).abs().sqrt(), True),  # 0, and the slope of a root at 0 is infinite
        (lambda lp, rows: lp + lp.detach() * float("inf"), False),  # infinite, with a slope of 1
    ],
)
def test_neither_loss_nor_gradient_hides_that_the_other_is_not_finite(loss, finite):
    policy = scratch_policy()
    algorithm = Algorithm(
        name="cliff",
        scope="sample",
        needs=frozenset(),
        min_samples=1,
        terms=(Term(name="cliff", denominator="tokens", loss=loss, watch={}),),
        advantage=RLOO.advantage,
        drop=keep,
    )
    before = snapshot(policy)
    with learner(policy, algorithm=algorithm) as trainer:
        trainer.accumulate(SAMPLES)
        report = trainer.apply()
    assert np.isfinite(report.metrics["loss"]) == finite != np.isfinite(report.metrics["grad_norm"])
    assert not report.applied
    assert unchanged(policy, before)


@pytest.mark.parametrize("samples", [[], [sample([1, 2, 3], [])]])
def test_without_trained_tokens_there_is_no_update(samples):
    policy = scratch_policy(layers=1)
    before = snapshot(policy)
    with learner(policy) as trainer:
        trainer.accumulate(samples)
        report = trainer.apply()
        assert trainer.optimizer.update == 0
    assert unchanged(policy, before)
    assert "learning_rate" not in report.metrics
    assert (report.metrics["loss"], report.metrics["grad_norm"], report.metrics["tokens/trained"]) == (0, 0, 0)


def test_a_conversation_without_trained_tokens_does_not_count_anywhere():
    policy = scratch_policy()
    quiet = sample([1, 2, 3], [], attempt=7)
    with_quiet, without = step(policy, RLOO, [*SAMPLES, quiet]), step(policy, RLOO, SAMPLES)
    assert with_quiet.metrics == without.metrics
    assert distance(without.gradients, with_quiet.gradients) == 0


def norm(gradients):
    return float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def test_the_norm_of_a_large_tensor_is_that_of_its_slices():
    """32 million numbers, in one tensor or in eight; fp32 on a CPU loses 0.2 % of the first."""
    one = torch.rand(1 << 25, generator=torch.Generator().manual_seed(0)).mul_(1e-4)
    exact = sum(float(part.double().square().sum()) for part in one.split(1 << 20))
    for parts in ([one], one.chunk(8), [one.view(1 << 12, 1 << 13).T]):
        assert float(square_sum(parts, one.device)) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_of_numbers_near_a_types_limits_is_exact(dtype):
    for size in (1e18, 1e-25):
        numbers = torch.full((3, 300_000), size, dtype=dtype)
        assert float(square_sum([numbers], numbers.device)) == pytest.approx(900_000 * size**2, rel=1e-6)
    assert float(square_sum([torch.zeros(0), torch.tensor(3.0), torch.tensor([[4.0]])], numbers.device)) == 25


def test_a_gradient_whose_squares_fp32_cannot_hold_is_skipped():
    policy = scratch_policy(dtype="float32")
    steep = replace(RLOO, terms=(replace(RLOO.terms[0], loss=lambda lp, rows: lp * 1e22),))
    with learner(policy, algorithm=steep) as trainer:
        trainer.accumulate(SAMPLES)
        report = trainer.apply()
    assert report.metrics["grad_norm"] == float("inf") and not report.applied


def test_clipping_sees_the_mean_gradient_and_not_the_sums():
    """Twelve trajectories make the sum twelve times the mean: a clip between the two norms must not act."""
    policy = scratch_policy()
    free = step(policy, RLOO, SAMPLES)
    mean = norm(free.gradients)
    trajectories = sum(s.leads for s in SAMPLES)
    clipped = step(policy, RLOO, SAMPLES, clip=mean * (1 + trajectories) / 2)
    assert distance(free.gradients, clipped.gradients) == 0


@pytest.mark.parametrize("budget", [60, 10_000])
def test_clipping_scales_the_whole_gradient_to_the_norm_it_allows(budget):
    policy = scratch_policy()
    free = step(policy, RLOO, SAMPLES)
    mean = norm(free.gradients)
    clipped = step(policy, RLOO, SAMPLES, clip=mean / 3, token_budget=budget)
    assert norm(clipped.gradients) == pytest.approx(mean / 3, rel=1e-10)
    assert distance({name: g / 3 for name, g in free.gradients.items()}, clipped.gradients) < 1e-10
    assert clipped.metrics["grad_norm"] == pytest.approx(mean, rel=1e-10), "reported before clipping"


def test_pieces_that_cancel_are_not_clipped_before_they_are_added():
    policy = scratch_policy()
    up, down = sample([1, 2, 3, 4], [2, 3], advantage=1.0), sample([1, 2, 3, 4], [2, 3], advantage=-0.99, attempt=1)
    alone = norm(step(policy, RLOO, [up]).gradients)
    both = step(policy, RLOO, [up], [down], clip=alone / 10)
    assert norm(both.gradients) == pytest.approx(alone * 0.01 / 2, rel=1e-9)


def test_narrow_modules_collect_their_gradients_in_single_precision():
    policy = scratch_policy(dtype="bfloat16")
    found = step(policy, RLOO, *[[one] for one in SAMPLES])
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    whole = step(policy, RLOO, SAMPLES)
    assert distance(whole.gradients, found.gradients) < 32 * torch.finfo(torch.bfloat16).eps


def test_a_closed_trainer_leaves_the_policy_to_the_next_one():
    policy = scratch_policy(layers=1)
    closed = Trainer(policy, RLOO, Recorder(), **SETTINGS)
    closed.close()
    step(policy, RLOO, SAMPLES)
    assert closed.accumulators == {}


def test_a_restored_trainer_goes_on_with_version_budget_and_recomputing():
    policy, other = scratch_policy(layers=1), scratch_policy(layers=1)
    settings = {"checkpointing": "auto", "token_budget": 77}
    with learner(policy, **settings) as trainer, learner(other, **settings) as restored:
        trainer.recompute()
        trainer.token_budget = 40
        trainer.weights()
        restored.accumulate(SAMPLES)
        restored.restore(copy.deepcopy(trainer.state()))
        state = {"version": 1, "token_budget": 40, "asked_budget": 77, "recomputes": True}
        assert restored.state() == trainer.state() == state
        newer = hasattr(other.network, "is_activation_checkpointing")  # transformers has renamed it
        assert other.network.is_activation_checkpointing if newer else other.network.is_gradient_checkpointing
        assert restored.apply().metrics["tokens/trained"] == 0, "a half-done step is forgotten"


def test_scores_stand_in_the_order_asked_and_are_empty_where_nothing_is_trained():
    policy = scratch_policy()
    talks = [s.conversation for s in SAMPLES]
    quiet = sample([1, 2, 3], []).conversation
    with closing(Trainer(policy, RLOO, Recorder(), **SETTINGS)) as trainer:
        plain = trainer.score(talks)
        mixed = trainer.score([quiet, *talks[::-1], quiet])
        assert trainer.score([]) == []
    assert len(mixed[0]) == len(mixed[-1]) == 0
    for one, other in zip(plain, mixed[-2:0:-1], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12)
        assert other.dtype == np.float64


def test_scores_of_a_frozen_copy_are_those_of_the_copy():
    policy, copy_of_other = scratch_policy(), scratch_policy(seed=3)
    talks = [s.conversation for s in SAMPLES]
    with (
        closing(Trainer(policy, RLOO, Recorder(), **SETTINGS)) as trainer,
        closing(Trainer(copy_of_other, RLOO, Recorder(), **SETTINGS)) as theirs,
    ):
        for found, expected in zip(trainer.score(talks, reference=copy_of_other), theirs.score(talks), strict=True):
            assert np.array_equal(found, expected)
        with pytest.raises(ValueError, match="no adapter to switch off"):
            trainer.score(talks, without_adapter=True)


def indifferent():
    """A policy for which every token is equally likely, so that its numbers can be worked out by hand."""
    policy = scratch_policy()
    with torch.no_grad():
        policy.network.get_output_embeddings().weight.zero_()
    return policy


def test_the_metrics_are_what_one_computes_by_hand():
    """Three tokens with engine log-ratios log 1, log 2 and log 4, of which only the last is above the cap of 3."""
    one = sample([1, 2, 3, 4], [2, 3], advantage=[1.0, -2.0], logprobs=[LIKELY, LIKELY - log(2)])
    other = sample([1, 5], [1], advantage=3.0, logprobs=[LIKELY - log(4)], attempt=1)
    algorithm = build(AlgorithmSection(name="rloo", correction=Correction(kind="token", cap=3.0)))
    metrics = step(indifferent(), algorithm, [one, other]).metrics
    weights = [1.0, 2.0, 4.0]
    assert metrics["entropy"] == pytest.approx(log(VOCABULARY), rel=1e-12)
    assert metrics["loss"] == pytest.approx(-(1.0 * 1 + 2.0 * -2 + 3.0 * 3) / 2, rel=1e-12)
    assert metrics["ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w**2 for w in weights)), rel=1e-12)
    assert metrics["kl/engine_trainer"] == pytest.approx(sum(w - 1 - log(w) for w in weights) / 3, rel=1e-12)
    assert metrics["engine_trainer/largest"] == pytest.approx(log(4), rel=1e-12)
    assert metrics["correction/share"] == metrics["engine_trainer/outside"] == pytest.approx(1 / 3)
    assert metrics["clip/share"] == 0
    assert (metrics["tokens/trained"], metrics["tokens/shared"]) == (3, 0)


def test_the_metrics_of_a_second_update_compare_with_the_log_probabilities_at_sampling():
    """Since sampling the four tokens have moved by log 1.5 up, log 1.1 up, log 2 down and log 2 down."""
    moves = np.log([1.5, 1.1, 0.5, 0.5])
    talk = sample([1, 2, 3, 4, 5], [1, 2, 3, 4], advantage=[1.0, 1.0, -1.0, 1.0], logprobs=np.full(4, LIKELY))
    later = replace(talk, old=LIKELY - moves, reference=np.full(4, LIKELY + 0.5))
    algorithm = build(
        AlgorithmSection(name="rloo", kl=Kl(coef=0.1, estimator="k2"), correction=Correction(kind="none"))
    )
    metrics = step(indifferent(), algorithm, [later]).metrics
    assert metrics["clip/share"] == pytest.approx(2 / 4), "the first rose though praised enough, the third fell enough"
    gains = 1.2 + 1.1 - 0.8 + 0.5
    assert metrics["loss"] == pytest.approx(-gains + 0.1 * 4 * 0.5**2 / 2, rel=1e-12)
    assert metrics["kl/reference"] == pytest.approx(exp(0.5) - 1 - 0.5, rel=1e-12)
    ratios = np.exp(-moves)  # trainer at sampling against engine
    assert metrics["kl/engine_trainer"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-12)


def test_shared_tokens_are_those_that_were_not_computed_again():
    prompt = list(range(16))
    talks = [sample([*prompt, 1 + index], [16], attempt=index) for index in range(4)]
    assert step(scratch_policy(), RLOO, talks).metrics["tokens/shared"] == 3 * 16


def test_a_policy_that_samples_as_the_engine_does_has_full_effective_samples():
    talk = sample([1, 2, 3], [1, 2], logprobs=[LIKELY, LIKELY])
    metrics = step(indifferent(), RLOO, [talk]).metrics
    assert metrics["ess"] == pytest.approx(1.0, rel=1e-12)
    assert metrics["kl/engine_trainer"] == pytest.approx(0.0, abs=1e-15)


def test_temperature_divides_the_logits_on_the_trainers_side_too():
    policy, sharper = scratch_policy(), scratch_policy()
    with torch.no_grad():  # twice the final states are twice the logits, which is half the temperature
        sharper.network.get_decoder().norm.weight.mul_(2)
    talks = [SAMPLES[0].conversation]
    with closing(Trainer(policy, RLOO, Recorder(), **(SETTINGS | {"temperature": 0.5}))) as trainer:
        cold = trainer.score(talks)[0]
    with closing(Trainer(sharper, RLOO, Recorder(), **SETTINGS)) as trainer:
        np.testing.assert_allclose(trainer.score(talks)[0], cold, rtol=1e-10)
    with closing(Trainer(policy, RLOO, Recorder(), **SETTINGS)) as trainer:
        assert not np.allclose(trainer.score(talks)[0], cold)


@pytest.mark.parametrize("correction", ["none", "token"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "the engine's word"])
def test_a_sample_of_older_weights_has_its_ratio_to_those(asked, correction):
    """The tokens of the test before, sampled by version 0 and trained on by version 1: clipping acts in one update."""
    moves = np.log([1.5, 1.1, 0.5, 0.5])
    talk = sample([1, 2, 3, 4, 5], [1, 2, 3, 4], advantage=[1.0, 1.0, -1.0, 1.0], logprobs=LIKELY - moves)
    stale = replace(talk, old=LIKELY - moves) if asked else talk
    fresh = sample([1, 2], [1], advantage=1.0, logprobs=[LIKELY], attempt=1, version=1)
    algorithm = build(AlgorithmSection(name="rloo", correction=Correction(kind=correction)))
    policy, recorder = indifferent(), Recorder()
    with closing(Trainer(policy, algorithm, recorder, **SETTINGS, staleness=1)) as trainer:
        trainer.version = 1
        trainer.accumulate([stale, fresh])
        metrics = trainer.apply().metrics
    assert metrics["clip/share"] == pytest.approx(2 / 5)
    assert metrics["loss"] == pytest.approx(-(1.2 + 1.1 - 0.8 + 0.5 + 1.0) / 2, rel=1e-12)
    ratios = np.exp(-moves)
    lag = np.sum(ratios**-1 - 1 + np.log(ratios)) / 5
    assert metrics["kl/engine_trainer"] == pytest.approx(lag, rel=1e-12)
