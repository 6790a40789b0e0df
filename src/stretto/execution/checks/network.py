"""Whether a port can be had and reached: what every process of a run needs to speak to the others.

Ports are asked of the kernel (bind 0), here as everywhere else in stretto: a fixed one is taken by the next run.
"""

from __future__ import annotations

import socket

from stretto.execution.checks.base import Check, Setting

PATIENCE = 1.0
"""Seconds to connect and to exchange a few bytes."""

LOOPBACK = "127.0.0.1"


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
