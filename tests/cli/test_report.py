"""`stretto report` as it is typed: a page, lines or a document, and refusals that say what to do."""

import json
import subprocess
import sys

import pytest

from recorded import unpacked, write_run
from stretto.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "runs" / "one")


def test_a_run_gets_its_page_in_its_folder(run, capsys):
    assert main(["report", "runs/one"]) == 0
    assert capsys.readouterr().out.split() == ["page", "runs/one/report.html"]
    page = (run / "report.html").read_text()
    assert unpacked(page, "head")["runs"][0]["name"] == "one" and page.startswith("<!doctype html>")


def test_several_runs_get_one_page_where_one_stands_or_where_it_is_wanted(run, tmp_path, capsys):
    write_run(tmp_path / "runs" / "other", recipe={"run": {"steps": 3}, "seed": 5})
    assert main(["report", "runs/one", "runs/other"]) == 0
    assert [each["name"] for each in unpacked((tmp_path / "report.html").read_text(), "head")["runs"]] == [
        "one",
        "other",
    ]
    assert main(["report", "runs/one", "runs/other", "--out", "both.html"]) == 0 and (tmp_path / "both.html").exists()


def test_a_document_says_what_the_page_says(run, capsys):
    assert main(["report", "runs/one", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["page"] == "runs/one/report.html"
    assert [each["stage"] for each in told["runs"][0]["waits"]] == ["generate", "train", "nothing"]


def test_explain_says_where_a_steps_seconds_go(run, capsys):
    assert main(["report", "runs/one", "--explain"]) == 0
    out = capsys.readouterr().out
    assert "60%  generating answers (1.2 s)" in out and "+ Steps end" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "nowhere: is not a run"),
        (["runs/one", "--step", "9"], "use a step from 1 to 3"),
        (["runs/one", "--follow", "0"], "--follow"),
    ],
)
def test_what_cannot_be_reported_is_refused_with_a_fix(arguments, says, run, capsys):
    assert main(["report", *arguments]) == 2
    assert says in capsys.readouterr().err and not (run / "report.html").exists()


def test_a_page_that_cannot_be_written_is_told(run, capsys):
    (run / "report.html").mkdir()
    assert main(["report", "runs/one"]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_following_ends_with_the_run(run, capsys):
    assert main(["report", "runs/one", "--follow", "0.01"]) == 0  # nobody trains there


def test_a_report_loads_no_torch(run):
    script = (
        "import sys; from stretto.cli.main import main; code = main(['report', 'runs/one', '--explain']);"
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'transformers', 'ray', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("damage", "arguments", "says"),
    [
        (lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[:5])), [],
         "step 2: 5 answers to 2 prompts, 5 with a verdict, 5 trained on\nsamples/step-000002.jsonl is truncated"),
        (lambda path: path.write_bytes(path.read_bytes()[:-40]), [], "is truncated: 7 of 8 answers are left"),
        (lambda path: path.write_text(""), [], "step 2: 0 answers to 0 prompts"),
        (lambda path: path.write_text(""), [], "samples/step-000002.jsonl is truncated: 0 of 8 answers are left"),
        (lambda path: path.unlink(), [], "samples/step-000002.jsonl is missing, though steps 1 to 3 were sampled"),
        (lambda path: None, ["--held-out"], "holds no held-out answers"),
        (lambda path: None, ["--held-out", "--dropped"], "held-out completions are never trained on"),
        (lambda path: path.rename(path.with_name("eval-000003.jsonl")), ["--held-out"], "one of the steps 3"),
        (lambda path: path.rename(path.with_name("eval-000002.jsonl")), ["--held-out"], "step 2: 8 held-out"),
    ],
)  # fmt: skip
def test_samples_of_a_step_that_is_damaged_or_missing_are_named(run, capsys, damage, arguments, says):
    damage(run / "samples" / "step-000002.jsonl")
    code, told = main(["samples", "runs/one", "--step", "2", *arguments]), capsys.readouterr()
    assert says in (told.err if code else told.out) and code in (0, 2)
