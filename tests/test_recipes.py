"""Every recipe that is shipped has nothing wrong with it."""

from pathlib import Path

import pytest

from stretto.cli.recipe import PROBES
from stretto.config.check import examine

SHIPPED = sorted((Path(__file__).parents[1] / "recipes").glob("**/*.yaml"))


def test_there_are_recipes():
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_has_nothing_wrong_with_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, problems = examine(path, root=path.parent, probes=PROBES)
    assert [str(problem) for problem in problems] == []
    assert recipe is not None
