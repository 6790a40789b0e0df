"""Models of the hub are fetched before the deadline of loading begins; what cannot be fetched is left to loading."""

import json
from contextlib import contextmanager

import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from running import recipe_in
from stretto.runtime import build, download, questions

PARTS = {"weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with some files of org/model, and a cache that holds what was fetched. Returns both."""
    there, cache = {}, {}

    def fetch(name, file):
        if file not in there:
            raise EntryNotFoundError(f"{name} has no {file}")
        cache[file] = tmp_path / file
        cache[file].write_text(there[file])
        return str(cache[file])

    monkeypatch.setattr(download.huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(
        download.huggingface_hub,
        "try_to_load_from_cache",
        lambda name, file: str(cache[file]) if file in cache else None,
    )
    monkeypatch.setattr(download, "offline", lambda: False)
    monkeypatch.setattr("stretto.models.source.offline", lambda: False)
    return there, cache


def fetched(tmp_path):
    """What is told while the model of a recipe is fetched."""
    notes = []
    recipe = recipe_in(tmp_path)
    model = recipe.model.model_copy(update={"name": "org/model"})
    download.fetch_models(recipe.model_copy(update={"model": model}), tmp_path, notes.append)
    return notes


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"model.safetensors": "w"}, {"model.safetensors"}),
        (
            {"model.safetensors.index.json": json.dumps(PARTS), "model-1.safetensors": "w", "model-2.safetensors": "w"},
            {"model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"},
        ),
    ],
    ids=["one file", "several"],
)
def test_weights_are_fetched_once(files, wanted, hub, tmp_path):
    there, cache = hub
    there |= files
    assert fetched(tmp_path) == ["downloading org/model into the Hugging Face cache"]
    assert cache.keys() == wanted
    assert fetched(tmp_path) == []


def test_what_cannot_be_fetched_is_left_to_loading(hub, tmp_path, monkeypatch):
    fetched(tmp_path)  # the hub knows no such model

    for error in (LocalEntryNotFoundError("the network is away"), RuntimeError("the connection was reset")):

        def away(name, file, error=error):
            raise error

        monkeypatch.setattr(download.huggingface_hub, "hf_hub_download", away)
        fetched(tmp_path)


def test_models_that_are_here_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(download.huggingface_hub, "hf_hub_download", None)
    notes = []
    download.fetch_models(recipe_in(tmp_path), tmp_path, notes.append)
    assert notes == []


def test_rewards_are_tried_before_it_and_the_deadline_of_loading_begins_after_it(tmp_path, monkeypatch):
    order = []

    async def rehearse(rewards, prompts):
        order.append("rehearsed")

    @contextmanager
    def loading(*rest):
        order.append("loading")
        yield

    monkeypatch.setattr(build, "rehearse", rehearse)
    monkeypatch.setattr(build, "fetch_models", lambda *rest: order.append("fetched"))
    monkeypatch.setattr(questions, "startup_deadline", loading)
    questions.evaluate_recipe(recipe_in(tmp_path), root=tmp_path)
    assert order == ["rehearsed", "fetched", "loading"]
