"""vLLM itself, on a CPU: runs with it, and faults on the way to it. Needs `.venv-vllm`, which `make engine` builds."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

from families import sharpen
from running import lines
from stretto.checks.rules.vllm import ARGUMENTS, ELSEWHERE
from stretto.engines.apart import EngineDeadlines
from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine
from stretto.engines.vllm.engine import VllmEngine, VllmSettings
from stretto.engines.vllm.process import PROGRAM, EngineProcess
from stretto.engines.vllm.start_probe import refuse_other_results
from stretto.engines.vllm.tensor_file import read_bucket
from stretto.errors import RecipeError, WeightsError
from stretto.models.lora import add_adapter
from stretto.models.quantised import quantise
from stretto.recipe.schema import Adapter
from stretto.types import Weights
from tiny import CPU, VOCABULARY, conversation, naive_logprobs, policy_from

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
RECIPE = ROOT / "recipes" / "smollm2-addition.yaml"
SMALL = ["batch.prompts=2", "batch.samples=4", "evaluate.every=0", "task.holdout.prompts=0", "engine.memory_share=0.05"]
LATER = ["deadlines.start=300", "run.steps=5", f"engine.python={PYTHON}", "engine.kind=vllm"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-vllm (make engine)"),
]


# Runs -----------------------------------------------------------------------------------------------------------------


def begun(folder, *changes, mark="", launcher=(), name=RECIPE):
    """The program, training in a new folder."""
    command = [sys.executable, *launcher, "-m", "stretto", "train", str(name), f"run.folder={folder}", *changes]
    clean = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        command, env={**clean, "MARK": mark}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )


def engines(mark):
    """Processes of vLLM that runs with this mark have started."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            told = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if str(PROGRAM).encode() in told[0] and f"MARK={mark}".encode() in told[1].split(b"\0"):
            found.append(int(folder.name))
    return found


def steps_of(folder):
    """The lines of a run's metrics, as far as it is."""
    path = folder / "metrics.jsonl"
    return [row for row in lines(path) if row["step"]] if path.exists() else []


def test_five_steps_with_an_adapter_on_two_cells_and_a_death_in_the_middle(tmp_path):
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    apart = ["placement.cluster=2xcpu", "placement.strategy=separate", "optimizer.lr=1e-3"]
    run = begun(folder, *SMALL, *LATER, *apart, mark=mark)
    while len(steps_of(folder)) < 2 and run.poll() is None:
        time.sleep(0.2)
    (engine,) = engines(mark)
    os.kill(engine, signal.SIGKILL)
    out, error = run.communicate()
    assert run.returncode == 0, error or out
    rows = steps_of(folder)
    assert [row["weights/version"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if row.get("seconds/engine_lost")] in ([3], [2], [4])
    assert max(row["kl/engine_trainer"] for row in rows) < 0.01
    assert engines(mark) == []


def test_an_engine_that_is_killed_again_and_again_ends_the_run_with_its_last_lines(tmp_path):
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    run = begun(folder, *SMALL, *LATER, "run.steps=240", mark=mark, name=RECIPE.with_name("tiny.yaml"))
    while not steps_of(folder) and run.poll() is None:
        time.sleep(0.2)
    while run.poll() is None:
        for engine in engines(mark):
            os.kill(engine, signal.SIGKILL)
        time.sleep(0.2)
    _, error = run.communicate()
    assert run.returncode == 1, error
    assert "was ended by SIGKILL\n    | " in error and "it died 3 times in a row" in error and "Traceback" not in error
    assert engines(mark) == []


def assert_two_steps(run, folder, mark):
    """A run takes two steps with the weights that its trainer has, and leaves no engine."""
    out, error = run.communicate()
    assert run.returncode == 0, error or out
    rows = steps_of(folder)
    assert [row["weights/version"] for row in rows] == [1, 2]
    assert max(row["kl/engine_trainer"] for row in rows) < 0.01
    assert engines(mark) == []


def test_two_steps_with_all_weights_on_one_device_under_a_launcher(tmp_path):
    mark, folder = uuid.uuid4().hex, tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "1", "--no-python", sys.executable)
    full = ["model.adapter=null", "optimizer.lr=1e-5", "run.steps=2"]
    run = begun(folder, *SMALL, *LATER, *full, mark=mark, launcher=launcher)
    assert_two_steps(run, folder, mark)


