"""What every test relies on: no network, one thread, the source tree in every process, the same examples everywhere."""

import os
from pathlib import Path

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models of tests are tiny: threads cost them more than they bring, above all beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")

settings.register_profile("stretto", derandomize=True, deadline=None, database=None)
settings.load_profile("stretto")
