"""A sample of the learning curves: one seed each, half of the steps; the whole table is scripts/evidence/learning."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "learning"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tiny_recipe_learns_from_its_reward_and_from_nothing_else():
    command = [sys.executable, str(SCRIPT), "--seeds", "1", "--steps", "120", "--cases", "grpo", "coin", "frozen"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    cells = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    verdicts = {row[1]: row[6] for row in cells[2:]}
    assert verdicts["grpo"] == "learns"
    assert verdicts["frozen"] == "flat"
    # A single throw of the coin may leave its interval by a hair; it must never look like learning.
    assert verdicts["coin"] != "learns"
