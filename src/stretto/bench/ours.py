"""Our side: what `stretto train` assembles from a recipe, taking the steps that it takes.

Only two things differ from a training: the engine is told how long each answer must be, and nothing is written to a run
folder. The first repetition starts from the model as it was; its tokens are kept, so that a peer can replay them.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto import __version__, threads
from stretto.bench.cases import CAP, SEED, answer_lengths
from stretto.bench.flops import shared, unshared
from stretto.bench.jobs import Job, JobResult
from stretto.bench.machine import synchronize
from stretto.bench.prepare import PreparedPrompt, model_section, read_prompts
from stretto.engines.base import Completion, Engine, Request, noise_key
from stretto.engines.native.engine import NativeEngine
from stretto.models.load import Policy, choose_device, load
from stretto.models.logprob_head import Head
from stretto.models.memory import freeze_loaded, keep_memory
from stretto.models.source import locate
from stretto.recipe.schema import BatchSection as BatchSection
from stretto.recipe.schema import (
    Correction,
    NativeEngineSection,
    NumericReward,
    Optimizer,
    OverlongReward,
    PolicyGradient,
    Recipe,
    RewardPart,
)
from stretto.runtime.build import build_runtime
from stretto.runtime.plans import make_plan
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import run_step
from stretto.runtime.spans import Clock
from stretto.tasks.source import PromptSource
from stretto.training.packing import merge
from stretto.types import Conversation, Group, Prompt
from stretto.workers.launchers.inprocess import Launcher, ThreadLauncher
from stretto.workers.worker import Worker
from stretto.workers.worker_spec import torch_device

RATE = 1e-6
"""Learning rate: small, so that every repetition does the same work."""


def rewards_of(longest: int) -> tuple[RewardPart, ...]:
    """Is the first number right, and how long is the answer: without the second, most groups of an untrained model have
    no contrast, their gradient is 0, and a replay compares nothing."""
    return (
        NumericReward(name="accuracy", pick="first"),
        OverlongReward(name="length", longest=longest, buffer=longest),
    )


REWARDS = rewards_of(CAP)
"""Rewards of answers as most cases have them."""

Prepare = Callable[[Runtime, Sequence[PreparedPrompt]], Awaitable[Runtime]]
"""Finds out what a step must know of its prompts before it begins."""

MakeWorker = Callable[..., Worker]
"""Makes a worker of an assignment and of what makes its engine."""


class InTurn(PromptSource):
    """Prompts in the order of a bench, never visited before."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__(prompts, seed=SEED)
        self.coming: Sequence[Prompt] = prompts

    def take(self, n: int) -> list[tuple[Prompt, int]]:
        """The first of those of the step."""
        return [(prompt, 0) for prompt in self.coming[:n]]


@dataclass(slots=True, kw_only=True)
class Endless(Policy):
    """The policy, to which the end of a turn is impossible, as it is to the peers before an answer has its length.

    Otherwise forced answers would go on with the chat template's next turn, which is all too easy to draft.
    """

    bias: Tensor
    """Of the head: no end token overcomes it."""

    def head(self) -> Head:
        """The head with that bias."""
        return replace(Policy.head(self), bias=self.bias)


def endless(policy: Policy) -> Endless:
    """The same network under that head."""
    weight = policy.head().weight
    bias = torch.zeros(len(weight), dtype=weight.dtype, device=weight.device)
    bias[sorted(policy.stop_tokens)] = float("-inf")
    return Endless(**{field.name: getattr(policy, field.name) for field in fields(policy)}, bias=bias)


class ForcedEngine(NativeEngine):
    """The native engine, in which the n-th answer to a prompt has the n-th length that was drawn for it."""

    def __init__(
        self, policy: Policy, *, rounds: Sequence[Sequence[PreparedPrompt]], lengths: NDArray[np.int64]
    ) -> None:
        super().__init__(endless(policy), graphs=True)  # as a run has them on a GPU
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
class StepTiming:
    """What one step came to."""

    seconds: float
    """Seconds of the whole step."""
    generate: float
    """Seconds of sampling, judging beside it, and what must be known of the prompts before."""
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
        algorithm=PolicyGradient(correction=Correction(kind="none")),
        batch=BatchSection(prompts=case.prompts, samples=case.samples),
        engine=NativeEngineSection(max_new_tokens=CAP),
        optimizer=Optimizer(lr=RATE, name=case.optimizer),
    )


