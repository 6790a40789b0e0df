"""A recipe that leaves its dtype open computes in float32 where the device is slow at bfloat16, and says so."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from running import Quiet, recipe_in, resume, start
from stretto.checks.machine.base import Gpu
from stretto.checks.machine.facts import look
from stretto.errors import RecipeError
from stretto.recipe.load import load_recipe
from stretto.recipe.resolve import resolve
from stretto.recipe.schema import ModelSection, Recipe
from stretto.runtime import precision, session
from stretto.runtime.precision import resolve_base, resolve_dtype
from stretto.runtime.recipe_file import with_lasting_paths
from stretto.runtime.value_table import ingredients

HERE = Path()


@pytest.fixture
def cpu(monkeypatch):
    """Makes this a machine without a GPU that multiplies float32 so many times as fast as bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return lambda times: monkeypatch.setattr(precision, "times_slower", lambda: times)


@pytest.fixture
def slow(cpu):
    """A CPU that multiplies float32 nine times as fast as bfloat16."""
    cpu(9.0)


@pytest.fixture
def old_gpu(slow, monkeypatch):
    """Makes this a machine with a GPU that can compute in bfloat16 or not."""

    def seen(able):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")

    return seen


def told(recipe):
    """The settled dtype, and what was said."""
    notes = []
    return resolve_dtype(recipe, HERE, notes.append).model.dtype, notes


def on(cluster, **model):
    return Recipe.model_validate({"placement": {"cluster": cluster}, "model": model})


def test_a_slow_cpu_gets_float32(slow):
    dtype, notes = told(Recipe())
    assert dtype == "float32"
    assert notes == ["model.dtype: float32, because this CPU multiplies float32 9 times as fast as bfloat16"]


