"""A server of the user's: what is asked of it, proved of it, and said where it cannot be used. It is a fake."""

import gc
import os
import socket
import threading
import time

import numpy as np
import pytest
import torch

from fake_server import FakeServer, FakeSglang
from stretto.engines.apart import EngineDeadlines
from stretto.engines.base import Request
from stretto.engines.request_rows import row_of
from stretto.engines.served.engine import ServedEngine
from stretto.engines.served.http_calls import HttpReply
from stretto.engines.served.sglang_api import SglangApi
from stretto.engines.served.transport import ServerTransport
from stretto.engines.served.vllm_api import VllmApi
from stretto.errors import DeadlineError, EngineDiedError, EngineError, RecipeError, WeightsError
from stretto.recipe.schema import Adapter
from stretto.types import Weights
from tiny import scratch_policy

ADAPTER = Adapter(rank=4, alpha=12.0)
SIZES = {"dtype": "float32", "width": 32, "adapter": ADAPTER}
VERSIONS = ("0.32",)


def api_of(server, url=None):
    """How it is asked."""
    url = url or server.url
    return SglangApi(url) if isinstance(server, FakeSglang) else VllmApi(url, versions=VERSIONS)


@pytest.fixture(params=[FakeServer, FakeSglang])
def server(request):
    """A server that is as it should be."""
    found = request.param(**SIZES)
    yield found
    found.close()


@pytest.fixture
def vllm():
    """One of vLLM."""
    found = FakeServer(**SIZES)
    yield found
    found.close()


@pytest.fixture
def sglang():
    """One of SGLang."""
    found = FakeSglang(**SIZES)
    yield found
    found.close()


