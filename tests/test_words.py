"""scripts/words and scripts/commit-msg: rules of WRITING.md that a program checks."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDS = runpy.run_path(str(ROOT / "scripts" / "words"))
CLEAN = ("README.md", "CONTRIBUTING.md", "WRITING.md", "src/stretto/cli", "src/stretto/recipe/schema")


def rules_broken(tmp_path, monkeypatch, name, text):
    """Return the rules that a text breaks as content of a file."""
    monkeypatch.setitem(WORDS["hits"].__globals__, "TOP", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return [row.split("rule ")[1][0] for row in WORDS["hits"](path, PATTERNS)]


PATTERNS = WORDS["patterns"]()


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('"""What came of a step."""', ["1"]),
        ('"""Return the result of a step."""', []),
        ('x = 1\n"""Or sharded."""', ["1"]),
        ('raise ValueError("the run says so in a line")', ["3"]),
        ("# Rows of everybody.", ["4"]),
        ('"""Score; a verdict of the environment."""', ["5"]),
        ('"""Number of prompts a step."""', ["6"]),
        ('"""Result, or none before the first step."""', ["8"]),
        ('"""Result, or `None` before the first step; none of the keys acts."""', []),
        ("# A failure of ours.", ["9"]),
        ('KEYS = ("told", "placement.seam", "ask_hub")', []),
    ],
)
def test_words_finds_the_rule_that_a_python_text_breaks(tmp_path, monkeypatch, text, rules):
    assert rules_broken(tmp_path, monkeypatch, "src/one.py", text) == rules


def test_words_skips_code_in_markdown_and_reads_test_names(tmp_path, monkeypatch):
    page = "The run `says` it.\n\n    told\n\n```\nnobody\n```\n\nThe run tells whoever asks.\n"
    assert rules_broken(tmp_path, monkeypatch, "page.md", page) == ["3", "3", "4"]
    names = "def test_a_rank_is_told_by_nobody():\n    '''What?'''\n"
    assert rules_broken(tmp_path, monkeypatch, "tests/test_one.py", names) == ["3", "4"]


def test_words_finds_nothing_where_the_project_is_first_read():
    files = WORDS["tracked"](list(CLEAN))
    assert len(files) > 30
    assert [row for path in files for row in WORDS["hits"](path, PATTERNS)] == []


def test_glossary_comes_from_writing_md():
    phrases = WORDS["glossary"]()
    assert {"verdict", "seam", "lane", "one step of lag"} <= set(phrases)
    assert not {"answer", "room", "publish", "cell"} & set(phrases)


@pytest.mark.parametrize(
    ("title", "accepted"),
    [
        ("engines: retry a vLLM start that runs out of memory", True),
        ("docs, cli: name the key", True),
        ("Merge branch 'words'", False),
        ("Engines retry", False),
        ("engines: " + "x" * 64, False),
    ],
)
def test_commit_hook_accepts_titles_with_an_area_alone(tmp_path, title, accepted):
    message = tmp_path / "message"
    message.write_text(f"{title}\n\nBody.\n# comment\n", "utf-8")
    done = subprocess.run(["bash", ROOT / "scripts" / "commit-msg", message], capture_output=True, check=False)
    assert (done.returncode == 0) == accepted


def test_sample_texts_draws_the_same_texts_for_a_seed():
    command = [sys.executable, ROOT / "scripts" / "sample_texts", "--seed", "7", "help=2", "keys=2", "readme=2"]
    first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second and first.count(b"\n") == 6
