"""A `module:name` is looked up without running a line of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.sandbox.target import exists

CODE = r"""
raise RuntimeError("this file must not be run")
"\d"  # an old-fashioned escape that compilers warn about
def plain(): ...
async def later(): ...
class Thing: ...
alias = plain
first, (second, *third) = 1, (2, 3)
typed: int = 3
from os import path as renamed, sep
import os.path
if True:
    def conditional(): ...
    try: import json as fast
    except ImportError: fast = None
    with open("x") as handle: ...
inner = [element for element in ()]
def outer():
    local = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "targets.py").write_text(CODE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('not run')\n")
    (tmp_path / "package" / "inside.py").write_text("def f(): ...\n")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "module.py").write_text("def f(): ...\n")
    (tmp_path / "starred.py").write_text("from os import *\n")
    (tmp_path / "dynamic.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    return str(tmp_path)


NAMES = ["plain", "later", "Thing", "alias", "first", "second", "third", "typed", "renamed", "sep", "os"]
NAMES += ["conditional", "fast", "handle", "inner", "outer"]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_top_level_exists(folder: str, name: str) -> None:
    assert exists(f"targets:{name}", [folder]) is None


@pytest.mark.parametrize(
    "target",
    ["package.inside:f", "bare.module:f", "starred:anything", "dynamic:anything", "math:sqrt", "json:dumps", "time:x"],
)
def test_packages_stars_and_compiled_modules_are_found(folder: str, target: str) -> None:
    assert exists(target, [folder]) is None


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("targets", "not of the form module:name"),
        ("targets:", "not of the form module:name"),
        ("a/b.py:f", "not of the form module:name"),
        ("targets:a.b", "not of the form module:name"),
        ("targets:plian", "defines no 'plian'; did you mean 'plain'?"),
        ("targets:local", "defines no 'local'"),
        ("targets:element", "defines no 'element'"),
        ("json:zzz", "defines no 'zzz'"),
        ("nowhere_to_be_seen:f", "there is no module 'nowhere_to_be_seen' in"),
        ("package.missing.deep:f", "there is no module 'package.missing' in"),
        ("bare:f", "is a folder without code of its own"),
        ("broken:f", "is not valid Python"),
        ("__main__:f", "__main__"),
    ],
)
def test_what_does_not_exist_is_told_in_a_sentence(folder: str, target: str, says: str) -> None:
    assert says in (exists(target, [folder]) or "")


def test_a_file_written_a_moment_ago_is_found(folder: str) -> None:
    assert exists("newcomer:f", [folder]) is not None
    Path(folder, "newcomer.py").write_text("f = 1\n")
    assert exists("newcomer:f", [folder]) is None