def test_two_devices_generate_together_and_each_of_them_trains(tmp_path):
    mark, folder, devices = uuid.uuid4().hex, tmp_path / "run", ["localhost/cpu:0", "localhost/cpu:1"]
    lane = f"{{role: generate, devices: [{', '.join(devices)}], mesh: {{tp: 2}}}}"
    trained = ", ".join(
        f"{{role: {role}, devices: [{device}]}}" for role in ("train", "reference") for device in devices
    )
    placed = f"placement={{cluster: 2xcpu, strategy: flatten, cells: [{lane}, {trained}]}}"
    few = ["run.steps=2", "batch.prompts=4", "model.scratch.warmup_steps=5", placed]
    run = begun(folder, *SMALL, *LATER, *few, mark=mark, name=RECIPE.with_name("tiny.yaml"))
    assert_two_steps(run, folder, mark)


def test_an_engine_that_hangs_at_its_start_ends_the_run_at_the_deadline(tmp_path):
    python, mark = tmp_path / "python", uuid.uuid4().hex
    python.write_text(
        '#!/bin/sh\n[ "$1" = -c ] && echo \'{"vllm": "0.32.0"}\' && exit\necho no peers; exec sleep 999\n'
    )
    python.chmod(0o755)
    quick = [f"engine.python={python}", "deadlines.start=20", "model.scratch.warmup_steps=5"]
    run = begun(tmp_path / "run", *SMALL, *LATER, *quick, mark=mark, name=RECIPE.with_name("tiny.yaml"))
    since = time.monotonic()
    _, error = run.communicate()
    assert run.returncode == 3 and time.monotonic() - since < 60
    assert "start has not answered" in error and "| no peers" in error and "deadlines.start" in error
    assert engines(mark) == []


# Faults ---------------------------------------------------------------------------------------------------------------


class Spoiled:
    """A process of vLLM, with somebody on the way to it."""

    def __init__(self, log):
        start = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        self.process = EngineProcess([str(PYTHON), "-u", str(PROGRAM)], name="vLLM", log=log, environment=start)
        self.spoil = lambda what, arguments: None

    def call(self, what, seconds, /, **arguments):
        told = self.spoil(what, arguments)
        return self.process.call(what, seconds, **arguments) if told is None else told

    def close(self):
        self.process.close()


