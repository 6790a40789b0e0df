"""Tiny runs: a recipe that trains in half a second, engines that say what a test wants, and readers of run folders.

The task is to copy one to three binary digits. A reward of kind numeric finds the right number in a random answer often
enough that there is something to learn from the first step on.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from stretto.api.recipes import PROBES
from stretto.checks.recipe import checked_recipe
from stretto.engines.scripted import ScriptedEngine
from stretto.runtime import session

RECIPE = {
    "seed": 5,
    "model": {
        "name": "scratch",
        "scratch": {"layers": 1, "width": 16, "heads": 2, "characters": "01=", "warmup_steps": 2, "context": 32},
        "dtype": "float32",
        "adapter": None,
    },
    "task": {
        "source": {"kind": "synthetic", "name": "copy", "length": [1, 3], "alphabet": "01", "count": 14},
        "prompt": "{text}=",
        "holdout": {"prompts": 4},
    },
    "rewards": [{"name": "accuracy", "kind": "numeric", "pick": "first"}],
    "batch": {"prompts": 3, "samples": 4},
    "engine": {"max_new_tokens": 4},
    "optimizer": {"lr": 0.01},
    "evaluate": {"every": 2, "prompts": 4},
    "checkpoint": {"every": 1, "keep": 20},
    "guards": {"min_disk_gb": 0},
    "log": [],
    "run": {"steps": 3},
}
END, USER, ASSISTANT, SYSTEM, UNKNOWN, ZERO, ONE, EQUALS = range(8)
TIMES = ("seconds/", "idle", "memory/", "micro_batches", "decode/")
"""Metrics that two equal runs need not share."""


class Quiet:
    """Keeps what a run tells its terminal; `at` is called with the name and arguments of everything it is told."""

    def __init__(self, at=None):
        self.told = []
        self.at = at or (lambda name, *values: None)

    def __getattr__(self, name):
        if name not in ("start", "note", "step", "sampled", "evaluated", "finish"):
            raise AttributeError(name)

        def tell(*values):
            self.told.append((name, *values))
            self.at(name, *values)

        return tell

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def notes(self):
        """The text of all notes."""
        return "\n".join(values[0] for name, *values in self.told if name == "note")


def data_with(**changes):
    """The recipe's data; keys are dotted names with two underscores for each dot."""
    data = copy.deepcopy(RECIPE)
    for key, value in changes.items():
        *path, last = key.split("__")
        at = data
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    return data


def written(folder, name="tiny", **changes):
    """The recipe as a file."""
    path = Path(folder) / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data_with(**changes)))
    return path


def recipe_in(folder, **changes):
    """The recipe, checked and resolved as the command line would; a table of V* may still have to be made."""
    path = written(folder, **changes)
    return checked_recipe(path, (), root=path.parent, probes=replace(PROBES, table=lambda recipe, root: ()))


def start(folder, *, at=None, engine=None, **changes):
    """Trains it in a new folder below `folder` and returns that."""
    recipe = recipe_in(folder, run__folder=str(Path(folder) / f"run{len(list(Path(folder).glob('run*')))}"), **changes)
    return session.start(recipe, name="tiny", root=Path(folder), progress=Quiet(at), make_engine=engine)


def resume(folder, *, at=None, engine=None, changes=(), allow=()):
    """Goes on with a run."""
    return session.resume(folder, changes=changes, allow=allow, progress=Quiet(at), make_engine=engine)


def scripted(script):
    """A factory of scripted engines."""
    return lambda policy: ScriptedEngine(script)


def lines(path):
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def metrics(folder):
    """metrics.jsonl without what depends on time."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in lines(folder / "metrics.jsonl")]


def samples(folder):
    """Every samples file by its name."""
    return {path.name: path.read_bytes() for path in sorted((folder / "samples").iterdir())}


def tensors(checkpoint):
    """Every tensor of a checkpoint, model and state, by file and name."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {(str(f.relative_to(checkpoint)), name): t for f in files for name, t in load_file(f).items()}


def values(checkpoint):
    """The plain state of every part but the manifest."""
    files = sorted((checkpoint / "state").glob("*.json"))
    return {f.name: json.loads(f.read_text()) for f in files if f.name != "manifest.json"}


def assert_same_run(one, other, *, step):
    """Two run folders hold the same course: metrics, samples, and the checkpoint after `step`, to the bit."""
    assert metrics(one) == metrics(other)
    assert samples(one) == samples(other)
    mine, theirs = (folder / "checkpoints" / f"step-{step:06d}" for folder in (one, other))
    assert_same_checkpoint(mine, theirs)


def assert_same_checkpoint(one, other):
    """Two checkpoints hold the same tensors and the same state, to the bit; where and how often they are may differ."""
    ours, others = tensors(one), tensors(other)
    assert ours.keys() == others.keys()
    for key, tensor in ours.items():
        mine, theirs = (t.reshape(-1).view(torch.uint8) for t in (tensor, others[key]))
        assert torch.equal(mine, theirs), f"{key} differs"
    states = values(one), values(other)
    for state in states:
        state["recipe.json"] |= {"run": None, "checkpoint": None}
    assert states[0] == states[1]
