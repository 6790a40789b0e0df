"""Workers whose sleeping models are seen to sleep, also on a CPU; in a file that their processes can import."""

from __future__ import annotations

from stretto.workers.offload import HostBuffer
from stretto.workers.worker import Worker
from tiny import CPU


class Hidden(HostBuffer):
    """Leaves empty tensors behind, and brings back copies that lie elsewhere."""

    def __init__(self, device=CPU):
        super().__init__(device)
        self.there, self.numbers = {}, 0

    def put(self, tensors):
        held = [tensor.new_empty(0) for tensor in tensors]
        self.there |= {id(empty): (empty, tensor.clone()) for empty, tensor in zip(held, tensors, strict=True)}
        self.numbers += sum(tensor.numel() for tensor in tensors)
        return held

    def take(self, held):
        return [self.there[id(empty)][1].clone() for empty in held]


class Sleepy(Worker):
    """A worker with such a buffer."""

    def make_host_buffer(self):
        return Hidden()
