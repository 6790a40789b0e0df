"""Publishing: an engine's receipt is compared with what was sent, and anything that does not fit stops the run.

Engines in a run, and one that keeps stale weights, are in `tests/runtime/test_plugins.py` and `test_carrier.py`.
"""

import pytest

from stretto.errors import WeightsError
from stretto.types import Receipt, Weights
from stretto.weights.publish import verify_publish

SENT = Weights(version=7, manifest={"embed": "aa", "head": "bb"}, where="/weights/7")
SHARED = Weights(version=7, manifest={}, where="shared")


def receipt(**changes):
    return Receipt(**({"version": 7, "manifest": {"embed": "aa", "head": "bb"}, "shared": False} | changes))


def test_equal_checksums_are_a_proof_and_tensors_that_are_shared_need_none():
    verify_publish(SENT, receipt())
    verify_publish(SHARED, receipt(manifest={}, shared=True))


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
        verify_publish(SENT, receipt(manifest=manifest))


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
