"""A small recipe that is right, as plain data, for tests that make it wrong."""

import copy

import pytest

RIGHT = {
    "seed": 1,
    "model": {
        "name": "scratch",
        "scratch": {"layers": 1, "width": 16, "heads": 2, "characters": "0123456789="},
        "dtype": "float32",
        "adapter": None,
    },
    "task": {
        "source": {"kind": "synthetic", "name": "reverse", "count": 50},
        "prompt": "{text}=",
        "holdout": {"prompts": 10},
    },
    "rewards": [{"name": "accuracy", "kind": "exact"}],
    "algorithm": {"name": "rloo"},
    "batch": {"prompts": 2, "samples": 4},
    "evaluate": {"every": 5, "prompts": 10},
    "run": {"steps": 10},
}


@pytest.fixture
def right(tmp_path, monkeypatch):
    """The data; the working directory is an empty folder, so that `runs/` would be made there."""
    monkeypatch.chdir(tmp_path)
    return copy.deepcopy(RIGHT)
