"""The time model against hand-worked numbers and against what must hold for every model and layout."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.placement.devices import find_device
from stretto.placement.rates import THREADS, Rates
from stretto.placement.transport import TensorPath
from stretto.planner.cost.collectives import Wires
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.seconds import NARROW, Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.token_load import TokenLoad

H100 = find_device("H100")
BARE = Rates(
    matmul_share=1.0, attention_share=1.0, layer_passes=0.0, decode_share=1.0, tick=0.0, tick_layer=0.0,
    tick_request=0.0, near_delay=0.0, far_delay=0.0, link_share=1.0, nic_share=1.0, phase=0.0, update=0.0, skew=1.0,
)  # fmt: skip
"""Nothing but products, bytes and bandwidth."""
DENSE, MIXTURE = named_shape("qwen3-32b"), named_shape("qwen3-235b-a22b")


def site(**mesh):
    mesh.setdefault("devices", mesh.get("tp", 1) * mesh.get("pp", 1) * mesh.get("cp", 1))
    return Site(device=H100, mesh=Mesh(**mesh))


def test_a_forward_is_two_operations_per_parameter_and_token():
    costs = Costs(rates=BARE)
    load = TokenLoad(tokens=1000.0, pairs=0.0, sequences=1.0)
    head = 1000 * 4 * 4 * DENSE.vocab / H100.bandwidth
    reached = H100.matmul * DENSE.ffn / (DENSE.ffn + NARROW)
    assert costs.compute(DENSE, site(), load) == pytest.approx(2 * DENSE.active_params * 1000 / reached + head)


def test_attention_is_two_products_per_head_and_pair():
    costs = Costs(rates=BARE)
    load = TokenLoad(tokens=0.0, pairs=1e6, sequences=1.0)
    assert costs.compute(DENSE, site(), load) == pytest.approx(64 * 4 * 128 * 64 * 1e6 / H100.matmul)


def test_training_costs_three_forwards_with_frozen_weights_two_and_recomputing_one_more():
    costs = Costs(rates=BARE)
    load = TokenLoad.sequence(2048, count=8)
    forward = costs.forward(DENSE, site(), load)
    update = costs.update(DENSE, site())
    assert costs.train(DENSE, site(), load) == pytest.approx(3 * forward + update)
    assert costs.train(DENSE, site(), load, recompute=True) == pytest.approx(4 * forward + update)
    frozen = costs.train(DENSE, site(), load, adapter=16) - costs.update(DENSE, site(), adapter=16)
    attention = costs.compute(DENSE, site(), replace(load, tokens=0.0))  # no part of which is spared
    assert frozen == pytest.approx(2 * costs.compute(DENSE, site(), load, adapter=16) + attention)
    assert 2 * forward < frozen < 3 * forward


def test_steps_that_no_recording_starts_cost_their_launches():
    """45 and 31 ms in 24 layers, measured on one H200, where recorded ones took 6.2 and 9.1."""
    small, cpu = named_shape("qwen2.5-0.5b"), find_device("cpu")
    fast, *plain = (
        Costs(recorded=recorded).tick(small, site(tp=tp), 64, 300)
        for recorded, tp in (("alone", 1), ("none", 1), ("alone", 2))
    )
    assert fast == Costs().tick(small, site(), 64, 300)
    assert fast < 0.008 < 0.031 < min(plain) <= max(plain) < 0.045
    assert Costs(recorded="alone").tick(MIXTURE, site(), 1, 0) > Costs().tick(MIXTURE, site(), 1, 0) + 0.1
    there = Site(device=cpu, mesh=Mesh(devices=1))
    kinds = ("all", "alone", "none")
    assert len({Costs(rates=THREADS, recorded=kind).tick(small, there, 4, 0) for kind in kinds}) == 1


def test_each_update_pays_for_its_own_reduction():
    load = TokenLoad.sequence(2048, count=64)
    there = site(devices=16, tp=8, zero=1)
    once, four = (Costs().train(DENSE, there, load, updates=updates) for updates in (1, 4))
    assert four - once == pytest.approx(3 * Costs().update(DENSE, there), rel=0.05)


def test_shared_prompts_are_computed_once_per_group():
    lengths = ((30,) * 8,) * 2
    shared, apart = (TokenLoad.groups(512, lengths, shared=shared) for shared in (True, False))
    assert (shared.tokens, apart.tokens) == (2 * 512 + 16 * 30, 16 * 542)
    assert apart.pairs == pytest.approx(16 * 542**2 / 2)
    assert shared.pairs == pytest.approx(2 * 512**2 / 2 + 16 * (30 * 512 + 450))
    assert shared.sequences == apart.sequences == 16


def test_the_longest_sequence_bounds_what_more_copies_can_gain():
    load = TokenLoad.groups(0, ((16000, *[100] * 63),), shared=False)
    few, many = (Costs().forward(DENSE, site(devices=n), load) for n in (16, 64))
    alone = Costs().forward(DENSE, site(), TokenLoad.sequence(16000))
    assert few == pytest.approx(many, rel=1e-6)
    assert few == pytest.approx(alone, rel=0.35)  # its attention is averaged in


def test_a_tick_of_one_sequence_reads_the_weights_once():
    costs = Costs(rates=BARE)
    read = 2.0 * (DENSE.params - DENSE.embedding_params) / H100.bandwidth
    assert costs.tick(DENSE, site(), 1, 0) == pytest.approx(read, rel=1e-6)


def test_a_tick_reads_every_cache():
    costs = Costs(rates=BARE)
    more = costs.tick(DENSE, site(), 32, 2000) - costs.tick(DENSE, site(), 32, 0)
    assert more == pytest.approx(32 * DENSE.kv_bytes(2000) / H100.bandwidth)


def test_more_ranks_than_key_heads_hold_caches_twice():
    costs = Costs()
    assert costs.cache_bytes(DENSE, site(tp=8), 10) == costs.cache_bytes(DENSE, site(tp=16), 10)
    assert costs.cache_bytes(named_shape("deepseek-v3"), site(tp=8), 1) == pytest.approx(70_272)


def test_a_small_batch_reads_only_the_experts_it_visits():
    costs = Costs()
    one = costs.weight_bytes(MIXTURE, site(), 1, "bfloat16")
    every = costs.weight_bytes(MIXTURE, site(), math.inf, "bfloat16")
    assert one == pytest.approx(2 * MIXTURE.active_params, rel=1e-6)
    assert every == pytest.approx(2 * (MIXTURE.params - MIXTURE.embedding_params), rel=1e-6)


@pytest.mark.parametrize(("precision", "times"), [("bfloat16", 1), ("float16", 1), ("float32", 16), ("float64", 32)])
def test_products_in_full_precision_lack_the_tensor_cores_of_a_gpu(precision, times):
    load, costs = TokenLoad(tokens=1e4, pairs=1e8, sequences=1.0), Costs(rates=BARE)
    shape = replace(DENSE, vocab=0)
    most = costs.compute(shape, site(), load)
    assert costs.compute(shape, site(), load, precision=precision) == pytest.approx(times * most)
    assert costs.compute(shape, on_cpu(), load, precision=precision) == costs.compute(shape, on_cpu(), load)


def on_cpu():
    return Site(device=find_device("cpu"), mesh=Mesh(devices=1))


def test_messages_are_as_wide_as_the_model_computes():
    load, costs = TokenLoad(tokens=1e4, pairs=0.0, sequences=1.0), Costs(rates=BARE)
    narrow = costs.messages(DENSE, site(tp=8), load, 1.0)
    assert costs.messages(DENSE, site(tp=8), load, 1.0, "float32") == pytest.approx(2 * narrow)


def test_a_base_in_few_bits_is_smaller_and_moves_more_bytes_because_each_product_makes_it_wide():
    ticks = [Costs().tick(DENSE, site(), 1, 100, precision=p) for p in ("bfloat16", "int8", "nf4")]
    held = [Costs().weight_bytes(DENSE, site(), math.inf, p) for p in ("bfloat16", "int8", "nf4")]
    assert ticks == sorted(ticks) and held == sorted(held, reverse=True)
    bf16, narrow = (Costs(widens=False).tick(DENSE, site(), 1, 100, precision=p) for p in ("bfloat16", "nf4"))
    assert narrow < bf16 == ticks[0], "an engine whose kernels read few bits"


def test_adapters_are_products_of_their_own_where_the_native_engine_decodes_on_a_gpu():
    for place, recorded, longer in ((site(), "alone", True), (site(), "all", False), (on_cpu(), "alone", False)):
        plain, adapted = (Costs(recorded=recorded).tick(DENSE, place, 8, 100, adapter=rank) for rank in (0, 16))
        assert adapted == pytest.approx(plain + longer * DENSE.layers * Rates().adapted_layer)


def test_decoding_has_a_floor_that_no_number_of_ranks_removes():
    rates = Rates()
    floor = rates.tick + rates.tick_layer * DENSE.layers
    assert all(Costs().tick(DENSE, site(tp=tp), 1, 100) > floor for tp in (1, 2, 4, 8))


@given(batch=st.integers(1, 500), context=st.floats(1, 1e5), tp=st.sampled_from([1, 2, 4, 8]))
def test_a_tick_never_gets_shorter_with_more_to_do(batch, context, tp):
    costs = Costs()
    now = costs.tick(MIXTURE, site(tp=tp), batch, context)
    assert now <= costs.tick(MIXTURE, site(tp=tp), batch + 1, context)
    assert now <= costs.tick(MIXTURE, site(tp=tp), batch, context * 1.1)


@given(tokens=st.integers(64, 20000), count=st.integers(1, 400), copies=st.sampled_from([1, 2, 4, 8, 16]))
def test_twice_the_devices_never_take_longer_for_a_forward(tokens, count, copies):
    load = TokenLoad.sequence(tokens, count=count)
    one, two = (Costs().forward(DENSE, site(devices=n), load) for n in (copies, 2 * copies))
    assert two <= one * (1 + 1e-9)


def test_bandwidth_decodes_and_arithmetic_trains():
    h20, h800 = (Site(device=find_device(name)) for name in ("H20", "H800"))
    small = named_shape("qwen2.5-7b")
    assert Costs().tick(small, h20, 16, 1000) < Costs().tick(small, h800, 16, 1000)
    load = TokenLoad.sequence(2000, count=16)
    assert Costs().train(small, h20, load) > 2 * Costs().train(small, h800, load)


def test_a_pipeline_fills_and_drains():
    assert Costs().bubble(site(pp=4), 8) == 1 + 3 / 8
    assert Costs().bubble(site(pp=4, stages=3), 8) == 1 + 1 / 8


def test_sharded_weights_are_gathered_for_every_micro_batch():
    there = site(devices=8, zero=3)
    load = TokenLoad.sequence(64, count=8)
    gathered = Costs().gathers(DENSE, there, "bfloat16")
    assert gathered == pytest.approx(2 * DENSE.params * 7 / 8 / (H100.link * Rates().link_share), rel=0.01)
    assert Costs().forward(DENSE, there, load) == pytest.approx(gathered)


@pytest.mark.parametrize(("adapter", "trained"), [(0, DENSE.params), (16, 16 * DENSE.linear_inputs)])
def test_gradients_of_shards_are_scattered_in_every_backward_and_added_up_once_over_cells(adapter, trained):
    costs, there, load = Costs(rates=BARE), site(devices=8, zero=3), TokenLoad.sequence(1, count=8)
    moved = 7 / 8 * (2 * 2 * DENSE.params + 4 * trained) / H100.link
    assert costs.accumulate(DENSE, there, load, adapter=adapter) == pytest.approx(moved)
    once, twice = (costs.update(DENSE, there, adapter=adapter, cells=cells) for cells in (1, 2))
    assert once == pytest.approx(28 * trained / 8 / H100.bandwidth)
    assert twice - once == pytest.approx(4 * trained / 8 / H100.nic), "to the other host, each rank its shard"


def test_experts_over_ranks_wait_for_the_popular_ones():
    there = site(devices=8, ep=8)
    load = TokenLoad.sequence(4096, count=8)
    even = Costs(rates=replace(Rates(), skew=1.0)).forward(MIXTURE, there, load)
    assert Costs().forward(MIXTURE, there, load) > even


def test_moving_to_the_host_is_bound_by_its_link():
    assert Costs(rates=replace(BARE, host_share=1.0)).move(63e9, site()) == pytest.approx(1.0)


def test_an_all_reduce_crosses_the_network_on_one_share_per_rank():
    near = Wires.between(site(devices=16), 8, rates=BARE)
    assert near.all_reduce(8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 450e9)
    far = Wires.between(site(devices=16), 16, rates=BARE)
    assert far.all_reduce(8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 450e9 + 2 * 1 / 2 * 1e9 / 50e9)
    strided = Wires.between(site(devices=16, tp=8), 2, stride=8, rates=BARE)
    assert strided.all_reduce(8e9) == pytest.approx(8e9 / 50e9)


def test_a_group_of_one_sends_nothing():
    alone = Wires.between(site(), 1, rates=Rates())
    assert alone.all_reduce(1e9) == alone.all_gather(1e9) == alone.all_to_all(1e9, 8) == alone.send(1e9) == 0


def test_a_rack_is_one_domain_but_many_hosts():
    rack = Site(device=find_device("GB200"), mesh=Mesh(devices=16))
    inside, across = (Wires.between(rack, ranks, rates=Rates()) for ranks in (4, 8))
    assert (across.near, across.far) == (8, 1)
    assert across.near_delay > inside.near_delay


def test_gradients_through_host_memory_are_copied_there_and_back():
    costs, size = Costs(rates=replace(BARE, gather=2e9, host_share=1.0)), 4.0 * DENSE.params
    direct, hosts = (costs.update(DENSE, site(), cells=2, path=path) for path in (TensorPath.NCCL, TensorPath.GLOO))
    reduced = 2 * size / H100.host_link + size / 2e9
    assert hosts - direct == pytest.approx(reduced - size / H100.link, rel=1e-3)
    assert costs.update(DENSE, site(), path=TensorPath.GLOO) == costs.update(DENSE, site())


def test_what_a_stage_costs_besides_its_work_grows_with_the_logarithm_of_its_devices():
    costs = Costs(rates=replace(BARE, phase=0.5))
    assert [costs.turn(devices) for devices in (1, 2, 8, 64)] == [0.5, 1.0, 2.0, 3.5]


def test_experts_that_are_cut_like_other_matrices_are_slower_than_whole_ones():
    costs, load = Costs(rates=BARE), TokenLoad(tokens=1e6, pairs=0.0, sequences=100.0)
    cut, whole = site(devices=8, tp=8), site(devices=8, tp=8, ep=8)
    assert costs.compute(MIXTURE, cut, load) > 1.2 * costs.compute(MIXTURE, whole, load)
