"""A resume goes on with what the run was trained with, or says what of it is another, and touches nothing."""

import json
import os
import shutil
import stat

import pytest
from yaml import safe_load as load

from running import Quiet, recipe_in, resume, start
from stretto.errors import CheckpointError, RecipeError
from stretto.models.files import files_in
from stretto.recipe.load import load_recipe
from stretto.runtime import inputs, questions, session
from stretto.runtime.inputs import InputsRecorder, read_record, refuse_changed
from stretto.runtime.moved import root_in, root_lines
from stretto.runtime.recipe_changes import FixedRecord, RecipeRecord
from stretto.storage.checkpoint import Checkpoints
from stretto.storage.digests import CACHE, LARGE, digest, remembered

LORA = {"kind": "lora", "rank": 2, "alpha": 8.0}
ROWS = [{"id": str(n), "text": f"{n:b}", "answer": f"{n:b}", "level": 1} for n in range(8)]
JUDGE = """import helpers
from words import few, many as lots
def good(answer, prompt, signals):
    import late
    from importlib import import_module
    import_module("named")
    return helpers.right(answer, prompt["reference"])
"""
MODULES = {
    "judge.py": JUDGE,
    "helpers.py": "import deeper\ndef right(a, b):\n    return float(a == b)\n",
    "deeper.py": "LIMIT = 1\n",
    "late.py": "",
    "named.py": "",
    "words/__init__.py": "from . import few\n",
    "words/few.py": "from .many import x\n",
    "words/many.py": "x = 1\n",
    "unused.py": "x = 1\n",
}
OWN = {
    "task__source": {"kind": "jsonl", "path": "data.jsonl"},
    "task__holdout__prompts": 2,
    "evaluate__prompts": 2,
    "rewards": [{"name": "mine", "kind": "judge:good"}],
    "model__adapter": LORA,
}


def write_rows(folder, rows):
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def flip(path, place=-1):
    """Changes one bit, and leaves size and times as they were."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A recipe's folder with data and rewards of its own, and a run in it."""
    root = tmp_path_factory.mktemp("project")
    write_rows(root, ROWS)
    for name, text in MODULES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root, start(root, run__steps=2, evaluate__every=0, checkpoint__best=None, **OWN).folder


@pytest.fixture
def project(made, tmp_path):
    """A copy of it: (folder, run). The run counts its paths from the copy."""
    root, run = made
    shutil.copytree(root, tmp_path / "project")
    mine = tmp_path / "project" / run.name
    recipe = mine / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"# root: {root}", f"# root: {tmp_path / 'project'}"))
    return tmp_path / "project", mine


def refused(run, allow=(), recipe=None):
    """What a resume would refuse: field -> problem."""
    recipe, root = (recipe, run.parent) if recipe else session.load_run_recipe(run)
    try:
        refuse_changed(run, recipe, root, allow=allow, note=lambda text: None)
    except RecipeError as error:
        return {problem.field: problem for problem in error.problems}
    return {}


def rows_with(number, **changes):
    return [row | changes if index == number else row for index, row in enumerate(ROWS)]


