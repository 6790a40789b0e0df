"""A small part of what `scripts/evidence/survive` does in full."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "survive"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "times"), [("kills", 3), ("signals", 1), ("damage", 12)])
def test_a_run_comes_through(kind, times):
    command = [sys.executable, SCRIPT, "--only", kind, "--times", str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
