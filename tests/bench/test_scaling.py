"""A recipe on several numbers of devices: what runs wrote down becomes rows, and what is not at hand is predicted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from running import written
from stretto.api.recipes import open_recipe
from stretto.bench import scaling_page
from stretto.bench.scaling import LOST, ScalingRequest, scaling
from stretto.bench.scaling_sizes import part_of, usual_sizes
from stretto.bench.scaling_sizes import written as cluster_text
from stretto.cli.main import main
from stretto.errors import RecipeError, StrettoError
from stretto.placement.cluster import parse_cluster

SECONDS = {"1xcpu1": 4.0, "2xcpu": 2.5}
"""Cluster -> seconds of its usual step."""


def pretend(recipe, changes, folder):
    """A run that took as long as is written above; its first step takes longer, as first steps do."""
    told = dict(change.split("=", 1) for change in changes)
    step, several = SECONDS[told["placement.cluster"]], "2x" in told["placement.cluster"]
    folder.mkdir()
    rows = [{"step": 0, "eval/accuracy": 0.2, "seconds/evaluate": 1.0}]
    for number in (1, 2, 3):
        seconds = {"seconds/step": step * (3 if number == 1 else 1), "seconds/publish": 0.4 if several else 0.2}
        seconds |= {"seconds/reduce": 0.1} if several else {}
        rows.append({"step": number, "idle": 0.2 if several else 0.0, "tokens/generated": 100.0, **seconds})
    rows[2] |= {"eval/accuracy": 0.9, "seconds/evaluate": 0.5}
    rows[3] |= {"eval/accuracy": 0.8, "seconds/evaluate": 0.5}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    predicted = {"seconds": {"step": step * 2}}
    plan = {"strategy": "flatten", "measured": {"memory_gb": {"localhost/cpu:0": 0.5}}, "predicted": predicted}
    (folder / "plan.json").write_text(json.dumps(plan))


def wish(folder, cluster="2xcpu", **changes):
    path = written(folder)
    recipe = open_recipe(path, ["placement.price_per_gpu_hour=3600", "batch.prompts=8"], deep=False)
    return ScalingRequest(recipe=recipe, path=Path(path), root=folder, cluster=cluster, **changes)


@pytest.fixture
def document(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.bench.scaling.not_at_hand", lambda cluster: None)
    return scaling(wish(tmp_path, ahead=(4,)), note=len, train=pretend, look=lambda: 0.0)


def test_every_size_has_its_speed_its_accuracy_and_its_price(document):
    one, two, _ = document["rows"]
    assert (one["case"], one["stretto"], one["ratio"], one["efficiency"]) == ("1 x cpu", 4.0, 1.0, 1.0)
    assert (two["stretto"], two["peer"], two["ratio"]) == (2.5, 4.0, pytest.approx(1.6))
    assert two["efficiency"] == pytest.approx(0.8)
    assert two["accuracy"] == {"best": 0.9, "final": 0.8}
    assert (two["utilization"], two["memory_gb"]) == (0.8, {"localhost/cpu:0": 0.5})
    assert two["predicted"] == {"step": 5.0, "ratio": pytest.approx(1.6)}
    assert two["run_seconds"] == pytest.approx(2.5 * 5 + 2.0)
    assert two["cost"] == pytest.approx(2 * two["run_seconds"])


def test_what_is_lost_adds_up_to_what_the_step_takes_beyond_its_share(document):
    one, two, _ = document["rows"]
    assert tuple(two["lost"]) == LOST
    step, evaluation = 2.5 - 4.0 / 2, (2.0 - 2.0 / 2) / 3
    assert sum(two["lost"].values()) == pytest.approx(step + evaluation)
    assert two["lost"]["reduction"] == pytest.approx(0.1)
    assert two["lost"]["publish"] == pytest.approx(0.4 - 0.1 - 0.2 / 2)
    assert two["lost"]["imbalance"] == pytest.approx(0.2 * 2.5)
    assert all(seconds == pytest.approx(0.0) for seconds in one["lost"].values())


def test_sizes_that_are_not_at_hand_are_predicted_and_say_so(document):
    four = document["rows"][-1]
    assert (four["case"], four["devices"], four["measured"], four["accuracy"]) == ("4 x cpu", 4, False, None)
    assert four["ratio"] >= 1
    assert four["efficiency"] == pytest.approx(four["ratio"] / 4)
    assert four["peer_name"] == "1 x cpu, predicted"
    low, high = four["predicted"]["interval"]
    assert low < four["run_seconds"] < high


def test_a_size_that_fails_costs_no_other_its_row(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.bench.scaling.not_at_hand", lambda cluster: None)

    def fails_alone(recipe, changes, folder):
        if "placement.cluster=1xcpu1" in changes:
            raise StrettoError("bench: separate has no effect\n  on one device")
        pretend(recipe, changes, folder)

    # Two devices at least, for the planner as well: with less it says nothing, and what it says of four stands alone.
    asked = wish(tmp_path, changes=("placement.strategy=separate",), ahead=(4,))
    placement = asked.recipe.placement.model_copy(update={"strategy": "separate"})
    asked = replace(asked, recipe=asked.recipe.model_copy(update={"placement": placement}))
    told = []
    document = scaling(asked, note=told.append, train=fails_alone, look=lambda: 0.0)
    measured, _ = document["rows"]
    assert (measured["devices"], measured["measured"], measured["ratio"]) == (2, True, 1.0)
    assert document["rows"][1]["peer_name"] == "2 x cpu, predicted"
    assert document["failed"] == {"1 x cpu": "bench: separate has no effect on one device"}
    assert scaling_page.failures(document) == ["1 x cpu failed: bench: separate has no effect on one device"]
    assert "- 1 x cpu failed" in scaling_page.section(document, date="2026-01-01", command="stretto bench scaling")
    assert all(
        show(document) for show in (scaling_page.table, scaling_page.picture, lambda it: [*scaling_page.bars(it)])
    )
    with pytest.raises(StrettoError, match="no effect"):
        scaling(replace(asked, sizes=(1,), ahead=()), note=told.append, train=fails_alone, look=lambda: 0.0)


def test_people_get_a_table_bars_and_a_picture(document):
    table = scaling_page.table(document)
    assert "4 x cpu (predicted)" in table[-1]
    assert "0.90 best, 0.80 final" in table[2]
    (lost,) = scaling_page.losses(document)
    assert lost.startswith("2 x cpu loses 0.83 s a step: work ")
    one, two, four, _ = scaling_page.bars(document)
    assert (one.count("#"), four.count("#")) == (10, 0)
    assert "/" in four and two.endswith("1.60")
    picture = scaling_page.picture(document)
    assert all(f">{name}</text>" in picture for name in ("ideal", "measured", "predicted"))
    page = scaling_page.section(document, date="2026-01-01", command="stretto bench scaling")
    assert "| 2 x cpu | flatten | 2.5 |" in page


def test_a_size_beyond_the_machine_is_predicted_with_a_reason(tmp_path):
    told = []
    document = scaling(wish(tmp_path, "64x8xH100", sizes=(512,)), note=told.append, train=pretend, look=lambda: 0.0)
    assert [row["measured"] for row in document["rows"]] == [False]
    assert told == ["512 devices are only predicted: 64 hosts need a Ray cluster (RAY_ADDRESS)"]


def test_sizes_are_powers_of_two_and_all():
    assert usual_sizes(1) == (1,)
    assert usual_sizes(6) == (1, 2, 4, 6)
    assert usual_sizes(8) == (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("cluster", "size", "text"),
    [
        ("2xcpu", 1, "1xcpu1"),
        ("8xH100", 4, "4xH100"),
        ("2x8xH100", 12, "1x8xH100+1x4xH100"),
        ("8xH100", 24, "1x8xH100+1x8xH100+1x8xH100"),
        ("1xcpu+1xcpu2", 2, "1xcpu+1xcpu2"),
        ("4xH800+4xH20", 6, "1x4xH800+1x2xH20"),
    ],
)
def test_a_part_of_a_cluster_is_written_as_a_recipe_has_it(cluster, size, text):
    part = part_of(parse_cluster(cluster), size)
    assert cluster_text(part) == text
    read = parse_cluster(text)
    assert len(part) == len(read) == size
    assert list(part.devices) == list(read.devices)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"sizes": (3,)}, "--size"), ({"ahead": (9,), "cluster": "4xH800+4xH20"}, "--ahead")],
)
def test_sizes_that_cannot_be_are_refused(tmp_path, changes, field):
    with pytest.raises(RecipeError) as error:
        scaling(wish(tmp_path, **changes), note=len, train=pretend, look=lambda: 0.0)
    assert [problem.field for problem in error.value.problems] == [field]


def test_a_recipe_of_shapes_is_predicted_from_the_first_size_that_has_room_for_it(capsys):
    study = str(Path(__file__).parents[2] / "recipes" / "studies" / "ppo-four-models.yaml")
    sizes = ["--size", "1", "--size", "8", "--size", "16"]
    assert main(["bench", "scaling", study, "--cluster", "4x8xA100-80", *sizes, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["devices"], row["measured"]) for row in document["rows"]] == [(8, False), (16, False)]
    assert [row["peer_name"] for row in document["rows"]] == ["8 x A100, predicted"] * 2
    assert list(document["failed"]) == ["1 x A100"]
    assert "nothing runs on 1 devices" in document["failed"]["1 x A100"]


def test_the_command_needs_a_recipe_a_cluster_and_no_cells_by_hand(tmp_path, capsys):
    path = str(written(tmp_path))
    cells = "placement.cells=[{role: generate, devices: [localhost/cpu:0]}, {role: train, devices: [localhost/cpu:1]}]"
    assert main(["bench", "scaling", path, cells, "placement.cluster=2xcpu", "--cluster", "2xcpu"]) == 2
    assert "fix: add placement.cells=null" in capsys.readouterr().err
    assert main(["bench", "scaling", path]) == 2
    assert "--cluster" in capsys.readouterr().err
    assert main(["bench", "rollout", "--cluster", "2xcpu"]) == 2
    assert "scaling RECIPE" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_recipe_really_runs_on_one_and_on_two_devices(tmp_path, capsys):
    path = str(written(tmp_path, run__steps=3, placement__strategy="flatten"))
    picture = tmp_path / "speed.svg"
    assert main(["bench", "scaling", path, "--cluster", "2xcpu", "--ahead", "4", "--plot", str(picture), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["devices"], row["measured"]) for row in document["rows"]] == [(1, True), (2, True), (4, False)]
    assert document["rows"][1]["lost"]["reduction"] > 0
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("busy", "seconds", "doubted"),
    [
        ([0.0, 0.1, 0.2, 0.0], 2.5, []),
        ([0.0, 1.4, 0.0, 0.0], 2.5, ["1 x cpu: other programs keep 1.4 of"]),
        ([0.0, 0.0, 0.9, 0.0], 2.5, ["2 x cpu: other programs keep 0.9 of"]),
        ([0.0] * 4, 1.74, ["2 x cpu: an efficiency of 115% is more than all devices have"]),
        ([2.0] * 4, 11.0, ["1 x cpu: other", "2 x cpu: other"]),
    ],
)
def test_a_busy_machine_makes_figures_doubtful(tmp_path, monkeypatch, busy, seconds, doubted):
    monkeypatch.setattr("stretto.bench.scaling.not_at_hand", lambda cluster: None)
    monkeypatch.setitem(SECONDS, "2xcpu", seconds)
    told, looks = [], iter(busy)
    document = scaling(wish(tmp_path), note=told.append, train=pretend, look=lambda: next(looks))
    assert [line[: len(start)] for line, start in zip(document["doubts"], doubted, strict=True)] == doubted
    assert all(line in told and line in scaling_page.failures(document) for line in document["doubts"])
    assert all(line in scaling_page.section(document, date="today", command="bench") for line in document["doubts"])
