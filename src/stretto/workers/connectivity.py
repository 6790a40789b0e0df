"""Whether every process of a run can reach every other: asked once, before the first of them waits for another.

Each opens a port of its own (whatever is free) at the address by which its host reaches the driver's, and each connects
to all the others. Groups over gloo use the same addresses. No host is looked up by name, because a name is often that
of another network, or of loopback.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

LOOPBACK = "127.0.0.1"

PATIENCE = 5.0
"""Seconds to connect and to exchange a few bytes."""

WORD = b"stretto"

ALLOW = (
    "let these hosts connect to each other on all ports (firewall, container or security group), and give `ray start` "
    "an address that the others reach (--node-ip-address)"
)
"""What to do where they do not."""


def own_address(toward: str) -> str:
    """The address by which this host reaches another one. Nothing is sent."""
    kind = socket.AF_INET6 if ":" in toward else socket.AF_INET
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])


def on_loopback() -> dict[str, str]:
    """What keeps the groups of a cell's own processes there, which torch makes; others are told an address."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


class ProbeServer:
    """A port that answers whoever connects."""

    def __init__(self, address: str) -> None:
        kind = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.server = socket.create_server((address, 0), family=kind, backlog=128)
        self.place: tuple[str, int] = self.server.getsockname()[:2]
        threading.Thread(target=self._answer, name="probe-server", daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self.server.accept()
                with caller, suppress(OSError):
                    caller.settimeout(PATIENCE)
                    caller.sendall(WORD)

    def close(self) -> None:
        """Answers nobody any more."""
        with suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.server.close()


def unreachable(places: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """The `places` that do not answer this process, each with where it is and why."""
    with ThreadPoolExecutor(min(64, len(places)) or 1) as pool:  # silent ones all take their time
        answers = zip(places, pool.map(_silence, places.values()), strict=True)
        return {name: f"{places[name][0]} port {places[name][1]}: {why}" for name, why in answers if why}


def _silence(place: tuple[str, int]) -> str:
    """Why a port does not answer; empty if it does."""
    try:
        with socket.create_connection(place, timeout=PATIENCE) as near:
            near.settimeout(PATIENCE)
            return "" if near.recv(16) == WORD else "something else answers"
    except OSError as error:
        return error.strerror or str(error)
