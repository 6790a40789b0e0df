"""How what waits is cut: groups stay together unless cutting one lets the cells end earlier."""

import pytest

from simulated import Clockwork, plan_of, simulate
from stretto.scheduler.microbatches import ReadyGroup, StageQueue


def cut_up(groups, *, cells, budget=2300):
    """The tokens of each piece when so many cells are free at once; groups are (prompt, answers)."""
    queue = StageQueue()
    for number, (prompt, answers) in enumerate(groups):
        queue.put(ReadyGroup.of(number, prompt, tuple(enumerate(answers))))
    pieces, share = [], queue.tokens / cells
    while queue.groups:
        pieces.append(queue.cut(budget=budget, share=share, cells=cells))
    items = sorted(item for piece, _ in pieces for item in piece)
    assert items == [(number, attempt) for number, (_, answers) in enumerate(groups) for attempt in range(len(answers))]
    return [tokens for _, tokens in pieces]


ANSWERS = (136, 66, 22, 213, 9, 115, 39, 129)


def test_a_last_group_is_cut_into_no_more_parts_than_there_are_cells_for_it():
    assert cut_up([(512, ANSWERS)], cells=1) == [512 + sum(ANSWERS)]
    assert cut_up([(512, ANSWERS)], cells=2) == [512 + 437, 512 + 292]
    four = cut_up([(512, ANSWERS)], cells=4)
    assert 2 < len(four) <= 4 and max(four) < 1.2 * min(four)


def test_a_group_whose_rest_is_not_worth_a_second_prompt_stays_together():
    assert cut_up([(512, (40,) * 8)], cells=2) == [512 + 320]
    assert cut_up([(20, (80,) * 8)], cells=2) == [20 + 320, 20 + 320]
    assert cut_up([(512, (40,) * 8)], cells=1, budget=700) == [672, 672], "a budget holds all the same"
    queue = StageQueue()
    queue.put(ReadyGroup.of(0, 512, tuple(enumerate((40,) * 8))))
    _, tokens = queue.cut(budget=700, share=10.0, cells=1)
    assert tokens == 672, "while others get what comes, only the budget cuts"


@pytest.mark.parametrize("strategy", ["flatten", "elastic"])
def test_no_strategy_computes_prompts_more_often_than_it_must(strategy):
    """Expected lengths are measured, so their sums leave remainders; what is still to come is counted in whole ones."""
    lengths = [[9 + (37 * group + 61 * attempt) % 160 for attempt in range(8)] for group in range(8)]
    _, out = simulate(
        plan_of(strategy, 2), lengths, prompt=512, expected=30.1, slots=64, budget=2300,
        durations=Clockwork(per_token={"train": 0.1}),
    )  # fmt: skip
    computed = sum(stretch.tokens for stretch in out.stretches if stretch.stage == "train")
    assert computed <= 8 * 512 + sum(map(sum, lengths)) + 512, "at most one group has its prompt computed twice"
