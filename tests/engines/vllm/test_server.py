"""A vLLM server of the user's: what is asked of it, proved of it, and said where it cannot be used. It is a fake."""

import os
import time
from functools import partial

import numpy as np
import pytest
import torch

from fake_server import FakeServer
from stretto.engines.base import Request
from stretto.engines.vllm.engine import VllmDeadlines, VllmSettings
from stretto.engines.vllm.served_engine import ServedEngine
from stretto.engines.vllm.server_http import served_model
from stretto.engines.vllm.server_transport import VllmServer
from stretto.errors import DeadlineError, EngineError, RecipeError, WeightsError
from stretto.recipe.schema import Adapter
from stretto.types import Weights
from tiny import scratch_policy

ADAPTER = Adapter(rank=4, alpha=12.0)
SIZES = {"dtype": "float32", "width": 32, "adapter": ADAPTER}
VERSIONS = ("0.32",)


@pytest.fixture
def server():
    """A server that is as it should be."""
    found = FakeServer(**SIZES)
    yield found
    found.close()


@pytest.fixture
def made(server, tmp_path):
    """A function that makes an engine on a policy with the server's base."""
    engines = []

    def make(*, url=server.url, processed=False, **changes):
        policy, room = scratch_policy(**SIZES | changes), tmp_path / "adapters"
        room.mkdir()
        engine = ServedEngine(
            policy, partial(VllmServer, url, versions=VERSIONS), name="vLLM there", room=room, processed=processed,
            settings=VllmSettings(
                versions=VERSIONS, dtype="float32", context=server.context, cache_bytes=0, rank=4, device="cpu"
            ),
            deadlines=VllmDeadlines(start=1.0, generate=9.0, publish=9.0, first=1.0),
        )  # fmt: skip
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def publish(engine, version, by=1e-6):
    """An update of every number, its publish, and the proof as a worker asks for it."""
    with torch.no_grad():
        for index, weight in enumerate(engine.policy.trained().values()):
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(index)), alpha=by)
    engine.receive(Weights(version=version, manifest={}, where="shared"))
    return engine.checksums(engine.policy.trained())


def request(key=7, *, longest=4, texts=()):
    return Request(
        key=key, tokens=np.full(3, 9), max_new_tokens=longest, stop=frozenset({0}), temperature=1.0, stop_texts=texts
    )


def answered(engine, count):
    """The next completions, in the order of their keys."""
    done, end = [], time.monotonic() + 9
    while len(done) < count and time.monotonic() < end:
        done += engine.step(0.2)
    return sorted(done, key=lambda each: each.key)


def refused(make):
    """The key, the reason and the fix of what is refused."""
    with pytest.raises(RecipeError) as caught:
        make()
    (problem,) = caught.value.problems
    return problem.field, problem.reason, problem.fix


# Answers --------------------------------------------------------------------------------------------------------------


def test_each_version_has_a_name_of_its_own_of_which_the_server_keeps_the_last_alone(server, made, tmp_path):
    engine = made()
    for version in (1, 2):
        publish(engine, version)
        engine.submit([request(5), request(2**64 - 1, longest=9)])
        one, two = answered(engine, 2)
        assert (one.tokens.tolist(), one.logprobs.tolist(), one.stop) == ([9] * 4, [-1.0] * 4, "length")
        assert len(two.tokens) == 9 and one.version == engine.holds().version == version
    first, name = server.requests[0], server.requests[-1]["model"]
    assert name.startswith("policy-v2-") and list(server.adapters) == [name] == [engine.called]
    assert first["model"] != name and first["cache_salt"] == first["model"] and first["stream"]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [name]
    told = {each["sampling_params"]["seed"] for each in server.requests}
    params = first["sampling_params"]
    assert (
        told == {5, 2**63 - 1} and params["stop_token_ids"] == [0] and params["ignore_eos"] and params["logprobs"] == 0
    )
    engine.close()
    assert server.adapters == {} and len(server.unloaded) == 3 and not (tmp_path / "adapters").exists()


def test_what_is_called_off_comes_with_what_it_has_and_a_text_ends_an_answer(server, made):
    engine = made()
    server.hold.clear()
    text = engine.policy.tokenizer.decode([9]) * 3
    engine.submit([request(1, longest=6), request(2, longest=8, texts=("no", text))])
    (cut,) = answered(engine, 1)
    assert (cut.key, cut.tokens.tolist(), cut.stop) == (2, [9] * 3, "stop")
    while len(engine.process.answers[1].tokens) < 5:
        time.sleep(0.01)
    engine.submit([request(3, longest=6)])
    publish(engine, 4)
    server.hold.set()
    rest = {each.key: each for each in engine.step(0.1)}
    assert rest.keys() == {1, 3} and {each.stop for each in rest.values()} == {"abort"}
    assert rest[1].tokens.tolist() == [9] * 5 and engine.step(0.1) == []
    engine.submit([request(4)])
    while not engine.process.answers[4].stop:
        time.sleep(0.01)
    (ended,) = engine.abort([4])  # which is whole, though nobody has asked for it yet
    assert ended.stop == "length" and len(ended.tokens) == 4


def test_a_conversation_that_is_longer_than_its_context_is_told(server, made):
    server.context = 8
    engine = made()
    engine.submit([request(longest=20)])
    with pytest.raises(EngineError, match=r"engine\.url: a conversation of 3 .* whose context is 8\n.*max-model-len"):
        answered(engine, 1)


