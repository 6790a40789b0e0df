"""Default learning rate and the former one: half of the steps, one seed. The table is scripts/evidence/default_rate."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "default_rate"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_default_rate_learns_where_the_former_one_collapses():
    command = [sys.executable, str(SCRIPT), "run.steps=30", "--seeds", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    cells = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    rows = {row[1]: row for row in cells[2:]}
    assert rows["old"][7] == "collapses" and rows["old"][8], "the diagnosis names optimizer.lr"
    assert rows["new"][7] == "learns"
