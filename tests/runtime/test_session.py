"""A run folder holds everything that is documented, in that form, and its models load elsewhere."""

import gc
import json
import math
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rounding import rounding
from running import END, ONE, USER, ZERO, Quiet, lines, metrics, recipe_in, resume, scripted, start, tensors
from stretto.algorithms.base import build
from stretto.algorithms.kl import k3
from stretto.errors import EngineError, GuardError
from stretto.models.load import load
from stretto.models.source import ModelFiles
from stretto.recipe.load import load_recipe
from stretto.recipe.schema import AlgorithmSection, Optimizer
from stretto.runtime import inputs, session
from stretto.runtime.endings import summary
from stretto.storage.digests import LARGE
from stretto.training.optimizer import MasterAdamW
from stretto.training.trainer import Trainer
from stretto.types import Conversation

LORA = {"kind": "lora", "rank": 2, "alpha": 8.0}
ALWAYS = {
    "step", "reward/mean", "reward/std", "reward/outcome", "reward/part/accuracy", "loss", "grad_norm", "clip/share",
    "correction/share", "entropy", "kl/engine_trainer", "ess", "length/mean", "length/truncated", "groups/used",
    "groups/dead", "groups/infra", "tokens/generated", "tokens/trained", "tokens/shared", "seconds/step",
    "seconds/generate", "seconds/reward", "seconds/train", "seconds/publish", "idle", "memory/peak_gb",
    "weights/version", "learning_rate",
}  # fmt: skip
"""What every line of metrics.jsonl after a step holds."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of full fine-tuning, with TensorBoard, a pull to the reference and pass@k."""
    folder = tmp_path_factory.mktemp("run")
    changes = {"algorithm__kl": {"coef": 0.01}, "evaluate__pass_k": 3, "log": ["tensorboard"], "run__steps": 4}
    return start(folder, **changes)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A finished run that trains an adapter at another temperature."""
    changes = {"model__adapter": LORA, "engine__temperature": 0.7, "optimizer__lr": 0.05, "run__steps": 4}
    return start(tmp_path_factory.mktemp("adapted"), **changes)


def test_the_recipe_is_kept_resolved_and_loads_back(run, tmp_path):
    text = (run.folder / "recipe.yaml").read_text()
    assert text.startswith("# root: /")
    recipe = load_recipe(run.folder / "recipe.yaml")
    assert recipe.algorithm.clip == (0.2, 0.2)
    again, root = session.load_run_recipe(run.folder)
    assert again == recipe
    assert root.is_dir()


def test_the_plan_says_which_role_is_where(run):
    plan = json.loads((run.folder / "plan.json").read_text())
    assert plan["strategy"] == "flatten"
    assert {cell["role"] for cell in plan["cells"]} >= {"generate", "train", "reference"}
    assert {"name", "role", "devices", "mesh", "weights"} <= set(plan["cells"][0])


def test_what_was_expected_stands_beside_what_was_measured(run):
    plan, rows = json.loads((run.folder / "plan.json").read_text()), lines(run.folder / "metrics.jsonl")[1:]
    for told in (plan["predicted"], plan["measured"]):
        assert told["seconds"].keys() >= {"step", "generate", "reference", "train", "publish"}
        assert all(peak > 0 for peak in told["memory_gb"].values())
    assert plan["predicted"]["memory_gb"].keys() == plan["measured"]["memory_gb"].keys()
    assert plan["measured"]["steps"] == len(rows)
    assert plan["measured"]["seconds"]["step"] == pytest.approx(np.median([row["seconds/step"] for row in rows]))


def test_every_line_of_metrics_has_every_key(run):
    first, *rows = lines(run.folder / "metrics.jsonl")
    passes = {f"eval/pass_at_{k}{over}" for k in (1, 2, 3) for over in ("", "_n")}
    evaluated = {
        "eval/reward",
        "eval/reward/part/accuracy",
        "eval/accuracy",
        "eval/low",
        "eval/high",
        "eval/n",
        "eval/asked",
        "seconds/evaluate",
    }
    assert first.keys() == {"step"} | evaluated | passes
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row.keys() >= ALWAYS | {"kl/reference", "seconds/reference"}
        assert ("eval/accuracy" in row) == (row["step"] % 2 == 0)
        assert all(value is None or math.isfinite(value) for value in row.values())
        assert row["weights/version"] == row["step"]
        assert 0 <= row["idle"] <= 1
        assert row["seconds/step"] >= row["seconds/generate"] > 0
        assert 0 <= row["entropy"] <= math.log(8) + rounding(torch.float32, 8)


def test_metrics_follow_from_the_samples(run):
    for row in lines(run.folder / "metrics.jsonl")[1:]:
        rows = lines(run.folder / "samples" / f"step-{row['step']:06d}.jsonl")
        assert len(rows) == 12
        rewards = [each["reward"]["value"] for each in rows]
        lengths = [sum(each["conversations"][0]["trained"]) for each in rows]
        assert row["reward/mean"] == pytest.approx(np.mean(rewards))
        assert row["reward/std"] == pytest.approx(np.std(rewards))
        assert row["length/mean"] == pytest.approx(np.mean(lengths))
        assert row["tokens/generated"] == row["tokens/trained"] == sum(lengths)
        assert row["length/truncated"] == np.mean([each["conversations"][0]["stop"] == "length" for each in rows])
        groups = {}
        for each in rows:
            groups.setdefault(each["prompt"], []).append(each["reward"]["value"])
        assert row["groups/dead"] == sum(len(set(values)) == 1 for values in groups.values())


def test_every_row_of_samples_has_the_documented_form(run):
    for step in range(1, 5):
        for row in lines(run.folder / "samples" / f"step-{step:06d}.jsonl"):
            wanted = {"step", "prompt", "visit", "attempt", "environment", "messages", "conversations", "reward"}
            assert row.keys() >= wanted | {"failure", "used"}
            assert (row["step"], row["failure"], row["used"]) == (step, None, True)
            assert row["reward"].keys() == {"value", "outcome", "parts"}
            (conversation,) = row["conversations"]
            wanted = {"tokens", "trained", "logprobs", "advantages", "stop", "version", "parent", "text"}
            assert conversation.keys() == wanted | {"widths", "trainer_logprobs"}
            assert sum(conversation["widths"]) == len(conversation["text"])
            assert conversation["trainer_logprobs"] == pytest.approx(conversation["logprobs"], abs=1e-4)
            assert conversation["version"] == step - 1
            tokens, trained = conversation["tokens"], conversation["trained"]
            assert len(tokens) == len(trained) == len(conversation["logprobs"]) == len(conversation["advantages"])
            assert tokens[0] == USER
            assert conversation["text"].startswith(f"<|user|>{row['messages'][0]['content']}<|assistant|>")
            advantages = {a for a, t in zip(conversation["advantages"], trained, strict=True) if t}
            assert len(advantages) == 1


def test_the_timeline_is_a_trace_of_every_stage(run):
    trace = json.loads((run.folder / "timeline.json").read_text())
    events = trace["traceEvents"]
    stages = {(event["name"], event["args"]["step"]) for event in events if event["ph"] == "X"}
    steps = range(1, 5)
    assert stages >= {
        (name, step) for name in ("generate", "reward", "reference", "train", "publish") for step in steps
    }
    assert stages >= {("evaluate", step) for step in (0, 2, 4)} | {("checkpoint", step) for step in steps}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_events_say_what_happened(run):
    kinds = [(event["kind"], event["step"]) for event in lines(run.folder / "events.jsonl")]
    saved, asked = (lambda step: ("checkpoint", step)), (lambda step: ("evaluated", step))
    # A checkpoint is said once it is on the disk, which may be after what the next step says.
    assert kinds[0] == ("started", 0) and [kind for kind in kinds if kind[0] == "evaluated"] == [*map(asked, (0, 2, 4))]
    assert [kind for kind in kinds[1:] if kind[0] == "checkpoint"] == [*map(saved, (1, 2, 3, 4))] and len(kinds) == 8


def test_tensorboard_has_a_file(run):
    assert list((run.folder / "tensorboard").glob("events.out.tfevents.*"))


def test_a_finished_run_says_what_it_achieved(run):
    assert run.model == run.folder / "checkpoints" / "step-000004"
    assert [step for step, _ in run.evaluations] == [0, 2, 4]
    text = "\n".join(summary(run))
    assert "held-out accuracy" in text
    assert str(run.model) in text


def test_a_checkpoint_is_a_model_that_transformers_loads(run):
    model = AutoModelForCausalLM.from_pretrained(run.model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "01="}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.encode(text) == [USER, ZERO, ONE, 7, 2]
    held = tensors(run.model)
    mine = {name: tensor for (file, name), tensor in held.items() if file == "model.safetensors"}
    state = model.state_dict()
    assert mine.keys() <= state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in mine.items())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own
def test_an_adapter_is_one_that_peft_loads_on_the_base_it_names(adapted):
    named = json.loads((adapted.model / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = AutoModelForCausalLM.from_pretrained(named)
    model = PeftModel.from_pretrained(base, adapted.model)
    assert sum("lora_B" in name and weight.abs().sum() > 0 for name, weight in model.named_parameters()) == 7


def policy_after(run, step, recipe):
    """The policy as a checkpoint holds it."""
    files = ModelFiles(kind="scratch", name="scratch", folder=None, file=None)
    base = run.folder / "base" if recipe.model.adapter else run.folder / "checkpoints" / f"step-{step:06d}"
    policy = load(recipe.model, files, seed=recipe.seed, device=torch.device("cpu"), base=base)
    if recipe.model.adapter:
        held = tensors(run.folder / "checkpoints" / f"step-{step:06d}")
        with torch.no_grad():
            for name, weight in policy.trained().items():
                plain = f"base_model.model.{name.replace('.default', '')}"
                weight.copy_(held["adapter_model.safetensors", plain])
    return policy


@pytest.mark.parametrize("name", ["run", "adapted"])
def test_what_the_engine_sampled_is_what_the_trainer_computes_from_the_checkpoint_before(request, name):
    run = request.getfixturevalue(name)
    recipe = load_recipe(run.folder / "recipe.yaml")
    for step in (2, 4):
        policy = policy_after(run, step - 1, recipe)
        optimizer = MasterAdamW(policy.trained(), Optimizer(lr=0.0), updates=1)
        trainer = Trainer(
            policy,
            build(AlgorithmSection(name="rloo", clip=(0.2, 0.2))),
            optimizer,
            token_budget=64,
            temperature=recipe.engine.temperature,
            clip=None,
            checkpointing=False,
        )
        rows = [
            conversation_of(row["conversations"][0]) for row in lines(run.folder / "samples" / f"step-{step:06d}.jsonl")
        ]
        scores = np.concatenate(trainer.score(rows))
        engine = np.concatenate([row.logprobs[row.trained] for row in rows])
        np.testing.assert_allclose(engine, scores, rtol=0, atol=1e-4)
        assert k3(scores, engine).mean() <= 1e-6


def conversation_of(row):
    return Conversation(
        tokens=np.array(row["tokens"]),
        trained=np.array(row["trained"], dtype=bool),
        logprobs=np.array(row["logprobs"]),
        stop=row["stop"],
        version=row["version"],
    )


@pytest.mark.parametrize("lr", [0.0, 0.05])
@pytest.mark.parametrize("updates", [1, 2])
def test_engine_and_trainer_agree_in_every_line(tmp_path, lr, updates):
    folder = start(tmp_path, optimizer__lr=lr, batch__updates=updates, checkpoint__every=100).folder
    rows = metrics(folder)[1:]
    assert len(rows) == 3
    for row in rows:
        assert 0 <= row["kl/engine_trainer"] <= 1e-6
        assert row["engine_trainer/largest"] <= 1e-4
        assert row["ess"] == pytest.approx(1, abs=1e-4)
        assert row["correction/share"] == 0
    moved = tensors(folder / "checkpoints" / "step-000003")
    base = tensors(folder / "base")
    weights = [(tensor, moved["model.safetensors", name]) for (_, name), tensor in base.items()]
    assert all(torch.equal(*pair) for pair in weights) == (lr == 0.0)


def test_an_automatic_folder_is_numbered_and_named_after_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = recipe_in(tmp_path, run__steps=1, model__adapter=LORA)
    for number in (1, 2):
        quiet = Quiet()
        finished = session.start(recipe, name="tiny", root=tmp_path, progress=quiet)
        assert str(finished.folder) == f"runs/tiny-{number:03d}"
        assert f"run folder runs/tiny-{number:03d}" in quiet.notes()
        named = json.loads((finished.model / "adapter_config.json").read_text())["base_model_name_or_path"]
        assert named == str(tmp_path / finished.folder / "base"), "a relative path would depend on where one stands"


WANDERS = """import os
from stretto import Outcome

