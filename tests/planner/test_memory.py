"""Bytes per rank against hand counts, and against the peaks that trainers published."""

import pytest

from planning import setting_of
from stretto.placement.devices import GB, find_device
from stretto.planner.candidate import Candidate
from stretto.planner.cost import memory
from stretto.planner.cost.memory import RankMemory
from stretto.planner.cost.memory_fit import MemoryFits
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.shapes import named_shape
from stretto.planner.workload import adapted
from stretto.recipe.schema import Adapter

H100 = find_device("H100")
SHAPE = named_shape("qwen3-4b")


def site(**mesh):
    mesh.setdefault("devices", mesh.get("tp", 1) * mesh.get("pp", 1))
    return Site(device=H100, mesh=Mesh(**mesh))


def test_full_training_holds_eighteen_bytes_per_parameter():
    held = memory.states(SHAPE, site())
    assert held.states == 18 * SHAPE.params
    assert memory.states(SHAPE, site(), optimizer="adamw8bit").states == 10 * SHAPE.params
    assert memory.states(SHAPE, site(), optimizer="adamw16bit").states == 12 * SHAPE.params


@pytest.mark.parametrize(("zero", "bytes_each"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8), (3, 16 / 8)])
def test_each_zero_stage_shards_what_it_says(zero, bytes_each):
    assert memory.states(SHAPE, site(devices=8, zero=zero)).states == pytest.approx(bytes_each * SHAPE.params)


def test_tensor_and_pipeline_ranks_divide_everything():
    assert memory.states(SHAPE, site(tp=2, pp=2)).states == pytest.approx(18 * SHAPE.params / 4)


@pytest.mark.parametrize("name", ["qwen2.5-7b", "deepseek-v3"])
def test_what_our_cells_do_not_cut_is_on_each_of_their_ranks(name):
    shape, theirs, ours = named_shape(name), site(tp=4), Site(device=H100, mesh=Mesh.of_mesh({"tp": 4}, 4))
    full = 0.75 * (shape.plain_params + shape.uncut_params)  # theirs have a quarter of it
    trained = [memory.states(shape, there).states for there in (ours, theirs)]
    read = [memory.generating(shape, there, 0.0).weights for there in (ours, theirs)]
    assert trained[0] - trained[1] == pytest.approx(18 * full)
    assert read[0] - read[1] == pytest.approx(2 * full)
    handed_on = 2 * shape.hidden * shape.layers * 4096
    assert memory.activations(shape, theirs, 4096) < handed_on < memory.activations(shape, ours, 4096)
    alone = Site(device=H100, mesh=Mesh.of_mesh({}, 1))
    assert memory.training(shape, alone, 4096) == memory.training(shape, site(), 4096)


def test_an_adapter_trains_its_own_parameters_only():
    held = memory.states(SHAPE, site(), adapter=16)
    trained = 16 * SHAPE.linear_inputs
    assert held.weights == pytest.approx(2 * SHAPE.params + 2 * trained)
    assert held.gradients + held.optimizer == pytest.approx(16 * trained)
    assert trained < 0.01 * SHAPE.params


def test_a_quantised_base_is_a_quarter_but_for_embedding_and_head():
    whole, quarter = (memory.states(SHAPE, site(), adapter=16, base=base).weights for base in ("bfloat16", "nf4"))
    plain = 2 * SHAPE.embedding_params * (1 if SHAPE.tied else 2)
    assert quarter - plain < 0.3 * (whole - plain)


def test_an_adapter_has_the_parameters_of_the_layers_that_it_sits_on():
    shape, few = named_shape("qwen3-30b-a3b"), Adapter(targets=("q_proj", "down_proj"))
    attention = adapted(shape, Adapter(targets="attention"), few_bits=False)
    common = adapted(shape, Adapter(), few_bits=True)  # experts in few bits stay as they are
    assert adapted(shape, Adapter(), few_bits=False).linear_inputs == shape.linear_inputs
    expert = 3 * (shape.hidden + shape.expert_ffn)
    assert shape.linear_inputs - common.linear_inputs == shape.moe_layers * shape.experts * expert
    assert common.linear_inputs == attention.linear_inputs == common.active_inputs  # it has no other linear layers
    named = adapted(SHAPE, few, few_bits=False).linear_inputs
    assert named == SHAPE.layers * (2 * SHAPE.hidden + SHAPE.heads * SHAPE.head_dim + SHAPE.ffn)


def test_a_base_in_few_bits_is_made_wide_one_matrix_at_a_time():
    plain, four, eight = (
        memory.training(SHAPE, site(), 4096, adapter=16, base=base) for base in ("bfloat16", "nf4", "fp8")
    )
    assert four.gathered - plain.gathered == 2 * SHAPE.hidden * SHAPE.ffn
    assert eight.gathered - plain.gathered == 2 * SHAPE.hidden * SHAPE.ffn, "what comes out is scaled"
    processor = Site(device=find_device("cpu"), mesh=Mesh(devices=1))
    assert memory.widened(SHAPE, processor, "fp8") == 6 * SHAPE.hidden * SHAPE.ffn, "whose bits are moved"


def test_a_cpu_keeps_room_for_caches_while_it_trains():
    def training(cluster, **changes):
        setting = setting_of(cluster, "qwen2.5-0.5b", adapter=16, **changes)
        choice = Candidate(strategy="flatten", devices=1, recompute=False, budget=4096)
        return MemoryFits(setting).room(choice).sides[0].phases["train"]

    few, many = (training("1xcpu", prompts=count) for count in (1, 2))
    assert many.cache == 2 * few.cache > 0, "freed in pieces that are too small for activations"
    assert training("1xH100").cache == 0


