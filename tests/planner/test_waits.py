"""What of a plan nothing can execute yet, and that nothing else is called that."""

import pytest

from planning import setting_of, workload
from stretto.placement.partitions import RolePlace
from stretto.planner.candidate import Candidate
from stretto.planner.problem import ModelSplit
from stretto.planner.search import search, variants_of
from stretto.recipe.schema import Placement

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
        (LORA, CUT | {"lane": ModelSplit(tp=2)}),
        (LORA | {"base": "int8"}, CUT | {"lane": ModelSplit(tp=2)}),
        ({"model": "qwen3-30b-a3b"}, CUT | {"lane": ModelSplit(tp=4, ep=4)}),
        ({"model": "qwen3-30b-a3b"}, CUT | {"lane": ModelSplit(tp=2, dp=2, ep=4)}),
        ({}, CUT | {"train": ModelSplit(dp=2), "sharded": True}),
        ({}, CUT | {"train": ModelSplit(dp=2, tp=2)}),
        (LORA | {"base": "nf4"}, CUT | {"train": ModelSplit(dp=2, tp=2)}),
        ({"model": "qwen2.5-1.5b"}, CUT | {"train": ModelSplit(tp=4)}),
        ({"model": "qwen3-30b-a3b"}, CUT | {"train": ModelSplit(dp=2, tp=2, ep=4)}),
        (LORA | {"model": "deepseek-v3", "base": "nf4"}, CUT | {"train": ModelSplit(dp=4, ep=4)}),
    ],
    ids=[
        *("four bits", "eight bits in slices", "8-bit AdamW in slices", "experts", "adapted experts", "reference"),
        *("a lane", "a lane on eight bits", "a lane with whole experts", "a lane of teams", "shared", "matrices"),
        "matrices in four bits",
        *("key-value heads with two devices each", "matrices and experts", "experts in four bits"),
    ],
)
def test_these_plans_can_be_executed(work, choice):
    assert list(Candidate(**choice).waits_for(workload(**work))) == []


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (CUT | {"lane": ModelSplit(tp=2, pp=2)}, "pipelines that generate"),
        (CUT | {"lane": ModelSplit(dp=4, ep=2)}, "lanes that share neither all matrices nor all experts"),
        (CUT | {"lane": ModelSplit(tp=3)}, "key-value heads that devices cannot share evenly"),
        (CUT | {"train": ModelSplit(tp=2, pp=2)}, "pipelines that train"),
        (CUT | {"train": ModelSplit(tp=4, ep=2)}, "experts spread over fewer devices than share a matrix"),
        (CUT | {"frozen": ModelSplit(tp=2)}, "frozen models that are cut in more than slices"),
    ],
)
def test_these_say_what_they_wait_for(choice, told):
    assert told in list(Candidate(**choice).waits_for(workload(**REFERRED)))


def test_an_exact_kl_in_slices_waits():
    assert list(Candidate(**CUT).waits_for(workload(exact=True))) == ["the exact KL of a model in slices"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        ({"lane": ModelSplit(tp=2)}, []),
        ({"strategy": "separate", "train": ModelSplit(dp=2), "lane": ModelSplit(tp=2), "sleeps": True}, []),
        ({"lane": ModelSplit(tp=2), "sleeps": True}, ["vLLM on several devices that it shares with what sleeps"]),
        ({"lane": ModelSplit(dp=2)}, ["vLLM on devices that do not share every matrix"]),
    ],
)
def test_vllm_generates_on_devices_that_share_every_matrix_and_take_no_turns(choice, told):
    found = list(Candidate(**{**CUT, **choice}).waits_for(workload(engine="vllm")))
    assert [each for each in found if each.startswith("vLLM")] == told


@pytest.mark.parametrize(
    ("work", "split", "told"),
    [
        ({"model": "gemma3-12b"}, ModelSplit(tp=4), "a family that was not tried cut"),
        ({"model": "qwen2.5-1.5b"}, ModelSplit(tp=3), "key-value heads that devices cannot share evenly"),
    ],
)
def test_not_every_model_can_be_cut(work, split, told):
    assert list(Candidate(**CUT | {"train": split}).waits_for(workload(**work))) == [told]


