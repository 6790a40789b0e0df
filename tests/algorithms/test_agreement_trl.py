"""Agreement with TRL's own functions on random answers, where TRL is installed (`scripts/evidence/agreement`).

TRL's losses are methods of its trainers, so they are called on a stand-in that has the numbers a method reads. Where
conventions differ, TRL is called with ours, and the difference is written beside it:
- CISPO: TRL's `epsilon_high` is the cap itself and there is no lower bound, so 5 is our clip of (1, 4);
- Dr. GRPO: TRL divides by `max_completion_length`, which is our `algorithm.constant`;
- GSPO is `loss_type` grpo with the ratio of the sequence, and a KL term, where there is one, is always k3;
- RLOO: TRL's ratio is that of the whole sequence and ours of each token, so they agree while weights have not moved;
- single precision: of one factor of the deviation of rewards, and of the share of clipped tokens.

A*PO has no difference to name: V* and the regression are the same in both.
"""

import math
from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from padded import ANSWERS, INDEX, WIDTH, credited, gap, loss_and_gradient, random_answers
from stretto.algorithms.base import build
from stretto.algorithms.optimal import optimal_value
from stretto.models.logprob_head import Head, logprobs_of
from stretto.recipe.schema import AlgorithmSection, Correction, Kl, Vstar
from stretto.rewards.answer import overlong

trl = pytest.importorskip("trl", reason="TRL is not installed; scripts/evidence/agreement installs it")
grpo = pytest.importorskip("trl.trainer.grpo_trainer")
rloo = pytest.importorskip("trl.trainer.rloo_trainer")
utils = pytest.importorskip("trl.trainer.utils")
rewards = pytest.importorskip("trl.rewards")
a2po = pytest.importorskip("trl.experimental.a2po.a2po_trainer")

EXACT, SINGLE = 1e-12, 1e-6
"""Relative: of the same arithmetic, and where TRL has one number of it in single precision."""

SEEDS = pytest.mark.parametrize("seed", range(5))
HOLES = pytest.mark.parametrize("holes", [False, True], ids=["plain", "tools"])
UNCORRECTED = Correction(kind="none")


class Alone:
    """Stands where an Accelerator would, on one process."""

    num_processes, sync_gradients = 1, True

    def gather(self, tensor):
        return tensor

    gather_for_metrics = gather

    def reduce(self, tensor, reduction):
        return tensor


def stand_in(new, **chosen):
    """What TRL's `_compute_loss` reads of its trainer."""
    usual = {
        "_get_per_token_logps_and_entropies": lambda *args, **more: (new, torch.zeros_like(new), None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "loss_type": "grpo",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 24,
        "_entropy_bonus_enabled": False,
        "accelerator": Alone(),
        "model": SimpleNamespace(training=True),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(**(usual | chosen))


def inputs(answers, **more):
    """A batch as TRL's trainers hand it to `_compute_loss`; a tool's words are masked by a mask of their own."""
    nobody = torch.zeros(ANSWERS, 1, dtype=torch.long)
    return {
        "prompt_ids": nobody,
        "prompt_mask": nobody + 1,
        "completion_ids": torch.zeros(ANSWERS, WIDTH, dtype=torch.long),
        "completion_mask": torch.ones(ANSWERS, WIDTH, dtype=torch.long),
        "tool_mask": answers.mask,
        "advantages": answers.advantage[:, 0],
        "old_per_token_logps": answers.old,
        "ref_per_token_logps": answers.reference,
        "num_items_in_batch": answers.mask.sum(),
        **more,
    }


def trl_policy(answers, *, weights=None, **chosen):
    """TRL's loss, its gradient and its metrics."""
    new = answers.new.clone().requires_grad_()
    corrected = weights is not None
    trainer = stand_in(new, use_vllm=corrected, vllm_importance_sampling_correction=corrected, **chosen)
    loss = grpo.GRPOTrainer._compute_loss(trainer, None, inputs(answers, importance_sampling_ratio=weights))
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient, trainer._metrics["train"]


LOSSES = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-4,
        "epsilon_high": 4e-4,
    },
}
"""Our name -> TRL's settings for it."""


def chosen_here(name):
    return {"name": name, **({"constant": 24} if name == "dr_grpo" else {})}


@SEEDS
@HOLES
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_and_their_gradients(name, seed, holes):
    answers = random_answers(seed, holes=holes)
    ours, gradient = loss_and_gradient(answers, correction=UNCORRECTED, **chosen_here(name))
    theirs, their_gradient, _ = trl_policy(answers, **LOSSES[name])
    assert gap(ours, theirs) < EXACT
    assert gap(gradient, their_gradient) < EXACT