async def play(prompt, model):
    os.chdir("{place}")
    reply = await model.chat(list(prompt.messages))
    return Outcome(answer=reply["content"])
"""


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("again", [False, True], ids=["train", "resume"])
@pytest.mark.parametrize("how", ["callback", "environment", "relative run.folder"])
def test_run_keeps_its_folder_when_the_working_directory_changes(run, tmp_path, monkeypatch, how, again):
    """Another directory holds a finished run of the same name, which stays as it is."""
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    folder = "mine/r" if how == "relative run.folder" else "auto"
    name = "mine/r" if how == "relative run.folder" else "runs/r-001"
    shutil.copytree(run.folder, other / name)
    before = contents(other)
    monkeypatch.chdir(here)
    changes = {"run__steps": 4, "run__folder": folder, "checkpoint__keep": 2}
    if how == "environment":
        (here / "wanders.py").write_text(WANDERS.replace("{place}", str(other)))
        changes["environment__kind"] = "wanders:play"
    quiet = Quiet(lambda name, *values: os.chdir(other) if name == "step" and how != "environment" else None)
    finished = session.start(recipe_in(here, **changes), name="r", root=here, progress=quiet)
    if again:
        monkeypatch.chdir(here)
        more = {"changes": ["run.steps=6"], "allow": ["run.steps"]}
        finished = session.resume(Path(name), progress=quiet, **more)
    assert contents(other) == before
    assert finished.folder == here / name and finished.model.is_dir(), "a relative path would lead elsewhere by now"
    assert [row["step"] for row in metrics(here / name)] == list(range(0, 7 if again else 5))
    kept = sorted(path.name for path in (here / name / "checkpoints").iterdir())
    assert len(kept) >= 2 and kept[-1] == ("step-000006" if again else "step-000004")
    assert {path.parts[0] for path in map(Path, contents(here))} & {"runs", "mine"} == {name.split("/")[0]}


def test_large_file_is_remembered_where_the_run_began(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/config.json").write_text("{}")
    with (tmp_path / "here/model.safetensors").open("wb") as file:
        file.truncate(LARGE)
    recipe = recipe_in(tmp_path / "here")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name": "."})})
    go, read = threading.Event(), inputs.InputsRecorder._read_large
    monkeypatch.setattr(inputs.InputsRecorder, "_read_large", lambda self: go.wait() and read(self))
    with inputs.InputsRecorder(tmp_path / "here/run", recipe, tmp_path / "here"):
        monkeypatch.chdir(tmp_path / "there")
        go.set()
    assert (tmp_path / "here/.stretto/digests.json").is_file()
    assert contents(tmp_path / "there") == {}


def test_what_was_found_in_the_working_directory_is_found_from_any_other(run, tmp_path, monkeypatch):
    begun, elsewhere, beside = (tmp_path / name for name in ("begun", "elsewhere", "beside"))
    for folder in (begun, elsewhere, beside):
        folder.mkdir()
    shutil.copytree(run.folder / "base", begun / "model")
    rows = [{"question": f"{one}+{one}=", "answer": str(2 * one)} for one in range(8)]
    (begun / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"kind": "jsonl", "path": "sums.jsonl", "columns": {"prompt": "question", "answer": "answer"}}
    changes = {
        "model": {"name": "model"},
        "task": {"source": source, "holdout": {"prompts": 0}},
        "evaluate": {"every": 0},
    }
    monkeypatch.chdir(begun)
    recipe = recipe_in(beside, run__steps=1, run__folder="run", **changes)
    finished = session.start(recipe, name="tiny", root=beside, progress=Quiet())
    monkeypatch.chdir(elsewhere)
    again = resume(begun / finished.folder, changes=["run.steps=2"], allow=["run.steps"])
    assert len(metrics(again.folder)) == 2


def test_the_same_recipe_is_the_same_run_and_another_seed_another(tmp_path):
    def course(**changes):
        return metrics(start(tmp_path, run__steps=2, **changes).folder)

    first = course()
    assert course() == first
    assert course(seed=6) != first


@pytest.fixture
def nothing_frozen():
    """Python's collector as a program has it by default."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_scripted_engine_can_play_the_model(tmp_path, nothing_frozen):
    def copies(request):
        return [*request.tokens[1:-2], END]

    frozen = []
    guards = {"min_disk_gb": 0, "max_k3": None}
    run = start(
        tmp_path,
        at=lambda name, *values: frozen.append(gc.get_freeze_count()) if name == "step" else None,
        engine=scripted(copies), guards=guards, run__steps=1,
    )  # fmt: skip
    # The collector does not walk through what is loaded while steps are made, and does so again afterwards.
    assert frozen[0] > 100_000 and gc.get_freeze_count() == 0
    first, row = metrics(run.folder)
    assert (first["eval/accuracy"], row["reward/mean"], row["groups/dead"], row["grad_norm"]) == (1, 1, 3, 0)
    assert run.evaluations[0][1].interval[1] == pytest.approx(1)


