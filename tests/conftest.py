"""What every test relies on: no network, one thread, the source tree in every process, the same examples everywhere."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models of tests are tiny: threads cost them more than they bring, above all beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")

settings.register_profile("stretto", derandomize=True, deadline=None, database=None)
settings.load_profile("stretto")


@pytest.fixture
def billion(tmp_path):
    """A folder of a model of a billion parameters in bf16, and none of their weight."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(2 * 10**9)
    return str(tmp_path)
