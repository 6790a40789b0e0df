"""A sample of the learning curves: one seed each; the whole table is scripts/evidence/learning."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "learning"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tiny_recipe_learns_and_its_controls_stay_flat():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--seeds", "1", "--algorithms", "grpo"], capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 runs do what they should" in done.stdout