def test_a_head_that_is_trained_has_its_gradient_in_fp32_beside_each_chunks():
    full, lora = (memory.training(SHAPE, site(), 4096, adapter=rank) for rank in (0, 16))
    assert full.head - lora.head == 6 * SHAPE.embedding_params


def test_a_base_that_a_critics_adapter_shares_is_there_once():
    roles = ("generate", "train", "fit", "value")
    told = {"roles": roles, "adapter": 16, "critic_adapter": 8, "reading": frozenset({"generate", "value"})}
    choice = Candidate(strategy="flatten", devices=1, recompute=True, budget=4096)
    shared, apart = (
        MemoryFits(setting_of("1xH100", base="nf4", critic_shares=shares, **told)).room(choice).sides[0].phases["train"]
        for shares in (True, False)
    )
    whole = memory.weights(named_shape("qwen2.5-3b"), site())
    assert apart.weights - shared.weights == pytest.approx(whole)


def test_experts_are_spread_over_their_own_ranks():
    shape = named_shape("deepseek-v3")
    held = memory.weights(shape, site(devices=32, ep=32))
    assert held == pytest.approx(2 * (shape.params - shape.routed_params) + 2 * shape.routed_params / 32)


def test_recomputing_keeps_one_input_per_layer_and_one_layer_alive():
    kept = memory.activations(SHAPE, site(), 16384, "keep")
    again = memory.activations(SHAPE, site(), 16384, "recompute")
    away = memory.activations(SHAPE, site(), 16384, "offload")
    assert again - away == pytest.approx(16384 * 2 * SHAPE.hidden * (SHAPE.layers - 2))
    assert kept > 4 * again


def test_logits_of_a_large_vocabulary_are_the_peak_unless_the_head_is_chunked():
    whole = memory.training(SHAPE, site(), 65536, adapter=16, chunked=False)
    assert whole.largest == "head"
    assert memory.training(SHAPE, site(), 65536, adapter=16).head == memory.HEAD_CHUNK


@pytest.mark.parametrize(
    ("name", "gpus", "tokens", "adapter", "kind", "chunked", "gigabytes"),
    [
        ("qwen3-0.6b", 1, 16384, 16, "recompute", True, 5.1),
        ("qwen3-4b", 1, 65536, 16, "offload", True, 31.1),
        ("qwen3-4b", 8, 65536, 0, "recompute", False, 171.5),
        ("qwen3-30b-a3b", 8, 65536, 0, "recompute", True, 105.4),
        ("intellect-3-106b-a12b", 8, 65536, 16, "recompute", True, 153.6),
        ("qwen3-235b-a22b", 8, 16384, 16, "offload", True, 150.3),
    ],
)
def test_published_peaks_of_a_sharded_trainer_are_within_fifteen_percent(
    name, gpus, tokens, adapter, kind, chunked, gigabytes
):
    held = memory.training(
        named_shape(name), site(devices=gpus, zero=3), tokens, adapter=adapter, base="float32", kind=kind,
        chunked=chunked,
    )  # fmt: skip
    assert (held.total - held.context) / GB == pytest.approx(gigabytes, rel=0.15)


def test_the_caches_of_a_32b_engine_on_four_cards_hold_what_was_published():
    held = memory.generating(named_shape("qwen3-32b"), site(tp=4), 484_000)
    assert held.total == pytest.approx(0.6 * H100.memory, abs=0.1 * held.cache)


def test_a_model_that_does_not_fit_leaves_no_room_for_caches():
    assert memory.generating(named_shape("deepseek-v3"), site(tp=8), 0.0).total > 0.85 * H100.memory


def test_a_hand_over_in_buckets_is_bounded():
    assert memory.handover(SHAPE, site()) == memory.BUCKET
    assert memory.handover(SHAPE, site(), bucketed=False) == pytest.approx(2 * SHAPE.params)


def test_what_sleeps_is_charged_to_the_host_without_caches():
    held = RankMemory(weights=3.0, optimizer=12.0, cache=99.0, activations=99.0)
    assert memory.asleep([held, held], 8) == 8 * (30.0 + memory.BUCKET)


def test_a_device_is_never_filled_to_the_brim():
    assert memory.fits(0.9 * H100.memory, site())
    assert not memory.fits(0.95 * H100.memory, site())


def test_a_3b_adapter_trains_on_a_24_gb_card():
    card = Site(device=find_device("RTX4090"))
    held = memory.training(named_shape("qwen2.5-3b"), card, 4096, adapter=16)
    assert memory.fits(held.total, card)
    assert not memory.fits(memory.training(named_shape("qwen2.5-3b"), card, 4096).total, card)


@pytest.mark.parametrize(("base", "bytes_each"), [("float32", 16), ("float64", 32)])
@pytest.mark.parametrize("zero", [0, 3])
def test_weights_in_full_precision_are_their_own_masters(base, bytes_each, zero):
    held = memory.states(SHAPE, site(devices=8, zero=zero), base=base)
    assert held.states == pytest.approx(bytes_each * SHAPE.params / (8 if zero else 1))


@pytest.mark.parametrize("kind", ["keep", "recompute", "offload"])
def test_activations_are_as_wide_as_the_model_computes(kind):
    narrow, wide = (memory.activations(SHAPE, site(), 4096, kind, each) for each in ("bfloat16", "float32"))
    assert wide == 2 * narrow
    assert memory.activations(SHAPE, site(), 4096, kind, "nf4") == narrow
