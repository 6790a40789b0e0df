"""Tiny models, conversations and gradients that the tests of training are made of.

Everything is random but keyed by a seed, small enough for milliseconds, and built through the public seams. A gradient
is what a trainer hands to its optimizer, so it is read by a `Recorder` in the optimizer's place.
"""

import copy
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from stretto.algorithms.base import TokenStreams, build
from stretto.algorithms.catalog import CATALOG
from stretto.kernels.cpu.backward import take_over
from stretto.kernels.cuda.fused_layers import fuse_layers
from stretto.models.converted import settle
from stretto.models.load import Policy, load, refuse_moving_positions, switch_dropout_off, take_over_attention
from stretto.models.scratch import character_tokenizer
from stretto.models.source import ModelFiles
from stretto.recipe.schema import AlgorithmSection, ModelSection, Scratch
from stretto.runtime.minibatches import credit
from stretto.training.trainer import Trainer
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Sample, Trajectory, trajectory_key

SAMPLING = {name: facts for name, facts in CATALOG.items() if facts.rows == "prompts"}
"""The algorithms that learn from answers which are sampled."""

CHARACTERS = "0123456789="
VOCABULARY = 5 + len(CHARACTERS)
SCRATCH_FILES = ModelFiles(kind="scratch", name="scratch", folder=None, file=None)
CPU = torch.device("cpu")


def scratch_model(*, dtype="float64", adapter=None, quantize="none", layers=2, width=16, heads=2, context=256):
    """The model section of a recipe for a tiny decoder."""
    scratch = Scratch(layers=layers, width=width, heads=heads, characters=CHARACTERS, warmup_steps=0, context=context)
    return ModelSection(name="scratch", scratch=scratch, dtype=dtype, adapter=adapter, quantize=quantize)


def scratch_policy(*, seed=0, **sizes):
    """A tiny random decoder, its weights large enough that its distributions are not flat."""
    policy = load(scratch_model(**sizes), SCRATCH_FILES, seed=seed, device=CPU)
    with torch.no_grad():
        for name, weight in policy.network.named_parameters():
            if weight.dim() == 2 and weight.is_floating_point() and "lora_" not in name:
                weight.mul_(8)
    return policy


