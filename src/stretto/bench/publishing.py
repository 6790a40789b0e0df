"""What a publish takes: the workers of a training hand new weights over, once a step, and prove that they arrived.

Each way of handing over is a plan: an engine that reads the trainer's tensors, an engine on a cell of its own, vLLM in
a process of its own. Before each publish the policy is trained on one conversation, so that there is something new;
that is not timed. What bytes leave a trainer is counted where they pass: at the carrier between workers, and on the way
to an engine's process. The forecast beside it is the planner's, for the same plan on the same devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from stretto import __version__, threads
from stretto.bench.cells import MOVING
from stretto.bench.jobs import Job, JobResult
from stretto.bench.ours import recipe_of
from stretto.bench.prepare import PreparedPrompt, read_prompts
from stretto.engines.apart import EngineTransport
from stretto.engines.vllm.engine import VllmEngine
from stretto.placement.cluster import parse_cluster
from stretto.placement.plan import Plan
from stretto.planner.candidate import Candidate
from stretto.planner.cost.step_end import StepEnds
from stretto.planner.forecast import setting_of
from stretto.recipe.schema import Optimizer, Recipe, VllmEngineSection
from stretto.runtime.build import build_runtime
from stretto.types import Conversation, Sample, Weights
from stretto.weights.carrier import Carrier, Receiver
from stretto.workers.api import POLICY, WorkerApi
from stretto.workers.launchers.inprocess import Launcher, ThreadLauncher, processes
from stretto.workers.models import EngineFactory
from stretto.workers.worker import Worker
from stretto.workers.worker_group import WorkerGroup
from stretto.workers.worker_spec import WorkerSpec

ANSWER = 8
"""Tokens that the policy is trained on before each publish."""

WAYS = {
    "same process": Candidate(strategy="flatten", devices=1),
    "second cell": Candidate(strategy="separate", devices=2, generating=1),
    "vLLM": Candidate(strategy="flatten", devices=1),
}
"""Way of handing over -> the plan that has it."""

Launch = Callable[[Sequence[str]], Launcher]
"""Starts workers that count what they hand over, on these devices."""


class CountingTransport:
    """Whom an engine of another process is asked through, with a count of the bytes of weights that it is sent."""

    def __init__(self, process: EngineTransport) -> None:
        self.process, self.sent = process, 0

    def call(self, what: str, seconds: float, /, **arguments: Any) -> dict[str, Any]:
        """The answer of the process; files of weights that a question names are counted."""
        if what == "adapter":
            self.sent += sum(file.stat().st_size for file in Path(arguments["folder"]).glob("*.safetensors"))
        if what == "load":
            self.sent += Path(arguments["path"]).stat().st_size
        return self.process.call(what, seconds, **arguments)

    def close(self) -> None:
        """Ends the process."""
        self.process.close()


class CountingCarrier(Carrier):
    """The carrier, with a clock and a count of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.bytes = 0.0, 0

    def bring(self, tensors: Mapping[str, Tensor], hand_round: Callable[[Tensor], None]) -> None:
        """As always."""
        begun = time.perf_counter()
        super().bring(tensors, hand_round)
        self.seconds += time.perf_counter() - begun
        self.bytes += sum(tensor.nbytes for tensor in tensors.values())

    def tell(self, weights: Weights, engine: Receiver) -> None:
        """As always."""
        begun = time.perf_counter()
        super().tell(weights, engine)
        self.seconds += time.perf_counter() - begun


class PublishWorker(Worker):
    """The worker of a training, which says what its publishes took."""

    def __init__(self, assignment: WorkerSpec, make_engine: EngineFactory | None = None) -> None:
        super().__init__(assignment, make_engine)
        self.carrier = self.counter = CountingCarrier()
        self.sent: CountingTransport | None = None
        if isinstance(self.engine, VllmEngine) and self.engine.process is not None:
            self.engine.process = self.sent = CountingTransport(self.engine.process)

    def hand_over(self) -> None:
        """What a trainer does of a publish, after the update that it follows in a step."""
        self._tell(POLICY, self.trained(POLICY).weights())

    def handed_over(self) -> tuple[float, int]:
        """Seconds that handing over has taken here since this was asked last, and the bytes that came from a trainer:
        to this worker, and from it into its engine's process."""
        counter, sent = self.counter, self.sent
        seconds, size = counter.seconds, 0 if self.optimizer is not None else counter.bytes
        counter.seconds, counter.bytes = 0.0, 0
        if sent is not None:
            size, sent.sent = size + sent.sent, 0
        return seconds, size


