"""Steps on the real cluster, and the constants that follow from them: what `stretto plan --measure` does.

The steps are of two kinds: workloads of its own choice, so that every constant shows (short and long prompts, few and
many answers, with and without a reference, on one device and on all), and the recipe's own under its best plans. They
are taken in turns, so that a slow moment of the machine meets all of them; of each the step in the middle counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from stretto import threads
from stretto.bench.calibration_steps import CalibrationStep, CalibrationSteps, CalibrationWorker
from stretto.errors import RecipeError
from stretto.placement.plan import Plan
from stretto.placement.rates import Rates
from stretto.planner.calibrate import MeasuredStep, fit
from stretto.planner.candidate import Candidate
from stretto.planner.cost.lengths import LengthDistribution
from stretto.planner.problem import PlanningProblem
from stretto.planner.saved_calibration import SavedCalibration, this_machine
from stretto.planner.search import SearchResult
from stretto.planner.simulate import Forecast
from stretto.planner.workload import StepWorkload
from stretto.recipe.schema import Recipe
from stretto.runtime.plans import devices_here
from stretto.workers.launchers.inprocess import Launcher, launcher_for

ROUNDS = 3
"""How often each step is taken."""
BEST = 3
"""Plans of the recipe that are run."""

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A workload of our own choice."""

    name: str
    """The probe's name in messages."""
    prompt: int
    """Tokens of a prompt."""
    lengths: LengthDistribution
    """Lengths of the answers."""
    prompts: int
    """Groups."""
    samples: int
    """Answers of a group."""
    reference: bool = False
    """Whether a reference scores them."""


PROBES = (
    Probe(name="short", prompt=48, lengths=LengthDistribution(mean=24.0, sigma=0.6, cap=64), prompts=8, samples=8),
    Probe(name="few", prompt=48, lengths=LengthDistribution(mean=64.0, sigma=0.3, cap=128), prompts=2, samples=2),
    Probe(
        name="long prompts", prompt=512, lengths=LengthDistribution(mean=16.0, sigma=0.3, cap=32), prompts=4, samples=2
    ),
    Probe(
        name="long tail", prompt=96, lengths=LengthDistribution(mean=40.0, sigma=1.0, cap=192), prompts=4, samples=8,
        reference=True,
    ),
    Probe(
        name="long prompts, scored", prompt=320, lengths=LengthDistribution(mean=24.0, sigma=0.6, cap=96), prompts=4,
        samples=4, reference=True,
    ),
)  # fmt: skip
"""Workloads that differ in what they spend their time on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeStep:
    """A step to take."""

    name: str
    """The step's name in messages."""
    setting: PlanningProblem
    """The step's workload on the cluster."""
    choice: Candidate
    """How it is done."""
    plan: Plan
    """The same as a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What came of it."""

    kept: SavedCalibration
    """The constants."""
    before: float
    """Median relative error of the steps' parts with the constants that the fit began with."""
    seconds: tuple[tuple[str, float], ...]
    """(strategy, measured seconds of a step) of the recipe's own plans."""


def measure(
    recipe: Recipe,
    root: Path,
    setting: PlanningProblem,
    found: SearchResult,
    *,
    note: Note,
    launch: Callable[..., Launcher] = launcher_for,
    rounds: int = ROUNDS,
) -> ProbeResult:
    """Takes the steps and fits the constants; a RecipeError says what cannot be measured here."""
    best = runnable(found, setting)
    mine = list(recipes(setting, best))
    asks = [*own(setting), *mine]
    seen = threads.run(taken(recipe, root, asks, note=note, launch=launch, rounds=rounds))
    kind = setting.cluster.hosts[0].device.kind
    result = fit(seen, Rates.of({}, kind=kind))
    kept = SavedCalibration(
        machine=this_machine(),
        device=setting.ordered[0][1].name,
        model=setting.workload.shapes["train"].name,
        date=datetime.now(UTC).date().isoformat(),
        steps=rounds * len(asks),
        error=result.after,
        rates=result.rates,
    )
    took = [(ask.choice.label, step.seconds) for ask, step in zip(asks, seen, strict=True)][len(asks) - len(mine) :]
    return ProbeResult(kept=kept, before=result.before, seconds=tuple(took))


