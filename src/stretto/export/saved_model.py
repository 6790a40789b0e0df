"""Which model of a run is meant, and that model as the run samples from it.

A run's checkpoint is a model's folder, or an adapter beside a base. `find` says where all of it is and loads nothing;
`SavedModel.load` makes the same `Policy` that the run's workers have, in a type of the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from stretto.algorithms.catalog import trains_reward_model
from stretto.environments.render import Renderer
from stretto.errors import RecipeError
from stretto.models.adapter_folder import AdapterFacts, read_adapter
from stretto.models.files import files_read
from stretto.models.load import Policy, load
from stretto.models.source import ModelFiles, cached_config, locate
from stretto.models.template_file import template_path, use_template
from stretto.recipe.schema import Recipe
from stretto.runtime.build import load_task
from stretto.runtime.inputs import read_record, refuse_other_base
from stretto.runtime.moved import point_adapters
from stretto.runtime.reading import NEWEST, read_checkpoint
from stretto.runtime.recipe_file import load_run_recipe
from stretto.storage.checkpoint import step_of
from stretto.types import Prompt

T = TypeVar("T")

Note = Callable[[str], None]


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


def find(run: Path, which: str = NEWEST, *, note: Note = lambda text: None) -> SavedModel:
    """The model of a run's newest valid checkpoint, of its best one, or of that of a step."""
    return using(run, which, lambda model: model, note=note)


def using(run: Path, which: str, use: Callable[[SavedModel], T], *, note: Note = lambda text: None) -> T:
    """Call `use` with that model and return its result; the run does not remove its checkpoint meanwhile.

    RecipeError where the base or the chat template is not the one that the run was trained with.
    """
    recipe, root = load_run_recipe(run)
    if trains_reward_model(recipe.algorithm.name):
        reason = f"a reward model answers nothing, and {run} has trained one"
        fix = "name a checkpoint of it, a folder that transformers reads as a sequence classifier, as"
        raise RecipeError.of("algorithm.name", reason, f"{fix} roles.reward_model.name")
    point_adapters(run, recipe, root)

    def opened(checkpoint: Path) -> T:
        files = _files(run, recipe, root, checkpoint)
        base = {} if files.adapter is None else files_read(replace(files, adapter=None))
        refuse_other_base(run, base, template_path(recipe.task, root), note=note)
        return use(SavedModel(run=run, recipe=recipe, root=root, checkpoint=checkpoint, files=files))

    return read_checkpoint(run, recipe, opened, which=which, note=note)


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
