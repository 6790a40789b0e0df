"""The command line as programs and people meet it: exit codes, what stands where, and that help is instant."""

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from stretto import __version__, threads
from stretto.api import recipes as opening
from stretto.cli import doctor as doctor_command
from stretto.cli import main as entry
from stretto.cli import render
from stretto.cli.main import main
from stretto.errors import DeadlineError, EngineError, RecipeError
from stretto.recipe.load import load_recipe

RECIPE = """
model:
  name: scratch
  scratch: {layers: 1, width: 16, heads: 2, characters: "0123456789="}
  dtype: float32
  adapter: null
task: {source: {name: reverse, count: 50}, prompt: "{text}=", holdout: {prompts: 10}}
rewards: [{kind: exact}]
batch: {prompts: 64, samples: 8}
evaluate: {prompts: 10}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return "r.yaml"


def test_check_prints_the_recipe_the_objective_and_the_batch(recipe, tmp_path, capsys):
    assert main(["check", recipe, "seed=7"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert "64 prompts x 8 samples = 512 trajectories, one update" in out
    assert "clip 0.2/0.2 is inactive on policy" in out
    assert "seed: 7  (default 0)" in out
    printed = out.partition("recipe\n")[2].partition("\nnot the default")[0]
    (tmp_path / "printed.yaml").write_text(printed)
    assert load_recipe(tmp_path / "printed.yaml").seed == 7
    assert main(["check", "printed.yaml"]) == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["batch.prompts=16"], "40 prompts to train on, 10 held out one epoch is 3 steps, the run has 9"),  # 2.5 steps
        (
            ["algorithm.name=sft", "batch.samples=1", "batch.prompts=40"],
            "40 demonstrations to train on, 10 held out one epoch is 1 step, the run has 9",
        ),
    ],
)
def test_check_counts_prompts_and_the_steps_of_an_epoch(recipe, capsys, changes, sentence):
    assert main(["check", recipe, *changes, "run.steps=9"]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())


def test_json_has_null_where_a_number_is_none(capsys):
    render.document({"accuracy": float("nan"), "interval": (0.5, float("inf"))})
    assert json.loads(capsys.readouterr().out) == {"accuracy": None, "interval": [0.5, None]}


def test_check_reads_and_leaves_no_trace(recipe, tmp_path):
    assert main(["check", recipe]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    "arguments",
    [["r.yaml", "--json"], ["--json", "r.yaml", "seed=7"], ["r.yaml", "seed=7", "--json", "run.steps=9"]],
)
def test_json_is_one_document_and_nothing_else(recipe, capsys, arguments):
    assert main(["check", *arguments]) == 0
    out, error = capsys.readouterr()
    document = json.loads(out)
    assert error == ""
    assert list(document) == ["ok", "problems", "objective", "batch", "recipe"]
    assert document["ok"] is True
    assert document["problems"] == []
    assert document["objective"].startswith("loss = ")
    assert document["batch"].startswith("64 prompts x 8 samples")
    assert document["recipe"]["algorithm"]["clip"] == [0.2, 0.2]
    assert document["recipe"]["seed"] == (7 if "seed=7" in arguments else 0)


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["check", "r.yaml", "sead=1", "batch.samples=1", "--json"], ["sead", "batch.samples"]),
        (["check", "absent.yaml", "--json"], ["absent.yaml"]),
        (["check", "--json"], ["arguments"]),
        (["check", "r.yaml", "--jsn", "--json"], ["arguments"]),
    ],
)
def test_a_failure_is_one_json_document_too(recipe, capsys, arguments, fields):
    assert main(arguments) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert [problem["field"] for problem in document["problems"]] == fields
    assert all(problem["reason"] and problem["fix"] for problem in document["problems"])
    assert document["objective"] is document["batch"] is document["recipe"] is None


def test_problems_are_listed_on_standard_error(recipe, capsys):
    assert main(["check", recipe, "batch.sampels=1", "algorithm.name=gpro", "engine.temperature=1000"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("3 problems; nothing was started\n")
    assert "batch.sampels: there is no such key in `batch`\n    fix: did you mean `batch.samples`?" in error
    assert "algorithm.name: there is no algorithm 'gpro'\n    fix: did you mean 'grpo'?" in error


def test_what_a_recipe_says_cannot_move_the_cursor(recipe, capsys):
    hostile = ['log=["\\e[2J\\e[31m[red]x"]', 'placement.cluster="\\e]0;x\\a"', "\x1b[2J=1", "model.name=[bold]"]
    assert main(["check", recipe, *hostile]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\x07" not in error
    assert "[red]x" in error


@pytest.mark.parametrize("arguments", [[], ["chek"], ["check"], ["check", "--nonsense"], ["--nonsense"]])
def test_a_command_line_that_makes_no_sense_exits_with_2(recipe, capsys, arguments):
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert "Usage" in out + error
    assert "Traceback" not in out + error


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"stretto {__version__}\n"


def failing(monkeypatch, error):
    """Makes the task's room raise."""

    def task(*_):
        raise error

    monkeypatch.setattr(opening, "PROBES", replace(opening.PROBES, task=task))


