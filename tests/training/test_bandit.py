"""One question, one token to answer it with, and a reward for one of the answers: does the policy learn it?

The policy samples by itself here, with a generator of its own, so that nothing but algorithm, trainer and optimizer
is under test.
"""

from contextlib import closing

import numpy as np
import pytest
import torch

from stretto.algorithms.base import build
from stretto.recipe.schema import AlgorithmSection, Optimizer
from stretto.runtime.minibatches import credit
from stretto.training.optimizer import MasterAdamW
from stretto.training.packing import pack
from stretto.training.trainer import Trainer
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Trajectory
from tiers import slow_but
from tiny import SAMPLING, SETTINGS, sample, scratch_policy

QUESTION = [1, 6, 7, 2]
RIGHT = 9
STEPS, GROUPS, SAMPLES = 40, 4, 8
ALGORITHMS = [name for name, facts in SAMPLING.items() if not facts.needs]
"""Those that learn from rewards alone."""


def answers(policy):
    """Log-probability of every token as the answer."""
    batch = pack([sample([*QUESTION, RIGHT], [len(QUESTION)])], device=policy.device, dtype=torch.float64)
    with torch.no_grad():
        state = policy.hidden(batch.tokens, batch.positions, batch.layout)[batch.sources]
        return (state @ policy.head().weight.T)[0].log_softmax(-1)


def answered(token, logprob, *, group, attempt, version):
    """One attempt with its answer."""
    talk = Conversation(
        tokens=np.array([*QUESTION, token]),
        trained=np.array([False] * len(QUESTION) + [True]),
        logprobs=np.array([0.0] * len(QUESTION) + [logprob]),
        stop="length",
        version=version,
    )
    prompt = Prompt(id=f"question {group}", messages=())
    return Trajectory(
        prompt=prompt, visit=version, attempt=attempt, conversations=(talk,), outcome=Outcome(answer=str(token))
    )


def play(name, reward, *, seed, lr=0.01, steps=STEPS):
    """Probability of the right answer before and after training."""
    policy = scratch_policy(layers=1, seed=seed)
    with torch.no_grad():
        policy.network.get_output_embeddings().weight.mul_(0.2)  # a policy without strong opinions
    algorithm = build(AlgorithmSection(name=name))
    generator = torch.Generator().manual_seed(seed)
    before = answers(policy)[RIGHT].exp()
    optimizer = MasterAdamW(policy.trained(), Optimizer(lr=lr), updates=steps)
    with closing(Trainer(policy, algorithm, optimizer, **(SETTINGS | {"clip": 1.0}))) as trainer:
        for version in range(steps):
            logprobs = answers(policy)
            groups = []
            for group in range(GROUPS):
                drawn = torch.multinomial(logprobs.exp(), SAMPLES, replacement=True, generator=generator).tolist()
                tries = tuple(
                    answered(token, float(logprobs[token]), group=group, attempt=attempt, version=version)
                    for attempt, token in enumerate(drawn)
                )
                values = [reward(token, generator) for token in drawn]
                rewards = tuple(Reward(value=value, outcome=value, parts={}) for value in values)
                groups.append(Group(prompt=tries[0].prompt, trajectories=tries, rewards=rewards))
            trainer.accumulate(credit(algorithm, groups, {}))
            report = trainer.apply()
            assert report.metrics["kl/engine_trainer"] < 1e-12
            assert report.metrics["ess"] == pytest.approx(1.0)
            trainer.weights()
    return float(before), float(answers(policy)[RIGHT].exp())


def right_answer(token, generator):
    return float(token == RIGHT)


def coin(token, generator):
    return float(torch.rand((), generator=generator) < 0.5)


@pytest.mark.parametrize("name", slow_but("grpo", "dapo", "gspo", "cispo", of=ALGORITHMS))
@pytest.mark.parametrize("seed", slow_but(0, of=[0, 1]))
def test_the_rewarded_answer_becomes_the_likely_one(name, seed):
    before, after = play(name, right_answer, seed=seed)
    assert before < 0.1
    assert after > 0.95


@pytest.mark.parametrize("name", slow_but("grpo", "rloo", of=ALGORITHMS))
@pytest.mark.parametrize("seed", [0])
def test_a_coin_teaches_nothing(name, seed):
    before, after = play(name, coin, seed=seed)
    assert after < before + 0.1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_without_a_learning_rate_nothing_is_learnt(name):
    before, after = play(name, right_answer, seed=0, lr=0.0, steps=5)
    assert after == before
