"""Several processes adding up tensors, or handing them round: a group of members, made anew when one is lost.

A group is built on a store that its members reach, under the name of its epoch: after a member was replaced, the others
leave the old group and meet in the next epoch. torch's default group is not used, because it cannot be made anew.
By which path tensors pass is told by whoever calls the meeting (`backends`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # it exports what its stubs forget
    PrefixStore,
    Store,
    TCPStore,
)

from stretto.errors import LostTouchError, TrainingError
from stretto.placement.transport import TensorPath
from stretto.workers.backends import BACKENDS, Backend
from stretto.workers.connectivity import LOOPBACK, own_address


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the members of a group meet."""

    store: Store | tuple[str, int]
    """The store itself, in one process, or the address of one."""
    name: str
    """The name of this epoch."""
    rank: int
    """Which member this is."""
    size: int
    """How many there are."""
    seconds: float
    """How long one waits for another."""
    path: TensorPath = TensorPath.GLOO
    """By which path tensors pass between them; the same for all."""

    @property
    def address(self) -> str:
        """By which the others reach this process; where the store is in it, they are too."""
        return LOOPBACK if isinstance(self.store, Store) else own_address(self.store[0])


LOOK = 0.2
"""Most seconds between two looks whether everybody has come."""

DECIDED, ALL, OFF = "decided", "all have come", "called off"


def reach(meeting: Rendezvous) -> Store:
    """The store, under the name of the meeting."""
    store = meeting.store
    if not isinstance(store, Store):
        store = TCPStore(*store, is_master=False, timeout=timedelta(seconds=meeting.seconds))
    found: Store = PrefixStore(meeting.name, store)
    return found


def wait_for_all(meeting: Rendezvous, off: Callable[[], bool] = lambda: False) -> Store:
    """The store, once everybody has come: nobody connects to others of whom one never will.

    TrainingError if it is called off meanwhile, itself or as `off` tells, or if somebody does not come in time.
    """
    store, end, pause = reach(meeting), time.monotonic() + meeting.seconds, 0.01
    if store.add("come", 1) == meeting.size:
        store.compare_set(DECIDED, "", ALL)  # unless it was called off: one who had come may have died since
    while not store.check([DECIDED]):
        if off():
            store.compare_set(DECIDED, "", OFF)
        if time.monotonic() > end:
            told = f"of {meeting.size} members not all have come within {meeting.seconds:g} s"
            raise TrainingError(f"{meeting.name}: {told}")
        time.sleep(pause)
        pause = min(2 * pause, LOOK)
    if store.get(DECIDED).decode() != ALL:
        raise TrainingError(f"{meeting.name}: it was called off, because a member was lost")
    return store


def cancel_groups(meeting: Rendezvous) -> None:
    """Lets nobody wait any longer for one who has died: neither those who have come, nor those who have met already
    and would not notice by themselves."""
    reach(meeting).set(DECIDED, OFF)


def store_at(address: str) -> TCPStore:
    """The store where workers meet. Told only an address, torch would listen on all of them."""
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=kind, backlog=1024)
    port = server.getsockname()[1]
    return TCPStore(address, port, None, True, wait_for_workers=False, master_listen_fd=server.detach())


class ProcessGroup:
    """One member's end of a group."""

    def __init__(self, meeting: Rendezvous, device: torch.device, within: ProcessGroup | None = None) -> None:
        """`device` is where this member computes; `within` is the group of whose members these are some."""
        self.meeting, self.device, self.within = meeting, device, within
        self.parts: list[ProcessGroup] = []
        with self._failures():
            self.store = wait_for_all(meeting, lambda: within is not None and within.called_off())
            self.backend: Backend = BACKENDS[meeting.path](self.store, meeting, device, self.called_off)

    def called_off(self) -> bool:
        """Whether a member was lost."""
        mine = self.store.get(DECIDED).decode() == OFF
        return mine or (self.within is not None and self.within.called_off())

    def among(self, members: Sequence[int]) -> ProcessGroup:
        """A group of some members, this one among them, which meet now; it ends with this one."""
        name = f"{self.meeting.name} {','.join(map(str, members))}"
        rank, size = members.index(self.meeting.rank), len(members)
        self.parts.append(ProcessGroup(replace(self.meeting, name=name, rank=rank, size=size), self.device, self))
        return self.parts[-1]

    def add(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of every member's."""
        with self._failures():
            self.backend.add(tensor)

    def add_ahead(self, tensor: Tensor) -> None:
        """As `add`, of a tensor where this member computes, which need not wait for it until it settles."""
        with self._failures():
            self.backend.add_ahead(tensor)

    def settle(self) -> None:
        """Waits for what was added up ahead."""
        with self._failures():
            self.backend.settle()

    def hand_round(self, tensor: Tensor, *, source: int) -> None:
        """Makes a tensor that of member `source`."""
        with self._failures():
            self.backend.hand_round(tensor, source)

    @property
    def size(self) -> int:
        """How many members there are."""
        return self.meeting.size

    def exchange(self, rows: Tensor) -> Tensor:
        """Row i is what member i has sent to this one; row i of `rows` goes to member i."""
        with self._failures():
            return self.backend.exchange(rows)

    def gather_ahead(self, rows: Tensor) -> Tensor:
        """Every member's rows, of which all have equally many, member after member; as `add_ahead`."""
        with self._failures():
            return self.backend.gather_ahead(rows)

    def close(self) -> None:
        """Leaves the others."""
        for part in self.parts:
            part.close()
        self.backend.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            told = f"member {self.meeting.rank} of {self.meeting.size} lost touch with another ({error})"
            raise LostTouchError(f"{self.meeting.name}: {told}") from error
