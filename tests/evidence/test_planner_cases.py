"""The cost model as it ships against published measurements. Halves that predict each other are the script's work."""

import math
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape

SCRIPTS = Path(__file__).parents[2] / "scripts" / "evidence"


@pytest.fixture(scope="module")
def evidence():
    """The modules of the script, which lie beside it."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import answers
        import cases
        import placements
    finally:
        sys.path.remove(str(SCRIPTS))
    return cases, answers, placements


@pytest.fixture(scope="module")
def errors(evidence):
    """Metric -> family -> relative errors of every row that can be posed."""
    cases, answers, _ = evidence
    found, costs = defaultdict(lambda: defaultdict(list)), cases.costs_of(cases.PUBLISHED)
    for row in cases.rows():
        case = cases.pose(row)
        if not isinstance(case, str) and row["usable"] == "yes":
            found[row["metric"]][case.shape.name].append(abs(answers.answer(case, costs) / case.value - 1))
    return found


def test_step_times_are_within_thirty_percent(errors):
    steps = [
        error for metric in ("step_time", "throughput_per_gpu") for each in errors[metric].values() for error in each
    ]
    assert len(steps) == 40
    assert median(steps) < 0.3


def test_memory_of_every_family_is_within_fifteen_percent(errors):
    assert {name for name, each in errors["peak_gpu_memory"].items() if median(each) > 0.15} == set()
    assert len(errors["peak_gpu_memory"]) == 5


def test_hand_overs_of_weights_are_within_a_factor_of_one_and_a_half(evidence):
    cases, answers, _ = evidence
    factors = []
    for row in cases.rows():
        case = cases.pose(row)
        if row["metric"].startswith("weight_sync_time") and not isinstance(case, str):
            factors.append(math.exp(abs(math.log(answers.answer(case, cases.costs_of(cases.PUBLISHED)) / case.value))))
    assert len(factors) == 15
    assert median(factors) < 1.5


def test_a_row_that_says_too_little_is_not_posed_and_says_why(evidence):
    cases, _, _ = evidence
    reasons = [told for row in cases.rows() if isinstance(told := cases.pose(row), str)]
    assert len(reasons) > 100
    assert all(
        reason.startswith(("states no", "no model", "no device", "is contradicted", "is posed as"))
        for reason in reasons
    )


def test_nine_of_ten_published_comparisons_have_the_right_sign(evidence):
    cases, _, placements = evidence
    rows = cases.rows()
    costs = cases.costs_of(cases.PUBLISHED)
    signs = [*placements.compared(rows, costs), *placements.narrower_lanes(rows, costs)]
    assert len(signs) > 35
    assert sum(sign.right for sign in signs) >= 0.9 * len(signs)


def test_the_best_lanes_are_narrower_than_those_that_train(evidence):
    _, _, placements = evidence
    widths = []
    for model in ("llama-7b", "llama-13b"):
        took = placements.lanes(named_shape(model), 16, Costs())
        widths.append(min(took, key=took.__getitem__))
    assert widths == [2, 4]


@pytest.mark.slow
def test_colocating_wins_on_few_devices_and_splitting_on_many(evidence):
    cases, _, placements = evidence
    rows = [row for row in cases.rows() if row["gpus"] in ("64", "96")]  # where it changes; the script does them all
    best = list(placements.best_placements(rows, cases.costs_of(cases.PUBLISHED)))
    assert [sign.right for sign in best] == [True] * 4