def test_a_disk_without_room_stops_a_run_before_it_makes_anything(tmp_path):
    with pytest.raises(GuardError, match=r"GB free, less than guards\.min_disk_gb"):
        start(tmp_path, guards__min_disk_gb=1e9)
    assert not list(tmp_path.glob("run*"))


@pytest.mark.parametrize("folder", ["mine", "auto"])
def test_a_run_that_cannot_be_loaded_leaves_no_folder_in_the_way_of_the_next_try(tmp_path, monkeypatch, folder):
    def fails(policy):
        raise EngineError("no engine")

    monkeypatch.chdir(tmp_path)
    recipe = recipe_in(tmp_path, run__folder=folder, run__steps=1, log=["tensorboard"])
    with pytest.raises(EngineError):
        session.start(recipe, name="tiny", root=tmp_path, progress=Quiet(), make_engine=fails)
    assert not list(tmp_path.glob("mine*")) + list(tmp_path.glob("runs/*"))
    finished = session.start(recipe, name="tiny", root=tmp_path, progress=Quiet())
    assert finished.folder == Path("mine" if folder == "mine" else "runs/tiny-001")


def test_a_run_that_cannot_be_loaded_keeps_a_folder_with_anything_else_in_it(tmp_path):
    def fails(policy):
        (run,) = tmp_path.glob("run*")
        (run / "notes.txt").touch()
        raise EngineError("no engine")

    with pytest.raises(EngineError):
        start(tmp_path, engine=fails)
    assert [path.name for path in tmp_path.glob("run*")] == ["run0"]


def test_a_resume_that_cannot_be_loaded_keeps_its_folder(tmp_path):
    def fails(policy):
        raise EngineError("no engine")

    folder = start(tmp_path, run__steps=1, evaluate__every=0).folder
    for path in (folder / "checkpoints", folder / "samples"):
        shutil.rmtree(path)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(EngineError):
        resume(folder, engine=fails)
    assert (folder / "recipe.yaml").exists()
