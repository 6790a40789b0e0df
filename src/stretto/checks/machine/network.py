"""Whether a port can be had and reached: what every process of a run needs to speak to the others.

Ports are asked of the kernel (bind 0), here as everywhere else in stretto: a fixed one is taken by the next run.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from stretto.checks.machine.base import Check, MachineCheck
from stretto.errors import RecipeError
from stretto.threads import within

PATIENCE = 1.0
"""Seconds to connect and to exchange a few bytes."""

FAR = 3.0
"""Seconds to connect to another host; a packet that was lost is sent again within them."""

LOOPBACK = "127.0.0.1"

JOIN = (
    "run `ray start --head` on one host and `ray start --address=HOST:PORT` on each of the others, and here too; then "
    "set RAY_ADDRESS=HOST:PORT"
)
"""How several hosts become a cluster."""

NO_CLUSTER = ("names several hosts, and RAY_ADDRESS does not say which Ray cluster they are", JOIN)
"""Why several hosts cannot be used, and what to do."""


def loopback_is_reached(setting: MachineCheck) -> Check:
    """A process can reach another on the same host."""
    if why := exchange(LOOPBACK):
        fix = "allow connections to 127.0.0.1 (firewall, sandbox or container settings)"
        return Check(name="loopback", ok=False, text=f"a port on 127.0.0.1 cannot be reached: {why}", fix=fix)
    return Check(name="loopback", ok=True, text="a free port on 127.0.0.1 can be had and reached")


def own_address_is_reached(setting: MachineCheck) -> Check:
    """A process can reach this host by the address that other hosts know. A run of one host stays on loopback."""
    if setting.recipe is not None and setting.hosts == 1 and not cluster_named(setting.machine.environment):
        return Check(name="address", ok=True, text="no other address of this host is used, as the run stays on it")
    address = setting.machine.address
    if address is None:
        return Check(
            name="address", ok=True, text="this host has no address but loopback, which is enough for one host"
        )
    if why := exchange(address):
        fix = f"allow connections from this host to {address} (firewall or container settings)"
        return Check(name="address", ok=False, text=f"a port on {address} cannot be reached: {why}", fix=fix)
    return Check(name="address", ok=True, text=f"a free port on this host's address {address} can be had and reached")


def cluster_is_reached(setting: MachineCheck) -> Check | None:
    """The Ray cluster of a recipe with several devices answers, where it uses one: several hosts need it."""
    if setting.devices == 1:
        return None
    address = cluster_named(setting.machine.environment)
    if not address:
        if setting.hosts == 1:
            return None
        reason, fix = NO_CLUSTER
        return Check(name="cluster", ok=False, text=f"placement.cluster {reason}", fix=fix)
    try:
        place = place_of(address)
    except RecipeError as error:
        (problem,) = error.problems
        return Check(name="cluster", ok=False, text=f"RAY_ADDRESS {problem.reason}", fix=problem.fix)
    if place is None:
        return Check(name="cluster", ok=True, text=f"RAY_ADDRESS={address} is for Ray to find")
    if why := silence(place):
        text = f"the Ray cluster at RAY_ADDRESS={address} cannot be reached: {why}"
        return Check(name="cluster", ok=False, text=text, fix=JOIN, silent=True)
    return Check(name="cluster", ok=True, text=f"the Ray cluster at {address} can be reached")


def cluster_has_a_token(setting: MachineCheck) -> Check | None:
    """A cluster that is joined lets in only who has its token; one of the run's own always does that."""
    environment = setting.machine.environment
    if setting.devices == 1 or not (address := cluster_named(environment)):
        return None
    mode = environment.get("RAY_AUTH_MODE", "").lower()
    if not mode and address == "auto":  # then Ray looks itself whether there is a token
        return None
    if mode == "token":
        return Check(name="token", ok=True, text="the Ray cluster is joined with a token (RAY_AUTH_MODE=token)")
    text = (
        f"RAY_AUTH_MODE is not token, so the Ray cluster at {address} asks nobody for one: who reaches its ports can "
        "run programs there"
    )
    fix = "run `ray get-auth-token --generate`, copy ~/.ray/auth_token to every host, and set RAY_AUTH_MODE=token there"
    return Check(name="token", ok=False, text=text, fix=fix)


def cluster_named(environment: Mapping[str, str]) -> str:
    """The Ray cluster that RAY_ADDRESS names; empty where a run starts a Ray of its own."""
    told = environment.get("RAY_ADDRESS", "").strip()
    return "" if told == "local" else told


def place_of(address: str) -> tuple[str, int] | None:
    """Host and port of a cluster; none for `auto`, which Ray finds on this host. RecipeError for anything else."""
    if address == "auto":
        return None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    sound = bare and not set(bare) & set("/@[], \t") and (":" not in bare or host != bare)
    if sound and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 2**16:
        return bare, int(port)
    raise RecipeError.of("RAY_ADDRESS", f"{address!r} is no HOST:PORT of a Ray cluster", JOIN)


def silence(place: tuple[str, int], seconds: float = FAR) -> str | None:
    """Why nobody answers at a place, or none if somebody does. Looking up its name counts, too."""

    def connect() -> None:
        socket.create_connection(place, timeout=seconds).close()

    host, port = place
    where = f"nobody answers at {f'[{host}]' if ':' in host else host}:{port}"
    try:
        within(seconds, connect)
    except TimeoutError:
        return f"{where} within {seconds:g} s"
    except (OSError, UnicodeError) as error:  # a name may have a part that is too long for one
        return f"{getattr(error, 'strerror', None) or error}, {where}"
    return None


def exchange(address: str) -> str | None:
    """Why a few bytes do not go through a port of this address, or none if they do."""
    try:
        with socket.create_server((address, 0), backlog=1) as server:
            server.settimeout(PATIENCE)
            with socket.create_connection(server.getsockname(), timeout=PATIENCE) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(PATIENCE)
                    near.sendall(b"stretto")
                    return None if far.recv(16) == b"stretto" else "something else answered"
    except OSError as error:
        return error.strerror or str(error)
