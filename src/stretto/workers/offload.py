"""What of a device's models is in host memory while other stages work there, and when it comes back.

A plan's cells say in which phases they leave their memory to others (`Cell.sleeps`). Nothing moves before a stage needs
the room: when one begins, what may sleep in it goes to host memory, and what it reads comes back. Everything else stays
where it is, so a frozen model that sleeps moves twice a step at most. What several roles read sleeps only where all of
them may. Values never change, and objects stay the same: only where their numbers lie is another place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from stretto.engines.apart import ApartEngine
from stretto.engines.base import Engine
from stretto.errors import TrainingError
from stretto.models.load import Policy
from stretto.models.memory import OutOfMemory, memory_errors
from stretto.models.value_model import ValueModel
from stretto.training.optimizer import MasterAdamW

PUBLISH = "publish"
"""The phase in which weights are handed over, compared and written: who generates and who trains is awake then."""

UPDATE = "update"
"""The phase of an update that is not published. What only an update reads sleeps on while gradients are accumulated."""

FITTED = "fitted"
"""The phase in which the critic is updated, compared and written."""

READERS = {
    PUBLISH: ("train", frozenset({"generate", "train", UPDATE})),
    UPDATE: ("train", frozenset({"train", UPDATE})),
    FITTED: ("fit", frozenset({"fit", "value", FITTED})),
}
"""Phase -> (the role in whose phase others sleep, who reads in it), where that is more than its own role."""


class HostBuffer:
    """Host memory, for tensors of one device. Where the device is a CPU they are there already, and nothing moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def put(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What they hold, in host memory. It is pinned, so that it comes back as fast as the link allows."""
        if self.device.type == "cpu":
            return list(tensors)
        pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
        for there, tensor in zip(pinned, tensors, strict=True):
            there.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(self.device)  # the device may use their memory for something else now
        return pinned

    def take(self, held: Sequence[Tensor]) -> list[Tensor]:
        """The same on the device again."""
        return [tensor.to(self.device, non_blocking=True) for tensor in held]


class Offloadable(Protocol):
    """Something that sleeps and wakes as one."""

    read_by: frozenset[str]
    """Roles that need it: it sleeps where all of their cells may."""
    woken_by: frozenset[str]
    """Phases in which it must be awake."""

    def sleep(self) -> None:
        """Leaves the device; nothing happens if it sleeps already."""

    def wake(self) -> None:
        """Is on the device; nothing happens if it is awake."""


class HeldTensors:
    """Tensors that somebody holds; they stay the same objects."""

    def __init__(
        self,
        read_by: Collection[str],
        tensors: Callable[[], Iterable[Tensor]],
        host_buffer: HostBuffer,
        *,
        frozen: bool,
        woken_by: Collection[str] | None = None,
    ) -> None:
        """`tensors` are asked each time, as an optimizer has none before its first update; `frozen` ones never change,
        so what was copied once need not be copied again. They wake when a role begins that reads them, or later, when
        they are `woken_by` a phase."""
        self.read_by, self.tensors, self.host_buffer, self.frozen = frozenset(read_by), tensors, host_buffer, frozen
        self.woken_by = self.read_by if woken_by is None else frozenset(woken_by)
        self.away: list[Tensor] = []
        self.held: list[Tensor] = []

    def sleep(self) -> None:
        """To host memory."""
        if self.away:
            return
        kind, mine = self.host_buffer.device.type, {id(tensor): tensor for tensor in self.tensors()}
        away = [tensor for tensor in mine.values() if tensor.device.type == kind]
        self.held = self.held or self.host_buffer.put([tensor.detach() for tensor in away])
        self.away = away
        self._lie(self.held)

    def wake(self) -> None:
        """Back."""
        if self.away:
            self._lie(self.host_buffer.take(self.held))
            self.away = []
            self.held = self.held if self.frozen else []

    def _lie(self, places: Sequence[Tensor]) -> None:
        for tensor, place in zip(self.away, places, strict=True):
            tensor.data = place


class HeldStorages:
    """Memory that several tensors look at, such as the slices of a model (FSDP2): all of them stay as they are, and
    what is below them goes and comes back."""

    def __init__(
        self, read_by: Collection[str], tensors: Callable[[], Iterable[Tensor]], host_buffer: HostBuffer
    ) -> None:
        self.read_by = self.woken_by = frozenset(read_by)
        self.tensors, self.host_buffer = tensors, host_buffer
        self.away: list[tuple[Tensor, Tensor]] = []

    def sleep(self) -> None:
        """To host memory."""
        if self.away:
            return
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self.tensors()}
        whole = [torch.empty(0, dtype=torch.uint8, device=each.device).set_(each) for each in storages.values()]
        pairs = zip(whole, self.host_buffer.put(whole), strict=True)
        self.away = [(memory, held) for memory, held in pairs if held is not memory]
        for memory, _ in self.away:
            memory.untyped_storage().resize_(0)

    def wake(self) -> None:
        """Back."""
        for memory, held in self.away:
            memory.untyped_storage().resize_(held.nbytes)
            memory.copy_(held)
        self.away = []


class EngineCaches:
    """What an engine holds besides weights."""

    def __init__(self, engine: Engine) -> None:
        self.read_by = self.woken_by = frozenset({"generate"})
        self.engine, self.sleeps = engine, False

    def sleep(self) -> None:
        """The engine gives it back."""
        if not self.sleeps:
            self.engine.sleep(keep=True)
            self.sleeps = True

    def wake(self) -> None:
        """The engine takes it anew, as it needs it."""
        if self.sleeps:
            self.engine.wake()
            self.sleeps = False


def release_caches(engine: Engine) -> None:
    """Lets an engine give back what it holds between rounds; it takes it anew as it needs it.

    One of another process would take all of it back at once: its memory comes and goes with the phases of the plan.
    """
    if not isinstance(engine, ApartEngine):
        engine.sleep(keep=True)
        engine.wake()


class Offloader:
    """Everything on a device that can sleep."""

    def __init__(self, sleeps: Mapping[str, Collection[str]], parts: Sequence[Offloadable]) -> None:
        """`sleeps` has the phases in which each role on the device gives its memory away. Parts wake in their order."""
        self.sleeps, self.parts = sleeps, tuple(parts)
        self.phase = ""

    def add(self, part: Offloadable) -> None:
        """One more, which came later."""
        self.parts = (part, *self.parts)

    def enter(self, phase: str) -> None:
        """A stage begins on the device, or goes on there: makes room, then brings back what it reads."""
        if phase == self.phase or not any(self.sleeps.values()):
            return
        during, readers = READERS.get(phase, (phase, frozenset({phase})))
        try:
            with memory_errors():
                for part in self.parts:
                    if not part.woken_by & readers and self._may_sleep(part, during):
                        part.sleep()
                for part in self.parts:
                    if part.woken_by & readers:
                        part.wake()
        except OutOfMemory as error:
            raise TrainingError(
                f"{phase}: there is too little memory to bring its models to the device, or the others to the host; "
                "change what sleeps when (sleeps in placement.cells), or use smaller models"
            ) from error
        self.phase = phase

    def _may_sleep(self, part: Offloadable, phase: str) -> bool:
        roles = part.read_by & self.sleeps.keys()
        return bool(roles) and all(phase in self.sleeps[role] for role in roles)


class FrozenModels:
    """Frozen models of a device, loaded one after the other. Those that sleep in some phase do so until they are asked:
    together with what is loaded next they may be more than the device holds."""

    def __init__(self, sleeps: Mapping[str, Collection[str]], cut: Collection[str], host_buffer: HostBuffer) -> None:
        """What plays a role of `cut` comes to the device in slices, later, which sleep for themselves."""
        self.sleeps, self.cut, self.host_buffer = sleeps, cut, host_buffer
        self.parts: list[HeldTensors] = []

    def add(self, role: str, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """One that was loaded a moment ago."""
        if role in self.cut:
            return
        part = HeldTensors({role}, tensors, self.host_buffer, frozen=True)
        if self.sleeps.get(role):
            part.sleep()
        self.parts.append(part)


def sleepers_of(
    sleeps: Mapping[str, Collection[str]],
    *,
    policy: Policy,
    readers: Collection[str],
    optimizer: Callable[[], MasterAdamW | None],
    frozen: Sequence[Offloadable] = (),
    critic: ValueModel | None = None,
    critic_optimizer: Callable[[], MasterAdamW | None] = lambda: None,
    engine: Engine,
    host_buffer: HostBuffer,
) -> Offloader:
    """What a device holds; `readers` are the roles on it that read the policy's tensors, `frozen` are other models,
    `critic` is one that is trained."""

    def weights(trained: bool) -> Callable[[], Iterable[Tensor]]:
        return lambda: (weight for weight in policy.network.parameters() if weight.requires_grad == trained)

    def learned(optimizer: Callable[[], MasterAdamW | None]) -> Callable[[], Iterable[Tensor]]:
        return lambda: found.tensors() if (found := optimizer()) is not None else ()

    theirs = _parts_of(critic, policy) if critic else None
    shared = {"value", "fit"} if theirs and theirs.shares else set()
    parts = [
        HeldTensors({*readers, *shared}, weights(trained=False), host_buffer, frozen=True),
        HeldTensors(readers, weights(trained=True), host_buffer, frozen=False),
        HeldTensors({"train"}, learned(optimizer), host_buffer, frozen=False, woken_by={UPDATE}),
        *frozen,
    ]
    if critic and theirs:
        parts += [
            HeldTensors({"value", "fit"}, lambda: theirs.frozen, host_buffer, frozen=True),
            HeldTensors({"value", "fit"}, lambda: theirs.trained, host_buffer, frozen=False),
            HeldTensors({"fit"}, learned(critic_optimizer), host_buffer, frozen=False, woken_by={FITTED}),
        ]
    # The engine last: when it wakes, it looks where the policy's weights are.
    return Offloader(sleeps, [*parts, EngineCaches(engine)])


class CriticTensors(NamedTuple):
    """The parameters of a critic, by what becomes of them."""

    trained: list[Tensor]
    """Those that its updates change."""
    frozen: list[Tensor]
    """Those of its own that nobody changes."""
    shares: bool
    """True if others are the policy's."""


def _parts_of(critic: ValueModel, policy: Policy) -> CriticTensors:
    own, known = critic.parameters().values(), {id(weight) for weight in policy.network.parameters()}
    frozen = [weight for weight in own if not weight.requires_grad]
    mine = [weight for weight in frozen if id(weight) not in known]
    trained = [weight for weight in own if weight.requires_grad]
    return CriticTensors(trained=list(trained), frozen=list(mine), shares=len(mine) < len(frozen))