@pytest.mark.parametrize(("error", "code"), [(EngineError("it broke"), 1), (DeadlineError("too late"), 3)])
def test_a_failure_on_purpose_is_its_message_and_its_code(recipe, capsys, monkeypatch, error, code):
    failing(monkeypatch, error)
    assert main(["check", recipe]) == code
    out, text = capsys.readouterr()
    assert (out, text) == ("", f"{error}\n")
    assert main(["check", recipe, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["error"]) == (False, str(error))


def test_an_interruption_exits_with_130(recipe, monkeypatch, capsys):
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["check", recipe]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_of_ours_is_admitted_and_kept_in_a_file(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failing(monkeypatch, ZeroDivisionError("secretly divided"))
    assert main(["check", recipe]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert "this is a bug in stretto" in error
    assert "ZeroDivisionError: secretly divided" in error
    assert "Traceback" not in error
    (file,) = tmp_path.glob("stretto-bug-*.txt")
    assert str(file) in error
    assert "Traceback" in file.read_text()
    assert "in task" in file.read_text()
    assert main(["check", recipe, "--json"]) == 1
    assert "bug in stretto" in json.loads(capsys.readouterr().out)["error"]


def test_a_bug_is_admitted_where_nothing_can_be_written(recipe, monkeypatch, capsys):
    failing(monkeypatch, ZeroDivisionError())
    monkeypatch.setattr("stretto.checks.rules.files.unwritable", lambda folder: None)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert main(["check", recipe]) == 1
    assert "could not be written" in capsys.readouterr().err


HEAVY = ["torch", "transformers", "peft", "accelerate", "vllm", "ray", "datasets", "safetensors"]
HEAVY += ["reasoning_gym", "math_verify", "pandas", "pyarrow", "sympy"]
PROBE = """
import json, sys
from stretto.cli.main import main
codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print("RESULT", json.dumps([codes, heavy]))
"""


def test_check_and_every_help_load_nothing_heavy(recipe):
    commands = list(entry.COMMANDS)
    runs = [["--help"], ["--version"], ["check", recipe], ["check", recipe, "--json"], ["check", recipe, "sead=1"]]
    runs += [[name, "--help"] for name in commands]
    command = [sys.executable, "-W", "error", "-c", PROBE, json.dumps(runs), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    codes, heavy = json.loads(done.stdout.rpartition("RESULT ")[2])
    assert heavy == []
    assert codes == [0, 0, 0, 0, 2, *[0] * len(commands)]


def test_the_console_script_is_the_entry_point():
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'stretto = "stretto.cli.main:main"' in pyproject


def test_a_warning_is_a_line_without_the_place_in_our_source(recipe, capsys, monkeypatch):
    def warns(*rest, **more):
        warnings.warn("decode steps are slow", stacklevel=1)
        raise EngineError("it stopped")

    monkeypatch.setattr(opening, "checked_recipe", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["check", recipe]) == 1
    assert capsys.readouterr().err.startswith("note: decode steps are slow\n")


def test_the_package_runs_as_a_module(recipe):
    command = [sys.executable, "-m", "stretto"]
    for arguments, code in ((["--version"], 0), (["check", str(recipe)], 0), (["check", "nowhere.yaml"], 2)):
        by_module = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert by_module.returncode == code
    assert "nowhere.yaml: there is no such file" in by_module.stderr


@pytest.mark.parametrize("command", ["check", "plan", "train", "doctor", "value", "eval"])
@pytest.mark.parametrize("content", [b"\xff\xfe\0", "seed: 1  # café".encode("latin-1"), b"\0" * 9, b"GGUF\x03\0\0\0"])
def test_a_recipe_that_is_no_text_is_told(tmp_path, capsys, command, content):
    (tmp_path / "r.yaml").write_bytes(content)
    assert main([command, str(tmp_path / "r.yaml")]) == 2
    assert "give a recipe, written as YAML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "row", "reason"),
    [
        ("sft", '{"prompt": "1=", "completion": ""}', "the answer in column 'completion' is empty"),
        ("reward-model", '{"prompt": "1=", "chosen": "1", "rejected": "1"}', "are the same, so neither is better"),
        ("sft", None, "there is no file"),
    ],
)
def test_bad_rows_are_told_with_file_and_line(command, row, reason, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good = '{"prompt": "0=", "completion": "0", "chosen": "1", "rejected": "0"}'
    if row is not None:
        (tmp_path / "rows.jsonl").write_text(f"{good}\n{row}\n")
    model = "{name: scratch, adapter: null, scratch: {characters: '01='}}"
    task = "{source: {kind: jsonl, path: rows.jsonl}, holdout: {prompts: 1}}"
    (tmp_path / "recipe.yaml").write_text(f"model: {model}\ntask: {task}\nevaluate: {{prompts: 1}}\n")
    assert main([command, "recipe.yaml"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert row is None or f"{tmp_path / 'rows.jsonl'}:2" in error
    assert "Traceback" not in error


def test_another_algorithm_is_no_supervised_fine_tuning(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text("algorithm: {name: rloo}\n")
    assert main(["sft", str(tmp_path / "recipe.yaml")]) == 2
    assert "algorithm.name: is rloo, and stretto sft is for sft" in capsys.readouterr().err


SWALLOWS = {
    "fails as half a module does": "raise ModuleNotFoundError('Could not import module')",
    "fails as an optional package that lacks": "raise RecipeError.of('x', 'is not installed', 'install it')",
    "fails in a file": "raise OSError(28, 'No space left on device')",
    "begins an event loop": "threads.run(asyncio.sleep(0)); raise SystemExit(7)",
    "begins an event loop beside another": "threads.outside_loops(threads.run, asyncio.sleep(0)); raise SystemExit(7)",
}


@pytest.mark.parametrize("then", SWALLOWS)
def test_interrupt_that_an_import_swallowed_exits_with_130(monkeypatch, capsys, then):
    def doctor():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        exec(SWALLOWS[then])

    monkeypatch.setattr(doctor_command, "doctor", doctor)
    assert main(["doctor"]) == 130
    assert "bug" not in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_failure_without_an_interrupt_stays_what_it_is(monkeypatch, capsys):
    def doctor():
        raise ModuleNotFoundError("half")

    monkeypatch.setattr(doctor_command, "doctor", doctor)
    assert main(["doctor"]) == 1
    assert "this is a bug in stretto" in capsys.readouterr().err


def test_interrupt_that_was_answered_turns_no_later_failure_into_130(monkeypatch):
    def doctor():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            threads.forget_interrupt()
        raise RecipeError.of("x", "is wrong", "correct it")

    monkeypatch.setattr(doctor_command, "doctor", doctor)
    assert main(["doctor"]) == 2


def test_interrupt_of_an_event_loop_cancels_it_under_the_command_line(monkeypatch):
    seen = []

    async def work():
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            seen.append("canceled")
            raise

    monkeypatch.setattr(doctor_command, "doctor", lambda: threads.run(work()))
    assert main(["doctor"]) == 130
    assert seen == ["canceled"]