def test_a_fast_one_keeps_bfloat16(cpu):
    cpu(0.4)
    assert told(Recipe()) == ("bfloat16", [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_a_recipe_says_is_obeyed(slow, dtype):
    found, notes = told(Recipe(model=ModelSection(dtype=dtype)))
    assert found == dtype
    assert len(notes) == (dtype == "bfloat16")
    assert all("as the recipe says" in note and "9 times" in note for note in notes)


@pytest.mark.parametrize(("first", "then", "dtype"), [(9.0, 0.4, "float32"), (0.4, 9.0, "bfloat16")])
def test_a_settled_recipe_is_a_recipe_that_says_so(cpu, first, then, dtype):
    cpu(first)
    once = resolve_dtype(Recipe(), HERE)
    cpu(then)
    assert resolve_dtype(once, HERE).model.dtype == dtype


@pytest.mark.parametrize(("able", "dtype"), [(True, "bfloat16"), (False, "float32")])
@pytest.mark.parametrize("cluster", ["auto", "1xgpu", "1xL4"])
def test_gpus_without_bfloat16_get_float32(old_gpu, cluster, able, dtype):
    old_gpu(able)
    found, notes = told(on(cluster))
    assert found == dtype
    assert ["T4" in note for note in notes] == ([] if able else [True])


def test_gpus_of_other_hosts_are_taken_to_be_able(slow):
    assert told(on("8xH100")) == ("bfloat16", [])


def test_an_old_gpu_of_this_host_says_nothing_of_several(old_gpu):
    old_gpu(False)
    assert told(on("2x8xH100")) == ("bfloat16", [])
    assert told(on("2x1xcpu"))[0] == "float32"


@pytest.fixture
def memory(monkeypatch):
    """Makes this a machine of so many bytes, with a large GPU that torch cannot use."""
    here = replace(look(), gpus=(Gpu(name="NVIDIA H200", memory=150 * 10**9),))
    return lambda size: monkeypatch.setattr(precision, "look", lambda: replace(here, memory=size))


def test_a_model_that_fits_only_in_bfloat16_stays_in_it_and_says_so(slow, billion, memory):
    memory(3 * 10**9)
    dtype, (note,) = told(on("auto", name=billion))
    assert dtype == "bfloat16"
    assert "although this CPU multiplies float32 9 times as fast" in note
    assert "in float32 the model and what trains it need at least 3.7 GB, and this machine has 2.8 GB" in note
    memory(5 * 10**9)
    assert told(on("auto", name=billion))[0] == "float32"


def test_what_fits_in_neither_is_no_slower_for_it(slow, billion, memory):
    memory(15 * 10**9)  # 16 bytes for each weight in float32, and 18 with masters of bfloat16
    assert told(on("auto", name=billion, adapter=None))[0] == "float32"


def test_the_ratio_is_measured():
    assert 0.01 < precision.times_slower() < 1000
    assert precision.times_slower() == precision.times_slower()


def test_a_run_writes_down_what_it_computes_in_and_resumes_with_it(slow, cpu, tmp_path):
    recipe = recipe_in(tmp_path, run__folder=str(tmp_path / "run"))
    model = ModelSection.model_validate(recipe.model.model_dump(exclude={"dtype"}))
    recipe = resolve(recipe.model_copy(update={"model": model}))
    quiet = Quiet()
    finished = session.start(recipe, name="open", root=tmp_path, progress=quiet)
    assert load_recipe(finished.folder / "recipe.yaml").model.dtype == "float32"
    assert [each for each in quiet.told if "model.dtype: float32" in str(each)]
    cpu(0.4)  # a machine that would choose otherwise
    again = session.resume(finished.folder, changes=["run.steps=4"], allow=["run.steps"], progress=Quiet())
    assert load_recipe(again.folder / "recipe.yaml").model.dtype == "float32"


def test_training_reads_the_table_of_the_dtype_it_computes_in(slow, tmp_path):
    recipe = recipe_in(tmp_path)
    left_open = recipe.model_copy(
        update={"model": ModelSection.model_validate(recipe.model.model_dump(exclude={"dtype"}))}
    )
    tables = {str(ingredients(resolve_dtype(each, tmp_path), [], tmp_path)) for each in (recipe, left_open)}
    assert len(tables) == 1


def test_a_path_that_is_told_from_elsewhere_is_no_wish_for_a_type(slow, tmp_path, monkeypatch):
    (tmp_path / "shared" / "recipes").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "recipes").symlink_to(tmp_path / "shared" / "recipes")
    (tmp_path / "project" / "sums.jsonl").touch()
    monkeypatch.chdir(tmp_path / "project")
    root = tmp_path / "project" / "recipes"
    recipe = Recipe.model_validate_json('{"task": {"source": {"kind": "jsonl", "path": "sums.jsonl"}}}')
    lasting = with_lasting_paths(recipe, root)
    assert (root / lasting.task.source.path).is_file(), "also where the folder of the recipe is a link"
    assert lasting.task.model_copy(update={"source": recipe.task.source}) == recipe.task
    dtype, (note,) = told(lasting)
    assert dtype == "float32" and "as the recipe says" not in note


def test_a_base_in_as_many_bits_as_there_is_room_for_is_written_down(cpu, tmp_path, monkeypatch):
    asked = []

    def widest(recipe, root, cluster, kinds):
        asked.append((recipe.model.dtype, str(cluster), kinds))
        return "int8"

    monkeypatch.setattr(precision, "widest_base", widest)
    auto = {"model__quantize": "auto", "model__adapter": {"rank": 2}, "model__dtype": "float32"}
    run = start(tmp_path, run__steps=1, **auto).folder
    assert load_recipe(run / "recipe.yaml").model.quantize == "int8"
    again = resume(run, changes=("run.steps=2",), allow=("run.steps",))
    assert load_recipe(again.folder / "recipe.yaml").model.quantize == "int8"
    assert asked == [("float32", "1 x cpu", ("none", "int8", "nf4"))]


@pytest.mark.parametrize(
    ("found", "changes", "told"),
    [
        (None, {}, "no storage with which a step has room on 1 x cpu"),
        ("none", {"name": "a/model-nobody-has"}, "cannot tell what fits"),
    ],
)
def test_a_base_of_which_nothing_fits_or_is_known_is_refused(found, changes, told, cpu, monkeypatch):
    if found is None:
        monkeypatch.setattr(precision, "widest_base", lambda *asked: None)
    with pytest.raises(RecipeError, match=f"model.quantize: auto .*{told}"):
        resolve_base(on("1xcpu", quantize="auto", **changes), HERE)


def test_a_machine_with_room_keeps_the_base_as_it_is(cpu):
    notes = []
    assert resolve_base(on("1xcpu", quantize="auto"), HERE, notes.append).model.quantize == "none"
    assert notes == ["model.quantize: none, because a step has room"]
