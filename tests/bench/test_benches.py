"""The benches with our side on a tiny model, and small peers behind the same seam; each job runs in this process."""

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.algorithms.base import build
from stretto.bench import ours, run
from stretto.bench.cases import BenchCase, answer_lengths
from stretto.bench.compare import equal_replay, equal_work
from stretto.bench.jobs import JobResult
from stretto.bench.peer_generate import Forcing
from stretto.bench.peer_generate import rollout as generate_rollout
from stretto.bench.prepare import prepare, read_prompts
from stretto.bench.run import BenchRequest, measure, require
from stretto.cli.main import main
from stretto.engines.base import Completion
from stretto.engines.native.engine import NativeEngine
from stretto.environments.render import Renderer
from stretto.errors import RecipeError, StrettoError
from stretto.models.load import load
from stretto.models.source import locate
from stretto.rewards.answer import numeric, overlong
from stretto.runtime import precision
from stretto.types import Group, Outcome, Reward, Trajectory
from tiny import CPU, conversation, naive_step


def peer_step(job):
    """A peer that does the work of the case in twice our time, the less memory the smaller its batch."""
    tokens = int(answer_lengths(job.case).sum())
    if job.batch == 1:
        raise StrettoError("batch 1 is too small for this peer")
    seconds = {2: 200.0, 4: 100.0}[job.batch]
    stages = {"generate": 1.0, "train": seconds - 1.0}
    return JobResult(
        name=f"peer, batch {job.batch}",
        seconds=(seconds,),
        stages=stages,
        generated=tokens,
        trained=tokens,
        memory=job.batch << 40,
    )


def peer_replay(job):
    """Our algorithm on the same tokens, without packing, chunks, hooks or accumulators."""
    folder, recipe = Path(job.folder), ours.recipe_of(job)
    policy = load(recipe.model, locate(job.model, folder), seed=recipe.seed, device=CPU)
    renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens)
    answers = json.loads((folder / "replay.json").read_text())
    groups = [judged(asked, answers[asked.prompt.id], renderer) for asked in read_prompts(job)[0]]
    algorithm = build(recipe.algorithm)
    samples = [sample for group in groups for sample in algorithm.advantage([group], {})]
    loss, gradients = naive_step(policy, algorithm, samples)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    reward = float(np.mean([reward.value for group in groups for reward in group.rewards]))
    return JobResult(facts={"replay": {"reward": reward, "loss": loss, "grad_norm": norm}})


def judged(asked, answers, renderer):
    """A group of recorded answers with their rewards."""
    start = len(asked.tokens)
    talks = [conversation([*asked.tokens, *said], range(start, start + len(said))) for said in answers]
    values = [
        numeric(renderer.text(said), asked.prompt.reference, "first") + overlong(len(said), longest=64, buffer=64)
        for said in answers
    ]
    trajectories = tuple(
        Trajectory(prompt=asked.prompt, visit=0, attempt=n, conversations=(talk,), outcome=Outcome(answer=""))
        for n, talk in enumerate(talks)
    )
    rewards = tuple(Reward(value=value, outcome=value, parts={}) for value in values)
    return Group(prompt=asked.prompt, trajectories=trajectories, rewards=rewards)


SIDES = {
    "prepare": prepare,
    "stretto step": ours.step,
    "stretto rollout": ours.rollout,
    "generate rollout": generate_rollout,
    "trl step": peer_step,
    "trl replay": peer_replay,
}


