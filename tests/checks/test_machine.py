"""Each check of a machine, on machines that are described rather than found, and on real ports and programs."""

import os
import socket
import threading
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from stretto import host_memory
from stretto.checks.machine import devices, network, packages, programs, resources
from stretto.checks.machine.base import GB, Gpu, MachineCheck, MachineFacts
from stretto.checks.machine.facts import cores_of_group, gpus_of, look, neighbors_together, visible
from stretto.errors import RecipeError, SandboxError
from stretto.kernels.cpu import compiler
from stretto.recipe.load import parse_recipe
from stretto.sandbox.isolated.protection import Protection

NEEDS = ("torch>=2.11", "transformers>=5.17", "peft>=0.19", "numpy>=2.0", "ruff>=9; extra == 'dev'")
VERSIONS = {"stretto": "0.1", "torch": "2.13.0+cpu", "transformers": "5.23.0", "peft": "0.21.2"}
SOUND = MachineFacts(
    cores=4,
    shown=4,
    memory=16 * GB,
    shared=8 * GB,
    files=65536,
    address=None,
    versions=VERSIONS,
    needs={"stretto": NEEDS},
)
GPU = Gpu(name="NVIDIA H100", memory=80 * GB)


def setting(machine=None, recipe=None, root=None, **facts):
    """A sound machine with some facts changed; a recipe is given by its keys."""
    told = parse_recipe(recipe) if recipe is not None else None
    return MachineCheck(machine=replace(machine or SOUND, **facts), recipe=told, **({"root": root} if root else {}))


def on(cluster, **keys):
    return {"placement": {"cluster": cluster, **keys}}


def failed(check):
    """The text and the fix of a check that failed, as one."""
    assert check is not None
    assert not check.ok
    assert check.fix
    return f"{check.text} | {check.fix}"


def passed(check):
    assert check is not None
    assert check.ok
    assert check.fix is None
    return check.text


def test_versions_in_range_are_told():
    assert passed(packages.core_versions(setting())) == "torch 2.13.0+cpu, transformers 5.23.0, peft 0.21.2"


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({"transformers": "4.57.1"}, "transformers>=5.17 is needed, and 4.57.1 is installed"),
        ({"peft": None}, "peft>=0.19 is needed, and none is installed"),
        ({"torch": "2.10.0"}, "pip install 'torch>=2.11'"),
    ],
)
def test_a_version_out_of_range_is_refused_with_the_command_that_mends_it(versions, told):
    versions = {name: version for name, version in (VERSIONS | versions).items() if version}
    assert told in failed(packages.core_versions(setting(versions=versions)))


@pytest.mark.parametrize("version", ["2.14.0.dev20261101+cu130", "2.13.0a0+gitabc", "built by hand"])
def test_a_build_of_tomorrow_or_of_ones_own_is_not_refused(version):
    assert packages.core_versions(setting(versions=VERSIONS | {"torch": version})).ok


def test_what_is_not_installed_as_a_package_has_no_ranges():
    assert packages.core_versions(setting(needs={})) is None


@pytest.mark.parametrize(
    ("version", "needs", "suspicious"),
    [
        ("0.28.0+cpu", ("torch==2.13.0",), False),
        ("0.28.0", ("torch==2.13.0",), True),
        ("0.28.0+cu130", (), True),
        ("0.27.0+cpu", ("torch==2.12.0",), True),
        ("0.28.0+cpu", ("torch ==; broken", "numpy"), False),
    ],
)
def test_a_companion_of_another_torch_is_suspected(version, needs, suspicious):
    machine = replace(SOUND, versions=VERSIONS | {"torchvision": version}, needs={"torchvision": needs})
    assert packages.suspects(machine) == (["torchvision"] if suspicious else [])


