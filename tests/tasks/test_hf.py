"""Hugging Face datasets on this machine and of a hub that cannot be reached: what is read, and what is said."""

from __future__ import annotations

import datetime
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import datasets
import httpx
import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from stretto.cli.main import main
from stretto.errors import Problem, RecipeError
from stretto.models.source import ask_hub, locate
from stretto.recipe.schema import Source, TaskSection
from stretto.tasks import hf
from stretto.tasks.columns import RowError
from stretto.tasks.hf import plain
from stretto.tasks.source import load_prompts, peek

ROWS = [{"question": f"{a}+1?", "answer": str(a + 1), "id": f"n{a}", "level": a} for a in range(6)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def task(prompt: str | None = "{question}", **source: Any) -> TaskSection:
    return TaskSection(source=Source(kind="hf", **source), prompt=prompt)


def refused(folder: Path, task: TaskSection) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load_prompts(task, folder)
    (problem,) = caught.value.problems
    assert peek(task, folder).problems == (problem,)
    return problem


def write(folder: Path, kind: str, rows: list[dict[str, Any]] = ROWS) -> str:
    """The rows in a file or folder of that kind; its name."""
    data, path = datasets.Dataset.from_list(rows), folder / f"data.{kind}"
    match kind:
        case "csv":
            data.to_csv(path)
        case "parquet":
            data.to_parquet(path)
        case "json":
            path.write_text(json.dumps(rows))
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "arrow":
            data.save_to_disk(folder / "made")
            next((folder / "made").glob("*.arrow")).rename(path)
        case "saved":
            data.save_to_disk(path)
    return path.name


@pytest.mark.filterwarnings("ignore:Exception ignored in")  # its reader of CSV leaves a file open that was read in part
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "parquet", "arrow", "saved"])
def test_every_format_gives_the_same_prompts(kind: str, tmp_path: Path) -> None:
    prompts = load_prompts(task(path=write(tmp_path, kind)), tmp_path)
    assert [prompt.id for prompt in prompts] == [row["id"] for row in ROWS]
    assert [prompt.messages[0]["content"] for prompt in prompts] == [row["question"] for row in ROWS]
    assert [prompt.reference for prompt in prompts] == [row["answer"] for row in ROWS]
    assert prompts[3].tags == {"question": "3+1?", "level": 3}
    assert list(peek(task(path=f"data.{kind}"), tmp_path, rows=2).prompts) == list(prompts[:2])
    gc.collect()


def test_columns_are_named_as_for_a_file_of_lines(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    columns = {"prompt": "question", "answer": "level", "id": "answer"}
    first = load_prompts(task(None, path=path, columns=columns), tmp_path)[0]
    assert (first.id, first.reference, first.messages[0]["content"]) == ("1", "0", "0+1?")
    problem = refused(tmp_path, task(None, path=path, columns={"prompt": "qestion"}))
    assert problem.field == "task.source.columns.prompt"
    assert "did you mean question?" in problem.fix


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """A saved dataset with two splits, and a folder with a data file for each of three."""
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data.select(range(2))).save_to_disk(tmp_path / "saved")
    for number, name in enumerate(("train", "test", "validation"), start=1):
        data.select(range(number)).to_parquet(tmp_path / "folder" / f"{name}.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "split", "count"),
    [("saved", None, 6), ("saved", "test", 2), ("folder", None, 1), ("folder", "validation", 3)],
)
def test_a_split_is_read_by_its_name(splits: Path, path: str, split: str | None, count: int) -> None:
    assert len(load_prompts(task(path=path, split=split), splits)) == count


@pytest.mark.parametrize(
    ("source", "field", "says"),
    [
        ({"path": "saved", "split": "tset"}, "task.source.split", "did you mean test? the splits are: train, test"),
        ({"path": "folder", "split": "x"}, "task.source.split", "there is no split 'x'"),
        ({"path": "folder", "subset": "x"}, "task.source.subset", "Available: ['default']"),
        ({"path": "saved", "subset": "x"}, "task.source.subset", "has no effect on a saved dataset"),
        ({"path": "folder/test.parquet", "split": "test"}, "task.source.split", "has no effect on a file"),
        ({"path": "folder/test.parquet", "subset": "x"}, "task.source.subset", "has no effect on a file"),
        ({"path": "nothing"}, "task.source.path", "there is no file or folder"),
        ({"path": "saved", "name": "a/b"}, "task.source.name", "has no effect"),
        ({}, "task.source.name", "needs a dataset"),
    ],
)
def test_what_cannot_be_read_is_told(splits: Path, source: dict[str, Any], field: str, says: str) -> None:
    problem = refused(splits, task(**source))
    assert problem.field == field
    assert says in str(problem)