@SEEDS
@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_while_weights_have_not_moved(name, seed):
    answers = random_answers(seed)
    ours, gradient = loss_and_gradient(answers, correction=UNCORRECTED, changes={"old": None}, **chosen_here(name))
    new = answers.new.clone().requires_grad_()
    batch = inputs(answers) | {"old_per_token_logps": None}
    loss = grpo.GRPOTrainer._compute_loss(stand_in(new, **LOSSES[name]), None, batch)
    assert gap(ours, loss.item()) < EXACT
    assert gap(gradient, torch.autograd.grad(loss, new)[0]) < EXACT


@SEEDS
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_losses_with_a_kl_term_and_a_correction_of_the_engine(name, seed):
    """TRL's `token_truncate`: the correction multiplies the policy's loss and not the KL term, as here."""
    answers = random_answers(seed)
    ours, gradient = loss_and_gradient(
        answers,
        correction=Correction(kind="token", cap=2.0),
        kl=Kl(coef=0.3, estimator="k3", where="loss"),
        **chosen_here(name),
    )
    weights = (answers.old - answers.engine).exp().clamp(max=2.0)
    theirs, their_gradient, metrics = trl_policy(answers, weights=weights, beta=0.3, **LOSSES[name])
    assert gap(ours, theirs) < EXACT
    assert gap(gradient, their_gradient) < EXACT
    away = answers.flat(answers.reference - answers.new)
    assert gap((away.exp() - 1 - away).mean().item(), metrics["kl"][0]) < EXACT


@SEEDS
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_share_of_tokens_that_clipping_holds_back(name, seed):
    answers = random_answers(seed)
    (term,) = build(AlgorithmSection(name=name, correction=UNCORRECTED)).terms
    ours = term.watch["clip/share"].numbers(answers.flat(answers.new), answers.rows()).mean()
    *_, metrics = trl_policy(answers, **LOSSES[name])
    assert 0.1 < ours < 0.9
    assert gap(ours.item(), metrics["clip_ratio/region_mean"][0]) < SINGLE


@SEEDS
def test_grpos_advantages(seed):
    """TRL's lines, which stand in the midst of its generation, around its own deviation.

    That takes n / (n - 1) in single precision, so it differs in the eighth digit.
    """
    answers = random_answers(seed)
    grouped = torch.as_tensor(answers.rewards).view(-1, ANSWERS // len(set(INDEX)))
    deviation = utils.nanstd(grouped, dim=1)
    theirs = ((grouped - grouped.mean(1, keepdim=True)) / (deviation.view(-1, 1) + 1e-4)).flatten()
    ours, _ = credited(answers, name="grpo")
    assert gap(ours, theirs.repeat_interleave(answers.mask.sum(1).long())) < SINGLE


@SEEDS
def test_rloos_loss_while_weights_have_not_moved(seed):
    answers = random_answers(seed)
    ours, gradient = loss_and_gradient(answers, name="rloo", correction=UNCORRECTED, changes={"old": None})
    new = answers.new.clone().requires_grad_()
    batch = inputs(answers) | {"completion_mask": answers.mask, "old_logps": (answers.new * answers.mask).sum(1)}
    loss = rloo.RLOOTrainer._compute_loss(stand_in(new), None, batch)
    assert gap(gradient, torch.autograd.grad(loss, new)[0]) < EXACT
    by_answer = -answers.advantage[:, 0] * answers.mask.sum(1)  # TRL counts -A once per answer, we once per token
    assert gap(ours, by_answer.mean().item()) < EXACT


def test_the_penalty_of_long_answers():
    theirs = rewards.get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    ours = [overlong(length, longest=100, buffer=20) for length in range(300)]
    assert gap(ours, theirs([[0] * length for length in range(300)])) < EXACT


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_entropies_of_tokens(temperature):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(50, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 50, (60,), generator=generator)
    ours, entropy = logprobs_of(hidden, Head(weight=weight), targets, temperature=temperature)
    logits = hidden @ weight.T
    assert gap(ours, utils.selective_log_softmax(logits, targets, temperature=temperature)) < EXACT
    assert gap(entropy, utils.entropy_from_logits(logits / temperature)) < EXACT


class Words(dict):
    """What a tokenizer returns."""

    def to(self, device):
        return self


class Tokenizer:
    """Of prompts that are numbers."""

    def __call__(self, texts, **how):
        return Words(input_ids=torch.tensor([[int(text)] for text in texts]))

    def batch_decode(self, tokens, **how):
        return ["" for _ in tokens]


class Reference:
    """Says one token, as often as it is asked to."""

    def __init__(self, samples):
        self.samples = samples

    def generate(self, input_ids, generation_config):
        return torch.cat([input_ids, input_ids], 1).repeat_interleave(self.samples, 0)


@SEEDS
@pytest.mark.parametrize("beta1", [0.1, 0.5, 10.0])
def test_the_optimal_values_of_astar_po(beta1, seed, monkeypatch):
    """TRL's first stage, with rewards in the place of its reward functions."""
    drawn = torch.as_tensor(np.random.default_rng(seed).random((4, 8)).round(1))
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            beta1=beta1,
            num_value_samples=8,
            per_device_train_batch_size=4,
            max_prompt_length=None,
            filter_all_incorrect=False,
        ),
        train_dataset=[{"prompt": str(number)} for number in range(4)],
        eval_dataset=None,
        accelerator=SimpleNamespace(prepare=lambda loader: loader, device="cpu"),
        processing_class=Tokenizer(),
        ref_model=Reference(8),
        value_generation_config=None,
        _calculate_rewards=lambda prompts, answers, **columns: drawn.flatten(),
    )
    monkeypatch.setattr(a2po, "unwrap_model_for_generation", Unwrapped)
    monkeypatch.setattr(a2po, "gather_object", lambda objects: objects)
    monkeypatch.setattr(a2po.logger, "info", lambda *said: None)  # it asks for a distributed state of its own
    a2po.A2POTrainer._estimate_optimal_values(trainer)
    ours = [optimal_value(row.tolist(), beta1) for row in drawn]
    assert gap(ours, [trainer._optimal_values[str(number)] for number in range(4)]) < EXACT
    by_hand = [beta1 * (float(torch.logsumexp(row / beta1, 0)) - math.log(8)) for row in drawn]
    assert gap(ours, by_hand) < EXACT