def policy_from(config, *, dtype=torch.float64, seed=0):
    """A random model of any family, wrapped as `load` would."""
    config = copy.deepcopy(config)  # a model writes into its own
    refuse_moving_positions(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Experts one by one: the grouped kernel knows no fp64.
        return policy_around(settle(AutoModelForCausalLM.from_config(config, experts_implementation="eager"), dtype))


def policy_around(network):
    """What `load` makes of a network."""
    network.config.use_cache = False
    switch_dropout_off(network)
    take_over(network)
    fuse_layers(network)
    policy = Policy(network=network, tokenizer=character_tokenizer(CHARACTERS))
    take_over_attention(policy)
    return policy


def conversation(tokens, trained, *, logprobs=None, version=0, stop="stop"):
    """A conversation from plain lists; `trained` holds the places of the trained tokens."""
    mask = np.zeros(len(tokens), dtype=bool)
    mask[trained] = True
    full = np.zeros(len(tokens))
    full[mask] = -1.0 if logprobs is None else logprobs
    return Conversation(
        tokens=np.array(tokens, dtype=np.int64), trained=mask, logprobs=full, stop=stop, version=version
    )


def sample(tokens, trained, *, advantage=1.0, name="p", attempt=0, **keywords):
    """A credited conversation from plain lists."""
    talk = conversation(tokens, trained, **keywords)
    credit = np.broadcast_to(np.asarray(advantage, dtype=float), (int(talk.trained.sum()),)).copy()
    return Sample(key=(name, 0, attempt, 0), conversation=talk, advantage=credit, leads=True)


def random_talk(rng, opening):
    """A conversation that opens with given tokens and has one to three trained turns with context between them."""
    tokens, trained = list(opening), []
    for turn in range(rng.integers(1, 4)):
        if turn:
            tokens += rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist()
        said = rng.integers(0, VOCABULARY, rng.integers(1, 9)).tolist()
        trained += range(len(tokens), len(tokens) + len(said))
        tokens += said
    return conversation(tokens, trained, logprobs=rng.uniform(-4, -0.5, len(trained)))


def random_groups(seed, *, groups=3, samples=3):
    """Scored groups under one system prompt; a third of the trajectories hold a second conversation."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCABULARY, 20).tolist()
    made = []
    for index in range(groups):
        prompt = Prompt(id=f"p{index}", messages=({"role": "user", "content": "?"},))
        asked = system + rng.integers(0, VOCABULARY, rng.integers(2, 25)).tolist()
        trajectories = []
        for attempt in range(samples):
            talks = [random_talk(rng, asked)]
            if rng.random() < 1 / 3:
                talks.append(random_talk(rng, talks[0].tokens[: rng.integers(1, len(talks[0].tokens))]))
            trajectories.append(
                Trajectory(
                    prompt=prompt,
                    visit=0,
                    attempt=attempt,
                    conversations=tuple(talks),
                    outcome=Outcome(answer=""),
                )
            )
        values = rng.random(samples).round(2).tolist()
        rewards = tuple(Reward(value=value, outcome=value, parts={}) for value in values)
        made.append(Group(prompt=prompt, trajectories=tuple(trajectories), rewards=rewards))
    return tuple(made)


def credited(algorithm, groups, *, seed=0):
    """The groups' samples, with random numbers for every stream the algorithm needs."""
    rng = np.random.default_rng(seed)
    lengths = {
        (*trajectory_key(trajectory), index): int(talk.trained.sum())
        for group in groups
        for trajectory in group.trajectories
        for index, talk in enumerate(trajectory.conversations)
    }
    streams = {
        name: {key: rng.uniform(-4, -0.5, lengths[key]) for key in sorted(lengths)}  # whatever the groups' order
        for name in sorted(algorithm.needs - {"old"})
    }
    return credit(algorithm, groups, streams)


def with_old(policy, samples, *, seed=0, temperature=1.0):
    """The samples as in a second update: the trainer's log-probabilities have moved a little since."""
    rng = np.random.default_rng(seed)
    trainer = Trainer(policy, build(AlgorithmSection()), Recorder(), **(SETTINGS | {"temperature": temperature}))
    scores = trainer.score([s.conversation for s in samples])
    trainer.close()
    return tuple(
        replace(s, old=score + rng.normal(0, 0.3, len(score))) for s, score in zip(samples, scores, strict=True)
    )


class Recorder:
    """Stands where an optimizer would and keeps the gradients it is given."""

    def __init__(self):
        self.gradients = None

    def step(self, gradients):
        """Keeps a copy and changes nothing."""
        self.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        return 0.0


ABOUT_ROWS = {"tokens/shared", "micro_batches", "micro_batches/overhead"}
"""Metrics of an update that say how samples were laid into rows, and not what was learned from them."""

SETTINGS = {"token_budget": 10_000, "temperature": 1.0, "clip": None, "checkpointing": False}
"""Everything in one row, nothing clipped, nothing recomputed."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step of a trainer came to."""

    gradients: dict
    metrics: dict
    token_budget: int
    recomputes: bool


def keep_activations(network):
    """Undoes `recompute_activations`, by the name that this transformers has for it."""
    newer = getattr(network, "activation_checkpointing_disable", None)
    (newer or network.gradient_checkpointing_disable)()


def step(policy, algorithm, *pieces, **settings):
    """Accumulates the pieces one after the other and returns the gradient that would be applied."""
    recorder = Recorder()
    trainer = Trainer(policy, algorithm, recorder, **(SETTINGS | settings))
    try:
        for piece in pieces:
            trainer.accumulate(piece)
        report = trainer.apply()
    finally:
        trainer.close()
        keep_activations(policy.network)
    return Step(
        gradients=recorder.gradients,
        metrics=dict(report.metrics),
        token_budget=trainer.token_budget,
        recomputes=trainer.recomputes,
    )


def learned(metrics):
    """Those that do not depend on how samples were laid into rows."""
    return {key: value for key, value in metrics.items() if key not in ABOUT_ROWS}


def naive_logprobs(policy, talk, *, temperature=1.0):
    """Log-probabilities of trained tokens as plain transformers and torch compute them for one conversation."""
    ours = policy.network.config._attn_implementation
    policy.network.set_attn_implementation("eager" if policy.apart else "sdpa")
    try:
        logits = policy.network(input_ids=torch.as_tensor(talk.tokens)[None], use_cache=False).logits[0]
    finally:
        policy.network.set_attn_implementation(ours)
    at = torch.as_tensor(np.flatnonzero(talk.trained))
    targets = torch.as_tensor(talk.tokens)[at]
    return (logits[at - 1] / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def naive_rows(samples, dtype):
    """The streams of all samples, one after the other."""

    def stream(name):
        parts = [getattr(s, name) for s in samples]
        return None if parts[0] is None else torch.as_tensor(np.concatenate(parts), dtype=dtype)

    lengths = [int(s.conversation.trained.sum()) for s in samples]
    return TokenStreams(
        advantage=stream("advantage"),
        engine=torch.as_tensor(
            np.concatenate([s.conversation.logprobs[s.conversation.trained] for s in samples]), dtype=dtype
        ),
        conversation=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        lengths=torch.tensor(lengths),
        old=stream("old"),
        reference=stream("reference"),
        values=stream("values"),
        returns=stream("returns"),
        siblings=torch.tensor([s.siblings for s in samples]),
        family_tokens=torch.tensor([s.family_tokens for s in samples]),
    )


def naive_step(policy, algorithm, samples, *, temperature=1.0):
    """The same step without packing, chunks, hooks or accumulators: one forward per conversation, one backward."""
    logprobs = torch.cat([naive_logprobs(policy, s.conversation, temperature=temperature) for s in samples])
    return finished(logprobs, policy.trained(), algorithm, samples)


def finished(logprobs, trained, algorithm, samples):
    """Loss and gradients of a step, from the log-probabilities of all trained tokens in the samples' order."""
    counts = {
        "tokens": sum(int(s.conversation.trained.sum()) for s in samples),
        "conversations": len(samples),
        "trajectories": len({s.key[:3] for s in samples}),
        "constant": 1,
    }
    rows = naive_rows(samples, logprobs.dtype)
    loss = sum(term.loss(logprobs, rows).sum() / counts[term.denominator] for term in algorithm.terms)
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return float(loss.detach()), dict(zip(trained, gradients, strict=True))


def distance(one, other):
    """The largest difference of two gradients in any tensor, relative to that tensor's norm.

    A tensor whose true gradient is 0 (a bias of keys) holds rounding alone, so a millionth of the whole is the least.
    """
    assert one.keys() == other.keys()
    least = 1e-6 * torch.stack([gradient.double().norm() for gradient in one.values()]).norm()
    return max(
        float((one[name] - other[name]).double().norm() / one[name].double().norm().clamp(min=least)) for name in one
    )


def speaking(model):
    """A critic whose head and adapter say something, where they would begin at 0."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.trained().items():
            if name.startswith("head") or "lora_B" in name:
                weight.normal_(std=0.3, generator=generator)
    return model