def mixture(adapter):
    """A tiny mixture of experts whose matrices do not fill those of vLLM's kernel; with an adapter on few bits."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=0, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    policy = policy_from(config, dtype=torch.float32)
    sharpen(policy.network)
    if adapter is None:
        return policy
    quantise(policy.network, "nf4", CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experts in few bits get no adapter
        return replace(policy, adapted=add_adapter(policy.network, adapter, seed=0))


ADAPTER = Adapter(rank=4, alpha=12.0)


def started(folder, adapter, ranks, **arguments):
    """vLLM with a tiny model, in float32 so that log-probabilities can be compared closely."""
    return VllmEngine(
        mixture(adapter),
        partial(Spoiled, folder / "engine.log"),
        name="vLLM",
        settings=VllmSettings(
            versions=("0.32",), dtype="float32", context=256, cache_bytes=1 << 28,
            rank=None if adapter is None else 4, device="cpu", devices=ranks, arguments=arguments,
        ),
        deadlines=EngineDeadlines(start=300, generate=60, publish=60, first=300),
    )  # fmt: skip


@pytest.fixture(scope="module", params=[(ADAPTER, 2), (None, 1)], ids=["adapter on few bits, two ranks", "full"])
def engine(request, tmp_path_factory):
    """One that many tests ask."""
    adapter, ranks = request.param
    found = started(tmp_path_factory.mktemp("log"), adapter, ranks, max_num_seqs=16)
    found.checksums(dict(found.policy.network.named_parameters()))
    refuse_other_results(found)
    yield found
    shared = shared_by(found.process.process.process.pid)
    assert bool(shared) == any(path.is_socket() for path in found.room.iterdir()) == (ranks > 1)
    found.close()
    assert not found.room.exists() and not any(path.exists() for path in shared), "a second rank leaves nothing"


def shared_by(host):
    """Files in memory that vLLM's processes have made for each other."""
    maps = [line for each in (host, *ranks_of(host)) for line in Path(f"/proc/{each}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in maps if "/dev/shm/" in line and "(deleted)" not in line}


def publish(engine, version):
    """A publish and its proof."""
    engine.receive(Weights(version=version, manifest={}, where="shared"))
    return engine.checksums(engine.policy.trained())


def move(engine, by):
    """An update of every number."""
    with torch.no_grad():
        for weight in engine.policy.trained().values():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=by)


def answered(engine, *requests):
    engine.submit(requests)
    done = []
    while len(done) < len(requests):
        done += engine.step(0.5)
    return {each.key: each for each in done}


def asked(key, **changes):
    usual = {"tokens": np.array([1, 6, 7, 8, 2]), "max_new_tokens": 12, "stop": frozenset({0}), "temperature": 0.7}
    return Request(key=key, **{**usual, **changes})


@torch.no_grad()
def logprobs_of(engine, request, completion):
    """What the trained modules say of an answer."""
    tokens = [*request.tokens.tolist(), *completion.tokens.tolist()]
    talk = conversation(tokens, list(range(len(request.tokens), len(tokens))))
    return naive_logprobs(engine.policy, talk, temperature=request.temperature).numpy()


def ranks_of(host):
    """The processes of vLLM's ranks, in their order."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == host and b"resource_tracker" not in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def test_log_probabilities_follow_each_update(engine):
    before = None
    for version in (1, 2):
        move(engine, 0.02)
        publish(engine, version)
        done = answered(engine, *(asked(key) for key in range(6)))
        assert {each.version for each in done.values()} == {version}
        for key, each in done.items():
            theirs = logprobs_of(engine, asked(key), each)
            assert np.abs(each.logprobs - theirs).max() < 1e-3
        greedy = answered(engine, asked(9, temperature=0.0, stop=frozenset()))[9]
        native = answered(NativeEngine(engine.policy), asked(9, temperature=0.0, stop=frozenset()))[9]
        assert greedy.tokens.tolist() == native.tokens.tolist(), "two ranks say what one device does"
        assert before is None or not np.allclose(greedy.logprobs[:1], before, atol=1e-4)
        before = greedy.logprobs[:1]


def test_a_request_has_the_same_answer_alone_and_among_others(engine):
    alone = answered(engine, asked(3))[3]
    longer = [asked(key, tokens=np.random.default_rng(key).integers(5, 15, 240)) for key in range(10, 50)]
    among = answered(engine, *longer, *(asked(key) for key in range(5)))[3]  # more than one batch holds
    assert alone.tokens.tolist() == among.tokens.tolist()


def test_an_answer_that_is_cut_off_comes_with_what_it_has(engine):
    engine.submit([asked(1, max_new_tokens=200, stop=frozenset())])
    assert engine.step(0.0) == []
    (part,) = engine.abort([1])
    assert part.stop == "abort" and 0 < len(part.tokens) < 200 and len(part.logprobs) == len(part.tokens)
    assert engine.step(0.1) == []


def test_a_text_ends_an_answer_with_its_last_token_and_changes_nothing_before(engine):
    whole = answered(engine, asked(1, stop=frozenset()))[1]
    text = engine.policy.tokenizer.decode(whole.tokens[3:6], skip_special_tokens=False)
    both = answered(engine, asked(1, stop=frozenset(), stop_texts=("never", text)), asked(2, stop_texts=("never",)))
    said = engine.policy.tokenizer.decode(both[1].tokens, skip_special_tokens=False)
    assert both[1].stop == "stop" and text in said and len(both[1].tokens) <= 6
    assert both[1].tokens.tolist() == whole.tokens[: len(both[1].tokens)].tolist() and len(both[2].tokens) <= 12
    assert not engine.asked and not engine.watched.rows


def test_arguments_that_a_recipe_may_say_are_those_of_vllm():
    (source,) = PYTHON.parents[1].glob("lib/python*/site-packages/vllm/engine/arg_utils.py")
    known = {line.split(":")[0].strip() for line in source.read_text("utf-8").splitlines() if line.startswith("    ")}
    assert ARGUMENTS.keys() <= known and ELSEWHERE.keys() <= known


def tell(*questions):
    """A spoiler that answers these in the process's place, as if all were well."""
    names = []

    def spoil(what, arguments):
        names.extend([arguments["name"]] if "name" in arguments else [])
        if what in questions:
            return {"version": names[-1]} if what == "version" else {}

    return spoil


def kept(engine):
    """A spoiler that puts the adapter of the last publish in place of the new one, under the new name."""
    held = {}

    def spoil(what, arguments):
        if what == "adapter":
            save_file(held, Path(arguments["folder"]) / "adapter_model.safetensors")

    def remember(what, arguments):
        if what == "adapter":
            held.update(load_file(Path(arguments["folder"]) / "adapter_model.safetensors"))

    engine.process.spoil = remember
    publish(engine, 20)
    return spoil


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"


def bit(what, arguments):
    """A spoiler that changes one number in one tensor by one unit in its last place."""
    if what == "adapter":
        path = Path(arguments["folder"]) / "adapter_model.safetensors"
        held = load_file(path)
        next(iter(held.values())).view(torch.int32).view(-1)[5] += 1
        save_file(held, path)
    if what == "load":
        dict(read_bucket(Path(arguments["path"]), arguments["table"]))[EXPERT].view(torch.int32)[3, 5] += 1


FAULTS = {
    "not loaded": lambda engine: tell("adapter", "begin", "load", "finish", "version"),
    "one bit": lambda engine: bit,
    "the old one": kept,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_the_way_is_caught_in_the_same_publish_however_small_the_update(engine, fault):
    if fault == "the old one" and engine.policy.adapted is None:
        pytest.skip("without an adapter that is the same as not loaded")
    move(engine, 1e-6)
    publish(engine, 10)
    engine.process.spoil = FAULTS[fault](engine)
    move(engine, 1e-6)
    with pytest.raises(WeightsError, match=r"after step 11, \d+ of \d+ tensors of vLLM are not those of .* where "):
        publish(engine, 11)
    engine.process.spoil = lambda what, arguments: None
    publish(engine, 12)


WIDE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from host_tensors import ROWS, product
layer = torch.nn.Linear(2 * ROWS + 5, 7, bias=False)
layer.quant_method = torch.nn.Module()
layer.quant_method.apply = lambda layer, rows, bias: layer(rows)
with torch.no_grad():
    assert torch.equal(product(layer, layer.in_features), layer.weight)
"""


def test_a_matrix_that_is_wider_than_what_is_multiplied_at_once_is_read_back_whole():
    done = subprocess.run([PYTHON, "-c", WIDE, str(PROGRAM.parent)], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_what_one_of_two_ranks_refuses_is_told_by_the_key_and_in_its_words(tmp_path):
    with pytest.raises(RecipeError, match="vLLM cannot serve this: Unquantized MoE backend TRITON"):
        started(tmp_path, ADAPTER, 2, kernel_config={"moe_backend": "triton"})


def test_an_adapter_that_two_ranks_refuse_is_told_by_the_key_and_in_their_words(tmp_path):
    def widen(what, arguments):
        if what == "adapter":
            path = Path(arguments["folder"]) / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "r": 64}))

    engine = started(tmp_path, ADAPTER, 2)
    engine.process.spoil = widen
    with pytest.raises(RecipeError, match=r"model\.adapter\.targets: vLLM cannot load this adapter: LoRA rank 64"):
        publish(engine, 1)
    engine.close()


def test_weights_that_a_sleep_dropped_are_caught_before_anything_is_generated(engine):
    if engine.policy.adapted is not None:
        pytest.skip("with an adapter nothing can be sent that would drop them")
    publish(engine, 30)
    engine.sleep(keep=True)
    engine.wake()
    with torch.no_grad():
        held = {name: weight.clone() for name, weight in engine.policy.trained().items()}
        for weight in engine.policy.trained().values():
            weight.zero_()
        engine._publish()
        for name, weight in engine.policy.trained().items():
            weight.copy_(held[name])
    engine.submit([asked(1)])
    with pytest.raises(WeightsError, match="are not those of"):
        engine.step(0.1)
    engine.abort([1])
    publish(engine, 31)


def test_a_process_that_dies_is_replaced_and_its_answers_are_the_same(engine):
    usual = answered(engine, *(asked(key) for key in range(3)))
    engine.submit([asked(key) for key in range(3)])
    host = engine.process.process.process.pid
    os.kill(host if engine.settings.devices == 1 else ranks_of(host)[-1], signal.SIGKILL)
    done = []
    while len(done) < 3:
        done += engine.step(0.5)
    assert {each.key: each.tokens.tolist() for each in done} == {k: each.tokens.tolist() for k, each in usual.items()}
    assert engine.holds().lost > 1
