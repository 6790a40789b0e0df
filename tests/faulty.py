"""Carriers that spoil the second publish in one way each, for tests that see it caught; workers made with them."""

from dataclasses import replace

import torch

from stretto.weights.carrier import Carrier
from stretto.workers.worker import Worker

STEP = 2
"""The step whose publish goes wrong."""


class Sound(Carrier):
    """A carrier with small buckets; counts what it has brought."""

    def __init__(self):
        super().__init__(bucket=512)
        self.brought = self.unpacked = 0

    def bring(self, tensors, hand_round):
        self.brought, self.unpacked = self.brought + 1, 0
        super().bring(tensors, hand_round)

    def unpack(self, bucket, flat):
        self.unpacked += 1
        super().unpack(bucket, flat)


class Skips(Sound):
    """Nothing arrives, and nobody is told."""

    def unpack(self, bucket, flat):
        if self.brought != STEP:
            super().unpack(bucket, flat)

    def tell(self, weights, engine):
        if weights.version != STEP:
            super().tell(weights, engine)


class Silent(Sound):
    """The tensors do not arrive; the engine is told that they did."""

    def unpack(self, bucket, flat):
        if self.brought != STEP:
            super().unpack(bucket, flat)


class Drops(Sound):
    """One bucket of several does not arrive."""

    def unpack(self, bucket, flat):
        super().unpack(bucket, flat if (self.brought, self.unpacked) != (STEP, 1) else torch.zeros_like(flat))


class Flips(Sound):
    """One bit of one tensor is another after the engine was told."""

    def tell(self, weights, engine):
        super().tell(weights, engine)
        if weights.version == STEP:
            weight = list(engine.policy.trained().values())[-1].data
            kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
            weight.view(-1)[:1].view(kind).bitwise_xor_(1)


class Forgets(Sound):
    """One tensor stays what it was before the update."""

    def tell(self, weights, engine):
        last = list(engine.policy.trained().values())[-1].data
        if weights.version == STEP:
            last.copy_(self.before)
        self.before = last.clone()
        super().tell(weights, engine)


class Misnumbers(Sound):
    """The engine is told another version."""

    def tell(self, weights, engine):
        super().tell(replace(weights, version=weights.version + (weights.version == STEP)), engine)


def worker_with(faulty, device):
    """How workers are made, of which the one of a device has a faulty carrier."""

    def make(assignment):
        worker = Worker(assignment)
        worker.carrier = faulty() if assignment.device == device else Sound()
        return worker

    return make
