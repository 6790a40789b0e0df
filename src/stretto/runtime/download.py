"""Fetching models of the hub before anything with a deadline begins: how long that takes is the network's business.

What cannot be fetched here (weights in other formats, a network that is away, a model that needs a login) is left to
loading, which fetches it too or says in its own words what is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError

from stretto.models.source import locate, offline
from stretto.recipe.schema import Recipe, RoleModel
from stretto.runtime.base_copy import Note
from stretto.runtime.interrupt import stop_if_interrupted

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of all weights, or the one that says which files they are in."""


def fetch_models(recipe: Recipe, root: Path, note: Note) -> None:
    """Makes sure that the weights of every model of the hub are in the cache of this host."""
    for name in dict.fromkeys(_names(recipe)):
        if not locate(name, root).on_hub or offline():
            continue
        with suppress(Exception):  # whatever a library of the network raises: loading tries again, and tells
            if not _cached(name):
                note(f"downloading {name} into the Hugging Face cache")
                for file in _weights(name):
                    stop_if_interrupted()
                    huggingface_hub.hf_hub_download(name, file)


def _names(recipe: Recipe) -> Iterator[str]:
    """Every model that the recipe names."""
    yield recipe.model.name
    roles = (recipe.roles.reference, recipe.roles.critic, recipe.roles.teacher, recipe.roles.reward_model)
    yield from (role.name for role in roles if isinstance(role, RoleModel) and role.name)


def _cached(name: str) -> bool:
    """True if all weights are here, as far as the cache knows."""
    index = huggingface_hub.try_to_load_from_cache(name, INDEX)
    files = _listed(index) if isinstance(index, str) else [WHOLE]
    return all(isinstance(huggingface_hub.try_to_load_from_cache(name, file), str) for file in files)


def _weights(name: str) -> list[str]:
    """The files that weights are in."""
    try:
        return _listed(huggingface_hub.hf_hub_download(name, INDEX))
    except EntryNotFoundError:
        return [WHOLE]


def _listed(index: str) -> list[str]:
    """The files that an index names."""
    return sorted(set(json.loads(Path(index).read_text("utf-8"))["weight_map"].values()))
