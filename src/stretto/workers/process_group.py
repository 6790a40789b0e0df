"""Several processes adding up tensors, or handing them round: a group of members over gloo, made anew when one is lost.

A group is built on a store that its members reach, under the name of its epoch: after a member was replaced, the others
leave the old group and meet in the next epoch. torch's default group is not used, because it cannot be made anew.
Tensors on a GPU pass through host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # it exports what its stubs forget
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from stretto.errors import TrainingError
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

    @property
    def address(self) -> str:
        """By which the others reach this process; where the store is in it, they are too."""
        return LOOPBACK if isinstance(self.store, Store) else own_address(self.store[0])


LOOK = 0.2
"""Most seconds between two looks whether everybody has come."""

CONNECT = 60.0
"""Seconds for those who have come to connect to each other, unless they wait less for anything."""

DECIDED, ALL, OFF = "decided", "all have come", "called off"


def reach(meeting: Rendezvous) -> Store:
    """The store, under the name of the meeting."""
    store = meeting.store
    if not isinstance(store, Store):
        store = TCPStore(*store, is_master=False, timeout=timedelta(seconds=meeting.seconds))
    found: Store = PrefixStore(meeting.name, store)
    return found


def wait_for_all(meeting: Rendezvous) -> Store:
    """The store, once everybody has come: nobody connects to others of whom one never will.

    TrainingError if it is called off meanwhile, or if somebody does not come in time.
    """
    store, end, pause = reach(meeting), time.monotonic() + meeting.seconds, 0.01
    if store.add("come", 1) == meeting.size:
        store.set(DECIDED, ALL)
    while not store.check([DECIDED]):
        if time.monotonic() > end:
            told = f"of {meeting.size} members not all have come within {meeting.seconds:g} s"
            raise TrainingError(f"{meeting.name}: {told}")
        time.sleep(pause)
        pause = min(2 * pause, LOOK)
    if store.get(DECIDED).decode() != ALL:
        raise TrainingError(f"{meeting.name}: it was called off, because a member was lost")
    return store


def cancel_groups(meeting: Rendezvous) -> None:
    """Lets nobody wait any longer for one who has died. Those who have met already are not disturbed."""
    reach(meeting).set(DECIDED, OFF)


class ProcessGroup:
    """One member's end of a group."""

    def __init__(self, meeting: Rendezvous) -> None:
        self.meeting, patience = meeting, timedelta(seconds=meeting.seconds)
        with self._failures():
            store = wait_for_all(meeting)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = min(patience, timedelta(seconds=CONNECT))
            # Told, because gloo would look its own host's name up, which may be anybody's.
            options._devices = [ProcessGroupGloo.create_device(hostname=meeting.address)]
            self.gloo: Any = ProcessGroupGloo(store, meeting.rank, meeting.size, options)
            self.gloo.set_timeout(patience)

    def add(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of every member's."""
        with self._failures():
            host = tensor.cpu()
            self.gloo.allreduce([host]).wait()
        if host is not tensor:
            tensor.copy_(host)

    def hand_round(self, tensor: Tensor, *, source: int) -> None:
        """Makes a tensor that of member `source`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with self._failures():
            host = tensor.cpu()
            self.gloo.broadcast([host], options).wait()
        if host is not tensor:
            tensor.copy_(host)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            told = f"member {self.meeting.rank} of {self.meeting.size} lost touch with another ({error})"
            raise TrainingError(f"{self.meeting.name}: {told}") from error