CHANGES = {
    "another answer": (lambda p, r: write_rows(p, rows_with(3, answer="0")), "task.source.path", "reference answers"),
    "another question": (lambda p, r: write_rows(p, rows_with(3, text="0")), "task.source.path", "messages"),
    "another column": (lambda p, r: write_rows(p, rows_with(3, level=2)), "task.source.path", "other columns"),
    "a row less": (lambda p, r: write_rows(p, ROWS[:-1]), "task.source.path", "7 prompts"),
    "a row more": (lambda p, r: write_rows(p, [*ROWS, ROWS[0] | {"id": "x"}]), "task.source.path", "9 prompts"),
    "another reward": (lambda p, r: (p / "judge.py").write_text(JUDGE + "#"), "rewards", "judge.py differs"),
    "what it imports": (
        lambda p, r: (p / "helpers.py").write_text("def right(*_): return 1\n"),
        "rewards",
        "helpers",
    ),
    "what that imports": (lambda p, r: (p / "deeper.py").write_text("LIMIT = 2\n"), "rewards", "deeper.py differs"),
    "imported in a function": (lambda p, r: (p / "late.py").write_text("x = 1\n"), "rewards", "late.py differs"),
    "imported by name": (lambda p, r: (p / "named.py").write_text("x = 1\n"), "rewards", "named.py differs"),
    "a package": (lambda p, r: (p / "words/__init__.py").write_text("\n"), "rewards", "__init__.py differs"),
    "a relative import": (lambda p, r: (p / "words/many.py").write_text("x = 2\n"), "rewards", "many.py differs"),
    "a module that is gone": (lambda p, r: (p / "late.py").unlink(), "rewards", "late.py is gone"),
    "a module in front of a library": (lambda p, r: (p / "importlib.py").write_text(""), "rewards", "was not there"),
    "a bit of base": (lambda p, r: flip(r / "base/model.safetensors"), "model.name", "base/model.safetensors differs"),
    "the tokenizer": (lambda p, r: flip(r / "base/tokenizer.json", 40), "model.name", "tokenizer.json differs"),
    "the chat template": (lambda p, r: flip(r / "base/chat_template.jinja"), "model.name", "jinja differs"),
    "another template": (
        lambda p, r: (r / "base/chat_template.jinja").rename(r / "base/other.jinja"),
        "model.name",
        "other.jinja was not there",
    ),
    "no base": (lambda p, r: shutil.rmtree(r / "base"), "model.name", "is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_refused_by_name_unless_it_is_allowed(project, change):
    root, run = project
    assert refused(run) == {}
    act, field, said = CHANGES[change]
    act(root, run)
    problems = refused(run)
    assert list(problems) == [field]
    assert said in problems[field].reason and f"--allow {field}" in problems[field].fix
    assert refused(run, allow=[field]) == refused(run, allow=[field.partition(".")[0]]) == {}
    assert list(refused(run, allow=["optimizer", "engine", "batch"])) == [field]


UNREAD = {
    "the order of rows": lambda p, r: write_rows(p, ROWS[::-1]),
    "how rows are written": lambda p, r: (p / "data.jsonl").write_text(
        "\n\n".join(json.dumps(row, indent=None, separators=(",  ", " : ")) for row in ROWS)
    ),
    "a module that nothing imports": lambda p, r: (p / "unused.py").write_text("x = 2\n"),
    "notes beside the model": lambda p, r: (r / "base/trainer_state.json").write_text("{}"),
    "a reward that was touched": lambda p, r: os.utime(p / "judge.py", ns=(1, 1)),
}


@pytest.mark.parametrize("change", UNREAD)
def test_what_the_run_does_not_read_may_change(project, change):
    root, run = project
    UNREAD[change](root, run)
    assert refused(run) == {}


def test_file_that_a_copied_run_lacks_is_named_where_it_would_be(made, tmp_path):
    """The original is still there, and is not what is missing."""
    original = made[1]
    copy = shutil.copytree(original, tmp_path / "copy")
    (copy / "base/config.json").unlink()
    problem = refused(copy)["model.name"]
    assert f"{copy / 'base/config.json'} is gone" in problem.reason
    assert str(original) not in problem.reason


def test_module_that_a_moved_project_lacks_is_named_where_it_would_be(project):
    folder, run = project
    (folder / "late.py").unlink()
    assert f"{folder / 'late.py'} is gone" in refused(run)["rewards"].reason


def test_all_that_changed_is_told_at_once(project):
    root, run = project
    for change in ("another answer", "what it imports", "a bit of base"):
        CHANGES[change][0](root, run)
    assert sorted(refused(run)) == ["model.name", "rewards", "task.source.path"]
    assert sorted(refused(run, allow=["rewards"])) == ["model.name", "task.source.path"]


def test_a_resume_with_changed_inputs_touches_nothing_and_goes_on_when_told_to(project):
    root, run = project
    CHANGES["another answer"][0](root, run)
    CHANGES["what it imports"][0](root, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    longer = {"changes": ["run.steps=3"], "allow": ["run.steps"]}
    with pytest.raises(RecipeError, match=r"helpers\.py differs"):
        resume(run, **longer)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    longer["allow"] += ["rewards", "task.source"]
    assert resume(run, **longer).model.name == "step-000003"
    assert refused(run) == {}, "from now on it is trained with these"


def test_other_prompts_can_be_allowed_too(project):
    root, run = project
    write_rows(root, [row | {"id": f"new {row['id']}"} for row in ROWS])
    longer = {"changes": ["run.steps=3"], "allow": ["run.steps", "task.source.path"]}
    assert resume(run, **longer).model.name == "step-000003"


def test_an_evaluation_asks_what_the_run_was_trained_with_by_rewards_of_its_own_choice(project):
    root, run = project
    CHANGES["what it imports"][0](root, run)
    assert questions.evaluate_run(run).n == 2
    CHANGES["a bit of base"][0](root, run)
    with pytest.raises(RecipeError, match="base/model"):
        questions.evaluate_run(run)


def test_an_older_run_goes_on_with_a_note_and_has_a_record_then(project):
    root, run = project
    (run / inputs.NAME).unlink()
    CHANGES["what it imports"][0](root, run)
    quiet = Quiet()
    session.resume(run, progress=quiet)
    assert "this run has no inputs.json" in quiet.notes()
    assert refused(run) == {}
    CHANGES["another reward"][0](root, run)
    assert list(refused(run)) == ["rewards"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "inputs": {"a": 3}}', "ä"])
def test_a_record_that_cannot_be_read_is_refused(project, text):
    _, run = project
    (run / inputs.NAME).write_text(text)
    with pytest.raises(RecipeError, match="if it is removed, nothing is compared"):
        read_record(run)


def test_a_record_of_another_format_is_not_called_damaged(project):
    _, run = project
    (run / inputs.NAME).write_text('{"format": 7}')
    with pytest.raises(RecipeError, match="written in format 7"):
        read_record(run)


def test_other_versions_of_packages_are_a_note(project):
    _, run = project
    path = run / inputs.NAME
    record = json.loads(path.read_text())
    record["packages"]["transformers"] = "0.1"
    path.write_text(json.dumps(record))
    told = []
    recipe, root = session.load_run_recipe(run)
    refuse_changed(run, recipe, root, allow=(), note=told.append)
    assert "transformers" in told[0] and "(was 0.1)" in told[0]


# Large files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that is worth remembering."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(LARGE)
    return path


def test_a_large_file_is_read_once_until_something_is_written_to_it(large):
    first = digest(large)
    assert remembered(large) == first
    assert digest(large, going=pytest.fail) == first, "it was read again"
    with large.open("r+b") as file:
        file.write(b"\1")
    os.utime(large, ns=(large.stat().st_atime_ns, 0))
    os.utime(large, ns=(large.stat().st_atime_ns, json.loads(CACHE.read_text())[str(large)][0][1]))
    assert remembered(large) is None, "the time of a change cannot be put back"
    assert digest(large) != first


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 3}', "\0"])
def test_a_cache_that_cannot_be_read_is_made_again(large, text):
    first = digest(large)
    CACHE.write_text(text)
    assert remembered(large) is None
    assert digest(large) == first == remembered(large)


def test_a_large_model_is_read_beside_the_training_and_compared_by_size_until_then(large, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    recipe = recipe_in(tmp_path)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": "."})})
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(KeyError), InputsRecorder(run, recipe, tmp_path) as recording:
        recording._stopped.set()
        raise KeyError
    items = read_record(run).inputs["model.name"]
    assert items["config.json"].sha256 and items["model.safetensors"].sha256 is None
    assert refused(run, recipe=recipe) == {}
    with InputsRecorder(run, recipe, tmp_path):
        pass
    items = read_record(run).inputs["model.name"]
    assert items["model.safetensors"].sha256 == remembered(large) == digest(large)
    with large.open("r+b") as file:
        file.write(b"\1")
    assert list(refused(run, recipe=recipe)) == ["model.name"]


# Which files of a model are read -------------------------------------------------------------------------------------


LEADING_OUT = '{"weight_map": {"w": "../secret"}}'


@pytest.mark.parametrize(
    ("there", "read"),
    [
        (["config.json", "model.safetensors", "pytorch_model.bin"], ["config.json", "model.safetensors"]),
        (["config.json", "pytorch_model.bin", "optimizer.bin"], ["config.json", "pytorch_model.bin"]),
        (["vocab.json", "merges.txt", "README.txt", "log.json"], ["merges.txt", "vocab.json"]),
        (["tokenizer.model", "x.gguf", "modeling.py"], ["tokenizer.model"]),
        (["additional_chat_templates/tool.jinja"], ["additional_chat_templates/tool.jinja"]),
    ],
)
def test_only_what_loading_reads_is_looked_at(tmp_path, there, read):
    for name in there:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert sorted(files_in(tmp_path)) == read


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"w": 3}}', LEADING_OUT])
def test_an_index_that_is_damaged_or_leads_out_of_its_folder_names_no_file(tmp_path, text):
    (tmp_path.parent / "secret").write_text("x")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert list(files_in(tmp_path)) == ["model.safetensors.index.json"]


def test_the_parts_that_an_index_names_are_read(tmp_path):
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("1.safetensors", "2.safetensors", "3.safetensors"):
        (tmp_path / name).write_text("x")
    assert sorted(files_in(tmp_path)) == ["1.safetensors", "2.safetensors", "model.safetensors.index.json"]


# What a resume cannot change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "allow", "why"),
    [
        ("model.scratch.width=32", "model", "base/ in the run's folder"),
        ("model.scratch.warmup_steps=5", "model.scratch", "base/ in the run's folder"),
        ("model.scratch.characters=01=+", "model", "base/ in the run's folder"),
        ("model.name=package:no/such.gguf", "model", "which is still there"),
        ("model.adapter.rank=3", "model", "adapter of the old rank"),
        ("model.adapter.targets=[q_proj]", "model.adapter", "adapters of the old layers"),
        ("model.adapter=null", "model", "what was trained"),
        ("optimizer.name=adamw8bit", "optimizer", "moments of the old optimizer"),
        ("seed=6", "seed", "order of the prompts|base/"),
        ("task.holdout.prompts=3", "task", "count as held out"),
        ("run.folder=elsewhere", "run", "move it"),
        ("run.steps=1", "run.steps", "the newest checkpoint is of step 2 already"),
    ],
)
def test_a_change_that_would_do_nothing_is_refused_with_the_reason_although_it_is_allowed(project, change, allow, why):
    _, run = project
    before = (run / "recipe.yaml").read_text()
    with pytest.raises(RecipeError, match=why) as caught:
        resume(run, changes=[change], allow=[allow])
    assert [problem.field for problem in caught.value.problems] == [change.partition("=")[0]]
    assert (run / "recipe.yaml").read_text() == before


