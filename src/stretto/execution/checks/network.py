"""Whether a port can be had and reached: what every process of a run needs to speak to the others.

Ports are asked of the kernel (bind 0), here as everywhere else in stretto: a fixed one is taken by the next run.
"""

from __future__ import annotations

import socket

from stretto.execution.checks.base import Check, Setting

PATIENCE = 1.0
"""Seconds to connect and to exchange a few bytes."""

LOOPBACK = "127.0.0.1"

JOIN = (
    "run `ray start --head` on one host and `ray start --address=HOST:PORT` on each of the others, and here too; then "
    "set RAY_ADDRESS=HOST:PORT"
)
"""How several hosts become a cluster."""

NO_CLUSTER = ("names several hosts, and RAY_ADDRESS does not say which Ray cluster they are", JOIN)
"""Why several hosts cannot be used, and what to do."""


def loopback_is_reached(setting: Setting) -> Check:
    """A process can reach another on the same host."""
    if why := exchange(LOOPBACK):
        fix = "allow connections to 127.0.0.1 (firewall, sandbox or container settings)"
        return Check(name="loopback", ok=False, text=f"a port on 127.0.0.1 cannot be reached: {why}", fix=fix)
    return Check(name="loopback", ok=True, text="a free port on 127.0.0.1 can be had and reached")


def own_address_is_reached(setting: Setting) -> Check:
    """A process can reach this host by the address that other hosts know."""
    address = setting.machine.address
    if address is None:
        return Check(
            name="address", ok=True, text="this host has no address but loopback, which is enough for one host"
        )
    if why := exchange(address):
        fix = f"allow connections from this host to {address} (firewall or container settings)"
        return Check(name="address", ok=False, text=f"a port on {address} cannot be reached: {why}", fix=fix)
    return Check(name="address", ok=True, text=f"a free port on this host's address {address} can be had and reached")


def cluster_is_reached(setting: Setting) -> Check | None:
    """Where a recipe uses several hosts, their Ray cluster answers."""
    if setting.hosts == 1:
        return None
    address = setting.machine.environment.get("RAY_ADDRESS", "")
    if not address:
        reason, fix = NO_CLUSTER
        return Check(name="cluster", ok=False, text=f"placement.cluster {reason}", fix=fix)
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():  # "auto", or a place that only Ray understands
        return Check(name="cluster", ok=True, text=f"RAY_ADDRESS={address} is for Ray to find")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE):
            return Check(name="cluster", ok=True, text=f"the Ray cluster at {address} can be reached")
    except OSError as error:
        text = f"the Ray cluster at RAY_ADDRESS={address} cannot be reached: {error.strerror or error}"
        return Check(name="cluster", ok=False, text=text, fix=JOIN)


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
