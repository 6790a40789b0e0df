"""Clusters from text and from files; devices by any spelling; what is unknown is answered with what is near."""

import pytest

from stretto.errors import RecipeError
from stretto.placement.cluster import parse_cluster, read_cluster
from stretto.placement.devices import DEVICES, GB, DeviceKind, find_device, host_of, kind_of, number_of
from stretto.placement.rates import Rates


@pytest.mark.parametrize(
    ("text", "hosts", "devices", "first", "last"),
    [
        ("8xH100", 1, 8, "localhost/gpu:0", "localhost/gpu:7"),
        ("6x8xH100", 6, 48, "host0/gpu:0", "host5/gpu:7"),
        ("8xH800+8xH20", 2, 16, "host0/gpu:0", "host1/gpu:7"),
        ("2xcpu", 1, 2, "localhost/cpu:0", "localhost/cpu:1"),
        ("64 x nvidia h100 sxm5 80gb", 8, 64, "host0/gpu:0", "host7/gpu:7"),
        ("12xa100", 2, 12, "host0/gpu:0", "host1/gpu:3"),
        ("16xGB200", 4, 16, "host0/gpu:0", "host3/gpu:3"),
        ("H100", 1, 1, "localhost/gpu:0", "localhost/gpu:0"),
        ("4090", 1, 1, "localhost/gpu:0", "localhost/gpu:0"),
        ("2x4090", 1, 2, "localhost/gpu:0", "localhost/gpu:1"),
        ("2x8x4090+L4", 3, 17, "host0/gpu:0", "host2/gpu:0"),
    ],
)
def test_text_names_hosts_and_devices(text, hosts, devices, first, last):
    cluster = parse_cluster(text)
    names = list(cluster.devices)
    assert (len(cluster.hosts), len(cluster), names[0], names[-1]) == (hosts, devices, first, last)


def test_a_mixed_cluster_keeps_its_kinds_apart():
    pools = parse_cluster("8xH800+8xH20+8xH800").pools()
    assert [(device.name, count) for device, count in pools] == [("H800", 16), ("H20", 8)]


@pytest.mark.parametrize("spelling", ["h100", "H100 SXM", "H100-SXM5-80GB", "NVIDIA H100 80GB", "h100 sxm5"])
def test_a_device_is_found_however_it_is_spelled(spelling):
    assert find_device(spelling) is DEVICES["H100"]


def test_memory_counts_binary_gigabytes_and_variants_differ():
    assert find_device("A100").memory == 80 * 2**30
    assert find_device("a100 40g").memory == 40 * 2**30
    assert find_device("H20 141GB").memory > find_device("H20-96GB").memory


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH101", "H100"),
        ("8", "no cluster"),
        ("", "no cluster"),
        ("8xH100+", "no cluster"),
        ("0x8xH100", "no devices"),
        ("8x0xH100", "no devices"),
        ("999999x999999xH100", "the largest cluster"),
        ("16384xH100+8xH100", "16392 devices"),
        ("100000000000xL4", "the largest cluster"),
        ("-8xH100", "no cluster"),
    ],
)
def test_what_is_no_cluster_is_refused_with_what_to_write(text, said):
    with pytest.raises(RecipeError, match=said) as refused:
        parse_cluster(text, field="--cluster")
    assert refused.value.problems[0].field == "--cluster"


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
    ],
)
def test_a_device_is_found_by_what_its_driver_calls_it(driver, name):
    assert find_device(driver).name == name


def test_an_unknown_device_is_answered_with_how_to_give_its_numbers():
    with pytest.raises(RecipeError) as refused:
        find_device("Gaudi3")
    assert "memory_gb" in refused.value.problems[0].fix


def test_a_file_gives_hosts_devices_and_measured_rates():
    document = {
        "hosts": [{"device": "Mine", "devices": 4, "count": 2, "memory_gb": 512}, {"device": "L4", "devices": 1}],
        "devices": {"Mine": {"flops": 1e14, "memory_gb": 32, "bandwidth": 1e12, "domain": 4}},
        "rates": {"tick": 0.002},
    }
    cluster = read_cluster(document, file="mine.yaml")
    assert str(cluster) == "8 x Mine + 1 x L4"
    assert cluster.hosts[0].memory == 512 * GB
    assert cluster.hosts[0].device.host_memory == 128 * GB
    assert cluster.hosts[0].device.memory == 32 * GB
    assert cluster.hosts[0].device.matmul == pytest.approx(0.8e14)
    assert Rates.of(cluster.rates).tick == 0.002


def test_a_file_may_correct_a_known_device():
    document = {
        "hosts": [{"device": "H100", "devices": 8}],
        "devices": {"H100": {"like": "H100", "nic": 1.25e10, "matmul": 7e14}},
    }
    device = read_cluster(document, file="c.yaml").hosts[0].device
    assert (device.nic, device.matmul, device.bandwidth) == (1.25e10, 7e14, DEVICES["H100"].bandwidth)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (None, "the whole file"),
        ([], "the whole file"),
        ({}, "hosts"),
        ({"hosts": []}, "hosts"),
        ({"hosts": [{"device": "H100", "devices": 0}]}, "devices"),
        ({"hosts": [{"device": "H100", "devices": 8, "speed": 1}]}, "speed"),
        ({"hosts": [{"device": "H101", "devices": 8}]}, "H100"),
        ({"hosts": [{"device": "M", "devices": 8}], "devices": {"M": {"flops": 1e14}}}, "it needs"),
        ({"hosts": [{"device": "M", "devices": 8}], "devices": {"M": {"like": "H1000"}}}, "H100"),
        ({"hosts": [{"device": "H100", "devices": 1024, "count": 10_000}]}, "the largest cluster"),
        ({"hosts": 3}, "is no list"),
        ({"hosts": [{"device": "H100", "devices": 8}], "rates": {"tick": -1.0}}, "tick is -1"),
        ({"hosts": [{"device": "M", "devices": 8}], "devices": {"M": {"like": "L4", "flops": 1e-300}}}, "greater than"),
    ],
)
def test_a_wrong_file_is_refused_by_name(document, said):
    with pytest.raises(RecipeError, match=said) as refused:
        read_cluster(document, file="c.yaml")
    assert all(problem.field.startswith("c.yaml") for problem in refused.value.problems)


@pytest.mark.parametrize("rates", [{"speed": 1.0}, {"tick": -1.0}, {"tick": float("nan")}, {"decode_share": 0.0}])
def test_rates_that_cannot_be_are_refused(rates):
    with pytest.raises(RecipeError, match=next(iter(rates))):
        Rates.of(rates)


def test_a_host_without_a_device_is_one_problem():
    with pytest.raises(RecipeError) as refused:
        read_cluster({"hosts": ({"devices": 8},)}, file="c.yaml")
    assert [problem.field for problem in refused.value.problems] == ["c.yaml: hosts.0.device"]


def test_a_thread_of_a_cpu_has_constants_of_its_own():
    assert Rates.of({}, kind=DeviceKind.CPU).gather < Rates.of({}).gather


def test_the_name_of_a_device_tells_its_kind_its_host_and_its_number():
    names = {name: device.kind for name, device in parse_cluster("2xH100+3xcpu").devices.items()}
    assert names == {name: kind_of(name) for name in names}
    assert [kind_of(name) for name in names] == [DeviceKind.GPU] * 2 + [DeviceKind.CPU] * 3
    assert [(host_of(name), number_of(name)) for name in names][1:4] == [("host0", 1), ("host1", 0), ("host1", 1)]
