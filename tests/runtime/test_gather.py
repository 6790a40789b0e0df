"""Rounds of sampling: groups without a contrast are replaced, in launch order, until the step is full or rounds end."""

import json

import pytest

import running
from running import ASSISTANT, END, ONE, ZERO
from stretto.runtime import guards

UNGUARDED = {"guards__max_k3": None}
"""A script's log-probabilities are not the trainer's."""


def asked_digits(request):
    """The digits of the prompt that a request holds."""
    tokens = request.tokens.tolist()
    return [token for token in tokens[: tokens.index(ASSISTANT)] if token in (ZERO, ONE)]


def knows_only_some(request):
    """Right or wrong by the key's parity where the prompt holds a 0; always right where it does not."""
    digits = asked_digits(request)
    wrong = ZERO in digits and request.key % 2
    return [*([ONE if digit == ZERO else ZERO for digit in digits] if wrong else digits), END]


def dapo(tmp_path, script, **changes):
    changes = {"algorithm": {"name": "dapo"}, "evaluate__every": 0, "checkpoint__best": None, **UNGUARDED, **changes}
    return running.start(tmp_path, engine=running.scripted(script), **changes)


def used(folder, step):
    rows = [json.loads(line) for line in (folder / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()]
    return rows, [row for row in rows if row["used"]]


def test_dropped_groups_are_replaced_until_the_step_is_full(tmp_path):
    finished = dapo(tmp_path, knows_only_some, run__steps=2, batch__samples=8)
    for line in running.metrics(finished.folder):
        assert line["groups/used"] == 3
        assert line["trajectories/launched"] % 8 == 0
    _, trained = used(finished.folder, 1)
    outcomes = {}
    for row in trained:
        outcomes.setdefault((row["prompt"], row["visit"]), set()).add(row["reward"]["outcome"])
    assert len(outcomes) == 3
    assert all(len(values) == 2 for values in outcomes.values())


def test_verdicts_that_fail_are_a_share_of_the_step_and_not_of_its_last_round(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(guards, "reward_errors", lambda section, scored, launched: asked.append(launched))
    finished = dapo(tmp_path, knows_only_some, run__steps=2, batch__samples=8)
    assert asked == [line["trajectories/launched"] for line in running.metrics(finished.folder)]
    assert max(asked) > 3 * 8, "no step had a second round"


def test_groups_are_accepted_in_launch_order(tmp_path):
    finished = dapo(tmp_path, knows_only_some, run__steps=1, batch__samples=8, batch__oversample=3.0)
    rows, trained = used(finished.folder, 1)
    launched = list(dict.fromkeys((row["prompt"], row["visit"]) for row in rows))
    contrast = [
        key
        for key in launched
        if len({row["reward"]["outcome"] for row in rows if (row["prompt"], row["visit"]) == key}) > 1
    ]
    assert list(dict.fromkeys((row["prompt"], row["visit"]) for row in trained)) == contrast[:3]


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_run_whose_groups_are_all_dead_goes_on_and_says_so(tmp_path, rounds):
    told = []
    finished = dapo(
        tmp_path,
        lambda request: [*asked_digits(request), END],
        at=lambda name, *values: told.append((name, *values)),
        run__steps=2,
        batch__max_rounds=rounds,
    )
    lines = running.metrics(finished.folder)
    assert [line["groups/used"] for line in lines] == [0, 0]
    assert [line["groups/dead"] for line in lines] == [3 * rounds, 3 * rounds]
    assert [line["tokens/trained"] for line in lines] == [0, 0]
    notes = [values[0] for name, *values in told if name == "note" and "trained on 0 of 3 groups" in values[0]]
    assert len(notes) == 2
    assert f"{3 * rounds} had no contrast" in notes[0]


def test_an_algorithm_that_drops_nothing_needs_one_round(tmp_path):
    finished = running.start(
        tmp_path,
        engine=running.scripted(lambda request: [ONE, END]),
        evaluate__every=0,
        checkpoint__best=None,
        **UNGUARDED,
    )
    assert all(line["groups/used"] == 3 for line in running.metrics(finished.folder))
    assert all(line["trajectories/launched"] == 12 for line in running.metrics(finished.folder))


def test_a_stopped_dapo_run_resumes_to_the_same_weights(tmp_path):
    whole = dapo(tmp_path, knows_only_some, run__steps=4)
    part = dapo(tmp_path, knows_only_some, run__steps=2)
    again = running.resume(
        part.folder, engine=running.scripted(knows_only_some), changes=["run.steps=4"], allow=["run.steps"]
    )
    assert running.tensors(whole.model).keys() == running.tensors(again.model).keys()
    for name, tensor in running.tensors(whole.model).items():
        assert (tensor == running.tensors(again.model)[name]).all(), name
