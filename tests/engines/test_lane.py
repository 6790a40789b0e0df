"""A lane of several processes answers as one device does, whatever their clocks say."""

import numpy as np
import pytest
import torch
from torch import multiprocessing

from lanes import CASES, in_broken_lane, in_lane, in_teams, plain_engine, publish, requests, served
from processes import METHOD, run_together
from stretto.engines.native.lane import LaneLink
from stretto.errors import EngineError
from stretto.weights.tensors import checksums
from stretto.workers.connectivity import LOOPBACK
from stretto.workers.process_group import store_at
from tiers import slow_but


def started(function, size, folder, *arguments):
    """What several processes of a lane run, until all of them have ended."""
    store = store_at(LOOPBACK)
    run_together(function, size, size, (LOOPBACK, store.port), folder, *arguments)


@pytest.fixture(scope="module")
def lanes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lanes")
    started(in_lane, 2, folder, list(CASES))
    return folder


def assert_same(found, expected, *, rounding):
    """The same answers; log-probabilities to rounding."""
    assert [(each[0], each[1].tolist(), each[3], each[4]) for each in found] == [
        (each[0], each[1].tolist(), each[3], each[4]) for each in expected
    ]
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine[2], theirs[2], rtol=0, atol=rounding)
        assert (mine[5] is None) == (theirs[5] is None)
        if mine[5] is not None:
            assert mine[5].ids.tolist() == theirs[5].ids.tolist()


@pytest.mark.parametrize("case", [case for case in CASES if case != "half precision"])
def test_two_processes_answer_as_one(lanes, case):
    engine, policy = plain_engine(case)
    expected = served(engine, policy, lambda seconds: seconds)
    told = [torch.load(lanes / f"{case}-{rank}.pt", weights_only=False) for rank in range(2)]
    for each in told:
        assert_same(each["done"], expected, rounding=1e-10 if CASES[case] else 1e-5)
        assert each["sums"] == checksums(policy.network.named_parameters())
        assert each["spoiled"]
    assert {stop for _, _, _, stop, _, _ in expected} >= {"length", "abort"}
    assert told[0]["room"] == told[1]["room"] >= engine.kv_tokens


def test_in_half_precision_all_processes_still_say_the_same(lanes):
    first, second = (torch.load(lanes / f"half precision-{rank}.pt", weights_only=False) for rank in range(2))
    assert_same(first["done"], second["done"], rounding=0)


@pytest.mark.slow
def test_four_processes_answer_as_one(tmp_path):
    cases = {"lora": 1e-10, "qwen3 with wide heads": 1e-5}  # which has two key-value heads
    started(in_lane, 4, tmp_path, list(cases))
    for case, rounding in cases.items():
        engine, policy = plain_engine(case)
        found = torch.load(tmp_path / f"{case}-0.pt", weights_only=False)["done"]
        assert_same(found, served(engine, policy, lambda seconds: seconds), rounding=rounding)


def answers_of_one(case):
    """Key and version -> what one device answers to all requests of `in_teams`, and the weights after a publish."""
    engine, policy = plain_engine(case)
    found = {}
    for version in (1, 2):
        engine.submit([*requests(1, 7), *requests(2, 4)])
        while done := engine.step(60.0):
            found |= {(each.key, each.version): each for each in done}
        if version == 1:
            publish(engine, policy)
    return found, checksums(policy.network.named_parameters())


@pytest.mark.parametrize(
    ("size", "team", "cases"),
    [
        (2, 1, ["qwen3 with experts", "qwen3 with experts, lora", "qwen3 with experts, int8"]),
        pytest.param(4, 2, ["qwen3 with experts", "deepseek v3 with narrow values"], marks=pytest.mark.slow),
    ],
    ids=["two teams of one", "two teams of two"],
)
def test_teams_that_share_experts_answer_as_one(size, team, cases, tmp_path):
    started(in_teams, size, tmp_path, cases, team)
    for case in cases:
        expected, sums = answers_of_one(case)
        told = [torch.load(tmp_path / f"{case}-{rank}.pt", weights_only=False) for rank in range(size)]
        assert all(each["sums"] == sums for each in told)
        speakers = [each["done"] for each in told[::team]]
        found = [each for done in speakers for each in done]
        assert sorted(each[:1] + each[4:5] for each in found) == sorted(expected)
        assert all(len(done) > 4 for done in speakers)
        for key, tokens, logprobs, stop, version, _ in found:
            one = expected[key, version]
            count = len(tokens) if stop == "abort" else len(one.tokens)
            assert tokens.tolist() == one.tokens[:count].tolist()
            np.testing.assert_allclose(logprobs, one.logprobs[:count], rtol=0, atol=1e-5)
            assert stop in (one.stop, "abort")
        for first in range(0, size, team):
            for other in told[first : first + team]:
                assert_same(other["done"], told[first]["done"], rounding=1e-10)


def test_who_has_not_met_the_others_says_so():
    with pytest.raises(EngineError, match="rank 1 of a lane of 2 is on its own"):
        LaneLink(rank=1, size=2).add(torch.zeros(1))


@pytest.mark.parametrize("how", slow_but(of=["killed", "stopped", "left"]))
def test_who_waits_for_a_process_that_is_lost_says_so_in_time(how, tmp_path):
    store, context = store_at(LOOPBACK), multiprocessing.get_context(METHOD)
    given = (2, (LOOPBACK, store.port), tmp_path, how)
    processes = [context.Process(target=in_broken_lane, args=(rank, *given)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        processes[0].join(90)
        assert processes[0].exitcode == 0
        assert "member 0 of 2 lost touch with another" in (tmp_path / "said-0").read_text()
    finally:
        for process in processes:
            process.kill()
            process.join()