def test_a_suspect_is_imported_before_it_is_accused(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    case = setting(versions=VERSIONS | {"torchvision": "0.28.0"})
    (tmp_path / "torchvision.py").write_text("")
    assert "torchvision" in passed(packages.companions_match(case))
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    told = failed(packages.companions_match(case))
    assert "operator torchvision::nms does not exist" in told
    assert "pip uninstall torchvision" in told
    assert packages.companions_match(setting()) is None


def test_devices_are_counted_where_the_recipe_wants_them():
    assert passed(devices.devices_are_visible(setting())) == "no GPU and 4 CPU cores can be used"
    six = (GPU,) * 6
    assert "6 GPUs (NVIDIA H100, 80 GB)" in passed(devices.devices_are_visible(setting(gpus=six)))
    assert "need 8 GPUs, see 6" in failed(devices.devices_are_visible(setting(gpus=six, recipe=on("8xH100"))))
    assert "need 1 GPU, see 0" in failed(devices.devices_are_visible(setting(recipe=on("1xgpu"))))
    shared = passed(devices.devices_are_visible(setting(gpus=six, recipe=on("8xcpu"))))
    assert shared.endswith("8 CPU devices share 4 cores: results are the same, and steps take longer than planned")
    cells = [{"role": "train", "devices": [f"localhost/gpu:{index}" for index in range(7)]}]
    by_hand = setting(gpus=six, recipe=on("auto", cells=cells))
    assert "need 7 GPUs, see 6" in failed(devices.devices_are_visible(by_hand))


@pytest.mark.parametrize(
    ("cluster", "cells", "told"),
    [
        ("2xcpu", None, None),
        ("3xcpu", None, "3 CPU devices share 2 cores"),
        ("1xcpu+1xcpu2", None, "2 CPU devices of 3 threads share 2 cores"),
        ("1xcpu4", None, "1 CPU device of 4 threads has 2 cores"),
        ("2x2xcpu", None, None),
        ("8xH100", None, None),
        ("auto", None, None),
        ("auto", ["localhost/cpu:0", "localhost/cpu:5", "localhost/cpu:7"], "3 CPU devices share 2 cores"),
    ],
)
def test_devices_that_share_cores_are_named(cluster, cells, told):
    by_hand = cells and [{"role": "train", "devices": cells}]
    found = devices.shared_cores(parse_recipe(on(cluster, cells=by_hand)).placement, 2)
    assert found is None if told is None else found.startswith(f"{told}: ")


def test_a_torch_for_cpus_beside_a_gpu_is_told():
    assert "is a build for CPUs" in failed(devices.torch_can_use_the_gpu(setting(gpus=(GPU,))))
    assert devices.torch_can_use_the_gpu(setting(gpus=(GPU,), recipe=on("1xcpu"))) is None
    assert devices.torch_can_use_the_gpu(setting()) is None
    versions = VERSIONS | {"torch": "2.13.0+cu130"}
    assert passed(devices.torch_can_use_the_gpu(setting(gpus=(GPU,), versions=versions)))


def test_a_gpu_without_work_is_told_unless_the_recipe_says_so():
    told = failed(devices.no_device_is_forgotten(setting(gpus=(GPU,) * 4, recipe={})))
    assert "3 of 4 visible GPUs would have no work" in told
    assert devices.no_device_is_forgotten(setting(gpus=(GPU,) * 4, recipe=on("1xgpu"))) is None
    assert devices.no_device_is_forgotten(setting(gpus=(GPU,), recipe={})) is None


def test_a_model_that_cannot_fit_is_told_before_it_is_loaded(billion):
    whole = {"model": {"name": billion, "adapter": None}}
    assert "need at least 16.8 GB, and this machine has 16.0 GB" in failed(devices.model_fits(setting(recipe=whole)))
    assert "train an adapter" in failed(devices.model_fits(setting(recipe=whole)))
    adapted = {"model": {"name": billion}}
    assert "at least 1.9 GB" in passed(devices.model_fits(setting(recipe=adapted)))
    assert "the GPU has 80.0 GB" in passed(devices.model_fits(setting(recipe=whole, gpus=(GPU,))))
    small = failed(devices.model_fits(setting(recipe=adapted, memory=GB)))
    assert small.endswith("use a smaller model")


def test_a_model_whose_size_is_not_known_is_not_judged_and_the_check_says_so():
    assert devices.model_fits(setting(recipe={"model": {"name": "scratch"}})) is None
    told = passed(devices.model_fits(setting(recipe={"model": {"name": "some/model-that-is-not-here"}})))
    assert told.startswith("not checked: the size of some/model-that-is-not-here is not known")


def test_threads_have_cores():
    assert passed(resources.threads_have_cores(setting())) == "4 threads on 4 cores"
    given = setting(environment={"OMP_NUM_THREADS": "8"})
    assert "8 threads (OMP_NUM_THREADS says so)" in failed(resources.threads_have_cores(given))
    assert passed(resources.threads_have_cores(setting(shown=64, cores=2))) == "2 threads on 2 cores"
    assert passed(resources.threads_have_cores(setting(busy=0.9))).startswith("3 threads on 4 cores: other programs")
    assert resources.threads_have_cores(setting(shown=64, cores=2, environment={"OMP_NUM_THREADS": "2"})).ok
    assert "is no number" in failed(resources.threads_have_cores(setting(environment={"OMP_NUM_THREADS": "many"})))


def test_open_files_are_enough_for_the_processes_of_a_run():
    assert resources.files_can_be_opened(setting(files=1024)).ok
    assert resources.files_can_be_opened(setting(files=None)).ok
    assert "ulimit -n 4096" in failed(resources.files_can_be_opened(setting(files=1024, recipe=on("2xcpu"))))
    assert "ulimit -n 256" in failed(resources.files_can_be_opened(setting(files=64)))


def test_shared_memory_matters_to_several_processes():
    small = 64 * 2**20
    assert resources.memory_is_shared(setting(shared=small)) is None
    assert "--shm-size" in failed(resources.memory_is_shared(setting(shared=small, recipe=on("2xcpu"))))
    assert passed(resources.memory_is_shared(setting(recipe=on("2xcpu")))) == "8.0 GB free in /dev/shm"
    assert resources.memory_is_shared(setting(shared=None, recipe=on("2xcpu"))) is None


def test_shared_memory_matters_to_vllm_on_one_device_too(monkeypatch):
    monkeypatch.setattr(resources, "parameters", lambda name, root: 2**30)
    recipe = {"engine": {"kind": "vllm"}}
    told = failed(resources.engine_files_have_room(setting(shared=64 * 2**20, recipe=recipe)))
    assert "files of 2.50 GB" in told and "--shm-size=4g" in told
    assert resources.engine_files_have_room(setting(recipe=recipe)).ok
    assert resources.engine_files_have_room(setting(recipe=on("2xcpu"))) is None
    recipe["engine"]["url"] = "http://there"  # which reads an adapter from the run's folder
    assert resources.engine_files_have_room(setting(shared=0, recipe=recipe)) is None


def test_disk_has_room_for_what_is_kept(tmp_path, monkeypatch, billion):
    monkeypatch.chdir(tmp_path)
    none = {"guards": {"min_disk_gb": 0}}
    assert str(tmp_path) in passed(resources.disk_has_room(setting(recipe=none)))
    assert "are needed" in failed(resources.disk_has_room(setting(recipe={"guards": {"min_disk_gb": 1e9}})))
    whole = setting(recipe={"model": {"name": billion, "adapter": None}})
    assert resources.checkpoint_gb(whole) == pytest.approx(14e9 / GB)
    assert "a checkpoint takes about 13.0 GB, and 4 are kept" in resources.disk_has_room(whole).text
    assert resources.checkpoint_gb(setting(recipe={"model": {"name": billion}})) == 0


def test_ports_can_be_had_and_reached_here():
    assert passed(network.loopback_is_reached(setting()))
    assert "no address but loopback" in passed(network.own_address_is_reached(setting()))
    assert "127.0.0.1" in passed(network.own_address_is_reached(setting(address="127.0.0.1")))


def test_an_address_that_is_not_of_this_host_is_told():
    assert "203.0.113.9 cannot be reached" in failed(network.own_address_is_reached(setting(address="203.0.113.9")))


def test_several_hosts_need_a_cluster_that_answers():
    several = on("2x8xH100")
    assert network.cluster_is_reached(setting(recipe=on("8xH100"))) is None
    assert devices.devices_are_visible(setting(recipe=several)) is None, "Ray counts them"
    assert "RAY_ADDRESS does not say which Ray cluster" in failed(network.cluster_is_reached(setting(recipe=several)))
    with socket.create_server((network.LOOPBACK, 0)) as server:
        there = {"RAY_ADDRESS": "{}:{}".format(*server.getsockname())}
        assert network.cluster_is_reached(setting(recipe=several, environment=there)).ok
    text = failed(network.cluster_is_reached(setting(recipe=several, environment=there)))
    assert f"RAY_ADDRESS={there['RAY_ADDRESS']} cannot be reached: Connection refused" in text
    assert "ray start --head" in text
    assert network.cluster_is_reached(setting(recipe=several, environment={"RAY_ADDRESS": "auto"})).ok


def test_a_cluster_that_one_host_joins_must_answer_too():
    with socket.create_server((network.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    two, there = on("2xcpu"), {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    assert network.cluster_is_reached(setting(recipe=two)) is None, "it starts a Ray of its own"
    assert network.cluster_is_reached(setting(recipe=two, environment={"RAY_ADDRESS": "local"})) is None
    assert network.cluster_is_reached(setting(recipe=on("1xcpu"), environment=there)) is None, "it uses no Ray"
    found = network.cluster_is_reached(setting(recipe=two, environment=there))
    assert f"nobody answers at 127.0.0.1:{port}" in failed(found)
    assert found.silent


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("auto", None),
        ("10.0.0.1:6379", ("10.0.0.1", 6379)),
        ("ray://head:10001", ("head", 10001)),
        ("[fd00::1]:6379", ("fd00::1", 6379)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_an_address_of_a_cluster_is_a_host_and_a_port(address, place):
    assert network.place_of(address) == place


@pytest.mark.parametrize(
    "address",
    [
        *("garbage", "host", "host:", ":6379", "host:0", "host:65536", "host:99999999999", "host:-1", "host:6379x"),
        *("host:٣", "http://host:80", "anyscale://cluster", "fd00::1:6379", "a b:6379", "user@host:1", "ray://"),
        *("127.0.0.1:6379/", "10.0.0.1:6379,10.0.0.2:6379"),
    ],
)
def test_what_is_no_address_of_a_cluster_is_refused_before_anybody_connects(address):
    with pytest.raises(RecipeError, match="is no HOST:PORT of a Ray cluster\n    fix: run `ray start --head`"):
        network.place_of(address)
    found = network.cluster_is_reached(setting(recipe=on("2xcpu"), environment={"RAY_ADDRESS": address}))
    assert "is no HOST:PORT" in failed(found)
    assert not found.silent, "it is the address that is wrong"


def test_a_name_that_takes_its_time_is_not_waited_for(monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(socket, "create_connection", lambda *place, **told: stuck.wait(60))
    assert network.silence(("head", 1), seconds=0.01) == "nobody answers at head:1 within 0.01 s"
    stuck.set()


@pytest.mark.parametrize("host", ["a" * 70, "no.such.host.invalid", "::1"])
def test_a_name_that_is_nobodys_is_told(host):
    assert "nobody answers at " in network.silence((host, 9))


def test_a_run_of_one_host_asks_nothing_of_its_other_addresses():
    far = {"address": "203.0.113.9"}
    assert "the run stays on it" in passed(network.own_address_is_reached(setting(recipe=on("2xcpu"), **far)))
    joins = {"RAY_ADDRESS": "10.0.0.1:6379"}
    assert "cannot be reached" in failed(
        network.own_address_is_reached(setting(recipe=on("2xcpu"), environment=joins, **far))
    )
    assert "cannot be reached" in failed(network.own_address_is_reached(setting(recipe=on("2x8xH100"), **far)))


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, None),
        ({"RAY_ADDRESS": "local"}, None),
        ({"RAY_ADDRESS": "auto"}, None),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": "Token"}, True),
    ],
)
def test_a_cluster_without_a_token_is_told(told, said):
    found = network.cluster_has_a_token(setting(recipe=on("2xcpu"), environment=told))
    assert (found and found.ok) is said


def test_a_port_is_never_a_fixed_one(monkeypatch):
    asked = []
    create = socket.create_server

    def listen(address, **options):
        asked.append(address)
        return create(address, **options)

    monkeypatch.setattr(socket, "create_server", listen)
    assert network.exchange("127.0.0.1") is None
    assert asked == [("127.0.0.1", 0)]


def test_ray_is_needed_by_several_devices_only():
    assert programs.ray_is_installed(setting()) is None
    assert programs.ray_is_installed(setting(recipe={})) is None
    assert "uses 2 devices, and ray" in failed(programs.ray_is_installed(setting(recipe=on("2xcpu"))))
    there = setting(recipe=on("2xcpu"), versions=VERSIONS | {"ray": "2.52.0"})
    assert passed(programs.ray_is_installed(there)) == "ray 2.52.0 is installed"


@pytest.mark.parametrize("version", ["2.51.2", "2.50.0", "2.52.0rc1", "1.13"])
def test_a_ray_that_lets_in_anybody_is_too_old(version):
    old = programs.ray_is_installed(setting(recipe=on("2xcpu"), versions=VERSIONS | {"ray": version}))
    assert f"ray {version} is installed, and only 2.52 and later refuse" in failed(old)
    assert old.fix == "pip install 'ray>=2.52'"


@pytest.mark.parametrize("version", ["2.52.0", "2.60.0", "3.0.0.dev0", "3", "a build of mine"])
def test_a_ray_that_asks_for_a_token_is_new_enough(version):
    assert passed(programs.ray_is_installed(setting(recipe=on("2xcpu"), versions=VERSIONS | {"ray": version})))


def test_the_oldest_ray_is_the_one_that_is_asked_for():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ray"] == [f"ray>={programs.RAY}"]


def test_a_compiler_is_tried(monkeypatch):
    monkeypatch.setenv("CC", "cc")
    assert passed(programs.kernels_can_be_compiled(setting())) == "cc compiles the kernels for CPUs"
    assert programs.kernels_can_be_compiled(setting(gpus=(GPU,))) is None
    assert programs.kernels_can_be_compiled(setting(recipe={"engine": {"kind": "vllm"}})) is not None


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-compiler", "no-such-compiler does not start: No such file or directory"),
        ("false", "false says: exit code 1"),
        ("cc -fno-such-option", "-fno-such-option"),
    ],
)
def test_a_compiler_that_fails_is_told(monkeypatch, command, said):
    monkeypatch.setenv("CC", command)
    told = failed(programs.kernels_can_be_compiled(setting()))
    assert said in told and "1.5 times as long" in told and "name a gcc in CC" in told


def test_a_compiler_with_another_openmp_is_told(monkeypatch):
    monkeypatch.setattr(compiler, "RUNTIME", b"libother")
    told = failed(programs.kernels_can_be_compiled(setting()))
    assert "has another OpenMP than libother, which torch has" in told


def test_no_compiler_at_all_is_told(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    assert "there is no C compiler (gcc, cc)" in failed(programs.kernels_can_be_compiled(setting()))


LOCKED = Protection(namespaces=True, unprivileged=True, seccomp=True, landlock=True)


def test_what_the_sandbox_lacks_is_said():
    assert passed(programs.sandbox_check(lambda: LOCKED))
    assert "system calls are not filtered" in failed(programs.sandbox_check(lambda: replace(LOCKED, seccomp=False)))
    open_ = replace(LOCKED, namespaces=False, refused="unshare: Operation not permitted")
    assert "unshare: Operation not permitted" in failed(programs.sandbox_check(lambda: open_))


def test_a_sandbox_that_does_not_start_is_told():
    def broken() -> Protection:
        raise SandboxError("it exited with code 1")

    assert "it exited with code 1" in failed(programs.sandbox_check(broken))


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2", [2]),
        ("1, 0", [1, 0]),
        ("0,7,1", [0]),
        ("GPU-8932f937,GPU-11aa", [0, 1]),
    ],
)
def test_cuda_visible_devices_hides_gpus(listed, left):
    gpus = [Gpu(name=str(index), memory=GB) for index in range(3)]
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [int(gpu.name) for gpu in visible(gpus, environment)] == left