def test_a_model_that_was_moved_away_may_get_its_new_name(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    recipe = recipe_in(tmp_path)
    whole = recipe.model_dump(mode="json")
    old, new = (whole | {"model": whole["model"] | {"name": name}} for name in ("old", "new"))
    record = RecipeRecord(recipe, allow=["model"], held=FixedRecord(folder=tmp_path / "run", root=tmp_path))
    record.values = new
    with pytest.raises(RecipeError, match="which is still there"):
        record.restore(old)
    (tmp_path / "old").rename(tmp_path / "new")
    record.restore(old)


def test_a_checkpoint_from_before_a_key_existed_had_its_default(tmp_path):
    recipe = recipe_in(tmp_path, evaluate__pass_k=2)
    old = recipe.model_dump(mode="json")
    for section, key in (("guards", "non_finite"), ("run", "callbacks_strict"), ("evaluate", "pass_k")):
        del old[section][key]
    del old["model"]["scratch"]["warmup_lr"]
    with pytest.raises(RecipeError) as refused:
        RecipeRecord(recipe).restore(old)
    assert [problem.field for problem in refused.value.problems] == ["evaluate.pass_k"]


def test_a_recipe_edited_by_hand_is_refused_for_the_same_reasons(project):
    _, run = project
    path = run / "recipe.yaml"
    path.write_text(path.read_text().replace("rank: 2", "rank: 3"))
    assert load_recipe(path).model.adapter.rank == 3
    with pytest.raises(RecipeError, match="adapter of the old rank"):
        resume(run, allow=["model"])


EFFECTIVE = ["model.adapter.alpha=4.0", "model.dtype=float64", "optimizer.lr=0.5", "algorithm.kl.coef=0.1"]


@pytest.mark.parametrize("change", EFFECTIVE)
def test_a_change_that_has_an_effect_can_be_allowed(project, change):
    _, run = project
    key = change.partition("=")[0]
    with pytest.raises(RecipeError, match=f"pass --allow {key}"):
        resume(run, changes=[change])
    resume(run, changes=[change], allow=[key])


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("modle", "model"),
        ("optimizer.lrr", "optimizer"),
        ("rewards.0.weight", "rewards"),
        ("x", "such as optimizer"),
    ],
)
def test_allowing_what_is_no_key_is_refused(project, given, fix):
    _, run = project
    with pytest.raises(RecipeError) as caught:
        resume(run, allow=[given])
    (problem,) = caught.value.problems
    assert problem.field == "--allow" and given in problem.reason and fix in problem.fix


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json", "tokenizer.json"])
def test_a_bit_flipped_in_a_model_file_sends_the_run_to_the_checkpoint_before(project, name):
    _, run = project
    flip(run / "checkpoints" / "step-000002" / name, 30)
    quiet = Quiet()
    session.resume(run, progress=quiet)
    assert "skipped step-000002" in quiet.notes() and "content changed" in quiet.notes()