@pytest.mark.parametrize("name", ["data.pkl", "data.txt", "data"])
def test_a_file_of_another_kind_is_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    problem = refused(tmp_path, task(path=name))
    assert problem.field == "task.source.path"
    assert ".parquet" in problem.fix


def test_a_folder_of_pictures_or_programs_is_refused(tmp_path: Path) -> None:
    for name, content in (("pictures/a.png", b"x"), ("programs/programs.py", b"raise SystemExit(1)")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(content)
        assert refused(tmp_path, task(path=str(Path(name).parent))).field == "task.source.path"


def test_broken_and_empty_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text('{"question": "a"}\n{broken')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really")
    for name in ("broken.json", "broken.parquet"):
        problem = refused(tmp_path, task(path=name))
        assert problem.field == str(tmp_path / name)
        assert problem.reason.startswith("cannot be read: ")
    assert refused(tmp_path, task(path=write(tmp_path, "parquet", ROWS[:1] * 2))).field.endswith("data.parquet:2")


def test_an_empty_dataset_is_told(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"question": []}).to_parquet(tmp_path / "none.parquet")
    assert refused(tmp_path, task(path="none.parquet")).reason == "there are no rows"


def test_a_row_becomes_json_without_what_is_none() -> None:
    row = {
        "text": "a",
        "day": datetime.date(2026, 1, 2),
        "list": [1, float("nan"), {"x": datetime.datetime(2026, 1, 2, 3)}],
        "picture": {"bytes": b"\x89PNG", "path": None},
        "half": "\ud800",
    }
    assert plain(row) == {"text": "a", "day": "2026-01-02", "list": [1, None, {"x": "2026-01-02T03:00:00"}]}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hub may be asked, and nothing answers; who was looked for."""
    asked: list[str] = []

    def nobody(host: Any, *_: Any, **__: Any) -> Any:
        asked.append(str(host))
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return asked


def test_a_hub_that_cannot_be_reached_is_not_asked_again(
    hub: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to try again"))
    with pytest.raises(RecipeError) as caught:
        load_prompts(task(name="openai/gsm8k", subset="main"), tmp_path)
    assert set(hub) == {"huggingface.co"}
    (problem,) = caught.value.problems
    assert problem.field == "task.source.name"
    assert "cannot be reached" in problem.reason
    assert "HF_HUB_OFFLINE" in problem.fix


def test_a_recipe_can_be_checked_without_the_hub(hub: list[str], tmp_path: Path) -> None:
    found = peek(task(name="openai/gsm8k", subset="main"), tmp_path)
    assert (found.prompts, found.problems) == ((), ())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OSError("no such host"), "the hub cannot be reached: no such host"),
        (httpx.ConnectTimeout("too late"), "the hub cannot be reached: too late"),
        (ValueError("no JSON, but a page"), None),
        (404, "no model"),
        (503, None),
        (200, None),
    ],
    ids=str,
)
def test_a_model_is_asked_for_once_before_anybody_tries_again_and_again(
    answer: int | Exception, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def info(self: HfApi, name: str, timeout: float) -> None:
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        response = httpx.Response(answer, request=httpx.Request("GET", "https://hub"))
        if answer != 200:
            raise (RepositoryNotFoundError if answer == 404 else HfHubHTTPError)("wrong", response=response)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", info)
    with pytest.raises(RecipeError, match=said) if said else nullcontext():
        ask_hub(locate("some/model", tmp_path))
    assert asked == ["some/model"]


def test_a_check_says_what_it_could_not_look_at(
    hub: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"kind": "hf", "name": "openai/gsm8k", "columns": {"prompt": "question"}}
    recipe = {"model": {"name": "some/model"}, "task": {"source": source}, "rewards": [{"name": "a", "kind": "math"}]}
    (tmp_path / "mine.yaml").write_text(json.dumps(recipe))
    assert main(["check", str(tmp_path / "mine.yaml")]) == 0
    model, data, last = capsys.readouterr().out.strip().splitlines()[-3:]
    assert model == "not looked at: the model some/model, which is not on this machine"
    assert data == "not looked at: the dataset openai/gsm8k, because the hub cannot be reached"
    assert last == "nothing wrong was found in the rest"


def test_data_on_this_machine_asks_nobody(hub: list[str], splits: Path) -> None:
    for path in ("saved", "folder", write(splits, "jsonl")):
        assert load_prompts(task(path=path), splits)
    assert hub == []


def test_offline_only_what_was_downloaded_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    problem = refused(tmp_path, task(name="nobody/nothing"))
    assert problem.field == "task.source.name"
    assert "nobody/nothing cannot be opened" in problem.reason


def test_offline_a_dataset_that_was_downloaded_before_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache, path = Path(datasets.config.HF_DATASETS_CACHE), tmp_path / write(tmp_path, "parquet")
    made = datasets.load_dataset_builder("parquet", data_files=str(path), cache_dir=str(tmp_path / "made"))
    made.download_and_prepare()
    there = shutil.copytree(made.cache_dir, cache / "org___past" / "default" / "0.0.0" / "abc")
    (there / "parquet-train.arrow").rename(there / "past-train.arrow")
    prompts = load_prompts(task(name="org/past"), tmp_path)
    assert [prompt.id for prompt in prompts] == [row["id"] for row in ROWS]
    assert peek(task(name="org/past"), tmp_path, rows=2).prompts == prompts[:2]


def test_of_the_hub_a_look_streams_and_a_run_downloads(splits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is played by a folder of this machine, which `datasets` reads through the same builder."""
    plain_builder, prepared = datasets.load_dataset_builder, []

    def builder(what: str, **settings: Any) -> Any:
        assert (what, settings) == ("org/new", {"name": None})
        made = plain_builder(str(splits / "folder"))
        monkeypatch.setattr(type(made), "download_and_prepare", note(made.download_and_prepare), raising=False)
        return made

    def note(prepare: Any) -> Any:
        return lambda _: prepared.append(prepare())

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(hf.hub, "ask", lambda *what, **more: None)
    wanted = task(name="org/new", split="validation")
    assert len(peek(wanted, splits, rows=2).prompts) == 2
    assert prepared == []
    assert [prompt.id for prompt in load_prompts(wanted, splits)] == ["n0", "n1", "n2"]
    assert len(prepared) == 1


