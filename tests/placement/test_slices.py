"""Which cells of a plan hold slices of a model, and whose processes meet for that."""

import pytest

from stretto.placement.plan import Cell, Plan, SliceMeeting, meetings


def cell(role, devices, **more):
    return Cell(name=f"{role}-{devices}", role=role, devices=tuple(devices), **more)


def plan_of(*cells):
    return Plan(strategy="own", flow="phased", staleness=0, optimizer="replicated", cells=cells, priority={})


@pytest.mark.parametrize(
    ("asked", "others", "sliced"),
    [
        (cell("train", "ab"), (), True),
        (cell("fit", "ab"), (), True),
        (cell("train", "a"), (), False),
        (cell("generate", "ab"), (), False),
        (cell("reward", "ab"), (), True),
        (cell("reference", "ab"), (), True),
        (cell("reference", "ab", weights="gather:train"), (), False),
        (cell("value", "ab"), (), True),
        (cell("value", "ab", weights="gather:fit"), (cell("fit", "ab"),), True),
        (cell("value", "ab"), (cell("fit", "cd"),), False),
        (cell("value", "ab"), (cell("fit", "a"), cell("fit", "b")), False),
    ],
)
def test_a_model_is_cut_where_it_is_trained_or_asked_by_several_devices(asked, others, sliced):
    assert plan_of(asked, *others).in_slices(asked) is sliced


def test_who_is_linked_by_cells_meets_once_in_an_order_of_all_cells():
    told = meetings([cell("train", "bc"), cell("reward", "ef"), cell("fit", "ab"), cell("value", "ab")])
    assert told == (
        SliceMeeting(devices=("e", "f"), cells=(("e", "f"),)),
        SliceMeeting(devices=("a", "b", "c"), cells=(("b", "c"), ("a", "b"))),
    )
    assert meetings([]) == ()


def test_cells_that_name_the_same_devices_in_two_orders_are_no_meeting():
    with pytest.raises(ValueError, match="a and b are named in two orders"):
        meetings([cell("train", "ab"), cell("reference", "ba")])