def test_a_checkpoint_under_the_number_of_another_is_not_taken_for_it(project):
    _, run = project
    shutil.copytree(run / "checkpoints" / "step-000001", run / "checkpoints" / "step-000099")
    quiet = Quiet()
    assert session.resume(run, progress=quiet).model.name == "step-000002"
    assert "skipped step-000099" in quiet.notes() and "of step 1 under the name of another" in quiet.notes()
    store = Checkpoints(run / "checkpoints", keep=3, best=None)
    (run / "checkpoints" / "step-000001").rename(run / "checkpoints" / "step-000041")
    with pytest.raises(CheckpointError, match="of step 1 under"):
        store.restore(run / "checkpoints" / "step-000041", [])


def test_model_files_have_the_mode_that_any_new_file_has(project):
    _, run = project
    probe = run / "probe"
    probe.write_text("")
    files = [path for path in run.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {stat.S_IMODE(probe.stat().st_mode)}
    assert {path.suffix for path in files} > {".safetensors", ".json"}


# Moved runs ----------------------------------------------------------------------------------------------------------


def base_named(checkpoint):
    return json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
@pytest.mark.parametrize("how", ["resume", "eval"])
def test_the_adapters_of_a_moved_run_name_their_base_where_it_is_now(project, tmp_path, how):
    from peft import AutoPeftModelForCausalLM

    _, run = project
    moved = tmp_path / "elsewhere"
    run.rename(moved)
    checkpoints = sorted((moved / "checkpoints").iterdir())
    assert base_named(checkpoints[0]) != str(moved / "base")
    if how == "resume":
        resume(moved, changes=["run.steps=3"], allow=["run.steps"])
    else:
        questions.evaluate_run(moved)
    assert {base_named(path) for path in (moved / "checkpoints").iterdir()} == {str(moved / "base")}
    newest = {"resume": "step-000003", "eval": "step-000002"}[how]
    assert Checkpoints(moved / "checkpoints", keep=3, best=None).latest().name == newest
    AutoPeftModelForCausalLM.from_pretrained(checkpoints[0])


def test_a_project_that_was_moved_as_a_whole_finds_its_data_and_rewards(project, tmp_path):
    root, run = project
    root.rename(tmp_path / "moved")
    run = tmp_path / "moved" / run.name
    assert session.load_run_recipe(run)[1] == tmp_path / "moved"
    assert refused(run) == {}
    assert questions.evaluate_run(run).n == 2


@pytest.mark.parametrize("name", ["plain", "with space", "line\nbreak", '"quoted"', "\x85", "ünïcode"])
def test_any_name_of_a_folder_survives_in_the_first_lines(tmp_path, name):
    root = tmp_path / name
    (root / "run").mkdir(parents=True)
    text = root_lines(root, root / "run") + "seed: 5\n"
    assert root_in(text, root / "run") == root
    root.rename(tmp_path / "moved")
    assert root_in(text, tmp_path / "moved" / "run") == tmp_path / "moved"
    assert load(text) == {"seed": 5}


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("seed: 5\n", "CWD"),
        ("# root: /nowhere/at/all\nseed: 5\n", "/nowhere/at/all"),
        ("# root: /nowhere/at/all\n# root from here: ..\nseed: 5\n", "HERE"),
        ("# root: /nowhere/at/all\n# root from here: gone\nseed: 5\n", "/nowhere/at/all"),
        ("# root: /tmp\n# root from here: ..\n", "/tmp"),
        ("# root: /tmp\nseed: 5\n# root from here: ..\n", "/tmp"),
    ],
)
def test_the_folder_that_paths_count_from(tmp_path, monkeypatch, text, root):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    found = root_in(text, tmp_path / "run")
    assert str(found) == {"CWD": str(tmp_path), "HERE": str(tmp_path)}.get(root, root)
