"""A checkpoint of two Ray workers does not pass through the process that was started: the evidence, scaled down."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "evidence" / "checkpoint_memory"


@pytest.mark.timeout(520)
def test_a_checkpoint_does_not_grow_the_driver():
    done = subprocess.run([sys.executable, SCRIPT, "100"], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"a state of \d{2,3} MB", done.stdout)) == 2, "held twice, and in two parts"
