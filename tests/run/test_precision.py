"""A recipe that leaves its dtype open computes in float32 where the device is slow at bfloat16, and says so."""

import pytest
import torch

from running import Quiet, recipe_in
from stretto.config.load import load_recipe
from stretto.config.resolve import resolve
from stretto.config.schema import Model, Recipe
from stretto.run import precision, session
from stretto.run.precision import settled
from stretto.run.vstar import ingredients


@pytest.fixture
def slow(monkeypatch):
    """A CPU that multiplies float32 nine times as fast as bfloat16."""
    monkeypatch.setattr(precision, "times_slower", lambda: 9.0)


def told(recipe):
    """The settled dtype, and what was said."""
    notes = []
    return settled(recipe, notes.append).model.dtype, notes


def test_a_slow_cpu_gets_float32(slow):
    dtype, notes = told(Recipe())
    assert dtype == "float32"
    assert notes == ["model.dtype: float32, because this CPU multiplies float32 9 times as fast as bfloat16"]


def test_a_fast_one_keeps_bfloat16(monkeypatch):
    monkeypatch.setattr(precision, "times_slower", lambda: 0.4)
    assert told(Recipe()) == ("bfloat16", [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_a_recipe_says_is_obeyed(slow, dtype):
    found, notes = told(Recipe(model=Model(dtype=dtype)))
    assert found == dtype
    assert len(notes) == (dtype == "bfloat16")
    assert all("as the recipe says" in note and "9 times" in note for note in notes)


def test_a_settled_recipe_is_a_recipe_that_says_so(slow, monkeypatch):
    once = settled(Recipe())
    monkeypatch.setattr(precision, "times_slower", lambda: 0.4)
    assert settled(once).model.dtype == "float32"
    once = settled(Recipe())
    monkeypatch.setattr(precision, "times_slower", lambda: 9.0)
    assert settled(once).model.dtype == "bfloat16"


@pytest.mark.parametrize(("able", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_gpus_without_bfloat16_get_float32(slow, monkeypatch, able, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    found, notes = told(Recipe())
    assert found == dtype
    assert ["T4" in note for note in notes] == ([] if able else [True])


def test_gpus_of_other_hosts_are_taken_to_be_able(slow, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = Recipe.model_validate({"placement": {"cluster": "8xH100"}})
    assert told(recipe) == ("bfloat16", [])


def test_the_ratio_is_measured():
    assert 0.01 < precision.times_slower() < 1000
    assert precision.times_slower() == precision.times_slower()


def test_a_run_writes_down_what_it_computes_in_and_resumes_with_it(slow, monkeypatch, tmp_path):
    recipe = recipe_in(tmp_path)
    model = Model.model_validate(recipe.model.model_dump(exclude={"dtype"}))
    recipe = resolve(recipe.model_copy(update={"model": model}))
    quiet = Quiet()
    finished = session.start(recipe, name="open", root=tmp_path, progress=quiet)
    assert load_recipe(finished.folder / "recipe.yaml").model.dtype == "float32"
    assert [each for each in quiet.told if "model.dtype: float32" in str(each)]
    monkeypatch.setattr(precision, "times_slower", lambda: 0.4)  # a machine that would choose otherwise
    again = session.resume(finished.folder, changes=["run.steps=4"], allow=["run.steps"], progress=Quiet())
    assert load_recipe(again.folder / "recipe.yaml").model.dtype == "float32"


def test_training_reads_the_table_of_the_dtype_it_computes_in(slow, tmp_path):
    recipe = recipe_in(tmp_path)
    left_open = recipe.model_copy(update={"model": Model.model_validate(recipe.model.model_dump(exclude={"dtype"}))})
    tables = {str(ingredients(settled(each), [], tmp_path)) for each in (recipe, left_open)}
    assert len(tables) == 1
