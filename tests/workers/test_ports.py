"""What a run of one host opens to others: nothing. Its ports are on loopback, and Ray's ask everybody for a token."""

import asyncio
import os
import re
import subprocess
import sys
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
import ray

from crewed import steps
from running import recipe_in
from stretto.environments.addresses import Addresses
from stretto.placement.build import plan_of
from stretto.recipe.describe import roles_of
from stretto.runtime.build import build_runtime
from stretto.runtime.spans import Clock
from stretto.workers.connectivity import on_loopback
from stretto.workers.launchers.inprocess import worker_of
from stretto.workers.launchers.ray import ONLY_HERE, PrivateRay, RayLauncher
from stretto.workers.orphans import marked
from stretto.workers.process_group import Rendezvous, reach, store_at

DEVICES = ["localhost/cpu:0", "localhost/cpu:1"]

LISTENS = "0A"
"""The kernel's state of a socket that waits for connections."""


def listeners(processes):
    """(process, address, port) of every TCP socket on which one of these waits for connections."""
    found = []
    for process in processes:
        files = []
        for path in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile, as that of this very look
                files.append(os.readlink(path))
        mine = {int(told[1]) for file in files if (told := re.fullmatch(r"socket:\[(\d+)\]", file))}
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                words = row.split()
                if words[3] == LISTENS and int(words[9]) in mine:
                    address, port = words[1].split(":")
                    found.append((process, address_of(address), int(port, 16)))
    return found


def address_of(text):
    """An address as the kernel writes it: words of four bytes, each in the machine's order."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    address = ip_address(raw)
    return getattr(address, "ipv4_mapped", None) or address


def beyond(found):
    """Those of them that other hosts could reach."""
    return [(Path(f"/proc/{p}/cmdline").read_bytes()[:60], str(a), port) for p, a, port in found if not a.is_loopback]


def test_the_kernels_tables_are_read_rightly():
    assert str(address_of("0100007F")) == "127.0.0.1"
    assert str(address_of("00000000000000000000000000000000")) == "::"
    assert str(address_of("0000000000000000FFFF00000100007F")) == "127.0.0.1"
    assert address_of("00000000000000000000000001000000").is_loopback


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_listens_where_it_was_told_and_nowhere_else(address):
    before = {(a, port) for _, a, port in listeners([os.getpid()])}
    try:
        store = store_at(address)
    except OSError:
        pytest.skip("this host has no such address")
    opened = {(str(a), port) for _, a, port in listeners([os.getpid()]) if (a, port) not in before}
    assert opened == {(address, store.port)}
    there = reach(Rendezvous(store=(address, store.port), name="here", rank=0, size=1, seconds=5))
    there.set("a", "b")
    assert there.get("a") == b"b"


def test_programs_reach_a_model_at_loopback_and_nowhere_else():
    """The addresses of trajectories, and of `stretto serve`, which opens the same."""

    async def scenario():
        before = {(a, port) for _, a, port in listeners([os.getpid()])}
        addresses, model = Addresses(vocabulary=8), object()
        with addresses.running(model):
            told = await addresses.open(model)
            opened = {(str(a), port) for _, a, port in listeners([os.getpid()]) if (a, port) not in before}
        await addresses.close()
        return told, opened

    told, opened = asyncio.run(scenario())
    ((address, port),) = opened
    assert address == "127.0.0.1"
    assert f"//127.0.0.1:{port}/" in told.base_url


def test_a_port_that_is_taken_is_never_asked_for():
    assert len({store_at("127.0.0.1").port for _ in range(3)}) == 3


@pytest.mark.parametrize(
    "before", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "mine", "RAY_AUTH_MODE": "token"}]
)
def test_a_run_draws_a_token_and_gives_back_what_was_there(monkeypatch, before):
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", *ONLY_HERE)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    tokens = []
    for _ in range(2):
        closed = PrivateRay()
        closed.enter()
        tokens.append(os.environ["RAY_AUTH_TOKEN"])
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert ray.util.get_node_ip_address() in ("127.0.0.1", "::1")
        closed.leave()
        closed.leave()
        assert {name: os.environ[name] for name in names if name in os.environ} == before
    assert len({*tokens, "mine"}) == 3
    assert min(map(len, tokens)) == 64, "256 bits"
    PrivateRay().leave()
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER


def test_groups_that_torch_makes_itself_are_told_the_interface():
    assert set(on_loopback()) == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert set(on_loopback().values()) <= {"lo", "lo0"}


CLIENT = """
import os, sys
import ray
from ray._raylet import GcsClient
what, address = sys.argv[1:]
if what == "join":
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    print("let in")
else:
    GcsClient(address=address).internal_kv_put(b"x", b"y", True, None, 5)
    print("let in")
"""


def knocks(what, address, **token):
    """True if a client of Ray with this token, or none, is let in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, what, address],
        env={**environment, **token},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    let_in = "let in" in done.stdout
    assert let_in or "Authentication" in done.stderr or "ConnectionError" in done.stderr, done.stderr
    return let_in


@pytest.mark.slow
@pytest.mark.parametrize("cells", ["single", "wide"])
def test_a_run_of_one_host_listens_on_loopback_only(cells, tmp_path):
    """Looked at after some steps, when every process has met every other; a wide cell's meet by torch's own group."""
    recipe = recipe_in(tmp_path, model__dtype="float64")
    seen = []

    async def scenario():
        placement = recipe.placement.model_copy(update={"strategy": "elastic"})
        if cells == "wide":
            each = [{"role": "generate", "devices": [device]} for device in DEVICES]
            wide = {"role": "train", "devices": DEVICES}
            placement = placement.model_copy(update={"cells": (*each, wide)})
        plan = plan_of(placement, roles=roles_of(recipe), devices=tuple(DEVICES))
        launcher = RayLauncher(DEVICES, seconds=100, make=worker_of)
        parts = await build_runtime(recipe, plan=plan, root=tmp_path, folder=tmp_path, note=print, launcher=launcher)
        try:
            await steps(parts, Clock(devices=parts.devices))
            seen.extend(listeners([os.getpid(), *marked(launcher.reaper.mark)]))
        finally:
            await parts.close()
        return launcher

    launcher = asyncio.run(scenario())
    assert len({process for process, *_ in seen}) >= 5, "this one, two workers, and at least two of Ray's"
    assert beyond(seen) == []
    assert marked(launcher.reaper.mark) == []


@pytest.mark.slow
def test_who_has_not_the_token_of_a_run_is_refused():
    async def scenario():
        launcher = RayLauncher(DEVICES, seconds=60)
        try:
            await launcher.open()
            address = ray.get_runtime_context().gcs_address
            mine = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
            assert knocks("ask", address, **mine)
            assert not knocks("ask", address)
            assert not knocks("ask", address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
            assert not knocks("join", address)
        finally:
            await launcher.close()

    asyncio.run(scenario())
