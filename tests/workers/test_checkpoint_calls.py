"""When a checkpoint may be written beside what comes next, and when not."""

import time
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import FAMILIES
from stretto.models.lora import add_adapter
from stretto.recipe.schema import Adapter
from stretto.workers import model_state
from stretto.workers.checkpoint_calls import CheckpointCalls
from stretto.workers.shared_folder import HostFolder


class Calls(CheckpointCalls):
    """The part of a worker that writes, with a policy that takes its time."""

    def __init__(self, network):
        self.assignment, self.files = SimpleNamespace(sleeps={}), HostFolder()
        self.policy = SimpleNamespace(network=network, save=lambda place, base: time.sleep(0.3))

    def trained(self, model):
        """Nothing that is asked."""

    def _awake(self, model):
        return {}


@pytest.mark.parametrize(("targets", "over"), [("all-linear", True), ("attention", False)])
def test_nobody_walks_through_modules_that_a_forward_changes(targets, over, tmp_path, monkeypatch):
    monkeypatch.setattr(model_state, "held", lambda trainer: ())
    monkeypatch.setattr(model_state, "write", lambda *told, part, of: {})
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(FAMILIES["qwen3 with experts"]())
    add_adapter(network, Adapter(rank=2, targets=targets), seed=0)
    calls = Calls(network)
    calls.save("policy", tmp_path, {}, 0, 1, True, None)
    assert calls.writing.done() is over
    calls.writing.result()
