"""The benches of several cells on a tiny model, with workers in threads of this process."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stretto.bench import cells, run
from stretto.bench.cases import STRATEGIES, answer_lengths
from stretto.bench.compare import BenchSettings
from stretto.bench.forced_lengths import ForcedLengthsEngine, ForcedLengthsWorker
from stretto.bench.page import section
from stretto.bench.prepare import prepare
from stretto.bench.run import BenchRequest, measure
from stretto.bench.spread import PRECISE, agreement
from stretto.cli.main import main
from stretto.engines.base import Request
from stretto.errors import RecipeError, StrettoError
from stretto.models.load import load
from stretto.models.source import locate
from stretto.recipe.schema import ModelSection
from stretto.workers.launchers.inprocess import ThreadLauncher
from tiny import CPU

FEW = {"model": "scratch", "prompts": 2, "samples": 2}


def threads(devices):
    return ThreadLauncher(ForcedLengthsWorker)


SIDES = {
    "prepare": prepare,
    **{
        side: partial(what, launch=threads)
        for side, what in {
            "plans in turn": cells.in_turn,
            "plans alone": cells.alone,
            "plans agree": cells.agree,
            "cells in turn": cells.cells_in_turn,
        }.items()
    },
}


def here(job):
    """Does a job in this process."""
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    return SIDES[job.side](job)


def settings(folder, run=here):
    """Those of a bench whose jobs `run` does."""
    usual = {"threads": 1, "steps": 1, "turns": 1, "batches": (), "note": len}
    return BenchSettings(model="scratch", folder=folder, run=run, **usual)


@pytest.fixture(autouse=True, scope="module")
def short_answers():
    """Answers of these cases are long enough to be waited for, which a test need not do."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("strategies", "scaling"):
            bench = run.BENCHES[name]
            cases = tuple(replace(case, median=5, cap=8) for case in bench.cases)
            patch.setitem(run.BENCHES, name, replace(bench, cases=cases))
        yield


@pytest.fixture(scope="module")
def strategies():
    told = []
    return measure(BenchRequest(bench="strategies", cases=("models-43",), **FEW), note=told.append, run=here), told


def few(name):
    """A case of strategies with few answers."""
    case = next(case for case in run.BENCHES["strategies"].cases if case.name == name)
    return replace(case, prompts=FEW["prompts"], samples=FEW["samples"])


@pytest.fixture(scope="module")
def scaling():
    return measure(BenchRequest(bench="scaling", **FEW, steps=2), note=len, run=here)


@pytest.mark.slow
def test_every_strategy_stands_beside_flatten(strategies):
    document, told = strategies
    rows = document["rows"][:-1]
    assert [row["strategy"] for row in rows] == ["flatten", "interleave", "separate", "elastic"]
    for row in rows:
        assert (row["unit"], row["peer_name"]) == ("s/step", "flatten")
        assert len(row["seconds"]) == 1
        assert 0 <= row["idle"] < 1
        assert set(row["memory_gb"]) == {"localhost/cpu:0", "localhost/cpu:1"}
        assert row["started"] > 0
        assert {"seconds/reference", "seconds/reward"} <= row["stages"].keys()
    assert rows[0]["ratio"] == 1.0
    assert rows[3]["gain"] == pytest.approx(1 - 1 / rows[3]["ratio"])
    assert 0 <= rows[3]["bound"] < 1
    assert document["machine"]["threads"] == 2
    assert any("plans alone separate" in text for text in told)


@pytest.mark.slow
def test_strategies_come_to_one_gradient_from_the_same_answers_and_draw_the_same(strategies):
    agreement = strategies[0]["rows"][-1]
    assert len(agreement["differences"]) == 3
    assert agreement["stretto"] == max(agreement["differences"].values()) < PRECISE
    assert agreement["ratio"] > 1
    assert agreement["answers"] == 4
    assert set(agreement["other_answers"].values()) == {0}


def test_an_agreement_that_runs_out_of_memory_costs_the_table_nothing(tmp_path):
    def run(job):
        if job.side == "plans agree":
            raise StrettoError("out of memory " * 40)
        return here(job)

    row = agreement(settings(tmp_path, run), few("models-43"), ("flatten", "elastic"))
    machine = dict.fromkeys(("cpu", "threads", "cores", "memory_gb", "load", "torch", "transformers", "trl"), "1")
    text = section({"machine": machine, "rows": [row]}, date="today", command="bench")
    assert "| models-43 fp32 | relative difference of gradients | - | - | - |" in text
    assert "models-43 fp32, left out: out of memory out" in text
    assert max(map(len, text.splitlines())) < 300