def here(job):
    """Does a job in this process."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    measured = SIDES[job.side](job)
    return replace(measured, memory=measured.memory or 1 << 40)


def wish(bench, **changes):
    usual = {"model": "scratch", "prompts": 2, "samples": 2, "batches": (1, 2, 4), "threads": 1}
    return BenchRequest(bench=bench, **(usual | changes))


@pytest.fixture(scope="module")
def stepped():
    """The document of a bench, and what was told meanwhile."""
    told = []
    return measure(wish("step", cases=("full-43-fp32",)), note=told.append, run=here), told


def test_a_step_is_compared_with_the_fastest_and_the_leanest_peer(stepped):
    document, _ = stepped
    assert document["bench"] == "step"
    time, memory = document["rows"]
    assert (time["peer_name"], time["unit"], time["peer"]) == ("peer, batch 4", "s/step", 100.0)
    assert time["ratio"] == pytest.approx(100 / time["stretto"])
    assert (memory["peer_name"], memory["unit"], memory["peer"]) == ("peer, batch 2", "GB at the peak", 2048.0)
    assert memory["ratio"] == pytest.approx(2.0)


def test_a_peer_that_fails_at_a_batch_is_left_out_and_named(stepped):
    document, told = stepped
    assert document["rows"][0]["failed"] == {"batch 1": "batch 1 is too small for this peer"}
    assert any("too small" in text for text in told)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["prompt-43", "prompt-43-fp32"])
def test_a_bench_says_where_bfloat16_is_slow(case, monkeypatch):
    monkeypatch.setattr(precision, "times_slower", lambda: 9.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = []
    measure(wish("rollout", cases=(case,)), note=told.append, run=here)
    assert any("9 times" in text for text in told) == (case == "prompt-43")


def test_replaying_our_tokens_gives_what_a_plain_implementation_makes_of_them(stepped):
    replay = stepped[0]["rows"][0]["replay"]
    assert replay["grad_norm"]["stretto"] > 1e-3
    for name in ("reward", "grad_norm"):
        assert replay[name]["stretto"] == pytest.approx(replay[name]["peer"], rel=1e-4)
    assert replay["loss"]["stretto"] == pytest.approx(replay["loss"]["peer"], abs=1e-6)


def test_beside_a_time_stand_its_tokens_and_its_arithmetic(stepped):
    row = stepped[0]["rows"][0]
    tokens = int(answer_lengths(BenchCase(name="x", prompt=1, prompts=2, samples=2)).sum())
    assert row["tokens_generated"] == row["tokens_trained"] == {"stretto": tokens, "peer": tokens}
    assert row["flops"]["unshared"] > row["flops"]["shared"] > 0
    speed = row["flops"]["unshared"] / 100.0 / 1e9
    assert row["gflops_per_second"]["peer"] == pytest.approx(speed)
    assert row["share_of_matmul_rate"]["peer"] == pytest.approx(speed / row["matmul_gflops_per_second"])


def test_beside_memory_stand_the_same_work_and_the_speed_of_the_leanest(stepped):
    time, memory = stepped[0]["rows"]
    for name in ("tokens_generated", "tokens_trained", "flops", "matmul_gflops_per_second"):
        assert memory[name] == time[name]
    assert memory["gflops_per_second"]["peer"] == pytest.approx(memory["flops"]["unshared"] / 200.0 / 1e9)


def test_an_adapter_starts_the_same_on_both_sides():
    row = measure(wish("step", cases=("lora-43-fp32",), batches=(4,)), note=len, run=with_saved_adapter)["rows"][0]
    assert row["trained_weights"] == "adapter"
    assert row["replay"]["grad_norm"]["stretto"] == pytest.approx(row["replay"]["grad_norm"]["peer"], rel=1e-4)


def with_saved_adapter(job):
    """As `here`; the peer's adapter must be the file that was prepared for it."""
    measured = here(job)
    if job.side == "trl replay":
        from safetensors.torch import load_file

        section = ours.recipe_of(job).model
        fresh = load(section, locate(job.model, Path(job.folder)), seed=0, device=CPU).trained()
        saved = load_file(Path(job.folder) / "adapter" / "adapter_model.safetensors")
        plain = {name.removeprefix("base_model.model."): tensor for name, tensor in saved.items()}
        assert len(plain) == len(fresh)
        assert all(torch.equal(plain[name.replace(".default", "")], weight) for name, weight in fresh.items())
    return measured


def test_a_rollout_is_compared_with_generate_on_equal_lengths():
    document = measure(wish("rollout", cases=("prompt-43-fp32",)), note=len, run=here)
    (row,) = document["rows"]
    assert row["unit"] == "tokens/s"
    assert row["peer_name"].startswith("Hugging Face generate")
    assert row["ratio"] == pytest.approx(row["stretto"] / row["peer"])
    assert row["tokens_generated"]["stretto"] == row["tokens_generated"]["peer"]
    assert row["divergences_per_1000_tokens"] == 0, "in fp32 the batch changes no token"
    assert row["draft_divergences_per_1000_tokens"] == 0, "in fp32 drafts change no token"


