"""The engine around vLLM's process: versions, proofs, deaths. The process is a fake that keeps what it is sent."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cut import policy_of
from fake_vllm import FakeHost
from stretto.checks.rules.vllm import ARGUMENTS
from stretto.engines.apart import EngineDeadlines
from stretto.engines.base import Request
from stretto.engines.native.cache import token_bytes
from stretto.engines.served.probe import own_logprobs
from stretto.engines.vllm.engine import VllmEngine, VllmSettings
from stretto.engines.vllm.engine_args import engine_args, refusal
from stretto.engines.vllm.published import base_sizes, base_tensors, equal, write_base
from stretto.engines.vllm.start_probe import refuse_other_results
from stretto.errors import EngineDiedError, EngineError, RecipeError, WeightsError
from stretto.models.lora import add_adapter
from stretto.recipe.schema import Adapter, VllmEngineSection
from stretto.types import Weights
from stretto.workers import vllm as workers
from stretto.workers.offload import release_caches
from stretto.workers.vllm import asked_share, refuse_layers, share_of
from tiny import scratch_policy

SETTINGS = VllmSettings(
    versions=("0.32",), dtype="bfloat16", context=64, cache_bytes=1 << 20, rank=4, device="cpu"
)  # fmt: skip
PATIENCE = EngineDeadlines(start=9.0, generate=9.0, publish=9.0, first=9.0)
ADAPTER = Adapter(rank=4, alpha=12.0)


def engine_of(*hosts, adapter=ADAPTER):
    """An engine on a tiny policy; each process that it starts is the next host."""
    policy, waiting = scratch_policy(dtype="bfloat16", adapter=adapter), list(hosts or [FakeHost()])
    return VllmEngine(policy, lambda: waiting.pop(0), name="vLLM", settings=SETTINGS, deadlines=PATIENCE)


def request(key=7, *, longest=2, begun=0, texts=()):
    return Request(
        key=key,
        tokens=np.full(3, 9),
        max_new_tokens=longest,
        stop=frozenset({0}),
        temperature=1.0,
        begun=begun,
        stop_texts=texts,
    )


def nudge(engine):
    """The smallest update there is: one number of one tensor, by one unit in its last place."""
    with torch.no_grad():
        weight = next(iter(engine.policy.trained().values())).view(torch.int16)
        weight.view(-1)[3] += 1


def published(engine, version):
    """An update, its publish, and the proof as a worker asks for it."""
    nudge(engine)
    engine.receive(Weights(version=version, manifest={}, where="shared"))
    return engine.checksums(engine.policy.trained())


def dies(*times):
    """A spoiler that lets the process die at these questions, each once."""
    left = list(times)

    def spoil(what, arguments, host):
        if what in left:
            left.remove(what)
            raise EngineDiedError("its process was ended by SIGKILL\n    | last words")

    return spoil


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """Files that pass tensors lie here, and none stays."""
    monkeypatch.setattr("stretto.engines.vllm.memory_folder.SHARED", tmp_path)


@pytest.mark.parametrize("adapter", [ADAPTER, None], ids=["adapter", "full"])
def test_each_version_has_a_name_of_its_own_and_is_proved(adapter, tmp_path):
    engine = engine_of(host := FakeHost(), adapter=adapter)
    assert set(engine.checksums(dict(engine.policy.network.named_parameters()))) >= engine.policy.trained().keys()
    for version in (1, 2):
        before = engine.checksums(engine.policy.trained())
        after = published(engine, version)
        assert len([name for name in before if before[name] != after[name]]) == 1
        assert (engine.holds().version, host.name) == (version, f"policy-v{version}")
    published(engine, 2)
    assert host.name == "policy-v2.4"
    assert ("load" in host.called, "adapter" in host.called) == (adapter is None, adapter is not None)
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_answers_come_with_tokens_logprobs_and_version():
    engine = engine_of()
    published(engine, 3)
    engine.submit([request(1), request(2, longest=3)])
    first, second = [engine.step(0.1)[:] or engine.step(0.1) for _ in range(2)]
    assert [(done.key, done.tokens.tolist(), done.stop, done.version) for done in [*first, *second]] == [
        (1, [9, 9], "length", 3),
        (2, [9, 9, 9], "length", 3),
    ]
    assert first[0].logprobs.tolist() == [-1.0, -1.0]
    assert engine.step(0.1) == []


def test_a_seed_follows_from_the_key_and_from_what_was_sampled_elsewhere():
    engine = engine_of(host := FakeHost())
    engine.submit([request(2**64 - 1), request(5), request(6, begun=2)])
    one, two, moved = (row["seed"] for row in host.asked.values())
    engine.abort([6])
    engine.submit([request(6)])
    assert one == 2**63 - 1 and two == 5 and moved != host.asked[6]["seed"] == 6 and 0 <= moved < 2**63


def test_a_text_ends_an_answer_also_where_it_began_elsewhere_or_where_the_process_dies_on_the_way():
    engine = engine_of(host := FakeHost(), FakeHost())
    text = engine.policy.tokenizer.decode([9]) * 3
    wanted = [request(1, longest=3, texts=("no", text)), request(2, longest=9, texts=(text,)), request(3, longest=9)]
    engine.submit([*wanted, request(4, longest=9, begun=2, texts=(text,))])
    (moved,) = engine.step(9.0)
    host.spoil = dies("step")
    whole, cut = engine.step(9.0)
    rest = engine.step(0.0)
    assert [(done.key, len(done.tokens), done.stop) for done in (moved, whole, cut)] == [
        (4, 1, "stop"),
        (1, 3, "stop"),
        (2, 3, "stop"),
    ]
    assert whole.logprobs.tolist() == [-1.0] * 3 and rest == [] and set(engine.asked) == {3} == engine.known


def test_a_conversation_that_the_cache_has_no_room_for_is_refused_and_never_cut_short():
    def full(what, arguments, host):
        if what == "step":
            return {"done": [host._answer(7, "length")], "grown": []}

    engine = engine_of(FakeHost(full))
    long = replace(request(longest=2), tokens=np.arange(64))
    with pytest.raises(EngineError, match=r"engine.memory_share: .* of 64 .* up to 2 .* has 64 (?s:.*)fix"):
        engine.submit([long])
    engine.submit([request(longest=99)])
    with pytest.raises(EngineError, match=r"engine.memory_share: .* of 3 .* up to 99 .* has 64 (?s:.*)1.6 times as"):
        engine.step(0.1)


def not_loaded(what, arguments, host):
    """The process says that it has loaded an adapter, and has not."""
    if what == "adapter" and arguments["number"] > 1:
        host.name = arguments["name"]
        return {}


def same_number(what, arguments, host):
    """New bytes under the number of the old ones."""
    if what == "adapter":
        arguments["number"] = 1


def same_name(what, arguments, host):
    """The old adapter, which is called by its old name."""
    if what == "adapter" and arguments["number"] > 1:
        return {}


def corrupted(what, arguments, host):
    """One bit of a bucket changes on its way."""
    if what == "load" and host.called.count("begin") > 1:
        with open(arguments["path"], "r+b") as bucket:
            bucket.seek(1)
            byte = bucket.read(1)
            bucket.seek(1)
            bucket.write(bytes([byte[0] ^ 1]))


def unread(what, arguments, host):
    """The process cannot say what it holds."""
    if what == "read" and host.called.count("begin") + host.called.count("adapter") > 1:
        return {"tables": [[]]}


@pytest.mark.parametrize(
    ("spoil", "adapter", "told"),
    [
        (not_loaded, ADAPTER, "was published"),
        (same_number, ADAPTER, "was published"),
        (same_name, ADAPTER, "samples from weights policy-v0, policy-v1 were published"),
        (corrupted, None, "2 of "),  # the embedding, which is the head too
        (unread, ADAPTER, "is nothing where "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_whatever_does_not_arrive_is_caught_at_the_same_publish(spoil, adapter, told):
    engine = engine_of(FakeHost(spoil), adapter=adapter)
    engine.checksums(engine.policy.trained())
    with pytest.raises(WeightsError, match=f"after step 1, .*{told}"):
        published(engine, 1)


def test_a_family_that_vllm_stores_under_other_names_is_the_recipes_problem():
    def renamed(what, arguments, host):
        if what == "read":
            arguments["names"] = [name for name in arguments["names"] if "up_proj" not in name]

    engine = engine_of(FakeHost(renamed))
    with pytest.raises(RecipeError, match=r"engine.kind: .*under other names, and has no .*up_proj(?s:.*)kind: native"):
        engine.checksums(())


@pytest.mark.parametrize("slept", [False, True])
def test_a_trainer_that_lacks_memory_neither_wakes_it_nor_lets_it_sleep_for_a_moment(slept):
    engine = engine_of(host := FakeHost())
    if slept:
        engine.sleep(keep=True)
    before = list(host.called)
    release_caches(engine)
    assert host.called == before and engine.slept == slept


@pytest.mark.parametrize("then", ["generate", "publish"])
def test_weights_that_did_not_survive_a_sleep_are_caught_before_anything_is_generated(then):
    def forgets(what, arguments, host):
        if what == "wake":
            host.tensors["model.layers.1.mlp.up_proj.weight"].zero_()

    engine = engine_of(host := FakeHost(forgets))
    engine.checksums(())
    engine.sleep(keep=True)
    engine.wake()
    with pytest.raises(WeightsError, match=r"1 of \d+ tensors of vLLM .* model.layers.1.mlp.up_proj.weight is"):
        published(engine, 1) if then == "publish" else (engine.submit([request()]), engine.step(0.1))
    assert "step" not in host.called


def test_an_answer_of_other_weights_is_refused():
    def lies(what, arguments, host):
        if what == "step":
            for row in host.asked.values():
                row["version"] = "policy-v1"

    engine = engine_of(FakeHost(lies))
    published(engine, 2)
    engine.submit([request(longest=1)])
    with pytest.raises(WeightsError, match="answered with weights policy-v1, and policy-v2 are what was published"):
        engine.step(0.1)


def test_a_publish_ends_what_is_under_way_so_that_no_answer_is_of_two_versions():
    engine = engine_of()
    engine.submit([request(1, longest=5), request(2, longest=5)])
    engine.checksums(())
    engine.step(0.1)
    published(engine, 4)
    (aborted,) = engine.abort([1, 99])
    (left,) = engine.step(0.1)
    assert [(done.key, done.tokens.tolist(), done.stop, done.version) for done in (aborted, left)] == [
        (1, [9], "abort", 0),
        (2, [9], "abort", 0),
    ]


@pytest.mark.parametrize("at", ["step", "submit", "abort", "adapter", "read", "version"])
def test_a_process_that_dies_is_started_again_with_the_weights_and_the_requests(at):
    first, second = FakeHost(), FakeHost()
    engine = engine_of(first, second)
    published(engine, 1)
    engine.submit([request(1), request(2)])
    first.spoil = dies(at)
    engine.submit([request(3)])
    gone = engine.abort([3])
    done = [*engine.step(0.1), *engine.step(0.1)]
    published(engine, 2)
    assert first.closed and second.name == "policy-v2"
    assert [len(each.tokens) for each in gone] == [0]
    assert sorted(each.key for each in done) == [1, 2] and {each.version for each in done} == {1}
    assert engine.holds().lost >= 0 and engine.lost == 0
    assert second.called.index("read") < second.called.index("submit") if "submit" in second.called else True


def test_three_deaths_in_a_row_end_the_run_with_the_last_lines():
    engine = engine_of(FakeHost(dies("step")), FakeHost(dies("read")), FakeHost(dies("step")))
    engine.checksums(())
    engine.submit([request()])
    with pytest.raises(EngineError, match=r"(?s)last words\n    it died 3 times in a row") as failed:
        engine.step(0.1)
    assert not isinstance(failed.value, EngineDiedError)


def test_an_answer_between_them_makes_deaths_no_row():
    def once(what, arguments, host):
        if what == "step" and host.called.count("step") == 2:
            raise EngineDiedError("it died")

    engine = engine_of(*(FakeHost(once) for _ in range(5)))
    for key in range(5):
        engine.submit([request(key, longest=1)])
        (done,) = engine.step(0.1)
        assert done.key == key


def test_a_slot_may_be_larger_than_its_adapter_and_is_empty_there():
    mine = torch.arange(1.0, 5).view(2, 2)
    slot = torch.zeros(4, 2)
    slot[:2] = mine
    assert equal([slot], mine) and equal([mine], mine)
    slot[3, 1] = 1
    assert not equal([slot], mine)
    assert not equal([mine[:1]], mine) and not equal([None], mine) and not equal([mine.bfloat16()], mine)
    assert equal([torch.tensor([1e-40])], torch.zeros(1)) and not equal([torch.tensor([1e-30])], torch.zeros(1))


@pytest.mark.parametrize("side", [0, 1])
def test_ranks_hold_a_tensor_together_each_all_of_it_or_its_part_with_neighbors_that_have_the_same(side):
    whole = torch.arange(12.0).view(3, 4) if side else torch.arange(12.0).view(4, 3)
    left, right = whole.chunk(2, side)
    assert equal([whole, whole], whole) and equal([left, right], whole) and equal([left, left, right, right], whole)
    nothing, most, rest = whole.narrow(side, 0, 0), whole.narrow(side, 0, 3), whole.narrow(side, 3, 1)
    assert equal([whole, nothing], whole) and equal([most, rest], whole), "few tokens are on the first ranks"
    for wrong in (
        [right, left], [left, left], [left, None], [left, right, left], [left], [whole, left], [left] * 4,
        [left, right, left, right], [most, most], [rest, most], [nothing, nothing], [left, right.flatten()],
    ):  # fmt: skip
        assert not equal(wrong, whole)


def test_what_vllm_says_is_told_at_the_key_that_it_is_about():
    said = {"arguments": {"max_num_seqs": 0}, "share": 0.5, "rank": 24, "targets": ["q_proj"]}
    said |= {"device": "cuda", "devices": 1}
    given = engine_args(dtype="bfloat16", context=64, cache_bytes=1, **said)
    assert (given["max_lora_rank"], given["max_num_seqs"], given["gpu_memory_utilization"]) == (32, 0, 0.5)
    ours = engine_args(dtype="bfloat16", context=64, cache_bytes=1, **{**said, "arguments": {}})
    assert not ARGUMENTS.keys() & ours.keys()
    for error, short, field in (
        (ValueError("max_num_seqs\n must be positive"), False, "engine.arguments.max_num_seqs"),
        (RuntimeError("CUDA out of memory"), True, "engine.memory_share"),
        (ValueError("1 validation error for CacheConfig"), False, "engine.arguments"),
        (ValueError("0.1 GiB KV cache is needed"), False, "engine.memory_share"),
        (NotImplementedError(), False, "engine.kind"),
    ):
        told = refusal(error, {"max_num_seqs": 0}, short=short)
        assert told.args[0] == field and not told.args[1].endswith(": ")


def test_a_mixture_in_few_bits_is_sent_by_the_names_of_its_files_and_as_wide_as_it_is_read(tmp_path):
    policy = policy_of("mixtral", "nf4")
    write_base(policy, tmp_path / "model", bucket=20_000)
    names = [name for path in (tmp_path / "model").glob("*.safetensors") for name in load_file(path)]
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    assert sorted(names) == sorted(dict(base_tensors(policy))) and "lora" not in " ".join(names)
    assert sum(base_sizes(policy)) == sum(tensor.nbytes for _, tensor in base_tensors(policy))
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64, experts_implementation="eager")
    tokens = list(range(5, 15))
    with torch.no_grad(), policy.without_adapter():
        said = read(torch.tensor([tokens])).logits.log_softmax(-1)[0, range(9), tokens[1:]]
        assert np.abs(own_logprobs(policy, tokens) - said.numpy()).max() < 1e-6  # norms in float32


@pytest.mark.parametrize(
    ("family", "targets", "device", "told"),
    [
        ("qwen3 moe", "all-linear", "cpu", "adapters on experts"),
        ("deepseek v3", "attention", "cuda", "another form of kv_b_proj"),
        ("deepseek v3", ("o_proj",), "cpu", "positions of latent attention"),
        ("deepseek v3", ("o_proj",), "cuda", None),
        ("qwen3 moe", "attention", "cpu", None),
    ],
)
def test_layers_that_vllm_computes_wrongly_and_adapters_that_it_leaves_out_are_refused(family, targets, device, told):
    policy = policy_of(family, None)
    policy.adapted = add_adapter(policy.network, Adapter(rank=2, alpha=4, targets=targets), seed=0)
    with pytest.raises(RecipeError, match=told) if told else nullcontext():
        refuse_layers(policy, torch.device(device))


def test_an_engine_that_computes_something_else_with_the_same_weights_is_refused_at_its_start():
    engine = engine_of()
    with pytest.raises(RecipeError, match=r"vLLM computes llama otherwise .*(?s:.*)engine\.kind: native"):
        refuse_other_results(engine)
    engine.close()


GB = 2**30


def test_vllm_asks_for_no_more_of_a_gpu_than_it_needs_and_than_is_free():
    assert share_of(20 * GB, free=79 * GB, total=80 * GB) == 0.25
    assert share_of(70 * GB, free=41 * GB, total=80 * GB) == 0.5
    assert asked_share(torch.device("cpu"), GB) is None


@pytest.mark.parametrize(
    ("free", "share", "told"),
    [(14, "auto", None), (14, 0.2, None), (14, 0.5, "use at most 0.33"), (4, "auto", "what remains is too little")],
)
def test_what_vllm_needs_for_its_weights_is_no_room_for_a_cache(free, share, told, monkeypatch):
    policy = scratch_policy(dtype="bfloat16")
    named = {"memory_of": 24 * GB, "free_memory": free * GB, "weight_bytes": 4 * GB}
    for name, size in named.items():
        monkeypatch.setattr(workers, name, lambda _, size=size: size)
    section = VllmEngineSection(max_new_tokens=8, memory_share=share)
    spec = SimpleNamespace(torch_device=torch.device("cuda", 0), lane=None)
    if told:
        with pytest.raises(RecipeError, match=f"vLLM's own weights take 4.0 GB(?s:.*){told}"):
            workers.settings_of(policy, section, spec)
        return
    size = workers.settings_of(policy, section, spec).cache_bytes
    assert size == 4 * GB if share == "auto" else size == int(0.2 * 24 * GB)


def test_the_context_is_what_whole_blocks_of_the_cache_hold_but_for_the_one_that_vllm_keeps(monkeypatch):
    policy = scratch_policy(dtype="bfloat16", context=4096)
    each = token_bytes(policy)
    for name, size in {"memory_of": 1_000_000 * each, "free_memory": 900_000 * each, "weight_bytes": 0}.items():
        monkeypatch.setattr(workers, name, lambda _, size=size: size)
    spec = SimpleNamespace(torch_device=torch.device("cpu"), lane=None)

    def found(tokens):
        section = VllmEngineSection(max_new_tokens=300, memory_share=tokens / 1_000_000)
        return workers.settings_of(policy, section, spec)

    assert found(3000).context == (3000 // 256 - 1) * 256 == 2560 and found(9000).context == 4096
    with pytest.raises(RecipeError, match=r"holds 900 tokens, too few .*of 300(?s:.*)at least 0\.0011"):
        found(900)
    assert found(1100).context == 768


def test_a_host_without_the_run_folder_has_a_log_for_each_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spec = SimpleNamespace(device="localhost/cpu:0", logs=tmp_path / "elsewhere")
    first, second = workers.log_of(spec), workers.log_of(spec)
    assert first != second and first.parent == second.parent == tmp_path
    spec.logs.mkdir()
    assert workers.log_of(spec) == spec.logs / "engine-localhost-cpu-0.log"
