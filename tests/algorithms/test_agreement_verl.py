"""Agreement with verl's own functions on random answers, where verl is installed (`scripts/evidence/agreement`).

Where conventions differ, verl is called with ours, and the difference is written beside it:
- it adds 1e-8 to every count that it divides by, so a mean differs in the ninth digit;
- its PPO loss has a second clip at ratios of 3 for negative advantages, which we do not have: it is called with one
  that is never reached, and one test shows that nothing else differs;
- it leaves answers without trained tokens out of a mean over answers; here every answer has one;
- it normalizes with an epsilon of 1e-6, and gives the only answer of a group its reward as advantage, we 0;
- its k3 is cut at 10, which no token here reaches.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from padded import (
    ANSWERS,
    INDEX,
    WIDTH,
    credited,
    gap,
    loss_and_gradient,
    random_answers,
    token_rewards,
)
from stretto.algorithms.advantages import group_normalized
from stretto.algorithms.base import build
from stretto.algorithms.correction import correction_weight, truncated_share
from stretto.algorithms.critic import value_terms
from stretto.algorithms.kl import ESTIMATORS
from stretto.models.logprob_head import Head, logprobs_of
from stretto.recipe.schema import AlgorithmSection, Correction, Gae, Kl

verl = pytest.importorskip("verl", reason="verl is not installed; scripts/evidence/agreement installs it")
core = pytest.importorskip("verl.trainer.ppo.core_algos")
ActorConfig = pytest.importorskip("verl.workers.config").ActorConfig
correct = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
functional = pytest.importorskip("verl.utils.torch_functional")

EXACT, COUNTED = 1e-12, 1e-7
"""Relative: of the same arithmetic, and where verl adds 1e-8 to a count."""

NEVER = 1e9
"""A second clip that no ratio reaches."""

SEEDS = pytest.mark.parametrize("seed", range(5))
HOLES = pytest.mark.parametrize("holes", [False, True], ids=["plain", "tools"])
UNCORRECTED = Correction(kind="none")


def verl_policy(answers, kind, clip, mode, *, weights=None, second_clip=NEVER, **counts):
    """verl's policy loss of a kind, its metrics, and its gradient."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        clip_ratio_c=second_clip,
        global_batch_info=counts,
    )
    new = answers.new.clone().requires_grad_()
    loss, metrics = core.get_policy_loss_fn(kind)(
        answers.old, new, answers.advantage, answers.mask, mode, config, rollout_is_weights=weights
    )
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient, metrics


@SEEDS
@HOLES
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8)])
def test_generalized_advantages_and_returns(seed, holes, gamma, lam):
    """verl, too, carries the next value and advantage through what a tool said, and whitens over trained tokens."""
    answers = random_answers(seed, holes=holes)
    theirs, their_returns = core.compute_gae_advantage_return(
        token_rewards(answers, coef=0.1), answers.values, answers.mask, gamma, lam
    )
    kl = Kl(coef=0.1, estimator="k1", where="reward")
    ours, returns = credited(answers, name="ppo", gae=Gae(gamma=gamma, lam=lam), kl=kl)
    assert gap(returns, answers.flat(their_returns)) < EXACT
    assert gap(ours, answers.flat(theirs)) < COUNTED


@SEEDS
def test_grpos_advantages(seed):
    answers = random_answers(seed)
    ours, _ = credited(answers, name="grpo")
    theirs, _ = core.compute_grpo_outcome_advantage(token_rewards(answers), answers.mask, INDEX, epsilon=1e-4)
    assert gap(ours, answers.flat(theirs)) < EXACT
    usual, _ = core.compute_grpo_outcome_advantage(token_rewards(answers), answers.mask, INDEX)
    groups = np.split(answers.rewards, len(set(INDEX)))
    by_answer = np.concatenate([group_normalized(group, epsilon=1e-6) for group in groups])
    assert gap(np.repeat(by_answer, answers.mask.sum(1).long()), answers.flat(usual)) < EXACT


@SEEDS
def test_dr_grpos_advantages(seed):
    answers = random_answers(seed)
    ours, _ = credited(answers, name="dr_grpo")
    theirs, _ = core.compute_grpo_outcome_advantage(
        token_rewards(answers), answers.mask, INDEX, norm_adv_by_std_in_grpo=False
    )
    assert gap(ours, answers.flat(theirs)) < EXACT


@SEEDS
def test_rloos_advantages(seed):
    answers = random_answers(seed)
    ours, _ = credited(answers, name="rloo")
    theirs, _ = core.compute_rloo_outcome_advantage(token_rewards(answers), answers.mask, INDEX)
    assert gap(ours, answers.flat(theirs)) < EXACT