class Unwrapped:
    """A model that was never wrapped."""

    def __init__(self, model, accelerator):
        self.model = model

    def __enter__(self):
        return self.model

    def __exit__(self, *error):
        return None


@SEEDS
@HOLES
def test_the_regression_of_astar_po_and_its_gradient(seed, holes):
    answers = random_answers(seed, holes=holes)
    optimum = torch.as_tensor(np.random.default_rng(seed).random(ANSWERS))
    new = answers.new.clone().requires_grad_()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(beta2=0.05),
        _get_sequence_logps=lambda *args: (new * answers.mask).sum(1),
        _metrics={"train": defaultdict(list)},
    )
    batch = {
        "input_ids": None,
        "attention_mask": None,
        "logits_to_keep": None,
        "ref_logps": (answers.reference * answers.mask).sum(1),
        "rewards": torch.as_tensor(answers.rewards),
        "v_star": optimum,
    }
    loss = a2po.A2POTrainer.compute_loss(trainer, None, batch)
    gaps = (batch["rewards"] - optimum).repeat_interleave(answers.mask.sum(1).long())
    ours, gradient = loss_and_gradient(answers, name="astar_po", vstar=Vstar(beta2=0.05), changes={"advantage": gaps})
    assert gap(ours, loss.item()) < EXACT
    assert gap(gradient, torch.autograd.grad(loss, new)[0]) < EXACT


def test_the_defaults_that_the_page_of_differences_names():
    """docs/reference/differences.md says them of TRL; where a later TRL has others, the page is to be mended."""
    theirs = {field.name: field.default for field in fields(trl.GRPOConfig)}
    named = {
        "loss_type": "dapo", "epsilon": 0.2, "epsilon_high": None, "scale_rewards": "group", "beta": 0.0,
        "use_bias_correction_kl": True, "mask_truncated_completions": False, "adam_beta1": 0.9, "adam_beta2": 0.999,
        "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
        "lr_scheduler_type": "linear", "entropy_coef": 0.0,
    }  # fmt: skip
    assert {name: theirs[name] for name in named} == named
    assert {field.name: field.default for field in fields(trl.RLOOConfig)}["beta"] == 0.05
    ours = AlgorithmSection()
    assert (ours.name, ours.kl.coef, ours.correction) == ("grpo", 0.0, Correction(kind="token", cap=2.0))


@SEEDS
def test_of_clipped_answers_trls_rloo_clips_the_product_and_we_each_token(seed):
    """The row of the page: where no token has left the range but the answer has, they differ."""
    answers = random_answers(seed)
    old = answers.new - 0.15  # every token has become likelier by a factor of 1.16, within 1.2
    ones = answers.advantage * 0 + 1
    rows = {"old": (old * 1.0)[answers.mask.bool()], "advantage": ones[answers.mask.bool()]}
    _, ours = loss_and_gradient(answers, name="rloo", correction=UNCORRECTED, changes=rows)
    assert (ours[answers.mask.bool()] != 0).all()
    new = answers.new.clone().requires_grad_()
    batch = inputs(answers) | {
        "advantages": ones[:, 0],
        "completion_mask": answers.mask,
        "old_logps": (old * answers.mask).sum(1),
    }
    loss = rloo.RLOOTrainer._compute_loss(stand_in(new), None, batch)
    (theirs,) = torch.autograd.grad(loss, new)
    long = answers.mask.sum(1) >= 2  # 1.16 squared is above 1.2
    assert (theirs[long] == 0).all()
