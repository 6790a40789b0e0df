"""The gradient of a step does not depend on how its samples are laid out, and it is the one plain torch computes.

Layout is the order of groups and samples, the pieces in which they arrive, the token budget that cuts rows, and
whether activations are recomputed. Every registered algorithm goes through the same tests.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rounding import backward_sums, longest, rounding
from stretto.algorithms.base import Algorithm, Term, build, keep
from stretto.recipe.schema import Adapter, AlgorithmSection, Correction, Kl
from stretto.training.trainer import Trainer
from tiers import slow_but
from tiny import (
    SAMPLING,
    SETTINGS,
    Recorder,
    credited,
    distance,
    learned,
    naive_logprobs,
    naive_step,
    random_groups,
    scratch_policy,
    step,
    with_old,
)

CHOICES = {
    "plain": {},
    "uncorrected": {"correction": Correction(kind="none")},
    "kl in the loss": {"kl": Kl(coef=0.3, estimator="k3", where="loss")},
    "kl in the reward": {"kl": Kl(coef=0.3, estimator="k1", where="reward")},
    "second update": {"kl": Kl(coef=0.3, estimator="k2", where="loss")},
}
"""What a recipe may choose; the second update has `old` log-probabilities, so that clipping acts."""

EXACT = 1e-10
"""Relative distance allowed in fp64."""


@st.composite
def layouts(draw):
    """A function that deals samples into pieces, and the settings of the trainer that gets them."""
    seed, pieces = draw(st.integers(0, 10_000)), draw(st.integers(1, 4))
    budget, recompute = draw(st.sampled_from([16, 40, 90, 200, 10_000])), draw(st.booleans())

    def deal(samples):
        order = np.random.default_rng(seed).permutation(len(samples))
        return [[samples[index] for index in order[start::pieces]] for start in range(pieces)]

    return deal, {"token_budget": budget, "checkpointing": recompute}


def prepared(policy, name, choice, *, seed, temperature=1.0):
    algorithm = build(AlgorithmSection(name=name, **CHOICES[choice]))
    samples = credited(algorithm, random_groups(seed))
    if choice == "second update":
        samples = with_old(policy, samples, temperature=temperature)
    return algorithm, samples


POLICY, SINGLE = scratch_policy(), scratch_policy(dtype="float32")
ADAPTED = scratch_policy(adapter=Adapter(rank=2, alpha=4.0))
for parameter_name, parameter in ADAPTED.trained().items():
    if "lora_B" in parameter_name:  # zero at the start, which would hide half of the gradient
        parameter.data.normal_(std=0.3)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", slow_but("grpo", "dapo", "gspo", "ppo", "astar_po", of=SAMPLING))
@settings(max_examples=2)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_layout_changes_neither_gradient_nor_metrics(name, choice, layout, seed):
    algorithm, samples = prepared(POLICY, name, choice, seed=seed)
    deal, chosen = layout
    whole, laid_out = step(POLICY, algorithm, samples), step(POLICY, algorithm, *deal(samples), **chosen)
    assert distance(whole.gradients, laid_out.gradients) < EXACT
    assert learned(laid_out.metrics) == pytest.approx(learned(whole.metrics), rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("name", slow_but("grpo", "ppo", of=SAMPLING))
@settings(max_examples=2)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_layout_changes_nothing_but_rounding_in_single_precision(name, layout, seed):
    algorithm, samples = prepared(SINGLE, name, "second update", seed=seed)
    deal, chosen = layout
    whole, laid_out = step(SINGLE, algorithm, samples), step(SINGLE, algorithm, *deal(samples), **chosen)
    close = rounding(torch.float32, *backward_sums(SINGLE.network.config, longest(samples)))
    assert distance(whole.gradients, laid_out.gradients) < close


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", slow_but("grpo", "dapo", "gspo", "ppo", "astar_po", of=SAMPLING))
def test_the_gradient_is_that_of_one_plain_forward_per_conversation(name, choice):
    algorithm, samples = prepared(POLICY, name, choice, seed=5, temperature=0.7)
    loss, expected = naive_step(POLICY, algorithm, samples, temperature=0.7)
    packed = step(POLICY, algorithm, samples, temperature=0.7)
    assert packed.metrics["tokens/shared"] > 100
    assert packed.metrics["loss"] == pytest.approx(loss, rel=1e-12, abs=1e-14)
    assert distance(expected, packed.gradients) < EXACT


@settings(max_examples=6)
@given(layout=layouts(), seed=st.integers(0, 1000))
def test_adapters_get_the_same_gradient_in_every_layout(layout, seed):
    algorithm, samples = prepared(ADAPTED, "grpo", "second update", seed=seed)
    deal, chosen = layout
    _, expected = naive_step(ADAPTED, algorithm, samples)
    assert all("lora_" in name for name in expected)
    assert distance(expected, step(ADAPTED, algorithm, *deal(samples), **chosen).gradients) < EXACT


def test_the_order_of_the_groups_does_not_matter_to_credit():
    for algorithm in (build(AlgorithmSection(name=name)) for name in SAMPLING):
        groups = random_groups(7)
        forward, backward = credited(algorithm, groups), credited(algorithm, groups[::-1])
        one, other = step(POLICY, algorithm, forward), step(POLICY, algorithm, backward)
        assert distance(one.gradients, other.gradients) < EXACT


def test_terms_with_different_denominators_are_each_divided_by_their_own():
    terms = tuple(
        Term(name=kind, denominator=kind, loss=lambda logprobs, rows, p=power: logprobs**p * rows.advantage, watch={})
        for power, kind in enumerate(("tokens", "conversations", "trajectories", "constant"), start=1)
    )
    mixed = Algorithm(
        name="mixed",
        scope="sample",
        needs=frozenset(),
        min_samples=1,
        terms=terms,
        advantage=build(AlgorithmSection()).advantage,
        drop=keep,
    )
    samples = credited(mixed, random_groups(3))
    loss, expected = naive_step(POLICY, mixed, samples)
    for chosen in ({}, {"token_budget": 60}, {"token_budget": 60, "checkpointing": True}):
        found = step(POLICY, mixed, samples, **chosen)
        assert found.metrics["loss"] == pytest.approx(loss, rel=1e-12)
        assert distance(expected, found.gradients) < EXACT


def test_scores_are_the_plain_log_probabilities_in_every_layout():
    algorithm = build(AlgorithmSection())
    talks = [s.conversation for s in credited(algorithm, random_groups(9))]
    expected = [naive_logprobs(POLICY, talk, temperature=0.7).detach().numpy() for talk in talks]
    for budget in (16, 100, 10_000):
        trainer = Trainer(POLICY, algorithm, Recorder(), **(SETTINGS | {"token_budget": budget, "temperature": 0.7}))
        found = trainer.score(talks)
        trainer.close()
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-11)
