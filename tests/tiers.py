"""Which cases of a test run each time, and which only in the slow tier."""

import pytest


def slow_but(*quick, of):
    """The cases `of` a parametrised test, of which only the `quick` ones run each time; ids stay what they were."""
    assert set(map(repr, quick)) <= set(map(repr, of)), "a quick case is none of the cases"
    names = set(map(repr, quick))
    return [case if repr(case) in names else pytest.param(case, marks=pytest.mark.slow) for case in of]