@SEEDS
@HOLES
def test_reinforce_pps_advantages_with_penalties_in_the_reward(seed, holes):
    answers = random_answers(seed, holes=holes)
    ours, _ = credited(answers, name="reinforce_pp", kl=Kl(coef=0.1, estimator="k2", where="reward"))
    theirs, _ = core.compute_reinforce_plus_plus_outcome_advantage(
        token_rewards(answers, coef=0.1, estimator="k2"), answers.mask, config=SimpleNamespace(gamma=1.0)
    )
    assert gap(ours, answers.flat(theirs)) < COUNTED


POLICIES = {
    "reinforce": ("vanilla", (0.2, 0.2), "seq-mean-token-sum", {}),
    "rloo": ("vanilla", (0.2, 0.2), "seq-mean-token-sum", {}),
    "grpo": ("vanilla", (0.2, 0.2), "seq-mean-token-mean", {}),
    "dr_grpo": ("vanilla", (0.2, 0.2), "seq-mean-token-sum-norm", {"loss_scale_factor": 24}),
    "dapo": ("vanilla", (0.2, 0.28), "token-mean", {}),
    "reinforce_pp": ("vanilla", (0.2, 0.2), "token-mean", {}),
    "ppo": ("vanilla", (0.2, 0.2), "token-mean", {}),
    "gspo": ("gspo", (3e-4, 4e-4), "seq-mean-token-mean", {}),
    "cispo": ("cispo", (1.0, 4.0), "token-mean", {}),
}
"""Name -> verl's loss, its clip range, how it averages. verl's CISPO, too, clamps to [1 - low, 1 + high].

Of Dr. GRPO verl divides by the padded width unless it is told a constant.
"""


@SEEDS
@HOLES
@pytest.mark.parametrize("name", POLICIES)
def test_policy_losses_their_gradients_and_clip_shares(name, seed, holes):
    kind, clip, mode, counts = POLICIES[name]
    answers = random_answers(seed, holes=holes)
    constant = {"constant": 24} if counts else {}
    ours, gradient = loss_and_gradient(answers, name=name, correction=UNCORRECTED, **constant)
    theirs, their_gradient, metrics = verl_policy(answers, kind, clip, mode, **counts)
    assert gap(ours, theirs) < COUNTED
    assert gap(gradient, their_gradient) < COUNTED
    if kind != "cispo":  # there verl counts every ratio outside of the range, we those whose advantage asks for more
        (term,) = build(AlgorithmSection(name=name, correction=UNCORRECTED, **constant)).terms
        share = term.watch["clip/share"].numbers(answers.flat(answers.new), answers.rows()).sum() / answers.tokens
        assert gap(share.item(), metrics["actor/pg_clipfrac"]) < COUNTED


@SEEDS
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.05, 0.5)])
@pytest.mark.parametrize("kind", ["vanilla", "gspo", "cispo"])
def test_policy_losses_at_other_clip_ranges(kind, clip, seed):
    name = {"vanilla": "grpo", "gspo": "gspo", "cispo": "cispo"}[kind]
    mode = "token-mean" if kind == "cispo" else "seq-mean-token-mean"
    answers = random_answers(seed)
    ours, gradient = loss_and_gradient(answers, name=name, clip=clip, correction=UNCORRECTED)
    theirs, their_gradient, _ = verl_policy(answers, kind, clip, mode)
    assert gap(ours, theirs) < COUNTED
    assert gap(gradient, their_gradient) < COUNTED


@SEEDS
def test_the_older_function_and_its_averages(seed):
    answers = random_answers(seed)
    names = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum": "rloo"}
    for mode, name in names.items():
        ours, _ = loss_and_gradient(answers, name=name, clip=(0.2, 0.28), correction=UNCORRECTED)
        with pytest.warns(FutureWarning, match="deprecated"):
            theirs, *_ = core.compute_policy_loss(
                answers.old,
                answers.new,
                answers.advantage,
                answers.mask,
                cliprange_low=0.2,
                cliprange_high=0.28,
                clip_ratio_c=NEVER,
                loss_agg_mode=mode,
            )
        assert gap(ours, theirs) < COUNTED


@SEEDS
@pytest.mark.parametrize(
    ("name", "mode"), [("dapo", "token-mean"), ("grpo", "seq-mean-token-mean"), ("rloo", "seq-mean-token-sum")]
)
def test_micro_batches_that_verl_divides_by_global_counts(name, mode, seed):
    """Three micro-batches of verl, told the counts of the whole batch, add up to our one sum over the batch."""
    answers = random_answers(seed)
    counts = {"batch_num_tokens": answers.tokens, "global_batch_size": ANSWERS}
    ours, gradient = loss_and_gradient(answers, name=name, clip=(0.2, 0.2), correction=UNCORRECTED)
    pieces = [verl_policy(answers.part(at), "vanilla", (0.2, 0.2), mode, **counts) for at in ((0, 1), (1, 7), (7, 12))]
    assert gap(ours, sum(loss for loss, _, _ in pieces)) < COUNTED
    assert gap(gradient, torch.cat([piece for _, piece, _ in pieces])) < COUNTED


