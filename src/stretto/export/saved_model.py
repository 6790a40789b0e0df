"""Which model of a run is meant, and that model as the run samples from it.

A run's checkpoint is a model's folder, or an adapter beside a base. `find` says where all of it is and loads nothing;
`SavedModel.load` makes the same `Policy` that the run's workers have, in a type of the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stretto.algorithms.catalog import trains_reward_model
from stretto.environments.render import Renderer
from stretto.errors import CheckpointError, RecipeError
from stretto.models.adapter_folder import AdapterFacts, read_adapter
from stretto.models.load import Policy, load
from stretto.models.source import ModelFiles, cached_config, locate
from stretto.models.template_file import use_template
from stretto.recipe.schema import Recipe
from stretto.runtime.build import load_task
from stretto.runtime.inputs import read_record
from stretto.runtime.moved import point_adapters
from stretto.runtime.recipe_file import load_run_recipe
from stretto.storage.checkpoint import Checkpoints, none_yet, step_of
from stretto.storage.manifest import verify
from stretto.types import Prompt

NEWEST, BEST = "newest", "best"
"""What a checkpoint may be called besides by its step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """One checkpoint of a run, and all that its model consists of."""

    run: Path
    """The run's folder."""
    recipe: Recipe
    """The run's recipe."""
    root: Path
    """The folder that relative paths of the recipe count from."""
    checkpoint: Path
    """The checkpoint's folder."""
    files: ModelFiles
    """The model's files: the checkpoint itself, or the base with the checkpoint as its adapter."""

    @property
    def step(self) -> int:
        """The step after which it was written."""
        return step_of(self.checkpoint)

    @property
    def folder(self) -> Path:
        """The folder of the whole model, or of the base where there is an adapter."""
        config = self.files.config
        if config is None or not config.is_file():
            reason = f"{self.files.name} is not on this machine, which the adapters of {self.run} adapt"
            raise RecipeError.of("model.name", reason, "download it, or copy it here, as it was for the run")
        return config.parent

    @property
    def hub_base(self) -> str | None:
        """The hub id of the model that was trained; none if others cannot get it by its name."""
        if self.files.adapter is not None:
            return self.files.name if self.files.on_hub else None
        name, record = self.recipe.model.name, read_record(self.run)
        if record is None:
            return name if cached_config(name) is not None else None
        # A folder may be called as a model of the hub could be, so what counts is whether the run read the cache.
        cached = f"models--{name.replace('/', '--')}"
        files = record.inputs.get("model.name", {}).values()
        return name if any(cached in Path(each.what).parts for each in files) else None

    def load(self, dtype: str, device: str = "cpu") -> Policy:
        """The model as the run's workers have it, but for the type that it computes in and where it is."""
        section = self.recipe.model.model_copy(update={"dtype": dtype})
        policy = load(section, self.files, seed=self.recipe.seed, device=torch.device(device))
        use_template(policy.tokenizer, self.recipe.task, self.root)
        template = self.recipe.task.template
        policy.stop_at(Renderer(policy.tokenizer, stop=policy.stop_tokens, arguments=template).ends)
        policy.network.requires_grad_(False)
        return policy

    def prompts(self, most: int) -> tuple[Prompt, ...]:
        """The first held-out prompts; of a run that held none out, the first of those that it trained on."""
        task = load_task(self.recipe, self.root, None)
        return (task.heldout or task.training)[:most]


def find(run: Path, which: str = NEWEST, *, note: Callable[[str], None] = lambda text: None) -> SavedModel:
    """The model of a run's newest sound checkpoint, of its best one, or of that of a step."""
    recipe, root = load_run_recipe(run)
    if trains_reward_model(recipe.algorithm.name):
        reason = f"a reward model answers nothing, and {run} has trained one"
        fix = "name a checkpoint of it, a folder that transformers reads as a sequence classifier, as"
        raise RecipeError.of("algorithm.name", reason, f"{fix} roles.reward_model.name")
    checkpoints = Checkpoints(run / "checkpoints", keep=recipe.checkpoint.keep, best=recipe.checkpoint.best)
    checkpoint = _chosen(run, checkpoints, which, note)
    point_adapters(run, recipe, root)
    return SavedModel(
        run=run, recipe=recipe, root=root, checkpoint=checkpoint, files=_files(run, recipe, root, checkpoint)
    )


def _chosen(run: Path, checkpoints: Checkpoints, which: str, note: Callable[[str], None]) -> Path:
    """The folder of a checkpoint that was found to be whole."""
    if which == NEWEST:
        found = checkpoints.latest(lambda path, why: note(f"skipped {path.name}: {why}"))
        if found is None:
            raise none_yet(run)
        return found
    if which == BEST:
        found = checkpoints.best()
        if found is None:
            reason = f"{run}: no checkpoint has the metric that checkpoint.best names"
            raise CheckpointError(f"{reason}\n    fix: --step newest, or the number of one")
    elif which.isascii() and which.isdigit():
        found = checkpoints.folder / f"step-{int(which):06d}"
    else:
        raise RecipeError.of("--step", f"{which!r} is no step", "give the number of a checkpoint, newest or best")
    if not found.is_dir():
        there = ", ".join(sorted(str(step_of(path)) for path in checkpoints.folder.glob("step-*[0-9]"))) or "none"
        raise RecipeError.of("--step", f"{run} holds no checkpoint of step {which}", f"those that it holds: {there}")
    verify(found)
    return found


def _files(run: Path, recipe: Recipe, root: Path, checkpoint: Path) -> ModelFiles:
    if recipe.model.adapter is None:
        return ModelFiles(kind="folder", name=str(checkpoint), folder=checkpoint, file=None)
    adapter = read_adapter(str(checkpoint), checkpoint)
    return replace(_base(run, recipe, root, adapter), adapter=adapter)


def _base(run: Path, recipe: Recipe, root: Path, adapter: AdapterFacts) -> ModelFiles:
    """The model that an adapter adapts: the run's own copy, or what the recipe names."""
    own = run / "base"
    if own.is_dir():
        return ModelFiles(kind="folder", name=str(own), folder=own, file=None)
    try:
        return locate(recipe.model.name, root)
    except RecipeError:
        # An adapter that training went on with may be gone by now; what both of them adapt may still be there.
        with suppress(RecipeError):
            return locate(adapter.base, root)
        raise