@pytest.mark.slow
def test_four_models_of_unequal_size_take_the_same_step_wherever_they_lie(tmp_path):
    """Plans whose stages flow whiten gradients, the others credit; critic and reward model have sizes of their own."""
    document = measure(BenchRequest(bench="strategies", cases=("four-unequal",), **FEW), note=len, run=here)
    rows = document["rows"]
    assert [row["strategy"] for row in rows] == ["flatten", "interleave I1", "interleave I2", "separate", "elastic"]
    assert all(
        {"seconds/value", "seconds/fit", "seconds/reward", "seconds/reference"} <= row["stages"].keys() for row in rows
    )
    same = agreement(settings(tmp_path), few("four-unequal"), tuple(row["strategy"] for row in rows))
    assert len(same["differences"]) == 4
    assert same["stretto"] == max(same["differences"].values()) < PRECISE
    assert set(same["other_answers"].values()) == {0}
    for row in rows:
        assert row["expected"]["memory_gb"].keys() == row["memory_gb"].keys()
    text = section(document, date="today", command="bench")
    assert "| four-unequal interleave I2 | " in text
    assert "planned, measured" in text


@pytest.mark.slow
def test_two_cells_stand_beside_one_and_beside_two_that_exchange_nothing(scaling):
    weak, strong, *_, agreement = scaling["rows"]
    times = weak["seconds"]
    assert set(times) == {"one", "apart", "flatten weak", "flatten strong", "elastic weak", "elastic strong"}
    assert {len(taken) for taken in times.values()} == {2}
    assert weak["stretto"] == pytest.approx(np.median(np.divide(times["one"], times["flatten weak"])))
    assert weak["peer"] == pytest.approx(np.median(np.divide(times["one"], times["apart"])))
    assert strong["peer_name"] == "one cell"
    assert strong["ratio"] == pytest.approx(np.median(np.divide(times["one"], times["flatten strong"])))
    assert agreement["stretto"] < PRECISE
    assert agreement["rewards"]["one"] == pytest.approx(agreement["rewards"]["flatten"])
    assert len(agreement["rewards"]["elastic"]) == 2


def test_plans_take_turns_and_none_always_comes_first():
    assert [cells.turned(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_lengths_of_cases_of_several_cells_have_a_long_tail():
    lengths = answer_lengths(STRATEGIES[0])
    assert lengths.shape == (8, 8)
    assert lengths.max() > 5 * np.median(lengths)
    assert lengths.max() <= 256


def test_an_engine_that_is_told_answers_says_them_shortest_first_and_goes_on_where_another_stopped():
    policy = load(ModelSection(name="scratch", adapter=None), locate("scratch", Path()), seed=0, device=CPU)
    engine = ForcedLengthsEngine(policy)
    said = {key: (np.arange(size), np.full(size, -0.5)) for key, size in ((1, 5), (2, 3), (3, 4))}
    engine.tell({}, said)
    context = {"tokens": np.array([1, 2]), "max_new_tokens": 9, "stop": frozenset(), "temperature": 1.0}
    engine.submit([Request(key=1, **context), Request(key=2, begun=1, **context), Request(key=3, **context)])
    (first,) = engine.step(1.0)
    assert (first.key, first.tokens.tolist(), first.stop) == (2, [1, 2], "length")
    (gone,) = engine.abort([1])
    assert (gone.key, len(gone.tokens), gone.stop) == (1, 0, "abort")
    assert [completion.key for completion in engine.step(1.0)] == [3]
    assert engine.step(1.0) == []


def test_an_engine_that_is_told_lengths_samples_exactly_so_many():
    policy = load(ModelSection(name="scratch", adapter=None), locate("scratch", Path()), seed=0, device=CPU)
    engine = ForcedLengthsEngine(policy)
    engine.tell({7: 6}, {})
    engine.submit(
        [Request(key=7, tokens=np.array([1, 2]), max_new_tokens=99, stop=frozenset(range(9)), temperature=1.0, begun=2)]
    )
    (completion,) = engine.step(10.0)
    assert len(completion.tokens) == 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"threads": 2}, "--threads"),
        ({"steps": 30}, "--steps"),
        ({"turns": 2}, "--turns"),
        ({"cases": ("plain-1",)}, "--case"),
    ],
)
def test_a_wish_that_cannot_be_met_is_refused(changes, field):
    with pytest.raises(RecipeError) as error:
        measure(BenchRequest(bench="scaling", **(FEW | changes)), note=len, run=None)
    assert error.value.problems[0].field == field


@pytest.mark.slow
def test_the_command_leaves_out_interleave_without_a_reference_and_writes_a_page(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "measure", partial(measure, run=here))
    page = tmp_path / "page.md"
    command = ["bench", "strategies", "--model", "scratch", "--prompts", "2", "--samples", "2", "--json"]
    assert main([*command, "--write", str(page)]) == 0
    cases = [row["case"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert cases == ["plain-43 flatten", "plain-43 separate", "plain-43 elastic", "plain-43 fp32"]
    text = page.read_text()
    assert "| plain-43 elastic | s/step |" in text
    assert "| plain-43 fp32 | flatten, separate |" in text
    assert "GFLOP" not in text
