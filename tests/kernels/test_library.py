"""The kernels in C are made by the machine's own compiler, and a machine that cannot have them goes without."""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asked import sampled
from stretto.engines.native.decode_backend import Steps
from stretto.kernels.cpu import attention_kernels, compiler, decode_kernels, layer_kernels, logprob_kernels
from stretto.kernels.cpu.backward import take_over
from stretto.kernels.cpu.library import agree, library
from stretto.kernels.cpu.packed_linear import PackedSteps
from tiny import scratch_policy

MADE = (
    library,
    attention_kernels.attention_kernels,
    decode_kernels.decode_kernels,
    layer_kernels.layer_kernels,
    logprob_kernels.logprob_kernels,
)
"""What is made once for a process: the library, and what is in it."""


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """A copy of the sources, which is compiled."""
    for path in (*compiler.FOLDER.glob("*.c"), *compiler.FOLDER.glob("*.h")):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(compiler, "FOLDER", tmp_path)
    return tmp_path


@pytest.fixture
def anew():
    """Kernels are compiled once for a process; here, and once more after it."""
    for made in MADE:
        made.cache_clear()
    yield
    for made in MADE:
        made.cache_clear()


def test_a_machine_without_a_compiler_goes_without(anew, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert library(torch.bfloat16) is None
    policy = scratch_policy(dtype="float32")
    assert Steps(policy).kernels is None and sampled(policy, PackedSteps(policy))


@pytest.mark.parametrize("command", ["no-such-compiler", "false", "cc -fno-such-option", "true", "a quote'"])
def test_a_compiler_that_fails_costs_no_run(anew, monkeypatch, command):
    monkeypatch.setenv("CC", command)
    assert library(torch.float32) is None


def test_they_can_be_tried_while_activations_are_recomputed(anew):
    """What a trial keeps for its backward is not the layer's."""
    layer = LlamaRMSNorm(16)
    take_over(nn.ModuleList([layer]))
    states = torch.ones(3, 16, requires_grad=True)
    checkpoint(layer, states, use_reentrant=False).sum().backward()
    assert states.grad is not None and layer_kernels.layer_kernels(torch.float32) is not None


def test_what_is_no_number_confirms_nothing():
    ones, none = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert agree(lambda: [(ones, ones)], torch.float32)
    assert not agree(lambda: [(ones, ones), (none, ones)], torch.float32)
    assert not agree(lambda: [(none, ones), (ones, ones)], torch.float32)


def test_a_trial_that_fails_costs_no_run(anew, monkeypatch):
    monkeypatch.setattr(layer_kernels, "silu", lambda gates: 1 / 0)
    assert layer_kernels.layer_kernels(torch.float32) is None


def test_a_compiler_that_does_not_end_is_not_waited_for(anew, monkeypatch):
    monkeypatch.setattr(compiler, "SECONDS", 0.2)
    monkeypatch.setenv("CC", "sleep 30 #")
    assert compiler.build(Path("/dev/null"), bf16=False) is not None
    assert library(torch.float32) is None


def test_kernels_that_compute_something_else_are_found_out(anew, copied):
    shared = copied / "numbers.h"
    text = shared.read_text()
    assert "+ rest + 1.0f" in text
    shared.write_text(text.replace("+ rest + 1.0f", "+ rest + 1.1f"))
    assert library(torch.bfloat16) is not None
    assert [kernels(torch.bfloat16) for kernels in MADE[1:]] == [None] * len(MADE[1:])


def test_a_second_openmp_runtime_is_not_let_in(anew, copied):
    """As a compiler brings one that is not that of torch."""
    (copied / "runtime.c").write_text("int omp_get_max_threads(void) { return 7; }\n")
    assert library(torch.float32) is None


def test_threads_are_those_of_torch():
    """What the kernels start computes with is what torch was told, and no pool of their own."""
    code = (
        "import torch, threading\n"
        "from stretto.kernels.cpu.layer_kernels import layer_kernels\n"
        "torch.set_num_threads(2)\n"
        "torch.ones(1 << 20).add_(1)\n"
        "tasks = lambda: len(__import__('os').listdir('/proc/self/task'))\n"
        "before, kernels = tasks(), layer_kernels(torch.float32)\n"
        "kernels.norm(torch.ones(4096, 64), torch.ones(64), 1e-5)\n"
        "assert kernels is not None and tasks() == before, (before, tasks())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_kernel_has_its_arguments():
    text = "".join(path.read_text() for path in compiler.FOLDER.glob("*.c"))
    wanted = {"*": ctypes.c_void_p, "long": ctypes.c_long, "float": ctypes.c_float}
    for module in (attention_kernels, decode_kernels, layer_kernels, logprob_kernels):
        for name, arguments in module.ARGUMENTS.items():
            inside = re.search(rf"^(?:void|int) {name}\(([^)]*)\)", text, re.MULTILINE)[1]
            kinds = [each.strip().rsplit(" ", 1)[0] if "*" not in each else "*" for each in inside.split(",")]
            assert [wanted[kind] for kind in kinds] == list(arguments), name
