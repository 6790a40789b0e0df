"""The training half of a recorded step once more, on one process: same samples, same weights before, same update?

It begins at the checkpoint before the step, or at an earlier one with the steps between, and takes the samples from the
run folder. Credit, the reference's and the critic's numbers are computed anew. What comes of it is held against what
the run has recorded: loss, gradient norm and weights of the whole; log-probabilities, credit and text of each sample.
A sample that was changed after it was written differs in one of these, and is named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto import threads
from stretto.algorithms.catalog import learns_from_rows
from stretto.algorithms.credit import whitened_samples
from stretto.checks.own_code import import_plugins
from stretto.errors import CheckpointError, RecipeError
from stretto.recipe.schema import Recipe
from stretto.runtime.base_copy import Note
from stretto.runtime.build import build_runtime
from stretto.runtime.inputs import AS_TRAINED, refuse_changed
from stretto.runtime.minibatches import credit, keyed_conversations, merged, minibatches, value_streams
from stretto.runtime.moved import point_adapters
from stretto.runtime.plans import make_plan
from stretto.runtime.precision import resolve_precision
from stretto.runtime.reading import read_checkpoint
from stretto.runtime.recipe_changes import EVALUATION_KEYS, RecipeRecord
from stretto.runtime.recipe_file import load_run_recipe
from stretto.runtime.recorded_step import RecordedStep, SampleKey, read_step
from stretto.runtime.runtime import Runtime
from stretto.runtime.value_table import run_values
from stretto.storage.checkpoint import Checkpoints, step_of
from stretto.storage.manifest import STATE, verify
from stretto.storage.tensors import read_parts
from stretto.training.optimizer import wide_master
from stretto.training.parallel.zero1 import merge_states
from stretto.types import Sample
from stretto.workers.models import EngineFactory

COMPARED = ("loss", "grad_norm", "entropy", "kl/engine_trainer", "kl/reference", "tokens/trained", "learning_rate")
"""Metrics of a step that its training half makes."""

EXACT, ROUGH = 1e-4, 5e-2
"""By how much a gradient norm may differ, as a share: in float32 and wider, and in formats of 16 bits."""

MOVED, MOVED_ROUGH = 1e-2, 2e-1
"""By how much weights may differ, as a share of what the step has moved them. Adam makes much of rounding where a
gradient is almost 0."""

ROUNDED = 2e-5
"""What is left between equal credits of which one was rounded."""

FAR, FAR_ROUGH, TIMES = 1e-3, 0.5, 20.0
"""By how much a log-probability differs that is another token's: at least so much, and so many times what is usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDifference:
    """A sample that is not as the run trained on it."""

    key: SampleKey
    """Prompt, visit, attempt and conversation."""
    what: str
    """What differs, and where."""
    size: float
    """By how much."""

    def __str__(self) -> str:
        prompt, visit, attempt, index = self.key
        return f"prompt {prompt}, visit {visit}, attempt {attempt}, conversation {index}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDifference:
    """How far the weights after the step are from those that the run saved."""

    apart: float
    """Euclidean distance over all trained weights."""
    moved: float
    """How far the run's own step has moved them."""

    @property
    def share(self) -> float:
        """Of what the step has moved."""
        return self.apart / self.moved if self.moved else self.apart


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A step that was trained again."""

    step: int
    """Its number."""
    recorded: Mapping[str, float]
    """Its line of metrics.jsonl."""
    replayed: Mapping[str, float]
    """The same numbers now."""
    differences: tuple[SampleDifference, ...]
    """Samples that are not what was trained on, the worst first."""
    samples: int
    """How many were trained on."""
    farthest: float
    """Largest difference between a recorded log-probability and the trainer's."""

    def off(self, name: str) -> float:
        """By how much a number differs, as a share of the recorded one."""
        before, now = self.recorded.get(name, float("nan")), self.replayed.get(name, float("nan"))
        return abs(now - before) / max(abs(before), 1e-8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came of it."""

    folder: Path
    """The run's."""
    begun: int
    """The step whose checkpoint it began from; 0 for the model before training."""
    steps: tuple[ReplayedStep, ...]
    """The steps that were trained again; the last is the one that was asked for."""
    weights: WeightDifference | None
    """Of the last step; none where the run has no checkpoint of it."""
    narrow: bool
    """True where the model computes in 16 bits, so that little is exact."""

    @property
    def reproduced(self) -> bool:
        """True if nothing differs by more than rounding makes."""
        norm = ROUGH if self.narrow else EXACT
        share = MOVED_ROUGH if self.narrow else MOVED
        return all(step.off("grad_norm") <= norm and not step.differences for step in self.steps) and (
            self.weights is None or self.weights.share <= share
        )

    def document(self) -> dict[str, Any]:
        """For programs."""
        weights = None if self.weights is None else {"apart": self.weights.apart, "moved": self.weights.moved}
        return {
            "ok": self.reproduced,
            "run": str(self.folder),
            "begun": self.begun,
            "weights": weights,
            "steps": [
                {
                    "step": each.step,
                    "recorded": {name: each.recorded.get(name) for name in COMPARED},
                    "replayed": {name: each.replayed.get(name) for name in COMPARED},
                    "samples": each.samples,
                    "farthest": each.farthest,
                    "differences": [{"key": list(one.key), "what": one.what} for one in each.differences],
                }
                for each in self.steps
            ],
        }


def replay(folder: Path, step: int, *, note: Note, make_engine: EngineFactory) -> Replay:
    """Trains a recorded step again. `make_engine` makes what stands where an engine would: nothing is generated."""
    recipe, root = load_run_recipe(folder)
    refuse_unreplayable(recipe)
    recorded = read_step(folder, step)
    refuse_changed(folder, recipe, root, allow=EVALUATION_KEYS, note=note, remedy=AS_TRAINED)
    point_adapters(folder, recipe, root)

    def replayed(start: Path | None) -> Replay:
        return _from(start, folder, recipe, root, recorded, note, make_engine)

    return read_checkpoint(folder, recipe, replayed, before=step, otherwise=lambda: replayed(None), note=note)


def _from(
    start: Path | None,
    folder: Path,
    recipe: Recipe,
    root: Path,
    recorded: RecordedStep,
    note: Note,
    make_engine: EngineFactory,
) -> Replay:
    """A recorded step, replayed from a checkpoint before it, or from the model before training."""
    step = recorded.step
    begun = step_of(start) if start else 0
    if begun < step - 1:
        where = f"that of step {begun}" if start else "the model before training"
        note(
            f"there is no checkpoint of step {step - 1}, so steps {begun + 1} to {step} are replayed, from {where}; "
            "checkpoint.every: 1 with a larger checkpoint.keep would make this one step"
        )
    before = [read_step(folder, each) for each in range(begun + 1, step)]
    return threads.run(_replayed(folder, recipe, root, start, [*before, recorded], note, make_engine))


def refuse_unreplayable(recipe: Recipe) -> None:
    """What a run folder does not hold all of, or what is trained by more than its samples."""
    replays = getattr(recipe.engine, "router_replay", False)
    critic, part = recipe.roles.critic, recipe.engine.top_p < 1.0 or getattr(recipe.engine, "top_k", None) is not None
    for found, field, what, fix in (
        (recipe.placement.staleness, "placement.staleness", "a run with staleness", "without"),
        (part, "engine", "answers that were drawn from a part of the vocabulary", "without top_p and top_k"),
        (replays, "engine.router_replay", "a run that is trained on its engine's choice of experts", "without"),
        (learns_from_rows(recipe.algorithm.name), "algorithm.name", "a run that learns from rows", "with answers"),
        (recipe.roles.teacher, "roles.teacher", "a run with a teacher", "without"),
        (critic and critic.optimizer, "roles.critic.optimizer", "a run that trains its critic", "without"),
        (recipe.algorithm.kl.adaptive, "algorithm.kl.adaptive", "a run whose KL coefficient moves", "without"),
    ):
        if found:
            raise RecipeError.of(field, f"replay of {what} is not available yet", f"replay a run {fix}")


async def _replayed(
    folder: Path,
    recipe: Recipe,
    root: Path,
    start: Path | None,
    recorded: Sequence[RecordedStep],
    note: Note,
    make_engine: EngineFactory,
) -> Replay:
    recipe = resolve_precision(recipe, root, note)
    import_plugins(recipe, root)
    alone = {"strategy": "flatten", "cluster": "auto", "cells": None, "fractions": None, "nccl": False}
    recipe = recipe.model_copy(update={"placement": recipe.placement.model_copy(update=alone)})
    plan = make_plan(recipe).only({"generate", "train", "reference", "value"})
    parts = await build_runtime(
        recipe, plan=plan, root=root, folder=folder, note=note, make_engine=make_engine, judged=False,
        drafts=False, values=run_values(recipe, root, folder), stacks=Path(),
    )  # fmt: skip
    try:
        if start is not None:
            held = (RecipeRecord(recipe, allow=EVALUATION_KEYS), *parts.stateful)
            written = parts.worker_group.files.names
            Checkpoints(start.parent, keep=1, best=None).restore(start, held, written=written)
        await parts.restored(start)
        before: Mapping[str, Any] = {}
        done = list[ReplayedStep]()
        for each in recorded:
            before = await _masters(parts)
            done.append(await _step(parts, each))
        last = recorded[-1].step
        return Replay(
            folder=folder,
            begun=recorded[0].step - 1,
            steps=tuple(done),
            weights=_apart(folder, last, before, await _masters(parts)),
            narrow=recipe.model.dtype in ("bfloat16", "float16"),
        )
    finally:
        await parts.close()


async def _step(parts: Runtime, recorded: RecordedStep) -> ReplayedStep:
    """One step's updates, and what differs in its samples."""
    recipe, group = parts.recipe, parts.worker_group
    cells = {cell.role: cell.name for cell in parts.plan.cells}
    trajectories = [trajectory for each in recorded.groups for trajectory in each.trajectories]
    keyed = keyed_conversations(trajectories)
    talks = [conversation for _, conversation in keyed]
    said = dict(zip((key for key, _ in keyed), await group.score(cells["train"], talks), strict=True))
    streams: dict[str, Mapping[SampleKey, NDArray[np.float64]]] = {}
    for role, name in (("reference", "reference"), ("value", "values")):
        if role in cells:
            found = await group.score(cells[role], talks)
            streams[name] = dict(zip((key for key, _ in keyed), found, strict=True))
    streams |= value_streams(parts, recorded.groups)
    samples = credit(parts.crediting, recorded.groups, streams, whitened=not parts.whitens)
    reported = whitened_samples(samples) if parts.whitens else samples
    differences = sorted(_differences(parts, recorded, reported, said), key=lambda one: -one.size)
    if recipe.batch.updates_a_step > 1:
        samples = tuple(replace(sample, old=said[sample.key]) for sample in samples)
    # What was sampled in another version cannot be trained, and was not: the file says otherwise.
    samples = tuple(
        replace(sample, conversation=replace(sample.conversation, version=parts.version)) for sample in samples
    )
    portions = minibatches(samples, recipe, step=recorded.step)
    await group.begin()
    reports = []
    for index, portion in enumerate(portions):
        await group.accumulate(cells["train"], portion)
        report = await group.apply(last=index + 1 == len(portions))
        reports.append({**report.metrics, "updates/skipped": float(not report.applied)})
    group.applying = False
    far = [float(np.abs(said[key] - _recorded(talk)).max(initial=0.0)) for key, talk in keyed]
    return ReplayedStep(
        step=recorded.step,
        recorded=recorded.metrics,
        replayed=merged(reports),
        differences=tuple(differences),
        samples=len(samples),
        farthest=max(far, default=0.0),
    )


def _recorded(talk: Any) -> NDArray[np.float64]:
    """The engine's log-probabilities of the trained tokens."""
    found: NDArray[np.float64] = talk.logprobs[talk.trained]
    return found


def _differences(
    parts: Runtime,
    recorded: RecordedStep,
    samples: Sequence[Sample],
    said: Mapping[SampleKey, NDArray[np.float64]],
) -> Iterator[SampleDifference]:
    """Samples whose record contradicts itself, or what the weights say of it."""
    narrow = parts.recipe.model.dtype in ("bfloat16", "float16")
    gaps = {sample.key: np.abs(said[sample.key] - _recorded(sample.conversation)) for sample in samples}
    usual = float(np.median([gap.max(initial=0.0) for gap in gaps.values()] or [0.0]))
    limit = max(FAR_ROUGH if narrow else FAR, TIMES * usual)
    worst = _worst_credit(recorded, samples)
    for sample in samples:
        key, talk, gap = sample.key, sample.conversation, gaps[sample.key]
        if talk.version != parts.version:
            told = f"version {talk.version} of the weights sampled it, and this step trains version {parts.version}"
            yield SampleDifference(key=key, what=told, size=float("inf"))
        if gap.max(initial=0.0) > limit:
            place = int(np.flatnonzero(talk.trained)[gap.argmax()])
            told = f"the log-probability of token {place} is off by {gap.max():.3g}, where {usual:.2g} is usual"
            yield SampleDifference(key=key, what=told, size=float(gap.max()))
        if key in worst:
            told = f"its recorded advantage is off by {worst[key]:.3g} from what its group's rewards make"
            yield SampleDifference(key=key, what=told, size=worst[key])
        if recorded.texts[key] != parts.renderer.all_text(talk.tokens.tolist()):
            yield SampleDifference(key=key, what="its text is not what its tokens say", size=1.0)


def _worst_credit(recorded: RecordedStep, samples: Sequence[Sample]) -> dict[SampleKey, float]:
    """Of each group whose credit does not follow from its rewards, the sample that is farthest off: a reward that was
    changed moves its own credit most and those of the others a little."""
    off: dict[tuple[str, int], dict[SampleKey, float]] = {}
    for sample in samples:
        gap = float(np.abs(sample.advantage - recorded.advantages[sample.key]).max(initial=0.0))
        if gap > ROUNDED * max(1.0, float(np.abs(sample.advantage).max(initial=0.0))):
            off.setdefault(sample.key[:2], {})[sample.key] = gap
    return {key: gap for found in off.values() for key, gap in [max(found.items(), key=lambda one: one[1])]}


async def _masters(parts: Runtime) -> Mapping[str, Any]:
    """The trained weights as they are now, as a checkpoint would hold them."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as beside:
        await parts.worker_group.save(Path(beside, "now"))
        (state,) = read_parts(Path(beside, "now") / STATE, "optimizer")
        return {name: wide_master(stored).clone() for name, stored in state["masters"].items()}


def _apart(folder: Path, step: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> WeightDifference | None:
    """The weights after the step against the run's checkpoint of it, if it has one."""
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    try:
        verify(checkpoint)
    except CheckpointError:
        return None
    held = merge_states(read_parts(checkpoint / STATE, "optimizer"))["masters"]
    saved = {name: wide_master(stored) for name, stored in held.items()}
    return WeightDifference(apart=_distance(after, saved), moved=_distance(before, saved))


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    parts: Callable[[str], torch.Tensor] = lambda name: one[name].double() - other[name].double()  # noqa: E731
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(parts(name)) for name in one])))