@SEEDS
def test_verls_second_clip_is_all_that_differs(seed):
    """Where A < 0 and the ratio is above 3, verl counts 3 |A| and we ratio |A|; nowhere else."""
    answers = random_answers(seed)
    ratio = (4 * (answers.new - answers.old)).exp()
    wild = replace(answers, new=answers.old + ratio.log())
    ours, _ = loss_and_gradient(wild, name="dapo", correction=UNCORRECTED)
    theirs, *_ = verl_policy(wild, "vanilla", (0.2, 0.28), "token-mean", second_clip=3.0)
    excess = ((ratio - 3) * -wild.advantage * (ratio > 3) * (wild.advantage < 0) * wild.mask).sum() / wild.tokens
    assert excess > 0
    assert gap(ours - excess, theirs) < COUNTED


@SEEDS
@HOLES
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_corrections_of_the_engine_and_the_losses_they_weigh(kind, seed, holes):
    """verl has no geometric weight; its weights, too, are cut from above alone, and multiply the policy's loss."""
    answers = random_answers(seed, holes=holes)
    theirs, _ = correct.compute_rollout_correction_weights(
        answers.old - answers.engine, answers.mask, rollout_is=kind, rollout_is_threshold=1.5
    )
    correction = Correction(kind=kind, cap=1.5)
    ours = correction_weight(answers.flat(answers.new), answers.rows(), correction=correction)
    assert gap(ours, answers.flat(theirs)) < EXACT
    truncated = truncated_share(answers.flat(answers.new), answers.rows(), correction=correction)
    assert truncated.sum() == (answers.flat(theirs) == 1.5).sum()
    loss, gradient = loss_and_gradient(answers, name="grpo", correction=correction)
    weighed = verl_policy(answers, "vanilla", (0.2, 0.2), "seq-mean-token-mean", weights=theirs)
    assert gap(loss, weighed[0]) < COUNTED
    assert gap(gradient, weighed[1]) < COUNTED


@SEEDS
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_kl_estimators_and_the_gradient_of_a_kl_term(estimator, seed):
    answers = random_answers(seed)
    new = answers.new.clone().requires_grad_()
    theirs = core.kl_penalty(new, answers.reference, estimator)
    assert gap(ESTIMATORS[estimator](answers.new, answers.reference), theirs.detach()) < EXACT
    pull = 0.3 * core.agg_loss(theirs, answers.mask, "seq-mean-token-mean")
    (pull_gradient,) = torch.autograd.grad(pull, new)
    policy, policy_gradient, _ = verl_policy(answers, "vanilla", (0.2, 0.2), "seq-mean-token-mean")
    kl = Kl(coef=0.3, estimator=estimator, where="loss")
    ours, gradient = loss_and_gradient(answers, name="grpo", kl=kl, correction=UNCORRECTED)
    assert gap(ours, policy + pull.item()) < COUNTED
    assert gap(gradient, policy_gradient + pull_gradient) < COUNTED


@SEEDS
@HOLES
@pytest.mark.parametrize("clip", [0.2, 0.5])
def test_the_critics_loss_its_gradient_and_its_clip_share(clip, seed, holes):
    answers = random_answers(seed, holes=holes)
    now = (answers.values + (answers.new - answers.old)).requires_grad_()
    theirs, their_share = core.compute_value_loss(now, answers.returns, answers.values, answers.mask, clip)
    (their_gradient,) = torch.autograd.grad(theirs, now)
    (term,) = value_terms(Gae(value_clip=clip))
    ours = term.loss(answers.flat(now), answers.rows()).sum() / answers.tokens
    (gradient,) = torch.autograd.grad(ours, now)
    assert gap(ours.item(), theirs.item()) < EXACT
    assert gap(gradient, their_gradient) < EXACT
    share = term.watch["clip/value_share"].numbers(answers.flat(now), answers.rows()).sum() / answers.tokens
    assert gap(share.item(), their_share.item()) < COUNTED


def test_entropies_and_log_probabilities_of_tokens():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ANSWERS * WIDTH, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 50, (ANSWERS * WIDTH,), generator=generator)
    ours, entropy = logprobs_of(hidden, Head(weight=weight), targets, temperature=0.7)
    logits = hidden @ weight.T / 0.7  # verl, too, divides by the sampling temperature first
    assert gap(ours, functional.logprobs_from_logits_naive(logits, targets)) < EXACT
    assert gap(entropy, functional.entropy_from_logits(logits)) < EXACT
