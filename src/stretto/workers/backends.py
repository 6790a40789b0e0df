"""What carries tensors within a group of processes: gloo through host memory, or NCCL from card to card.

Which of them a group uses follows from its devices (`placement.transport`); `process_group` makes it once everybody has
come. NCCL was not tried on GPUs yet. Its calls return before anything has happened and never end where another process
has died, so they are watched from here: whoever is called off, or waits too long, aborts them. What they wrote until
then is worthless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # it exports what its stubs forget
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    is_nccl_available,
)

from stretto.placement.transport import TensorPath

CONNECT = 60.0
"""Seconds for those who have come to connect to each other, unless they wait less for anything."""

LOOK = 0.2
"""Seconds between two looks whether a call was called off."""

PAUSES = 5e-5, 5e-3
"""Seconds between two looks whether a call is over, at first and at most."""

WATCHDOG = 2.0
"""NCCL's own watchdog ends the process, so it waits so many times as long as we do."""


class Backend(Protocol):
    """One member's end of a group. Every member calls the same, in the same order; a RuntimeError where one is gone."""

    def add(self, tensor: Tensor) -> None:
        """Makes a tensor the sum of every member's."""
        ...

    def add_ahead(self, tensor: Tensor) -> None:
        """As `add`, of a tensor on the device: what follows there waits for it, and this process need not."""
        ...

    def settle(self) -> None:
        """Waits for what was added up ahead."""
        ...

    def hand_round(self, tensor: Tensor, source: int) -> None:
        """Makes a tensor that of member `source`."""
        ...

    def exchange(self, rows: Tensor) -> Tensor:
        """Row i is what member i has sent to this one; row i of `rows` goes to member i."""
        ...

    def gather_ahead(self, rows: Tensor) -> Tensor:
        """Every member's rows, of which all have equally many, member after member; on the device, as `add_ahead`."""
        ...

    def close(self) -> None:
        """Leaves the group, whatever is under way."""
        ...


class Member(Protocol):
    """Who a process is in a group: the part of a `Rendezvous` that a backend needs."""

    @property
    def rank(self) -> int:
        """Which member it is."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def seconds(self) -> float:
        """How long one waits for another."""
        ...

    @property
    def address(self) -> str:
        """By which the others reach this process."""
        ...


class Gloo:
    """Tensors on a GPU pass through host memory."""

    def __init__(self, store: Store, member: Member, device: torch.device, off: Callable[[], bool]) -> None:
        """Gloo itself notices who has died, and needs neither the `device` nor to be told that it is called `off`."""
        patience = timedelta(seconds=member.seconds)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = min(patience, timedelta(seconds=CONNECT))
        # Told, because gloo would look its own host's name up, which may be anybody's.
        options._devices = [ProcessGroupGloo.create_device(hostname=member.address)]
        self.group: Any = ProcessGroupGloo(store, member.rank, member.size, options)
        self.group.set_timeout(patience)

    def add(self, tensor: Tensor) -> None:
        """In host memory."""
        host = tensor.cpu()
        self.group.allreduce([host]).wait()
        if host is not tensor:
            tensor.copy_(host)

    def add_ahead(self, tensor: Tensor) -> None:
        """In host memory nothing is ahead."""
        self.add(tensor)

    def settle(self) -> None:
        """Everything has been waited for."""

    def hand_round(self, tensor: Tensor, source: int) -> None:
        """In host memory."""
        host = tensor.cpu()
        self.group.broadcast([host], rooted(source)).wait()
        if host is not tensor:
            tensor.copy_(host)

    def exchange(self, rows: Tensor) -> Tensor:
        """In host memory."""
        host = rows.cpu()
        found = torch.empty_like(host)
        self.group.alltoall_base(found, host, [], []).wait()
        return found.to(rows.device)

    def gather_ahead(self, rows: Tensor) -> Tensor:
        """In host memory nothing is ahead."""
        host = rows.cpu()
        found = host.new_empty(self.group.size() * len(host), *host.shape[1:])
        self.group._allgather_base(found, host).wait()
        return found.to(rows.device)

    def close(self) -> None:
        """Its connections close when nobody knows it any more, and the others learn of that."""
        self.group = None


class Nccl:
    """Tensors in host memory pass through the card."""

    def __init__(self, store: Store, member: Member, device: torch.device, off: Callable[[], bool]) -> None:
        """`off` tells whether the group was called off."""
        if not is_nccl_available():
            raise RuntimeError("this build of torch has no NCCL; leave placement.nccl out")
        from torch.distributed import ProcessGroupNCCL  # builds for CPUs lack it

        self.device, self.seconds, self.off = device, member.seconds, off
        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=WATCHDOG * member.seconds)
        self.group: Any = ProcessGroupNCCL(store, member.rank, member.size, options)
        self.ahead: Any = None
        self.add(torch.zeros(1, device=device))  # members connect at their first call

    def add(self, tensor: Tensor) -> None:
        """From card to card."""
        self._call(tensor, lambda here: self.group.allreduce([here]))

    def add_ahead(self, tensor: Tensor) -> None:
        """The card waits, in the order of its work."""
        self.ahead = self.group.allreduce([tensor])
        self.ahead.wait()

    def settle(self) -> None:
        """The newest is the last that ends."""
        work, self.ahead = self.ahead, None
        if work is not None:
            finish(work, seconds=self.seconds, off=self.off, abort=self.group.abort)

    def hand_round(self, tensor: Tensor, source: int) -> None:
        """From card to card."""
        self._call(tensor, lambda here: self.group.broadcast([here], rooted(source)))

    def exchange(self, rows: Tensor) -> Tensor:
        """From card to card."""
        found = torch.empty_like(rows, device=self.device)
        self._call(rows, lambda here: self.group.alltoall_base(found, here, [], []), changes=False)
        return found.to(rows.device)

    def gather_ahead(self, rows: Tensor) -> Tensor:
        """The card waits, in the order of its work."""
        found = rows.new_empty(self.group.size() * len(rows), *rows.shape[1:])
        self.ahead = self.group._allgather_base(found, rows)
        self.ahead.wait()
        return found

    def close(self) -> None:
        """Without waiting for anybody."""
        self.group.abort()

    def _call(self, tensor: Tensor, begin: Callable[[Tensor], Any], *, changes: bool = True) -> None:
        here = tensor.to(self.device)
        finish(begin(here), seconds=self.seconds, off=self.off, abort=self.group.abort)
        if changes and here is not tensor:
            tensor.copy_(here)


def rooted(source: int) -> Any:
    """Options of a broadcast."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return options


def finish(work: Any, *, seconds: float, off: Callable[[], bool], abort: Callable[[], None]) -> None:
    """Waits for a call that may never end. A RuntimeError where it failed, was called off or took too long."""
    begun = looked = time.monotonic()
    pause, most = PAUSES
    while not work.is_completed():
        now = time.monotonic()
        late = now > begun + seconds
        if late or (now > looked + LOOK and off()):
            abort()
            raise RuntimeError(f"not answered for {seconds:g} s" if late else "called off, because a member was lost")
        looked = now if now > looked + LOOK else looked
        time.sleep(pause)
        pause = min(2 * pause, most)
    work.wait()


BACKENDS: Mapping[TensorPath, type[Gloo] | type[Nccl]] = {TensorPath.GLOO: Gloo, TensorPath.NCCL: Nccl}
"""What carries tensors along a path between processes."""