def test_a_missing_package_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.extras.find_spec", lambda name: None)
    problem = refused(tmp_path, task(path="x"))
    assert problem.field == "task.source.kind"
    assert problem.fix.startswith("pip install '") and "'datasets>=" in problem.fix


def test_reading_loads_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet")
    program = f"""
import sys
from pathlib import Path
from stretto.models.source import ask_hub, locate
from stretto.recipe.schema import Source, TaskSection
from stretto.tasks.source import load_prompts
task = TaskSection(source=Source(kind="hf", path={path!r}), prompt="{{question}}")
print(len(load_prompts(task, Path({str(tmp_path)!r}))), "torch" in sys.modules)
"""
    surroundings = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=surroundings, timeout=60)
    assert done.stdout == "6 False\n", done.stderr


def test_a_row_that_no_model_could_read_is_refused() -> None:
    assert plain({"a": "x", "picture": b"x" * 5_000_000}) == {"a": "x"}, "what is left out takes no room"
    for row in ({"a": "x" * 5_000_000}, {"a": "x" * 3_000_000, "b": ["x" * 3_000_000]}, {"a": {"b": "é" * 3_000_000}}):
        with pytest.raises(RowError, match="more than 4 MiB of text"):
            plain(row)


def test_a_long_text_is_told_with_its_row(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [*ROWS, {**ROWS[0], "id": "long", "question": "x" * 2_000_001}])
    problem = refused_in(tmp_path, task(path="data.parquet"))
    assert problem.field == f"{tmp_path / 'data.parquet'}:7"
    assert "2,000,00" in problem.reason


def refused_in(folder: Path, task: TaskSection) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load_prompts(task, folder)
    return caught.value.problems[0]
