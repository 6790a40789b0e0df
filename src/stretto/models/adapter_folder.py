"""What an adapter's folder says of itself: how large the adapter is, and which model it adapts.

PEFT describes an adapter in `adapter_config.json`. Only plain LoRA is continued here; what else an adapter may be is
refused by name, because weights that are left out would change what the model says without a sound. Nothing of the
adapter's weights is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import Adapter

FIELD = "model.name"
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
LARGEST = 2**20
"""Bytes of a description; real ones have a thousand."""

PLAIN = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "layers_to_transform": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "exclude_modules": ([], None),
    "fan_in_fan_out": (False, None),
    "init_lora_weights": (True, False, "gaussian", None),
}
"""Key of an adapter's description -> the values with which it is the plain kind that stretto itself makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """What a folder says of its adapter."""

    folder: Path
    """Where it is."""
    base: str
    """The model that it adapts: a hub id or a path."""
    rank: int
    """Rank of the update."""
    alpha: float
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Last parts of the names of the layers that it adapts."""

    def refused(self, section: Adapter | None) -> Problem | None:
        """Why a recipe's `model.adapter` cannot go on with this one, or none.

        `all-linear` may be the names that it stood for; whether it was is known when the weights are read.
        """
        if section is None:
            reason = f"is null, which trains a whole model, and model.name is an adapter of {self.base}"
            fix = "name the model that `stretto merge` makes of its run, or describe the adapter here"
            return Problem(field="model.adapter", reason=reason, fix=fix)
        differs = [
            f"{key} {mine:g}, not {theirs:g}"
            for key, mine, theirs in (("rank", self.rank, section.rank), ("alpha", self.alpha, section.alpha))
            if mine != theirs
        ]
        if section.targets != "all-linear" and set(section.targets) != set(self.targets):
            differs.append(f"the targets {', '.join(self.targets)}")
        if not differs:
            return None
        reason = f"the adapter of model.name, which training would go on with, has {' and '.join(differs)}"
        return Problem(field="model.adapter", reason=reason, fix=f"write {self.written}")

    @property
    def written(self) -> str:
        """The adapter as a recipe describes it."""
        return f"{{rank: {self.rank}, alpha: {self.alpha:g}, targets: [{', '.join(self.targets)}]}}"


def is_adapter(folder: Path) -> bool:
    """True for a folder that holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_adapter(name: str, folder: Path) -> AdapterFacts:
    """What the folder says; RecipeError for what is no plain LoRA. `name` is what the recipe calls it."""
    config = _read(name, folder)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _refusal(name, f"is an adapter of kind {kind!r}")
    for key, allowed in PLAIN.items():
        if key in config and config[key] not in allowed:
            raise _refusal(name, f"is an adapter with {key}: {str(config[key])[:60]}")
    base, rank, alpha, targets = (
        config.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha", "target_modules")
    )
    if not isinstance(base, str) or not base:
        reason = f"{name} is an adapter that does not say what it adapts"
        fix = f"write the model's hub id or folder as base_model_name_or_path into its {CONFIG}"
        raise RecipeError.of(FIELD, reason, fix)
    whole = isinstance(rank, int) and not isinstance(rank, bool) and 0 < rank < 2**16
    scaled = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha < 2**20
    names = [targets] if isinstance(targets, str) else targets
    if not whole or not scaled or not isinstance(names, list) or not all(_is_name(each) for each in names) or not names:
        raise _refusal(name, f"is an adapter whose {CONFIG} has no usable r, lora_alpha and target_modules")
    if not any((folder / file).is_file() for file in WEIGHTS):
        raise RecipeError.of(FIELD, f"{name} is an adapter without {WEIGHTS[0]}", "copy the whole folder")
    return AdapterFacts(
        folder=folder, base=base, rank=int(rank or 0), alpha=float(alpha or 0), targets=tuple(sorted(names))
    )


def _is_name(target: object) -> bool:
    """A plain name of layers; PEFT also takes regular expressions, of which nobody knows here what they match."""
    return isinstance(target, str) and target.replace("_", "").replace(".", "").isalnum()


def _read(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError("it is far too large")
        found: Any = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{name} is an adapter whose {CONFIG} cannot be read: {error}"
        raise RecipeError.of(FIELD, reason, "get the adapter's files again") from None
    return found


def _refusal(name: str, reason: str) -> RecipeError:
    fix = "merge it into its base with PEFT (merge_and_unload), and name the folder that save_pretrained wrote"
    return RecipeError.of(FIELD, f"{name} {reason}, which is not available yet", fix)
