"""The reference page is made from the schema, and is up to date."""

import runpy
from pathlib import Path

from stretto.algorithms.catalog import CATALOG
from stretto.recipe.schema_text import homes

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "reference"))
page = SCRIPT["page"]


def test_the_committed_page_is_up_to_date():
    committed = (ROOT / "docs" / "reference" / "recipe.md").read_text("utf-8")
    assert committed == page(), "run scripts/reference"


def test_the_table_of_other_projects_is_up_to_date():
    committed = (ROOT / "docs" / "guides" / "coming-from.md").read_text("utf-8")
    assert "| `batch.samples`, answers to each prompt | `num_generations` |" in committed
    assert committed == SCRIPT["others"](committed), "run scripts/reference"


def test_every_key_and_algorithm_is_on_the_page():
    text = page()
    for name in (*homes(), *CATALOG):
        heads = f", `{name}: "  # a key that tells kinds apart stands in their headings
        assert f"| `{name}` |" in text or heads in text


def test_every_key_says_what_it_does():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert all(cells), row


def test_the_script_compares_the_page(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["reference", "--check"])
    assert SCRIPT["main"]() == 0
    assert "up to date" in capsys.readouterr().out
