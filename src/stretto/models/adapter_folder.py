"""What an adapter's folder says of itself: how large the adapter is, and which model it adapts.

PEFT describes an adapter in `adapter_config.json`. Only plain LoRA is continued here, on experts too; what else an
adapter may be is refused by name, because weights that are left out would change what the model says without a sound.
Nothing of the adapter's weights is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.errors import Problem, RecipeError
from stretto.recipe.schema import Adapter

FIELD = "model.name"
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
CHOICES = ("gate", "router")
"""What a plain layer that chooses among experts is called; it is not adapted here."""
FUSED = {"gate_up_proj": 2}
"""Parameter of experts -> how many matrices it holds, each of which has an adapter of the recipe's rank. PEFT writes
them as one of so many times the rank."""
RECIPE = Path("state", "recipe.json")
"""In the checkpoint of a run, the run's recipe."""
LARGEST = 2**20
"""Bytes of a description; real ones have a thousand."""

PLAIN = {
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "modules_to_save": ([], None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "layers_to_transform": ([], None),
    "trainable_token_indices": ([], {}, None),
    "exclude_modules": ([], None),
    "fan_in_fan_out": (False, True, None),
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
    experts: tuple[str, ...] = ()
    """Names of the parameters of experts that it adapts."""
    quantize: str | None = None
    """What the run that made it has said as `model.quantize`; none if a run does not say so."""

    def refused(self, section: Adapter | None) -> Problem | None:
        """Why a recipe's `model.adapter` cannot go on with this one, or none.

        `all-linear` and `attention` may be the names that they stood for; whether they were is known when the weights
        are read.
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
        named = not isinstance(section.targets, str)
        if named and (self.experts or set(section.targets) != set(self.targets)):
            differs.append(f"the targets {', '.join((*self.targets, *self.experts))}")
        if not differs:
            return None
        reason = f"the adapter of model.name, which training would go on with, has {' and '.join(differs)}"
        return Problem(field="model.adapter", reason=reason, fix=f"write {self.written}")

    def other_base(self, quantize: str) -> str | None:
        """What to say if its base is stored in other bits than it was: it makes up for what those rounded off."""
        if self.quantize in (None, quantize):
            return None
        was, now = (f"in {kind}" if kind != "none" else "in full" for kind in (self.quantize, quantize))
        fix = f"model.quantize: {self.quantize} goes on with the model that it was"
        return f"the adapter was trained on a base {was}, and this one is {now}; {fix}"

    @property
    def written(self) -> str:
        """The adapter as a recipe describes it."""
        targets = "all-linear" if self.experts else f"[{', '.join(self.targets)}]"
        return f"{{rank: {self.rank}, alpha: {self.alpha:g}, targets: {targets}}}"


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
    base, rank, alpha, targets, parameters = (
        config.get(key) for key in ("base_model_name_or_path", "r", "lora_alpha", "target_modules", "target_parameters")
    )
    if not isinstance(base, str) or not base:
        reason = f"{name} is an adapter that does not say what it adapts"
        fix = f"write the model's hub id or folder as base_model_name_or_path into its {CONFIG}"
        raise RecipeError.of(FIELD, reason, fix)
    whole = isinstance(rank, int) and not isinstance(rank, bool) and 0 < rank < 2**16
    scaled = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha < 2**20
    names = [targets] if isinstance(targets, str) else targets
    held = [] if parameters is None else parameters
    lists = all(isinstance(each, list) and all(map(_is_name, each)) for each in (names, held))
    if not whole or not scaled or not lists or not (names or held):
        raise _refusal(name, f"is an adapter whose {CONFIG} has no usable r, lora_alpha and target_modules")
    layers = {each.removesuffix(".weight") for each in held if each.endswith(".weight")}
    experts = sorted(each for each in held if not each.endswith(".weight"))
    if any(each.rpartition(".")[2] in CHOICES for each in layers):
        raise _refusal(name, f"is an adapter of what chooses among experts ({', '.join(held)[:60]})")
    _refuse_patterns(name, config, experts)
    if not any((folder / file).is_file() for file in WEIGHTS):
        raise RecipeError.of(FIELD, f"{name} is an adapter without {WEIGHTS[0]}", "copy the whole folder")
    return AdapterFacts(
        folder=folder,
        base=base,
        rank=int(rank or 0),
        alpha=float(alpha or 0),
        targets=tuple(sorted({*(names or ()), *layers})),
        experts=tuple(experts),
        quantize=_made_on(folder),
    )


def _refuse_patterns(name: str, config: dict[str, Any], experts: Sequence[str]) -> None:
    """Other ranks for some layers are those of experts alone, whose fused matrices have the rank of each together."""
    ranks, alphas = (config.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    usual = {rf".*\.{each}": FUSED[each] for each in experts if each in FUSED}
    for key, found, each in (("rank_pattern", ranks, config["r"]), ("alpha_pattern", alphas, config["lora_alpha"])):
        if found != {pattern: count * each for pattern, count in usual.items()}:
            raise _refusal(name, f"is an adapter with {key}: {str(found)[:60]}")


def _made_on(folder: Path) -> str | None:
    """`model.quantize` of the run whose checkpoint it is."""
    try:
        found = json.loads((folder / RECIPE).read_text("utf-8"))["model"]["quantize"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


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
