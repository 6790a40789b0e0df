"""Publishing: an engine's receipt is compared with what was sent, and anything that does not fit stops the run."""

import pytest

from stretto.errors import WeightsError
from stretto.types import Receipt, Weights
from stretto.weights.publish import publish, verify_publish

SENT = Weights(version=7, manifest={"embed": "aa", "head": "bb"}, where="/weights/7")
SHARED = Weights(version=7, manifest={}, where="shared")


def receipt(**changes):
    return Receipt(**({"version": 7, "manifest": {"embed": "aa", "head": "bb"}, "shared": False} | changes))


class Engine:
    """Answers with a given receipt and remembers what it was sent."""

    def __init__(self, answer):
        self.answer, self.got = answer, []

    def receive(self, weights):
        self.got.append(weights)

    def holds(self):
        return self.answer


def test_equal_checksums_are_a_proof():
    engine = Engine(receipt())
    assert publish(SENT, engine) is engine.answer
    assert engine.got == [SENT]


def test_tensors_that_are_shared_need_no_checksum():
    engine = Engine(receipt(manifest={}, shared=True))
    assert publish(SHARED, engine).shared


@pytest.mark.parametrize("version", [6, 8])
@pytest.mark.parametrize("weights", [SENT, SHARED])
def test_another_version_stops_the_run(version, weights):
    with pytest.raises(WeightsError, match=f"samples from weights {version}, the trainer published 7"):
        verify_publish(weights, receipt(version=version, shared=weights is SHARED))


@pytest.mark.parametrize(
    ("manifest", "count", "named"),
    [
        ({"embed": "aa", "head": "STALE"}, 1, "head"),
        ({"embed": "aa"}, 1, "head"),
        ({}, 2, "embed, head"),
    ],
)
def test_a_tensor_that_differs_or_is_missing_stops_the_run_and_is_named(manifest, count, named):
    with pytest.raises(WeightsError, match=rf"{count} of 2 tensors of the engine differ .*\({named}\)"):
        publish(SENT, Engine(receipt(manifest=manifest)))


def test_of_many_that_differ_three_are_named():
    weights = Weights(version=7, manifest={f"layer {index}": "a" for index in range(9)}, where="/weights/7")
    with pytest.raises(WeightsError, match=r"9 of 9 .*\(layer 0, layer 1, layer 2\)"):
        verify_publish(weights, receipt(manifest={}))


def test_tensors_the_engine_has_besides_do_not_matter():
    verify_publish(SENT, receipt(manifest={"embed": "aa", "head": "bb", "rotary": "cc"}))


def test_an_engine_cannot_claim_to_share_what_was_sent_elsewhere():
    with pytest.raises(WeightsError, match="says it shares tensors, but the weights are at /weights/7"):
        verify_publish(SENT, receipt(shared=True))


def test_nothing_to_compare_is_no_proof():
    with pytest.raises(WeightsError, match="there is nothing to compare"):
        verify_publish(Weights(version=7, manifest={}, where="/weights/7"), receipt(manifest={}))


def test_an_engine_that_does_not_share_cannot_pass_for_one_that_does():
    with pytest.raises(WeightsError, match="nothing to compare"):
        verify_publish(SHARED, receipt())