def runnable(found: SearchResult, setting: PlanningProblem) -> tuple[Forecast, ...]:
    """The best plans that this host can execute, of those in which each device has whole models, as our own workloads
    do; a RecipeError if there is none."""
    missing = sorted(set(setting.names) - set(devices_here()))
    if missing or setting.mixed:
        reason = (
            f"this host has no {', '.join(missing[:3])}" if missing else "devices of several kinds are no one's own"
        )
        raise RecipeError.of("--measure", reason, "plan for the devices that are here, such as --cluster 2xcpu")
    if not found.ready:
        waits = ", ".join(found.best[0].choice.waits_for(setting.workload))
        raise RecipeError.of("--measure", f"no plan of it can be executed yet; it waits for {waits}", "leave it out")
    whole = tuple(forecast for forecast in found.ready if forecast.choice.whole)
    if not whole:
        reason = "every plan of it cuts a model over several devices, which is not measured yet"
        raise RecipeError.of("--measure", reason, "leave it out")
    return whole[:BEST]


def own(setting: PlanningProblem) -> Iterator[ProbeStep]:
    """Our own workloads: each on one device and on all of them, some with generation apart."""
    count = len(setting.names)
    budget = setting.ordered[0][1].kind.micro_batch
    for probe in PROBES:
        if probe.reference and not _may_score(setting.workload):
            probe = replace(probe, reference=False)
        work = asked(setting.workload, probe)
        choices = [Candidate(strategy="flatten", devices=devices, budget=budget) for devices in sorted({1, count})]
        if count > 1 and probe.prompts > 2:
            choices.append(Candidate(strategy="separate", devices=count, generating=count // 2, budget=budget))
        for choice in choices:
            yield _ask(probe.name, replace(setting, workload=work), choice)


def _may_score(work: StepWorkload) -> bool:
    """A reference is there already, or takes no memory of its own."""
    return bool(work.adapter) or "reference" in work.roles


def asked(work: StepWorkload, probe: Probe) -> StepWorkload:
    """A workload of our own choice, with the models of another."""
    policy = work.shapes["train"]
    roles = {"generate": policy, "train": policy} | ({"reference": policy} if probe.reference else {})
    reading = {"generate"} | ({"reference"} if probe.reference and work.adapter else set())
    return replace(
        work,
        shapes=roles,
        reading=frozenset(reading),
        prompts=probe.prompts,
        samples=probe.samples,
        prompt=probe.prompt,
        lengths=probe.lengths,
        oversample=1.0,
        acceptance=None,
        barrier=False,
        updates=1,
        staleness=0,
    )


def recipes(setting: PlanningProblem, best: Sequence[Forecast]) -> Iterator[ProbeStep]:
    """The recipe's own step under its best plans; none where it makes several updates or lags, which no trial does."""
    for forecast in best if setting.workload.updates == 1 and not setting.workload.staleness else ():
        yield _ask(f"the recipe, {forecast.choice.label}", setting, forecast.choice)


def _ask(name: str, setting: PlanningProblem, choice: Candidate) -> ProbeStep:
    told = name if choice.label in name else f"{name}, {choice.label} on {choice.devices}"
    return ProbeStep(name=told, setting=setting, choice=choice, plan=choice.plan(setting))


async def taken(
    recipe: Recipe,
    root: Path,
    asks: Sequence[ProbeStep],
    *,
    note: Note,
    launch: Callable[..., Launcher] = launcher_for,
    rounds: int = ROUNDS,
) -> list[MeasuredStep]:
    """Takes the steps in turns; of each ask the one in the middle."""
    # The first of them is `flatten`, in which every device plays every role.
    widest = max(asks, key=lambda ask: (ask.choice.devices, len(ask.setting.workload.roles)))
    trials = CalibrationSteps(
        recipe, root, launch(widest.setting.names, seconds=recipe.deadlines.start, make=CalibrationWorker)
    )
    took: list[list[CalibrationStep]] = [[] for _ in asks]
    note(f"starting {len(widest.setting.names)} workers; {len(asks)} kinds of steps follow, {rounds} times each")
    try:
        await trials.open(widest.setting.workload, widest.plan)
        begun, done = time.monotonic(), 0
        for _ in range(rounds):
            for ask, mine in zip(asks, took, strict=True):
                mine.append(await trials.step(ask.setting.workload, ask.plan))
                done += 1
                left = (time.monotonic() - begun) / done * (rounds * len(asks) - done)
                note(f"{done}/{rounds * len(asks)}  {ask.name}: {mine[-1].seconds:.2f} s  ETA {math.ceil(left)} s")
    finally:
        await trials.close()
    middle = [sorted(mine, key=lambda one: one.seconds)[len(mine) // 2] for mine in took]
    return [
        MeasuredStep(setting=ask.setting, choice=ask.choice, plan=ask.plan, seconds=one.seconds, notes=one.notes)
        for ask, one in zip(asks, middle, strict=True)
    ]
