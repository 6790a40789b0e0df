"""Accuracies are told apart where chance would seldom differ as much; numbers from the papers and worked by hand."""

from math import comb

import pytest

from stretto.report.chances import fisher, paired, sign_test, unpaired


def test_the_exact_test_of_pairs():
    assert sign_test(0, 0) == 1
    assert sign_test(5, 0) == pytest.approx(2 / 2**5)
    assert sign_test(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)


def test_fishers_test_of_the_lady_tasting_tea():
    assert fisher(3, 4, 1, 4) == pytest.approx(34 / 70)
    table = {k: comb(10, k) * comb(10, 10 - k) / comb(20, 10) for k in range(11)}
    assert fisher(8, 10, 2, 10) == pytest.approx(sum(p for p in table.values() if p <= table[8] * (1 + 1e-9)))


def test_newcombes_example_of_unpaired_shares():
    """56 of 70 against 48 of 80: his table II, method 10, gives 0.0524 to 0.3339."""
    found = unpaired(48, 80, 56, 70)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-4)
    assert found.told_apart and not found.paired


def test_pairs_tell_apart_what_shares_cannot():
    first = {str(i): i < 40 for i in range(100)}
    second = first | {str(i): True for i in range(40, 50)}
    by_prompt = paired(first, second)
    by_share = unpaired(40, 100, 50, 100)
    assert by_prompt.told_apart and not by_share.told_apart
    assert (by_prompt.value, by_share.value) == pytest.approx((0.1, 0.1))
    assert by_share.low < by_prompt.low < 0.1 < by_prompt.high < by_share.high
    assert by_prompt.prompts == 100


def test_the_same_verdicts_differ_by_nothing():
    found = paired({"a": True, "b": False}, {"a": True, "b": False})
    assert (found.value, found.chance) == (0, 1)
    assert found.low <= 0 <= found.high
    assert paired({"a": True}, {"b": True}) is None


def test_the_interval_of_pairs_holds_the_truth_about_as_often_as_it_says():
    """Of all outcomes of 12 prompts, weighted by how likely they are for shares 0.5 and 0.7 that agree a bit."""
    both, lost, won, neither = 0.4, 0.1, 0.3, 0.2
    held = 0.0
    for b in range(13):
        for low in range(13 - b):
            for w in range(13 - b - low):
                n = 12 - b - low - w
                chance = comb(12, b) * comb(12 - b, low) * comb(12 - b - low, w)
                chance *= both**b * lost**low * won**w * neither**n
                verdicts = [(True, True)] * b + [(True, False)] * low + [(False, True)] * w + [(False, False)] * n
                found = paired(*({str(i): each[side] for i, each in enumerate(verdicts)} for side in (0, 1)))
                held += chance * (found.low <= 0.2 <= found.high)
    assert 0.92 < held < 0.99
