"""What of a plan nothing can execute yet, and that nothing else is called that."""

import pytest

from planning import setting_of, workload
from stretto.planner.candidate import Candidate
from stretto.planner.problem import ModelSplit

REFERRED = {"roles": ("generate", "train", "reference"), "reading": frozenset({"generate"})}
LORA = {"adapter": 16, "reading": frozenset({"generate"})}
CUT = {"strategy": "flatten", "devices": 4, "train": ModelSplit(dp=4)}


@pytest.mark.parametrize(
    ("work", "choice"),
    [
        (LORA | {"model": "qwen3-8b", "base": "nf4"}, {"strategy": "flatten", "devices": 1}),
        (LORA | {"base": "int8"}, CUT),
        ({"optimizer": "adamw8bit"}, CUT | {"sleeps": True, "recompute": True}),
        ({"model": "qwen3-30b-a3b"}, CUT),
        (LORA | {"model": "qwen3-30b-a3b"}, CUT),
        (REFERRED, CUT | {"frozen": ModelSplit(dp=4)}),
    ],
    ids=["four bits", "eight bits in slices", "8-bit AdamW in slices", "experts", "adapted experts", "reference"],
)
def test_these_plans_can_be_executed(work, choice):
    assert list(Candidate(**choice).waits_for(workload(**work))) == []


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (CUT | {"lane": ModelSplit(tp=2)}, "generating on several devices together"),
        (CUT | {"train": ModelSplit(dp=2, tp=2)}, "training cells that cut more than parameters"),
        (CUT | {"train": ModelSplit(dp=2), "sharded": True}, "an optimizer that cells of several devices share"),
        (CUT | {"frozen": ModelSplit(dp=2)}, "frozen models in slices"),
    ],
)
def test_these_say_what_they_wait_for(choice, told):
    assert told in list(Candidate(**choice).waits_for(workload(**REFERRED)))


def test_a_plan_says_where_activations_are_recomputed_from_the_first_row_on():
    setting = setting_of("4xH100")
    cut = Candidate(**CUT, recompute=True).plan(setting)
    assert {cell.role: cell.recompute for cell in cut.cells} == {"generate": False, "train": True}
    alone = Candidate(strategy="flatten", devices=4, recompute=True).plan(setting)
    assert not any(cell.recompute for cell in alone.cells), "a device by itself begins when it must"
