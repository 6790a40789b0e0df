"""New weights cost what the way costs that they take."""

from dataclasses import replace

import pytest

from stretto.placement.devices import find_device
from stretto.placement.rates import Rates
from stretto.placement.transport import TensorPath
from stretto.planner.cost.mesh import Mesh, Site
from stretto.planner.cost.seconds import Costs
from stretto.planner.cost.shapes import named_shape
from stretto.planner.cost.transfers import WeightRoute, hand_over, own_route, reshard

H100 = find_device("H100")
DENSE, MIXTURE = named_shape("qwen2.5-7b"), named_shape("qwen3-30b-a3b")
BARE = Costs(
    rates=Rates(
        link_share=1.0, nic_share=1.0, host_share=1.0, near_delay=0.0, far_delay=0.0, gather=2e9, tensor=1e-4,
        load=1e-3, handover=0.5,
    )
)  # fmt: skip
SIZE = 2.0 * DENSE.params


def site(device=H100, **mesh):
    degrees = Mesh(**mesh)
    return Site(device=device, mesh=replace(degrees, devices=max(degrees.devices, degrees.tp * degrees.pp)))


def handed(route, *, receivers=1, crosses=False, trainer=None, engine=None, shape=DENSE, **more):
    return hand_over(
        BARE, route, shape, trainer or site(), engine or site(), receivers=receivers, crosses=crosses, **more
    )


@pytest.mark.parametrize(
    ("path", "seconds"),
    [
        (TensorPath.SHARED, 0.0),
        (TensorPath.IPC, 2 * SIZE / H100.bandwidth),
        (TensorPath.NCCL, SIZE / H100.link),
        (TensorPath.GLOO, 2 * SIZE / H100.host_link + SIZE / 2e9),
    ],
)
def test_each_path_costs_its_own_link(path, seconds):
    assert handed(own_route(path, engine_apart=False)).seconds == pytest.approx(seconds)


def test_through_host_memory_every_doubling_of_receivers_is_another_round():
    took = [handed(own_route(TensorPath.GLOO, engine_apart=False), receivers=count).seconds for count in (1, 3, 7)]
    assert took[2] - took[1] == pytest.approx(took[1] - took[0]) == pytest.approx(SIZE / 2e9)


def test_on_cpus_tensors_are_in_host_memory_already():
    cpu = site(find_device("cpu"))
    took = handed(own_route(TensorPath.GLOO, engine_apart=False), trainer=cpu, engine=cpu)
    assert took.seconds == pytest.approx(SIZE / 2e9)


def test_to_other_hosts_all_cards_of_a_host_take_in_what_it_needs_together():
    route = own_route(TensorPath.NCCL, engine_apart=False)
    together = handed(route, receivers=16, crosses=True).send
    assert together == pytest.approx(max(SIZE / 8 / H100.nic, SIZE * 7 / 8 / H100.link))
    assert handed(replace(route, paired=True), receivers=16, crosses=True).send == pytest.approx(SIZE / H100.nic)


def test_an_engine_of_its_own_takes_tensor_by_tensor_and_the_native_one_does_not():
    apart = own_route(TensorPath.IPC, engine_apart=True)
    calls = -(-SIZE // apart.bucket)
    took = handed(replace(apart, files=False))
    assert took.gather == pytest.approx(1e-4 * DENSE.tensors)
    assert took.load == pytest.approx(1e-4 * DENSE.tensors + 1e-3 * calls)
    assert took.besides == 0.5
    assert handed(own_route(TensorPath.IPC, engine_apart=False)).load == 0
    filed = handed(own_route(TensorPath.FILE, engine_apart=True))
    assert (filed.send, filed.load) == (0, pytest.approx(took.load + 2 * SIZE / H100.host_link + SIZE / 2e9))


def test_a_tensor_at_a_time_costs_a_call_each():
    route = WeightRoute(path=TensorPath.NCCL, loads=True, bucket=0.0)
    assert handed(route).load == pytest.approx((1e-4 + 1e-3) * DENSE.tensors)


def test_what_overlaps_takes_as_long_as_its_slowest_part():
    parts = WeightRoute(path=TensorPath.NCCL, exports=True, loads=True)
    serial, overlapped = handed(parts), handed(replace(parts, overlapped=True))
    assert overlapped.seconds == pytest.approx(max(serial.gather, serial.send, serial.load) + 0.5)
    assert serial.seconds == pytest.approx(serial.gather + serial.send + serial.load + 0.5)


def test_parts_of_tensors_are_gathered_before_they_leave():
    trainer = site(devices=8, zero=3)
    assert handed(own_route(TensorPath.NCCL, engine_apart=False), trainer=trainer).gather == pytest.approx(
        SIZE * 7 / 8 / H100.link
    )
    assert handed(WeightRoute(path=TensorPath.NCCL, gathers=False), trainer=trainer).gather == 0


def test_experts_are_most_of_the_tensors_of_a_mixture():
    assert MIXTURE.expert_tensors == 48 * 128 * 3
    assert named_shape("deepseek-v3").tensors == pytest.approx(45_395, rel=0.01)  # as NeMo-RL counts them
    stacked = WeightRoute(path=TensorPath.NCCL, loads=True, stacked=True)
    assert handed(stacked, shape=MIXTURE).load < 0.1 * handed(replace(stacked, stacked=False), shape=MIXTURE).load


def test_an_adapter_is_handed_over_in_a_moment():
    route = own_route(TensorPath.GLOO, engine_apart=False)
    assert handed(route, adapter=16).seconds < 0.1 * handed(route).seconds


def test_resharding_moves_what_hybridflow_counts():
    trainer = site(devices=8, tp=8)
    moved = SIZE * (8 - 2) / (2 * 8)
    assert reshard(BARE, DENSE, trainer, site(tp=2)) == pytest.approx(moved / H100.link)
    assert reshard(BARE, DENSE, trainer, site(tp=8)) == 0


def test_experts_that_trainer_and_engine_spread_alike_are_not_moved():
    apart, alike = site(devices=16, tp=8, ep=8), site(devices=16, tp=8, ep=16)
    engine = site(devices=16, tp=4, ep=16)
    assert reshard(BARE, MIXTURE, alike, engine) < 0.5 * reshard(BARE, MIXTURE, apart, engine)
