"""The part of a worker that writes checkpoints, beside the calls that come meanwhile.

What is written, and read again, is told by `workers.model_state`. The driver (`workers.checkpoints`) asks until it is
done, and fetches what its host does not see.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path

from torch import Tensor

from stretto.errors import CheckpointError
from stretto.models.load import Policy
from stretto.models.lora import changes_in_forward
from stretto.storage.atomic import storing
from stretto.threads import begun, give_way
from stretto.training.trainer import Trainer
from stretto.workers import model_state
from stretto.workers.shared_folder import HostFolder, Listing, SavedFiles
from stretto.workers.worker_spec import WorkerSpec


class CheckpointCalls:
    """Files of a checkpoint, written and handed over."""

    assignment: WorkerSpec
    policy: Policy
    files: HostFolder
    writing: Future[SavedFiles] | None

    def trained(self, model: str) -> Trainer:
        """What trains a model."""
        raise NotImplementedError

    def _awake(self, model: str) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def save(
        self, model: str, folder: Path, there: Listing, part: int, of: int, exports: bool, base: Path | None
    ) -> None:
        """Begins to write what the next step of a model depends on, or one of several parts of it, into `state/` of the
        driver's folder, in which it has found `there`. Where it `exports`, the policy for others, too, whose `base` is
        the run's copy.

        It goes on in a thread, because nothing of it changes before the next update, for which the driver waits. Where
        models sleep in host memory their tensors move, and a forward may change the policy's modules, through which an
        adapter's writer walks: there it is over when this returns.
        """
        self._awake(model)
        states = model_state.held(self.trained(model))

        def write() -> SavedFiles:
            give_way()
            with storing(folder, CheckpointError):
                place = self.files.at(folder, there)
                hashes = model_state.write(model, *states, place, part=part, of=of)
                if exports:
                    self.policy.save(place, base=base)
            return SavedFiles(fetched=self.files.names(), hashes=hashes)

        self.writing = begun(write)
        if any(self.assignment.sleeps.values()) or (exports and changes_in_forward(self.policy.network)):
            wait([self.writing])

    def saved(self) -> SavedFiles | None:
        """What was written, or none as long as that goes on."""
        assert self.writing is not None
        return self.writing.result() if self.writing.done() else None

    def read(self, name: str, start: int) -> bytes:
        """A piece of a file that the driver is to fetch; an empty one at its end."""
        return self.files.read(name, start)

    def append(self, name: str, piece: bytes) -> None:
        """A piece of a file that is restored from."""
        self.files.append(name, piece)

    def clear(self) -> None:
        """Removes files that were fetched, or restored from."""
        self.files.clear()