def step(job: Job) -> JobResult:
    """Whole steps: sample, judge, train, update, publish."""
    return measured_steps(job, recipe_of(job))


async def as_it_is(parts: Runtime, asked: Sequence[PreparedPrompt]) -> Runtime:
    """Where nothing must be known of the prompts before a step."""
    return parts


def measured_steps(
    job: Job, recipe: Recipe, *, prepare: Prepare = as_it_is, make_worker: MakeWorker = Worker
) -> JobResult:
    """The steps of a recipe whose answers have the lengths of the case."""
    rounds, lengths = read_prompts(job), answer_lengths(job.case)
    make_engine = partial(ForcedEngine, rounds=rounds, lengths=lengths)
    launcher = ThreadLauncher(partial(make_worker, make_engine=make_engine))
    steps = threads.run(_steps(recipe, Path(job.model), rounds, prepare=prepare, launcher=launcher))
    first, fastest = steps[0], min(steps[1:], key=lambda each: each.seconds)
    keep_tokens(Path(job.folder), first.groups)
    rewards = [reward.value for group in first.groups for reward in group.rewards]
    talks = [talk for group in first.groups for talk in conversations(group)]
    return JobResult(
        name=f"stretto {__version__}",
        seconds=tuple(each.seconds for each in steps[1:]),
        stages={"generate": fastest.generate, "train": fastest.seconds - fastest.generate},
        generated=sum(talk.sampled for group in fastest.groups for talk in conversations(group)),
        trained=int(fastest.report["tokens/trained"]),
        facts={
            "replay": {"reward": float(np.mean(rewards)), **{key: first.report[key] for key in ("loss", "grad_norm")}},
            "work": work([talk.tokens for talk in talks], [int((~talk.trained).sum()) for talk in talks]),
        },
    )


async def _steps(
    recipe: Recipe, root: Path, rounds: Sequence[Sequence[PreparedPrompt]], *, prepare: Prepare, launcher: Launcher
) -> list[StepTiming]:
    """Strictly on-policy steps, each over prompts of its own."""
    plan, note = make_plan(recipe), lambda text: None
    parts = await build_runtime(recipe, plan=plan, root=root, folder=None, note=note, launcher=launcher)
    kind, steps = torch_device(plan.devices[0]).type, list[StepTiming]()
    prompts = InTurn([each.prompt for each in rounds[0]])
    try:
        for number, asked in enumerate(rounds, start=1):
            prompts.coming = [each.prompt for each in asked]
            clock, begun = Clock(devices=parts.devices), time.perf_counter()
            clock.begin()
            ready = await prepare(replace(parts, prompts=prompts), asked)
            prepared = time.perf_counter() - begun
            taken = await run_step(ready, clock, step=number)
            synchronize(kind)
            seconds = time.perf_counter() - begun
            generate = prepared + clock.metrics()["seconds/generate"]
            steps.append(
                StepTiming(seconds=seconds, generate=generate, groups=taken.batch.accepted, report=taken.report)
            )
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


def rollout(job: Job) -> JobResult:
    """Generation, and in how many places sampling an answer alone, or the batch without drafts, gives other tokens."""
    rounds, lengths = read_prompts(job), answer_lengths(job.case)
    section, device = model_section(job.model, job.case), choose_device("auto")
    keep_memory()  # this and what follows as in a run
    policy = load(section, locate(section.name, Path(job.model)), seed=SEED, device=device)
    engine, seconds = NativeEngine(endless(policy), graphs=True), []
    freeze_loaded()
    for asked in rounds:
        wanted = requests(asked, lengths)
        begun = time.perf_counter()
        answers = generate(engine, wanted)
        synchronize(device.type)
        seconds.append(time.perf_counter() - begun)
    alone = [answer for request in wanted for answer in generate(NativeEngine(endless(policy)), [request])]
    undrafted = generate(NativeEngine(endless(policy), speculate=False), wanted)
    talks = [np.concatenate([request.tokens, answer.tokens]) for request, answer in zip(wanted, answers, strict=True)]
    return JobResult(
        name=f"stretto {__version__}",
        seconds=tuple(seconds[1:]),
        generated=sum(len(answer.tokens) for answer in answers),
        facts={
            "divergences": divergences(answers, alone),
            "draft_divergences": divergences(answers, undrafted),
            "work": work(talks, [len(request.tokens) for request in wanted]),
        },
    )


def requests(asked: Sequence[PreparedPrompt], lengths: NDArray[np.int64]) -> list[Request]:
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