@pytest.fixture
def made(server, tmp_path):
    """A function that makes an engine on a policy with the server's base."""
    engines = []

    def make(*, processed=False, **changes):
        policy, room = scratch_policy(**SIZES | changes), tmp_path / "adapters"
        room.mkdir()
        patience = EngineDeadlines(start=1.0, generate=9.0, publish=9.0, first=1.0)
        engine = ServedEngine(
            policy, api_of(server), room=room, processed=processed, context=server.context, deadlines=patience
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()
    gc.collect()  # a connection that was left open is told here, not by whatever test comes later


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
    name = engine.called
    assert name.startswith("policy-v2-") and list(server.adapters) == [name]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == [name]
    engine.close()
    assert server.adapters == {} and len(server.unloaded) == 3 and not (tmp_path / "adapters").exists()


def test_what_vllm_is_asked(vllm):
    body = api_of(vllm).question(row_of(request(2**64 - 1)), adapter="policy-v1")
    assert body["model"] == body["cache_salt"] == "policy-v1" and body["stream"]
    params = body["sampling_params"]
    assert params["seed"] == 2**63 - 1 and params["stop_token_ids"] == [0]
    assert params["ignore_eos"] and params["logprobs"] == 0


def test_what_sglang_is_asked(sglang):
    api = api_of(sglang)
    api.facts()
    body = api.question(row_of(request(2**64 - 1, longest=999)), adapter="policy-v1")
    assert body["lora_path"] == body["extra_key"] == "policy-v1" and body["return_logprob"] and body["stream"]
    params = body["sampling_params"]
    assert params["sampling_seed"] == 2**63 - 1 and params["stop_token_ids"] == [0] and not params["ignore_eos"]
    assert params["max_new_tokens"] == sglang.context - 3  # it refuses what might not fit
    assert (params["top_p"], params["top_k"], params["repetition_penalty"]) == (1.0, -1, 1.0)  # whatever it prefers
    assert "lora_path" not in api.probe([1, 2], model="base", adapter="", more=1, temperature=1.0)


@pytest.mark.parametrize("incremental", [False, True])
def test_what_sglang_tells_again_is_taken_once(sglang, tmp_path, incremental):
    sglang.incremental = incremental
    api = api_of(sglang)
    first = {"output_ids": [5, 6], "meta_info": meta_of(2, [-1.0, -2.0])}
    then = {"output_ids": [7], "meta_info": meta_of(3, [-3.0])}
    if not incremental:
        then = {"output_ids": [5, 6, 7], "meta_info": meta_of(3, [-1.0, -2.0, -3.0])}
    end = {**then, "meta_info": {**then["meta_info"], "finish_reason": {"type": "stop", "matched": 7}}}
    body = api.question({**row_of(request()), "stop": [7]}, adapter="policy-v1")
    assert list(api.pieces(first, body, 0)) == [([5, 6], [-1.0, -2.0], None)]
    assert list(api.pieces(end, body, 2)) == [([7], [-3.0], "stop")]
    assert list(api.pieces(end, body, 3)) == [((), (), "stop")]
    body["sampling_params"]["stop_token_ids"] = [8]
    with pytest.raises(EngineError, match="ended an answer at token 7, which ends none for the trainer's model"):
        list(api.pieces(end, body, 2))


def meta_of(count, logprobs):
    """What SGLang says beside tokens."""
    rows = [[each, 0, None] for each in logprobs]
    return {"completion_tokens": count, "output_token_logprobs": rows, "finish_reason": None}


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
    with pytest.raises(EngineError, match=r"engine\.url: a conversation of 3 .* whose context is 8\n") as caught:
        answered(engine, 1)
    assert api_of(server).context_option in str(caught.value)


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


def test_an_adapter_that_the_server_has_loaded_too_late_does_not_stay_there(server, made):
    engine, late = made(), threading.Event()
    server.takes = lambda name, tensors: late.wait(20) and tensors
    with pytest.raises(DeadlineError, match="adapter has not answered"):
        engine.process.call("adapter", 0.2, name="policy-v1", folder=str(engine.room / engine.called))
    late.set()
    while "policy-v1" not in server.adapters:
        time.sleep(0.01)
    engine.close()
    assert server.adapters == {}


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


VLLM = [
    ({"version": {"version": "0.31.2"}}, "is vLLM 0.31.2, and 0.32 is supported", "of that version"),
    ({"version": "sglang"}, "is no server of vLLM", "engine.kind: sglang"),
    ({"updating": False}, "loads no adapters while it runs", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ({"scales_out": False}, "takes no token ids (Scale-out endpoints are disabled.)", "--enable-scale-out"),
    ({"models": []}, "serves no model", "vllm serve"),
    ({"key": "secret"}, "asks for a key (Unauthorized)", "VLLM_API_KEY"),
]
OF_IT = {"version": "0.5.23", "enable_lora": True}
SGLANG = [
    ({"version": {**OF_IT, "version": "0.4.10"}}, "is SGLang 0.4.10, and 0.5 is supported", "of that version"),
    ({"version": {"detail": "Not Found"}}, "is no server of SGLang", "engine.kind: vllm"),
    ({"version": {**OF_IT, "enable_lora": None}}, "was started without adapters", "--enable-lora"),
    ({"version": {**OF_IT, "dp_size": 2}}, "has 2 copies of the model", "--tp-size"),
    ({"models": []}, "serves no model", "sglang.launch_server"),
    ({"get": lambda path: (200, OF_IT | {"data": None})}, "serves no model", "sglang.launch_server"),
    ({"key": "secret"}, "asks for a key (Unauthorized)", "SGLANG_API_KEY"),
]


@pytest.mark.parametrize(
    ("server", "changes", "reason", "fix"),
    [(kind, *case) for kind, cases in ((FakeServer, VLLM), (FakeSglang, SGLANG)) for case in cases],
    indirect=["server"],
)
def test_a_server_that_cannot_be_used_is_told_before_a_run(server, changes, reason, fix):
    version = server.version["version"]
    assert api_of(server, f"{server.url}/v1").facts() == (version, "/models/base", "/models/base", 256)
    vars(server).update(changes)
    field, why, do = refused(api_of(server).facts)
    assert field == "engine.url" and reason in why and fix in do


def test_a_server_that_is_not_there_is_told_and_a_key_of_the_environment_is_sent(server, monkeypatch):
    server.key = "secret"
    variable = f"{api_of(server).kind.upper()}_API_KEY"
    monkeypatch.setitem(os.environ, variable, "secret\n")  # as files of secrets end
    assert api_of(server).facts().name == "/models/base"
    monkeypatch.setitem(os.environ, variable, "hid\nden")
    field, why, do = refused(lambda: api_of(server))
    assert variable in why and "HTTP does not send" in why and "den" not in f"{why} {do}"
    monkeypatch.setitem(os.environ, variable, "secret")
    server.close()
    field, why, do = refused(api_of(server).facts)
    assert field == "engine.url" and "no server answers at http://127.0.0.1:" in why and "refused" in why
    assert api_of(server).start in do


def test_a_server_that_takes_no_connection_is_one_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        place = full.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(place)
        transport = ServerTransport(VllmApi(f"http://127.0.0.1:{place[1]}", versions=VERSIONS))
        with pytest.raises(EngineDiedError, match="does not answer: it takes no connection"):
            transport.call("version", 0.2)
        for each in waiting:
            each.close()


ROOM = "LoRA adapter policy-v1 with rank 4 is incompatible with the current LoRA memory pool configuration."


@pytest.mark.parametrize("told", [None, [], "fine", {}, {"prompt_logprobs": None, "meta_info": None}])
def test_an_answer_of_another_form_is_told_as_one(server, monkeypatch, told):
    transport = ServerTransport(api_of(server))
    monkeypatch.setattr(transport.http, "ask", lambda *asked, **more: HttpReply(200, told))
    with pytest.raises(EngineError, match=r"does not answer score as .*\n    fix: name the server itself"):
        transport.call("score", 1.0, tokens=[1, 2], adapted=False, more=0, temperature=1.0)
    with pytest.raises(EngineError, match="any more"):
        transport.call("version", 1.0)


WORDS = [
    (FakeServer, "LoRA rank 4 is greater than max_lora_rank 2.", "model.adapter.rank", "rank 2 at most", "--max-lora"),
    (FakeServer, "LoRA is not enabled.", "engine.url", "started without adapters", "--enable-lora"),
    (FakeServer, "No adapter found for /x", "engine.url", "does not see /", "run.folder"),
    (FakeServer, "unexpected modules", "engine.url", "does not load the adapter: unexpected modules", "log"),
    (FakeSglang, ROOM, "model.adapter.rank", "has no room for the adapter", "--lora-target-modules all"),
    (FakeSglang, "Repo id must be in the form 'name': 'FOLDER'", "engine.url", "does not see /", "run.folder"),
    (FakeSglang, "unexpected modules", "engine.url", "does not load the adapter: unexpected modules", "log"),
]


@pytest.mark.parametrize(("server", "words", "field", "reason", "fix"), WORDS, indirect=["server"])
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
    assert field == "engine.url" and "temperature 1" in why and fix == api_of(server).at_temperature
