"""Groups over NCCL add up, hand round, and let go of one that died. Run by scripts/gpu_hour."""

import time

import pytest
import torch
from torch import multiprocessing
from torch.distributed import HashStore, TCPStore

from stretto.errors import TrainingError
from stretto.placement.transport import TensorPath
from stretto.workers.process_group import ProcessGroup, Rendezvous, cancel_groups, store_at

SECONDS = 60


def meeting(store, rank, size, name="here"):
    return Rendezvous(store=store, name=name, rank=rank, size=size, seconds=SECONDS, path=TensorPath.NCCL)


@pytest.mark.gpu
def test_a_group_of_one_card_takes_tensors_of_the_card_and_of_the_host():
    group = ProcessGroup(meeting(HashStore(), 0, 1), torch.device("cuda", 0))
    for device in ("cuda", "cpu"):
        tensor = torch.arange(3.0, device=device)
        group.add(tensor)
        group.hand_round(tensor, source=0)
        assert tensor.tolist() == [0, 1, 2]
    group.close()


def adds(rank, size, port):
    """A process of a group: what it has becomes the sum, then that of the first."""
    device = torch.device("cuda", rank)
    group = ProcessGroup(meeting(("127.0.0.1", port), rank, size), device)
    mine = torch.full((1_000_003,), float(rank + 1), device=device)
    group.add(mine)
    assert (mine == size * (size + 1) / 2).all()
    host = torch.full((5,), float(rank))
    group.hand_round(host, source=size - 1)
    assert (host == size - 1).all()
    group.close()


@pytest.mark.multi_gpu
def test_cards_add_up_and_hand_round():
    size, store = torch.cuda.device_count(), store_at("127.0.0.1")
    multiprocessing.spawn(adds, (size, store.port), nprocs=size)


def loses(rank, port):
    """The second of two never takes part in a call after they have met; the first is called off, and both meet anew."""
    device = torch.device("cuda", rank)
    group = ProcessGroup(meeting(("127.0.0.1", port), rank, 2), device)
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(TrainingError, match="called off"):
            group.add(torch.ones(1000, device=device))
        assert time.monotonic() - begun < SECONDS / 2
    else:
        time.sleep(2)
        cancel_groups(meeting(("127.0.0.1", port), rank, 2))
    group.close()
    again = ProcessGroup(meeting(("127.0.0.1", port), rank, 2, name="again"), device)
    tensor = torch.ones(1, device=device)
    again.add(tensor)
    assert tensor.item() == 2
    again.close()


@pytest.mark.multi_gpu
def test_who_waits_for_one_that_is_gone_is_called_off_and_meets_it_anew():
    store: TCPStore = store_at("127.0.0.1")
    multiprocessing.spawn(loses, (store.port,), nprocs=2)
