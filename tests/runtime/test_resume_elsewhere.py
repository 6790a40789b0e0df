"""A run that goes on with another number of devices, another layout and another strategy ends where it would have."""

import os
import shutil

import pytest

from crewed import distance
from running import lines, resume, samples, start
from stretto.runtime import plans
from stretto.storage.tensors import read_parts
from stretto.training.parallel.zero1 import merge_states
from stretto.workers.launchers import inprocess
from stretto.workers.launchers.inprocess import ThreadLauncher
from tables import ASTAR, made
from tiers import slow_but

STEPS, STOPPED = 5, 2
"""Ten prompts, three a step: the fourth step begins another epoch."""

TALKS = """
from stretto import Outcome

async def run(prompt, model):
    first = await model.chat(prompt.messages)
    await model.chat([{"role": "user", "content": "1="}])
    return Outcome(answer=first.text)
"""

KINDS = {
    "grpo with an adapter": {
        "model__adapter": {"kind": "lora", "rank": 2, "alpha": 4.0},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
    },
    "dapo that drops groups": {"algorithm": {"name": "dapo"}, "batch__max_rounds": 4},
    "astar_po": ASTAR,
    "several conversations": {"environment": {"kind": "talks:run"}},
    "an adapter on four bits": {
        "model__adapter": {"kind": "lora", "rank": 2, "alpha": 4.0},
        "model__quantize": "nf4",
        "algorithm": {"name": "grpo", "kl": {"coef": 0.1}},
    },
    "ppo with a trained critic": {
        "roles": {"critic": {"name": "scratch", "optimizer": {"lr": 1e-4}}, "reward_model": {"name": "scratch"}},
        "rewards": [{"name": "accuracy", "kind": "numeric"}, {"name": "quality", "kind": "model", "weight": 0.5}],
        "algorithm": {"name": "ppo", "kl": {"coef": 0.1, "where": "reward"}},
    },
}

PLACES = {
    "one device": {"cluster": "1xcpu"},
    "elastic on two": {"cluster": "2xcpu", "strategy": "elastic"},
    "flatten on three": {"cluster": "3xcpu", "strategy": "flatten"},
    "separate on two": {"cluster": "2xcpu", "strategy": "separate"},
    "interleave on two": {"cluster": "2xcpu", "strategy": "interleave"},
}

MOVES = [
    ("flatten on three", "one device"),
    ("one device", "elastic on two"),
    ("elastic on two", "separate on two"),
    ("separate on two", "flatten on three"),
    ("one device", "interleave on two"),
]


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Several cells are threads of this process."""
    monkeypatch.setattr(inprocess, "processes", lambda devices, **told: ThreadLauncher())
    monkeypatch.setattr(plans, "devices_here", lambda: [f"localhost/cpu:{index}" for index in range(3)])


@pytest.fixture(scope="module", params=slow_but(*list(KINDS)[:4], of=KINDS))
def whole(request, tmp_path_factory):
    """The changes of a recipe, its folder, and the folder of its run on one device."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "talks.py").write_text(TALKS)
    changes = {
        "model__dtype": "float64",
        "optimizer__lr": 1e-4,
        "run__steps": STEPS,
        "evaluate__every": 0,
        **KINDS[request.param],
    }
    before = os.getcwd()
    os.chdir(folder)  # a table of V* is looked for below the working directory
    try:
        if KINDS[request.param] is ASTAR:
            made(folder, **{name: value for name, value in changes.items() if name not in ASTAR})
        yield changes, folder, start(folder, **changes).folder
    finally:
        os.chdir(before)


def masters(run, optimizer="optimizer"):
    """The weights after the last step, whoever holds them."""
    return merge_states(read_parts(run / "checkpoints" / f"step-{STEPS:06d}" / "state", optimizer))["masters"]


@pytest.mark.parametrize("move", slow_but(MOVES[0], of=MOVES))
def test_the_same_samples_and_the_same_weights_wherever_it_goes_on(whole, tmp_path, move):
    (changes, folder, alone), (first, then) = whole, move
    (begun := folder / tmp_path.name).mkdir()
    shutil.copy(folder / "talks.py", begun)
    placement = {f"placement__{key}": value for key, value in PLACES[first].items()}
    run = start(begun, **{**changes, **placement}).folder if first != "one device" else begun / "run0"
    if first == "one device":
        shutil.copytree(alone, run)
    for path in (run / "checkpoints").iterdir():
        if int(path.name[5:]) > STOPPED:
            shutil.rmtree(path)
    moved = [f"placement.{key}={value}" for key, value in {"strategy": "auto", **PLACES[then]}.items()]
    resume(run, changes=moved, allow=["placement"])
    assert distance(masters(run), masters(alone)) < 1e-9
    if "critic" in changes.get("roles", {}):
        assert distance(masters(run, "critic_optimizer"), masters(alone, "critic_optimizer")) < 1e-9
    keys = [
        sorted((row["prompt"], row["visit"], row["attempt"], row["used"]) for row in lines(one / "samples" / name))
        for one in (run, alone)
        for name in samples(alone)
    ]
    assert keys[:STEPS] == keys[STEPS:]
    assert {visit for step in keys for _, visit, _, _ in step} >= {0, 1}, "another epoch has begun"
