"""Which files a reward is made of: found in the syntax trees, followed on the user's paths, never run."""

import pytest

from stretto.sandbox.imports import sources

BOMB = "raise SystemExit('this was run')\n"


def found(folder, files, target="judge:good"):
    """The modules that are found where these files are."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return sorted(sources(target, [str(folder)]))


@pytest.mark.parametrize(
    ("files", "modules"),
    [
        ({"judge.py": "import json, numpy"}, ["judge"]),
        ({"judge.py": "import a", "a.py": "import judge"}, ["a", "judge"]),
        ({"judge.py": "import a.b as c", "a/__init__.py": "", "a/b.py": ""}, ["a", "a.b", "judge"]),
        ({"judge.py": "from a import b", "a/b.py": ""}, ["a.b", "judge"]),
        (
            {"judge.py": "from a import *", "a/__init__.py": "__all__ = ['b']", "a/b.py": "", "a/c.py": ""},
            "a a.b judge",
        ),
        ({"judge.py": "from a import *", "a/__init__.py": "__all__ = ('b', *x, 3)", "a/b.py": ""}, "a a.b judge"),
        ({"judge.py": "try:\n import a\nexcept ImportError:\n import b", "a.py": "", "b.py": ""}, ["a", "b", "judge"]),
        ({"judge.py": "def good(): import a", "a.py": ""}, ["a", "judge"]),
        ({"judge.py": "import importlib as i; i.import_module('a')", "a.py": ""}, ["a", "judge"]),
        ({"judge.py": "__import__('a')", "a.py": ""}, ["a", "judge"]),
        ({"judge.py": "__import__(name); __import__(''); __import__(3)"}, ["judge"]),
        ({"judge.py": "from . import a", "a.py": ""}, ["judge"]),
        ({"judge.py": "import a", "a.py": "def ("}, ["a", "judge"]),
        ({"judge.py": "import a", "a.py": "\0"}, ["a", "judge"]),
        ({"judge.py": "import json", "json.py": BOMB}, ["json", "judge"]),
        ({"judge.py": BOMB + "import a", "a.py": BOMB}, ["a", "judge"]),
        ({}, []),
    ],
)
def test_the_modules_of_a_reward(tmp_path, files, modules):
    assert found(tmp_path, files) == (modules.split() if isinstance(modules, str) else modules)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("from . import more", "pkg pkg.judge pkg.more"),
        ("from .more import x", "pkg pkg.judge pkg.more"),
        ("from .deep.er import x", "pkg pkg.deep pkg.deep.er pkg.judge"),
        ("from .. import out", "pkg pkg.judge"),
        ("from ....... import out", "pkg pkg.judge"),
        ("import out", "out pkg pkg.judge"),
        ("from importlib import import_module\nimport_module('.more', __package__)", "pkg pkg.judge pkg.more"),
    ],
)
def test_relative_imports_count_from_the_package(tmp_path, text, modules):
    files = dict.fromkeys(["pkg/__init__.py", "pkg/more.py", "pkg/deep/__init__.py", "pkg/deep/er.py", "out.py"], "")
    assert found(tmp_path, {**files, "pkg/judge.py": text}, "pkg.judge:good") == modules.split()


def test_an_installed_module_is_its_own_file_and_is_not_followed(tmp_path):
    assert found(tmp_path, {"decoder.py": ""}, "json:loads") == ["json"]


@pytest.mark.parametrize("target", ["", ":", "a..b:c", ".:x", "no.such.thing:f"])
def test_a_target_that_is_none_has_no_files(tmp_path, target):
    assert found(tmp_path, {"a.py": ""}, target) == []