@pytest.mark.slow
def test_the_rate_of_drafts_is_that_of_the_batch_without_them(monkeypatch):
    class Other(NativeEngine):
        """Says something else where it does not speculate."""

        def step(self, budget_seconds):
            done = super().step(budget_seconds)
            return done if self.speculate else [replace(each, tokens=each.tokens + 1) for each in done]

    monkeypatch.setattr(ours, "NativeEngine", Other)
    (row,) = measure(wish("rollout", cases=("prompt-43-fp32",)), note=len, run=here)["rows"]
    assert row["draft_divergences_per_1000_tokens"] == 1000
    assert row["divergences_per_1000_tokens"] == 0


def test_sides_that_did_other_work_are_not_compared():
    with pytest.raises(StrettoError, match="not equal"):
        equal_work(JobResult(generated=10, trained=10), JobResult(name="peer", generated=9, trained=9))


def replay_of(**values):
    """What a side made of the tokens that both get."""
    return JobResult(name="TRL", facts={"replay": {"reward": 0.5, "loss": 0.0, "grad_norm": 2.0} | values})


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("float32", {"grad_norm": 2.001}), ("bfloat16", {"grad_norm": 2.05}), ("bfloat16", {"reward": 0.5 + 1e-7})],
)
def test_what_rounding_makes_of_the_same_tokens_is_compared(dtype, values):
    replay = equal_replay(replay_of(), replay_of(**values), dtype)
    assert {name: sides["peer"] for name, sides in replay.items()} == replay_of(**values).facts["replay"]


@pytest.mark.parametrize(
    ("dtype", "values", "told"),
    [
        ("float32", {"grad_norm": 2.01}, "grad_norm is 2 for stretto and 2.01 for TRL"),
        ("bfloat16", {"grad_norm": 1.9}, "grad_norm is 2 for stretto and 1.9 for TRL"),
        ("float32", {"grad_norm": math.nan}, "grad_norm is 2 for stretto and nan for TRL"),
        ("bfloat16", {"reward": 0.51}, "reward is 0.5 for stretto and 0.51 for TRL"),
        ("bfloat16", {"loss": 0.1}, "loss is 0 for stretto and 0.1 for TRL"),
    ],
)
def test_sides_that_make_other_numbers_of_the_same_tokens_are_not_compared(dtype, values, told):
    with pytest.raises(StrettoError, match=told):
        equal_replay(replay_of(), replay_of(**values), dtype)


def test_a_bench_whose_gradients_are_not_the_peers_has_no_ratio(monkeypatch):
    def wrong(job):
        facts = peer_replay(job).facts["replay"]
        return JobResult(name="TRL", facts={"replay": facts | {"grad_norm": 2 * facts["grad_norm"]}})

    monkeypatch.setitem(SIDES, "trl replay", wrong)
    with pytest.raises(StrettoError, match="the same tokens gave other numbers in float32: grad_norm is"):
        measure(wish("step", cases=("full-43-fp32",), batches=(4,)), note=len, run=here)


def test_a_divergence_ends_the_comparison_of_an_answer():
    def answer(*tokens):
        return Completion(key=0, tokens=np.array(tokens), logprobs=np.zeros(3), stop="length", version=0)

    pairs = [(answer(1, 2, 3), answer(1, 2, 3)), (answer(1, 2, 3), answer(9, 2, 9))]
    assert ours.divergences(*zip(*pairs, strict=True)) == 1000 * 1 / (3 + 1)


def test_forced_answers_end_where_they_must_and_nowhere_else():
    forcing = Forcing([1, 3], prompt=2, ends=[0, 5])
    for sampled, allowed in ((0, ({0}, {1, 2, 3, 4})), (1, (None, {1, 2, 3, 4})), (2, (None, {0}))):
        scores = forcing(torch.zeros(2, 2 + sampled, dtype=torch.long), torch.zeros(2, 6))
        for row, possible in zip(scores, allowed, strict=True):
            assert possible is None or set(torch.isfinite(row).nonzero()[:, 0].tolist()) == possible


