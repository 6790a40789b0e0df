"""TRL behind the seam of the benches, on a tiny model, where TRL is installed."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed; make install")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from stretto.bench import peer_trl

from stretto.bench import ours
from stretto.bench.cases import BenchCase, answer_lengths
from stretto.bench.jobs import Job
from stretto.bench.prepare import prepare
from stretto.bench.run import BenchRequest, measure
from stretto.planner.cost import families
from stretto.planner.cost.shapes import ModelShape

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "batch"), [(False, 2), (True, 4)], ids=["full", "lora"])
def test_trl_makes_of_our_tokens_what_we_make_of_them(adapter, batch, tmp_path):
    case = BenchCase(name="tiny", prompt=1, dtype="float32", adapter=adapter, prompts=2, samples=2)
    folder = tmp_path / "tiny"
    folder.mkdir()

    def job(**changes):
        model = str(tmp_path / "model-float32")
        return Job(**({"side": "", "case": case, "model": model, "folder": str(folder), "threads": 1} | changes))

    prepare(job(model="scratch"))
    mine, theirs = ours.step(job()).facts["replay"], peer_trl.replay(job(batch=batch)).facts["replay"]
    assert mine["grad_norm"] > 1e-3
    assert theirs["reward"] == pytest.approx(mine["reward"], rel=1e-5)
    assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-3)
    assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
    answers = json.loads(Path(folder, "replay.json").read_text())
    assert [list(map(len, said)) for said in answers.values()] == answer_lengths(case).tolist()


def test_trl_samples_as_many_tokens_as_it_is_told_to(tmp_path):
    case = BenchCase(name="tiny", prompt=1, dtype="bfloat16", prompts=2, samples=2)
    folder = tmp_path / "tiny"
    folder.mkdir()
    job = Job(side="", case=case, model="scratch", folder=str(folder), threads=1, batch=4)
    prepare(job)
    found = peer_trl.step(
        Job(side="", case=case, model=str(tmp_path / "model-bfloat16"), folder=str(folder), threads=1, batch=4)
    )
    assert found.generated == found.trained == answer_lengths(case).sum()
    assert len(found.seconds) == 1
    assert found.stages["generate"] + found.stages["train"] == pytest.approx(found.best)


TINY = ModelShape(
    name="qwen2-tiny", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, ffn=48, vocab=300, tied=True
)  # fmt: skip
SIDES = {"prepare": prepare, "stretto step": ours.step, "trl step": peer_trl.step, "trl replay": peer_trl.replay}


def here(job):
    """Does a job in this process."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    return replace(SIDES[job.side](job), memory=1 << 30)


@pytest.mark.slow
def test_a_step_of_random_weights_is_compared_with_trl(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, TINY.name, TINY)
    wish = BenchRequest(
        bench="step",
        model="",
        shape=TINY.name,
        cases=("full-43-fp32",),
        prompts=2,
        samples=2,
        turns=1,
        batches=(4,),
        threads=1,
    )
    time, memory = measure(wish, note=len, run=here)["rows"]
    assert time["model"] == memory["model"] == TINY.name
    assert time["peer_name"].startswith("TRL ")
    assert time["replay"]["grad_norm"]["stretto"] > 1e-3
    assert time["tokens_trained"]["stretto"] == time["tokens_trained"]["peer"] > 0
