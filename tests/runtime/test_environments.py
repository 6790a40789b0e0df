"""Every environment against a real engine and the real trainer: what was sampled is what is trained.

Replaying the ids gives the engine's own log-probabilities, to rounding; a shift by one would be off by whole nats. The
gradient of conversations that branch from each other is the one that plain transformers compute for each by itself.
"""

from contextlib import closing
from functools import cache

import numpy as np
import pytest
import torch

from rolled import grouped, rolled
from stretto.algorithms.base import build
from stretto.environments import adapted, resolve
from stretto.models.load import load
from stretto.recipe.schema import AlgorithmSection, CodeGame, MemorySection, ModelSection, NumberGame, Scratch
from stretto.runtime.minibatches import credit
from stretto.runtime.warmup import warm_up
from stretto.training.trainer import Trainer
from stretto.types import Outcome, Prompt
from tiers import slow_but
from tiny import CPU, SCRATCH_FILES, SETTINGS, Recorder, distance, naive_logprobs, naive_step, step


class Tools:
    """A tool whose call a random model writes now and then."""

    def a(self, text: str) -> str:
        """Repeats.

        Args:
            text: What.
        """
        return text[:4]


async def branching(prompt, model):
    """Asks, goes on in two ways from the first reply, on along the second, and asks anew."""
    opening = list(prompt.messages)
    first = await model.chat(opening)
    a, b, c = ({"role": "user", "content": letter} for letter in "abc")
    one = await model.chat([*opening, first, b])
    other = await model.chat([*opening, first, c])
    last = await model.chat([*opening, first, c, other, a])
    anew = await model.chat([{"role": "user", "content": one.text[:3]}])
    worth = tuple(float(len(reply.tokens)) for reply in (first, one, other, last, anew))
    return Outcome(answer=one.text, turn_rewards=worth)


ENVIRONMENTS = {
    "tools": adapted(Tools, turns=4),
    "number": resolve(NumberGame(range=(0, 2), turns=3, higher="b", lower="c", right="a", invalid="a")),
    "code": resolve(CodeGame(alphabet="abc", length=1, turns=3, matched="b", right="a", invalid="c")),
    "memory": resolve(MemorySection(chunk=4, memory_tokens=3, empty="c", update="{memory}{chunk}", answer="{memory}")),
    "branching": branching,
}
PROMPTS = [
    Prompt(
        id=f"p{place}",
        messages=({"role": "user", "content": "ab"[place]},),
        reference=secret,
        tags={"document": "abcabcaabb"},
    )
    for place, secret in enumerate(("a", "b"))
]
NUMBERS = [Prompt(id=each.id, messages=each.messages, reference=str(place)) for place, each in enumerate(PROMPTS)]


def policy(name, *, steps=0):
    shown = ("a(b)", "b")
    scratch = Scratch(
        layers=2, width=16, heads=2, characters="abc012()", context=64, demonstration=shown, warmup_steps=steps
    )
    section = ModelSection(name="scratch", scratch=scratch, dtype="float64", adapter=None)
    made = load(section, SCRATCH_FILES, seed=0, device=CPU)
    with torch.no_grad():
        for weight in made.network.parameters():
            weight.mul_(3)  # opinions that are worth a nat
    environment = ENVIRONMENTS[name]
    warm_up(made, scratch, prompts=PROMPTS, environment=environment, seed=0, note=lambda text: None)
    return made


@cache
def model_of(name):
    """One that has seen how a tool is called, and one that has seen nothing."""
    return policy(name, steps=45) if name == "tools" else MODEL


MODEL = policy("branching")


@cache
def trajectories(name):
    """The same ones for every test."""
    made = rolled(model_of(name), ENVIRONMENTS[name], NUMBERS if name == "number" else PROMPTS, attempts=12)
    assert [each.failure for each in made] == [None] * len(made)
    return made


@pytest.mark.parametrize("name", slow_but("number", "code", "memory", "branching", of=list(ENVIRONMENTS)))
def test_replaying_the_ids_gives_the_engines_logprobs_and_a_shift_by_one_does_not(name):
    talks = [talk for each in trajectories(name) for talk in each.conversations]
    with closing(Trainer(model_of(name), build(AlgorithmSection()), Recorder(), **SETTINGS)) as trainer:
        replayed = trainer.score(talks)
    for talk, found in zip(talks, replayed, strict=True):
        np.testing.assert_allclose(found, talk.logprobs[talk.trained], atol=1e-9)
    logprobs = np.concatenate([talk.logprobs[talk.trained] for talk in talks])
    shifted = np.concatenate([np.roll(found, 1) for found in replayed])
    assert np.abs(shifted - logprobs).mean() > 0.1


@pytest.mark.parametrize("name", slow_but("number", "code", "memory", "branching", of=list(ENVIRONMENTS)))
def test_exactly_what_was_sampled_is_trained_the_end_of_each_turn_included(name):
    made, turns = trajectories(name), 0
    for trajectory in made:
        calls = [call for talk in trajectory.conversations for call in talk.turns]
        assert sorted(call for call, _ in calls) == list(range(len(calls)))
        assert trajectory.rewritten == 0
        for talk in trajectory.conversations:
            assert int(talk.trained.sum()) == sum(tokens for _, tokens in talk.turns)
            ends = [talk.tokens[talk.trained][at - 1] for at in np.cumsum([tokens for _, tokens in talk.turns])]
            stopped = [end in model_of(name).stop_tokens for end in ends]
            assert stopped[-1] == (talk.stop == "stop")
            turns += len(stopped)
    assert turns > len(made), "some trajectory has more than one turn"


@pytest.mark.slow
def test_tools_were_called_and_answered():
    signals = [each.outcome.signals for each in trajectories("tools")]
    assert sum(each["tool_calls"] for each in signals) > sum(each["tool_errors"] for each in signals) > 0


@pytest.mark.parametrize("name", ["branching", "memory"])
@pytest.mark.parametrize("section", [{"name": "multi_conv"}, {"name": "multi_conv", "average": "trajectory"}])
def test_the_gradient_of_many_conversations_is_that_of_each_by_itself(name, section):
    algorithm = build(AlgorithmSection(**section))
    samples = credit(algorithm, grouped(trajectories(name)), {})
    ours = step(MODEL, algorithm, samples)
    loss, theirs = naive_step(MODEL, algorithm, samples)
    assert distance(ours.gradients, theirs) < 1e-10
    assert ours.metrics["loss"] == pytest.approx(loss, abs=1e-12)
    assert ours.metrics["tokens/shared"] > 0


def test_the_gradient_of_credit_per_turn_in_branches_is_that_of_each_by_itself():
    algorithm = build(AlgorithmSection(name="rloo", credit="turn"))
    samples = credit(algorithm, grouped(trajectories("branching")), {})
    assert any(len(set(sample.advantage)) > 1 for sample in samples)
    ours = step(MODEL, algorithm, samples[::2], samples[1::2])
    assert distance(ours.gradients, naive_step(MODEL, algorithm, samples)[1]) < 1e-10


def test_naive_logprobs_are_the_engines_too():
    """The yardstick of the tests above, on its own."""
    talk = trajectories("branching")[0].conversations[1]
    found = naive_logprobs(MODEL, talk).detach().numpy()
    np.testing.assert_allclose(found, talk.logprobs[talk.trained], atol=1e-9)