@pytest.mark.parametrize(
    ("bench", "changes", "field"),
    [
        ("publish", {}, "--prompts"),
        ("publish", {"prompts": None}, "--samples"),
        ("publish", {"prompts": None, "samples": None, "turns": 3}, "--turns"),
        ("steps", {}, "bench"),
        ("step", {"cases": ("full-1",)}, "--case"),
        ("step", {"steps": 50}, "--steps"),
        ("step", {"batches": (3,)}, "--peer-batch"),
        ("step", {"batches": ()}, "--peer-batch"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused_before_anything_starts(bench, changes, field):
    with pytest.raises(RecipeError) as error:
        measure(wish(bench, **changes), note=len, run=None)
    assert error.value.problems[0].field == field


def test_a_missing_peer_is_named_with_the_command_that_installs_it():
    require(("json",))
    with pytest.raises(RecipeError, match="no_such_peer") as error:
        require(("no_such_peer",))
    fix = error.value.problems[0].fix
    assert fix.startswith("pip install ")
    assert "'trl<" in fix
    assert "ray" not in fix


@pytest.fixture
def at_home(monkeypatch):
    """Makes the command do its jobs in this process."""
    monkeypatch.setattr(run, "measure", partial(measure, run=here))


COMMAND = ["bench", "rollout", "--model", "scratch", "--prompts", "1", "--samples", "2", "--threads", "1"]


@pytest.mark.slow
def test_the_command_prints_one_document_and_writes_the_page(at_home, tmp_path, capsys):
    page = tmp_path / "page.md"
    assert main([*COMMAND, "--json", "--write", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document.keys() == {"bench", "machine", "rows"}
    assert document["machine"]["threads"] == 1
    for row in document["rows"]:
        assert {"case", "unit", "stretto", "peer", "peer_name", "ratio"} <= row.keys()
    assert "| prompt-43 | tokens/s |" in page.read_text()


def test_the_command_shows_a_line_for_each_row_and_its_progress_beside_it(at_home, capsys):
    assert main(COMMAND) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("prompt-43 ")
    assert "stretto rollout" in captured.err


FIGURE = {"case": "full-43", "unit": "s/step", "stretto": 5.0, "peer": 30.0, "peer_name": "P", "ratio": 6.0}
WORK = {
    "tokens_generated": {"stretto": 1828, "peer": 1828},
    "tokens_trained": {"stretto": 1828, "peer": 1828},
    "flops": {"unshared": 4.34e12, "shared": 2.12e12},
}
SPEED = {
    "gflops_per_second": {"stretto": 147.0, "peer": 57.0},
    "matmul_gflops_per_second": 412.0,
    "share_of_matmul_rate": {"stretto": 0.36, "peer": 0.14},
}
RATES = {"divergences_per_1000_tokens": 24.7, "draft_divergences_per_1000_tokens": 3.1}


@pytest.mark.parametrize(
    ("row", "beside"),
    [
        ({}, []),
        (WORK, ["1,828 tokens generated, 1,828 tokens trained, 4.34 TFLOP unshared, 2.12 TFLOP shared"]),
        (SPEED, ["stretto 147 GFLOP/s (36%), peer 57 GFLOP/s (14%), matmul rate 412 GFLOP/s"]),
        (RATES, ["divergences per 1,000 tokens 24.7 alone and 3.1 without drafts"]),
    ],
)
def test_below_a_figure_stands_what_its_row_has_of_work_and_speed(row, beside, monkeypatch, capsys):
    document = {"bench": "step", "machine": {}, "rows": [FIGURE | row]}
    monkeypatch.setattr(run, "measure", lambda wish, note: document)
    assert main(["bench", "step"]) == 0
    figure, *lines = capsys.readouterr().out.splitlines()
    assert figure == "full-43          6.00x  5 against 30 s/step  (P)"
    assert lines == [f"    {line}" for line in beside]


def test_a_failure_is_a_document_too(capsys):
    assert main(["bench", "nothing", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert (document["bench"], document["rows"]) == (None, None)
