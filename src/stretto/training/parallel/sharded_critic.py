"""Trains a critic that the processes of a cell hold slices of, in lockstep."""

from __future__ import annotations

from stretto.training.critic_trainer import CriticTrainer
from stretto.training.parallel.fsdp import ShardedTrainer


class ShardedCriticTrainer(ShardedTrainer, CriticTrainer):
    """The trainer of one process of such a cell: what is lockstep of the one, what is a critic's of the other."""
