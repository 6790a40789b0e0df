"""A sample of the learning curves: one seed each, half of the steps or less; the table is scripts/evidence/learning."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "learning"


def verdicts(steps, *cases):
    """What the script says of each."""
    command = [sys.executable, str(SCRIPT), "--seeds", "1", "--steps", str(steps), "--cases", *cases]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    cells = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines() if line.startswith("|")]
    return {row[1]: row[6] for row in cells[2:]}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_tiny_recipe_learns_from_its_reward_and_from_nothing_else():
    # Where nothing moves, fewer steps say as much.
    found = verdicts(120, "grpo") | verdicts(40, "coin") | verdicts(20, "frozen")
    assert found["grpo"] == "learns"
    assert found["frozen"] == "flat"
    # A single throw of the coin may leave its interval by a hair; it must never look like learning.
    assert found["coin"] != "learns"
