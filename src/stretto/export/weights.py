"""The weights of a trained model one by one, so that no more than a few of them are in memory at once.

`StoredWeights` reads the tensors of a folder where they lie. `TrainedWeights` is what a run's model amounts to: those
of its folder, or of its base with the adapter added. The sum is made in float32 whatever either is stored in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils import load_peft_weights
from safetensors import safe_open
from torch import Tensor

from stretto.errors import RecipeError
from stretto.export.saved_model import SavedModel
from stretto.models.adapter_folder import AdapterFacts
from stretto.models.files import WEIGHTS

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of layers."""


class StoredWeights:
    """The tensors of a model's folder, as transformers saves it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handles: dict[Path, Any] = {}
        self._places = {name: path for path in self._paths() for name in list(self._open(path).keys())}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of their files."""
        return tuple(self._places)

    def read(self, name: str) -> Tensor:
        """A tensor, as it is stored."""
        handle = self._open(self._places[name])
        tensor: Tensor = handle[name] if isinstance(handle, dict) else handle.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is not read for it."""
        handle = self._open(self._places[name])
        return tuple(handle[name].shape if isinstance(handle, dict) else handle.get_slice(name).get_shape())

    def _paths(self) -> list[Path]:
        first = next((self.folder / name for name in WEIGHTS if (self.folder / name).is_file()), None)
        if first is None:
            raise RecipeError.of(str(self.folder), f"holds none of {', '.join(WEIGHTS)}", "copy the whole folder")
        if first.suffix != ".json":
            return [first]
        listed = json.loads(first.read_text("utf-8"))["weight_map"].values()
        return [self.folder / name for name in dict.fromkeys(listed)]

    def _open(self, path: Path) -> Any:
        """What reads a file: a handle of safetensors, or the tensors of a file of PyTorch, which stay on the disk."""
        if path not in self._handles:
            if path.suffix == ".safetensors":
                self._handles[path] = safe_open(path, framework="pt")
            else:
                self._handles[path] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return self._handles[path]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUpdate:
    """What an adapter adds to one weight: up @ down, scaled."""

    up: Tensor
    """(outputs, rank)."""
    down: Tensor
    """(rank, inputs)."""
    scale: float
    """alpha / rank."""

    def whole(self) -> Tensor:
        """(outputs, inputs) in float32."""
        return self.scale * (self.up.float() @ self.down.float())


class TrainedWeights:
    """The weights that a run's model amounts to."""

    def __init__(self, model: SavedModel) -> None:
        self.stored = StoredWeights(model.folder)
        self.updates = {} if model.files.adapter is None else adapter_updates(model.files.adapter)
        if missing := sorted(self.updates.keys() - set(self.stored.names)):
            reason = f"{model.folder} stores {missing[0]} under another name than the adapter has; this family is not"
            fix = "merge it with PEFT: AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload()"
            raise RecipeError.of("model.name", f"{reason} available yet", fix)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights."""
        return self.stored.names

    def read(self, name: str) -> Tensor:
        """A weight, in float32 if the adapter changed it, else as it is stored."""
        stored = self.stored.read(name)
        return stored.float() + self.updates[name].whole() if name in self.updates else stored


def adapter_updates(facts: AdapterFacts) -> Mapping[str, AdapterUpdate]:
    """Name of a weight -> what the adapter adds to it."""
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_peft_weights(str(facts.folder), device="cpu").items():
        layer, _, factor = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        factors.setdefault(f"{layer}.weight", {})[factor.partition(".")[0]] = tensor
    broken = [name for name, pair in factors.items() if pair.keys() != {"A", "B"}]
    if broken or not factors:
        reason = f"{facts.folder} holds {'half of an update' if broken else 'no update'} of {(broken or ['any'])[0]}"
        raise RecipeError.of("model.name", reason, "copy the whole adapter")
    scale = facts.alpha / facts.rank
    return {name: AdapterUpdate(up=pair["B"], down=pair["A"], scale=scale) for name, pair in factors.items()}