class PublishApi(WorkerApi, Protocol):
    """What can be asked of it besides."""

    async def hand_over(self) -> None: ...
    async def handed_over(self) -> tuple[float, int]: ...


def told(worker: WorkerApi) -> PublishApi:
    """Such a worker, as whoever calls it sees it."""
    return cast(PublishApi, worker)


def launched(devices: Sequence[str]) -> Launcher:
    """One worker in a thread of this process, as a run on one device has it; several in processes of their own."""
    if len(devices) == 1:
        return ThreadLauncher(PublishWorker)
    return processes(devices, seconds=300, make=PublishWorker)


def publish(job: Job, *, launch: Launch = launched) -> JobResult:
    """Publishes in one way; the first, which opens connections and fills caches, does not count."""
    (way,) = job.plans
    recipe, choice = publish_recipe(job, way), WAYS[way]
    setting = setting_of(recipe, Path(job.model), parse_cluster(f"{choice.devices}xcpu"))
    plan = choice.plan(setting)
    taken = threads.run(_published(recipe, plan, job, launch(plan.devices)))[1:]
    seconds, moving, size = min(taken, key=lambda each: each[0])
    return JobResult(
        name=f"stretto {__version__}",
        seconds=tuple(each[0] for each in taken),
        stages={"hand-over": moving, "proof": seconds - moving},
        facts={
            "bytes": size,
            "predicted": StepEnds(setting).ending(choice).publish,
            "constants": setting.source or "usual constants",
        },
    )


def publish_recipe(job: Job, way: str) -> Recipe:
    """The case as a recipe, whose updates are large enough that every one changes weights in bfloat16."""
    recipe = recipe_of(job).model_copy(update={"optimizer": Optimizer(lr=MOVING, name=job.case.optimizer)})
    if way != "vLLM":
        return recipe
    longest = recipe.engine.max_new_tokens
    return recipe.model_copy(update={"engine": VllmEngineSection(max_new_tokens=longest)})


async def _published(recipe: Recipe, plan: Plan, job: Job, launcher: Launcher) -> list[tuple[float, float, int]]:
    """(seconds, those of handing over, bytes) of each publish."""
    root, logs = Path(job.model), Path(job.folder)
    parts = await build_runtime(
        recipe, plan=plan, root=root, folder=None, note=lambda text: None, launcher=launcher, stacks=logs
    )
    group, taken = parts.worker_group, []
    try:
        for version, asked in enumerate(read_prompts(job)):
            await _update(group, plan, sample_of(asked[0], version))
            taken.append(await _publish(group))
    finally:
        await parts.close()
    return taken


async def _update(group: WorkerGroup, plan: Plan, sample: Sample) -> None:
    """New weights, which nobody but their trainers has yet."""
    await group.begin()
    for cell in plan.cells:
        if cell.role == "train":
            await group.accumulate(cell.name, [sample])
    await group.apply(last=False)


async def _publish(group: WorkerGroup) -> tuple[float, float, int]:
    """What a step does after its last update."""
    everybody, patience = list(group.members), group.patience.publish
    await group.all(everybody, lambda each: told(each).handed_over(), seconds=patience)  # of this publish alone
    begun = time.perf_counter()
    await group.all(group.trainers, lambda each: told(each).hand_over(), seconds=patience)
    group.version += 1
    await group.updates.publish(group.trained[POLICY])
    seconds = time.perf_counter() - begun
    counted = await group.all(everybody, lambda each: told(each).handed_over(), seconds=patience)
    return seconds, max(moving for moving, _ in counted), sum(size for _, size in counted)


def sample_of(asked: PreparedPrompt, version: int) -> Sample:
    """A prompt, answered by its own first tokens and praised for it."""
    answer = np.resize(asked.tokens, ANSWER)
    trained = np.arange(len(asked.tokens) + ANSWER) >= len(asked.tokens)
    talk = Conversation(
        tokens=np.concatenate([asked.tokens, answer]),
        trained=trained,
        logprobs=np.zeros(len(trained)),
        stop="length",
        version=version,
    )
    key = (asked.prompt.id, 0, 0, 0)
    return Sample(key=key, conversation=talk, advantage=np.ones(ANSWER), leads=True, family_tokens=ANSWER)