FITTED = {"roles": ("generate", "train", "value", "fit"), "reading": frozenset({"generate", "value"})}


def test_a_teacher_and_a_critic_are_cut_like_the_policy_and_in_other_ways():
    for width in (2, 4):
        cut = Candidate(**CUT, frozen=ModelSplit(dp=width))
        assert list(cut.waits_for(workload(**REFERRED, taught=True))) == []
        assert list(cut.waits_for(workload(**FITTED))) == []
    alone = Candidate(strategy="flatten", devices=4)
    assert list(alone.waits_for(workload(**FITTED, optimizer="adamw8bit", critic_optimizer="adamw16bit"))) == []


@pytest.mark.parametrize(
    ("value", "fit", "asked", "trained", "runs"),
    [
        ((0, 4), (0, 4), 2, 2, True),
        ((0, 2), (2, 2), 1, 2, True),
        ((0, 2), (2, 2), 2, 2, False),
        ((0, 4), (0, 4), 1, 2, False),
        ((0, 4), (0, 4), 1, 1, True),
    ],
)
def test_a_critic_in_slices_is_asked_where_it_is_trained_or_as_a_whole_elsewhere(value, fit, asked, trained, runs):
    places = tuple(
        RolePlace(role, *place)
        for role, place in {"fit": fit, "generate": (0, 4), "train": (0, 4), "value": value}.items()
    )
    choice = Candidate(
        strategy="yours",
        devices=4,
        fractions=places,
        others=(("value", ModelSplit(dp=asked)), ("fit", ModelSplit(dp=trained))),
    )
    told = list(choice.waits_for(workload(**FITTED)))
    assert told == ([] if runs else ["values of a critic in slices where it is not trained"])


def test_few_bits_are_those_of_the_model_that_is_trained_and_of_no_other():
    few = workload(roles=("generate", "train", "reference", "value", "fit"), adapter=16, base="nf4")
    stored = {role: few.precision_of(role) for role in few.roles}
    assert stored == {"generate": "nf4", "train": "nf4", "reference": "nf4", "value": "bfloat16", "fit": "bfloat16"}
    assert workload(roles=("generate", "train", "reference"), adapter=16, base="nf4", taught=True).precision_of(
        "reference"
    ) == "bfloat16"  # fmt: skip


def test_a_plan_says_where_activations_are_recomputed_from_the_first_row_on():
    setting = setting_of("4xH100")
    cut = Candidate(**CUT, recompute=True).plan(setting)
    assert {cell.role: cell.recompute for cell in cut.cells} == {"generate": False, "train": True}
    alone = Candidate(strategy="flatten", devices=4, recompute=True).plan(setting)
    assert not any(cell.recompute for cell in alone.cells), "a device by itself begins when it must"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "clusters", "changes"),
    [
        ("llama-7b", ("1x8xA100-80", "2x8xA100-80", "8x8xA100-80"), {}),
        ("llama-13b", ("1x8xA100-80", "4x8xH100"), {}),
        ("llama-33b", ("2x8xA100-80", "8x8xH100"), {}),
        ("llama-65b", ("4x8xA100-80", "8x8xH100"), {}),
        ("llama3-8b", ("1xRTX4090",), LORA | {"base": "nf4"}),
        ("llama3-70b", ("2x8xH100",), LORA),
        ("llama3-70b", ("2x8xH200",), {}),
        ("qwen3-235b-a22b", ("6x8xH100",), LORA),
        ("deepseek-v3", ("6x8xH100",), LORA | {"base": "fp8"}),
        ("deepseek-v3", ("6x8xH100",), LORA | {"base": "nf4"}),
    ],
)
def test_plans_that_people_ask_for_wait_for_nothing(model, clusters, changes):
    """What can be executed is the best, or within a tenth of it."""
    for cluster in clusters:
        found = search(setting_of(cluster, model, **changes), variants_of(Placement()))
        assert found.ready, [list(each.choice.waits_for(workload(model, **changes))) for each in found.waiting]
        assert found.ready[0].step <= 1.1 * found.best[0].step