def test_a_server_that_was_started_again_gets_the_adapter_again_and_one_that_is_gone_ends_the_run(server, made):
    engine = made()
    publish(engine, 1)
    server.adapters.clear()
    engine.submit([request()])
    (done,) = answered(engine, 1)
    assert done.version == 1 and engine.called.endswith(".3") and engine.holds().lost > 0
    server.adapters.clear()
    assert engine.holds().version == 1 and engine.called.endswith(".4")
    server.close()
    with pytest.raises(DeadlineError, match=r"did not come back for 1 s\n    fix: .*deadlines\.start") as caught:
        engine.holds()
    assert caught.value.exit_code == 3


# Proof ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [1e-6, 1e-2])
def test_an_adapter_that_is_kept_is_caught_however_small_the_update(server, made, by):
    engine, kept = made(), []
    publish(engine, 1)
    server.takes = lambda name, tensors: kept[0]
    kept.append(next(iter(server.adapters.values()))[1])
    told = (
        "still computes with the adapter of then"
        if by < 1e-4
        else "does not compute with policy-v2-.* where .* is right"
    )
    with pytest.raises(WeightsError, match=f"after step 2, .*{told}"):
        publish(engine, 2, by)
    server.takes = lambda name, tensors: tensors
    publish(engine, 3)
    server.takes = lambda name, tensors: kept[0]
    with pytest.raises(WeightsError, match=f"after step 4, .*{told.replace('v2', 'v4')}.*\n.*the server's log"):
        publish(engine, 4)  # an older one than the last
    server.takes = lambda name, tensors: tensors
    publish(engine, 5, 0.0)
    publish(engine, 6, 0.0)


def test_files_that_are_not_the_adapter_and_a_name_that_is_another_folder_are_caught(server, made, tmp_path):
    engine = made()

    def spoil(name, tensors):
        path = tmp_path / "adapters" / name / "adapter_model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return tensors

    server.takes = spoil
    with pytest.raises(WeightsError, match=r"lora_\w\.weight in /.*/policy-v1-.* is \w+ where \w+ was published"):
        publish(engine, 1)
    server.takes = lambda name, tensors: tensors
    publish(engine, 2)
    server.adapters[engine.called] = "/other", server.adapters[engine.called][1]
    with pytest.raises(WeightsError, match=r"samples from weights policy-v2-\w+ of /other"):
        engine.holds()


def test_nothing_is_generated_before_the_proof(server, made):
    engine = made()
    publish(engine, 1)
    held = next(iter(server.adapters.values()))[1]
    server.takes = lambda name, tensors: held
    with torch.no_grad():
        for weight in engine.policy.trained().values():
            weight.add_(1e-6)
    engine.receive(Weights(version=2, manifest={}, where="shared"))
    engine.submit([request()])
    with pytest.raises(WeightsError, match="to the bit"):
        engine.step(0.1)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason", "fix"),
    [
        ({"version": {"version": "0.31.2"}}, "is vLLM 0.31.2, and 0.32 is supported", "of that version"),
        ({"version": "sglang"}, "is no server of vLLM", "SGLang"),
        ({"updating": False}, "loads no adapters while it runs", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"scales_out": False}, "takes no token ids (Scale-out endpoints are disabled.)", "--enable-scale-out"),
        ({"models": []}, "serves no model", "vllm serve"),
        ({"key": "secret"}, "asks for a key (Unauthorized)", "VLLM_API_KEY"),
    ],
)
def test_a_server_that_cannot_be_used_is_told_before_a_run(server, changes, reason, fix):
    assert served_model(f"{server.url}/v1", VERSIONS) == ("0.32.0", "base", "/models/base", 256)
    vars(server).update(changes)
    field, why, do = refused(lambda: served_model(server.url, VERSIONS))
    assert field == "engine.url" and reason in why and fix in do


def test_a_server_that_is_not_there_is_told_and_a_key_of_the_environment_is_sent(server, monkeypatch):
    server.key = "secret"
    monkeypatch.setitem(os.environ, "VLLM_API_KEY", "secret")
    assert served_model(server.url, VERSIONS).name == "base"
    server.close()
    field, why, do = refused(lambda: served_model(server.url, VERSIONS))
    assert field == "engine.url" and "no server answers at http://127.0.0.1:" in why and "refused" in why
    assert "vllm serve" in do


@pytest.mark.parametrize(
    ("words", "field", "reason", "fix"),
    [
        (
            "LoRA rank 4 is greater than max_lora_rank 2.",
            "model.adapter.rank",
            "has room for adapters of rank 2 at most",
            "--max-lora-rank",
        ),
        ("LoRA is not enabled.", "engine.url", "started without adapters", "--enable-lora"),
        ("No adapter found for /x", "engine.url", "does not see /", "run.folder"),
        ("unexpected modules", "engine.url", "does not load the adapter: unexpected modules", "log"),
    ],
)
def test_an_adapter_that_it_does_not_load_is_told_at_the_start(server, made, words, field, reason, fix):
    server.refuses = words
    told = refused(made)
    assert told[0] == field and reason in told[1] and fix in told[2]


def test_another_model_and_log_probabilities_of_another_temperature_are_told_at_the_start(server, made, tmp_path):
    field, why, fix = refused(lambda: made(seed=1))
    assert field == "engine.url" and "serves another model" in why and "is right" in why and "--dtype float32" in fix
    assert server.adapters == {} and not (tmp_path / "adapters").exists()
    made(processed=True).close()
    server.processed = False
    field, why, fix = refused(lambda: made(processed=True))
    assert field == "engine.url" and "temperature 1" in why and "processed_logprobs" in fix
