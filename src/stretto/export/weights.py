"""The weights of a trained model one by one, so that no more than a few of them are in memory at once.

`StoredWeights` reads the tensors of a folder where they lie. `TrainedWeights` is what a run's model amounts to: those
of its folder, or of its base with the adapter added. The sum is made in float32 whatever either is stored in. A base in
few bits is made wide for it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from peft.utils import load_peft_weights
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stretto.errors import RecipeError
from stretto.export.saved_model import SavedModel
from stretto.models.adapter_folder import AdapterFacts
from stretto.models.files import WEIGHTS
from stretto.models.load import Policy
from stretto.models.lora import base_of
from stretto.models.merged import in_files, narrow_layers, plain_name, wide, wide_shape

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of layers."""

ALIVE = 4
"""Parameters that are kept whole while their parts are read: those of a layer's experts."""


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


class Update(Protocol):
    """What an adapter adds to one weight."""

    def whole(self) -> Tensor:
        """In the weight's shape, in float32."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUpdate:
    """What an adapter adds to one parameter: up @ down, scaled."""

    up: Tensor
    """(outputs, rank), or (outputs, rank * experts)."""
    down: Tensor
    """(rank, inputs), or (experts * rank, inputs)."""
    scale: float
    """alpha / rank."""
    experts: int | None = None
    """How many there are of them, in a parameter that holds all of a layer."""
    turned: bool = False
    """True for a weight that is stored as (inputs, outputs)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        rows, width = len(self.up), self.down.shape[-1]
        return (width, rows) if self.turned else (rows, width) if self.experts is None else (self.experts, rows, width)

    def whole(self) -> Tensor:
        """(outputs, inputs), or (experts, outputs, inputs), in float32."""
        up, down = self.up.float(), self.down.float()
        if self.experts is not None:
            down = down.view(self.experts, -1, down.shape[-1])
            return self.scale * (up.view(len(up), -1, self.experts).permute(2, 0, 1) @ down)
        return self.scale * (up @ down if not self.turned else (up @ down).T)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUpdate:
    """What an adapter adds to one of the weights that a parameter is made of in files."""

    parts: Callable[[], Mapping[str, Tensor]]
    """What it adds to each of them."""
    name: str
    """Which of them."""

    def whole(self) -> Tensor:
        """In the weight's shape, in float32."""
        return self.parts()[self.name]


class TrainedWeights:
    """The weights that a run's model amounts to: the base that was trained on, and an adapter's updates.

    Files hold some parameters in parts, such as an expert each, and transformers knows how. A parameter is made once
    for those of its parts that are read one soon after the other.
    """

    def __init__(self, model: SavedModel, policy: Policy, plain: bool = False) -> None:
        """Of a run's policy; with `plain` on the base as it is stored, though it was trained on in few bits."""
        self.stored = StoredWeights(model.folder)
        self._known = frozenset(self.stored.names)
        self.network = policy.network
        self._made = OrderedDict[tuple[str, str], Mapping[str, Tensor]]()
        self.updates: dict[str, Update] = {}
        self._narrow: dict[str, Callable[[], Mapping[str, Tensor]]] = {}
        found = {} if model.files.adapter is None else adapter_updates(model.files.adapter, policy.network)
        for name, update in found.items():
            names, make = self._parts_of("update", name, update.shape, update.whole)
            self.updates |= {each: update if names == {name} else PartUpdate(parts=make, name=each) for each in names}
        for name, layer in {} if plain else narrow_layers(policy.network).items():
            names, make = self._parts_of("base", name, wide_shape(layer), partial(wide, layer))
            self._narrow |= dict.fromkeys(names, make)
        if missing := sorted((self.updates.keys() | self._narrow.keys()) - self._known):
            reason = f"{model.folder} stores {missing[0]} under another name than the adapter has; this family is not"
            fix = "merge it with PEFT: AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload()"
            raise RecipeError.of("model.name", f"{reason} available yet", fix)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all weights."""
        return self.stored.names

    def base(self, name: str) -> Tensor:
        """A weight without adapter: as it is stored, or in float32 what the trainer read of it in few bits."""
        return self._narrow[name]()[name] if name in self._narrow else self.stored.read(name)

    def read(self, name: str) -> Tensor:
        """A weight, in float32 if the adapter changed it, else as the base has it."""
        base = self.base(name)
        return base.float() + self.updates[name].whole() if name in self.updates else base

    def parts(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """What is stored of a parameter, by the names of files."""
        found = in_files(self.network, name, tensor)
        return {name: tensor} if name in self._known and found.keys() - self._known else found

    def _parts_of(
        self, what: str, name: str, shape: tuple[int, ...], read: Callable[[], Tensor]
    ) -> tuple[frozenset[str], Callable[[], Mapping[str, Tensor]]]:
        """The names of a parameter's parts, and what makes them."""

        def make() -> Mapping[str, Tensor]:
            key = what, name
            made = self._made.pop(key, None)
            self._made[key] = self.parts(name, read()) if made is None else made
            while len(self._made) > ALIVE:
                self._made.popitem(last=False)
            return self._made[key]

        return frozenset(self.parts(name, torch.empty(shape, device="meta"))), make


def adapter_updates(facts: AdapterFacts, network: nn.Module) -> Mapping[str, AdapterUpdate]:
    """Name of a parameter -> what the adapter adds to it, by its files; the network has layers for it."""
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_peft_weights(str(facts.folder), device="cpu").items():
        layer, _, factor = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        factors.setdefault(layer, {})[factor.partition(".")[0]] = tensor
    broken = [name for name, pair in factors.items() if pair.keys() != {"A", "B"}]
    if broken or not factors:
        reason = f"{facts.folder} holds {'half of an update' if broken else 'no update'} of {(broken or ['any'])[0]}"
        raise RecipeError.of("model.name", reason, "copy the whole adapter")
    found = {}
    for name, pair in factors.items():
        layer = network.get_submodule(name)
        parameter = getattr(layer, "parameter_name", "weight")
        held = getattr(base_of(layer), parameter)
        found[plain_name(f"{name}.{parameter}")] = AdapterUpdate(
            up=pair["B"],
            down=pair["A"],
            scale=facts.alpha / facts.rank,
            experts=len(held) if held.dim() == 3 else None,
            turned=isinstance(base_of(layer), Conv1D),
        )
    return found