class Library:
    """What the driver's management library does, for two GPUs of which the second does not answer."""

    def __init__(self, starts=True):
        self.starts, self.open = starts, False

    def nvmlInit_v2(self):
        self.open = self.starts
        return 0 if self.starts else 9

    def nvmlShutdown(self):
        self.open = False

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = 1000 + index
        return index

    def nvmlDeviceGetName(self, handle, name, length):
        name.value = f"GPU of {handle.value}".encode()[:length]

    def nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total = 80 * GB


def test_gpus_are_told_by_the_drivers_library():
    library = Library()
    assert gpus_of(library) == [Gpu(name="GPU of 1000", memory=80 * GB)]
    assert not library.open
    assert gpus_of(Library(starts=False)) == []


def test_this_machine_can_be_looked_at():
    machine = look()
    assert 1 <= machine.cores <= machine.shown <= (os.cpu_count() or 1)
    assert machine.memory > 2**20
    assert "torch" in machine.versions
    assert machine.environment == dict(os.environ)


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1073741824"}, 2, GB),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None, None),
        ({"memory/memory.limit_in_bytes": "1073741824"}, None, GB),
        ({}, None, None),
    ],
)
def test_a_containers_limits_are_read(tmp_path, files, cores, memory):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores_of_group(tmp_path) == cores
    assert host_memory.limit_of_group(tmp_path) == memory
    (tmp_path / "memory.current").write_text("1000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 400000\n")
    expected = host_memory.free(tmp_path / "none") if memory is None else memory - 600_000
    assert host_memory.total(tmp_path) <= (memory or host_memory.total(tmp_path / "none"))
    assert host_memory.free(tmp_path) == pytest.approx(expected, rel=0.2)


def test_hardware_threads_of_a_core_stand_together_where_the_system_tells(tmp_path):
    for number, together in {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"}.items():
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{together}\n")
    assert neighbors_together({0, 1, 2, 3, 4, 5, 7}, tmp_path) == [0, 4, 1, 5, 2, 3, 7]
