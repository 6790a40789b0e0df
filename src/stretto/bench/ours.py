"""Our side: the parts that `stretto train` assembles from a recipe, driven through the loop's own verbs.

Only two things differ from a training: the engine is told how long each answer must be, and nothing is written to a run
folder. The first repetition starts from the model as it was; its tokens are kept, so that a peer can replay them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from stretto import __version__, threads
from stretto.algorithms.base import Streams
from stretto.bench.cases import CAP, SEED, answer_lengths
from stretto.bench.flops import shared, unshared
from stretto.bench.jobs import Job, Measured
from stretto.bench.machine import synchronise
from stretto.bench.prepare import Asked, model_section, read_prompts
from stretto.config.locate import locate
from stretto.config.schema import AlgorithmSection, Correction, EngineSection, Optimizer, Recipe, RewardPart
from stretto.config.schema import Batch as BatchSection
from stretto.rollout.base import Completion, Engine, Request, noise_key
from stretto.rollout.collect import Launch
from stretto.rollout.native import NativeEngine
from stretto.run.learn import credit, learn
from stretto.run.local import LocalParts, assemble
from stretto.run.parts import make_plan
from stretto.train.head import Head
from stretto.train.model import Policy, choose_device, load
from stretto.train.packing import merge
from stretto.types import Conversation, Group

RATE = 1e-6
"""Learning rate: small, so that every repetition does the same work."""


def rewards_of(longest: int) -> tuple[RewardPart, ...]:
    """Is the first number right, and how long is the answer: without the second, most groups of an untrained model have
    no contrast, their gradient is 0, and a replay compares nothing."""
    return (
        RewardPart(name="accuracy", kind="numeric", pick="first"),
        RewardPart(name="length", kind="overlong", longest=longest, buffer=longest),
    )


REWARDS = rewards_of(CAP)
"""Of answers as most cases have them."""

MakeStreams = Callable[[LocalParts, Sequence[Asked], Sequence[Group]], Awaitable[Streams]]
"""Makes what an algorithm needs beside rewards."""


@dataclass(slots=True, kw_only=True)
class Endless(Policy):
    """The policy, to which the end of a turn is impossible, as it is to the peers before an answer has its length.

    Otherwise forced answers would go on with the chat template's next turn, which is all too easy to draft.
    """

    def head(self) -> Head:
        """The head with a bias that no end token overcomes."""
        head = Policy.head(self)
        bias = torch.zeros(len(head.weight), dtype=head.weight.dtype, device=head.weight.device)
        bias[sorted(self.stop_tokens)] = float("-inf")
        return replace(head, bias=bias)


def endless(policy: Policy) -> Endless:
    """The same network under that head."""
    return Endless(**{field.name: getattr(policy, field.name) for field in fields(policy)})


class ForcedEngine(NativeEngine):
    """The native engine, in which the n-th answer to a prompt has the n-th length that was drawn for it."""

    def __init__(self, policy: Policy, *, rounds: Sequence[Sequence[Asked]], lengths: NDArray[np.int64]) -> None:
        super().__init__(endless(policy))
        self.lengths = {
            each.tokens.tobytes(): row for asked in rounds for each, row in zip(asked, lengths.tolist(), strict=True)
        }
        self.answered: dict[bytes, int] = defaultdict(int)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues the requests with their lengths; no token ends an answer."""
        super().submit([self._forced(request) for request in requests])

    def _forced(self, request: Request) -> Request:
        context = request.tokens.tobytes()
        lengths, turn = self.lengths[context], self.answered[context]
        self.answered[context] += 1
        return replace(request, max_new_tokens=lengths[turn % len(lengths)], stop=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step came to."""

    generate: float
    """Seconds of sampling and judging, and of what else credit needs."""
    train: float
    """Seconds of credit, gradient, update and publishing."""
    groups: tuple[Group, ...]
    """What was sampled."""
    report: dict[str, float]
    """The trainer's numbers."""


def recipe_of(job: Job) -> Recipe:
    """The case as a recipe. Without a correction, because a peer that samples from what it trains makes none."""
    case = job.case
    return Recipe(
        seed=SEED,
        model=model_section(job.model, case),
        rewards=REWARDS,
        algorithm=AlgorithmSection(name="grpo", correction=Correction(kind="none")),
        batch=BatchSection(prompts=case.prompts, samples=case.samples),
        engine=EngineSection(max_new_tokens=CAP),
        optimizer=Optimizer(lr=RATE),
    )


def step(job: Job) -> Measured:
    """Whole steps: sample, judge, train, update, publish."""
    return measured_steps(job, recipe_of(job), streams=no_streams)


async def no_streams(parts: LocalParts, asked: Sequence[Asked], groups: Sequence[Group]) -> Streams:
    """What an algorithm gets that needs no other streams."""
    return {}


def measured_steps(job: Job, recipe: Recipe, *, streams: MakeStreams) -> Measured:
    """The steps of a recipe whose answers have the lengths of the case."""
    folder = Path(job.folder)
    rounds, lengths = read_prompts(job), answer_lengths(job.case)
    parts = assemble(
        recipe,
        plan=make_plan(recipe),
        root=Path(job.model),
        folder=None,
        note=lambda text: None,
        make_engine=lambda policy: ForcedEngine(policy, rounds=rounds, lengths=lengths),
    )
    steps = threads.run(_steps(parts, rounds, streams))
    first, fastest = steps[0], min(steps[1:], key=lambda each: each.generate + each.train)
    keep_tokens(folder, first.groups)
    rewards = [reward.value for group in first.groups for reward in group.rewards]
    talks = [talk for group in first.groups for talk in conversations(group)]
    return Measured(
        name=f"stretto {__version__}",
        seconds=tuple(each.generate + each.train for each in steps[1:]),
        stages={"generate": fastest.generate, "train": fastest.train},
        generated=sum(int(talk.trained.sum()) for group in fastest.groups for talk in conversations(group)),
        trained=int(fastest.report["tokens/trained"]),
        facts={
            "replay": {"reward": float(np.mean(rewards)), **{key: first.report[key] for key in ("loss", "grad_norm")}},
            "work": work([talk.tokens for talk in talks], [int((~talk.trained).sum()) for talk in talks]),
        },
    )


async def _steps(parts: LocalParts, rounds: Sequence[Sequence[Asked]], streams: MakeStreams) -> list[Step]:
    """Strictly on-policy steps, each over prompts of its own."""
    device = parts.policy.device.type
    steps = []
    try:
        for number, asked in enumerate(rounds):
            begun = time.perf_counter()
            launches = [
                Launch(prompt=each.prompt, visit=0, attempt=attempt)
                for each in asked
                for attempt in range(parts.recipe.batch.samples)
            ]
            trajectories = await parts.collect(launches, temperature=parts.recipe.engine.temperature)
            scored = await parts.score(trajectories, min_samples=parts.algorithm.min_samples)
            needed = await streams(parts, asked, scored.groups)
            synchronise(device)
            sampled = time.perf_counter()
            report = learn(parts, credit(parts.algorithm, scored.groups, needed), step=number + 1)
            parts.publish(parts.trainer.weights())
            synchronise(device)
            ended = time.perf_counter()
            steps.append(Step(generate=sampled - begun, train=ended - sampled, groups=scored.groups, report=report))
    finally:
        await parts.close()
    return steps


def conversations(group: Group) -> list[Conversation]:
    """The conversation of each of its answers."""
    return [trajectory.conversations[0] for trajectory in group.trajectories]


def keep_tokens(folder: Path, groups: Sequence[Group]) -> None:
    """Writes the answers by prompt, for a peer to replay."""
    kept = {group.prompt.id: [talk.tokens[talk.trained].tolist() for talk in conversations(group)] for group in groups}
    (folder / "replay.json").write_text(json.dumps(kept), encoding="utf-8")


def work(talks: Sequence[NDArray[np.int64]], prompts: Sequence[int]) -> dict[str, list[dict[str, int]]]:
    """What is generated and trained, unshared and shared; whole conversations and the tokens of their prompts."""
    answers = [len(talk) - prompt for talk, prompt in zip(talks, prompts, strict=True)]
    prefill = merge([talk[:prompt] for talk, prompt in zip(talks, prompts, strict=True)]).positions
    together = shared(prompts, answers, prefill=prefill, row=merge(talks).positions)
    return {
        "unshared": [asdict(each) for each in unshared(prompts, answers)],
        "shared": [asdict(each) for each in together],
    }


def rollout(job: Job) -> Measured:
    """Generation, and in how many places sampling an answer alone, or the batch without drafts, gives other tokens."""
    rounds, lengths = read_prompts(job), answer_lengths(job.case)
    section, device = model_section(job.model, job.case), choose_device("auto")
    policy = load(section, locate(section.name, Path(job.model)), seed=SEED, device=device)
    engine, seconds = NativeEngine(endless(policy)), []
    for asked in rounds:
        wanted = requests(asked, lengths)
        begun = time.perf_counter()
        answers = generate(engine, wanted)
        synchronise(device.type)
        seconds.append(time.perf_counter() - begun)
    alone = [answer for request in wanted for answer in generate(NativeEngine(endless(policy)), [request])]
    undrafted = generate(NativeEngine(endless(policy), speculate=False), wanted)
    talks = [np.concatenate([request.tokens, answer.tokens]) for request, answer in zip(wanted, answers, strict=True)]
    return Measured(
        name=f"stretto {__version__}",
        seconds=tuple(seconds[1:]),
        generated=sum(len(answer.tokens) for answer in answers),
        facts={
            "divergences": divergences(answers, alone),
            "draft_divergences": divergences(answers, undrafted),
            "work": work(talks, [len(request.tokens) for request in wanted]),
        },
    )


def requests(asked: Sequence[Asked], lengths: NDArray[np.int64]) -> list[Request]:
    """Every answer of the case as a request; no token ends it."""
    return [
        Request(
            key=noise_key(
                seed=SEED, visit=0, prompt=each.prompt.id, attempt=attempt, context=each.tokens, occurrence=0
            ),
            tokens=each.tokens,
            max_new_tokens=length,
            stop=frozenset(),
            temperature=1.0,
        )
        for each, row in zip(asked, lengths.tolist(), strict=True)
        for attempt, length in enumerate(row)
    ]


def generate(engine: Engine, wanted: Sequence[Request]) -> list[Completion]:
    """The answers to these requests, in their order."""
    engine.submit(wanted)
    found: dict[int, Completion] = {}
    while done := engine.step(60.0):
        found |= {completion.key: completion for completion in done}
    return [found[request.key] for request in wanted]


def divergences(answers: Sequence[Completion], others: Sequence[Completion]) -> float:
    """Places per 1,000 tokens in which equal requests drew different tokens after equal beginnings.

    After the first such place of an answer the contexts differ too, so an answer is compared no further.
    """
    compared = found = 0
    for one, other in zip(answers, others, strict=True):
        different = np.flatnonzero(one.tokens != other.tokens)
        compared += int(different[0]) + 1 if len(different) else len(one.tokens)
        found += bool(len(different))
    return 1000 * found / max(1, compared)
