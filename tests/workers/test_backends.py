"""A call that would never end is ended: when its group is called off, or when it has taken too long."""

import pytest
import torch
from torch.distributed import HashStore, is_nccl_available

from stretto.errors import TrainingError
from stretto.placement.transport import TensorPath
from stretto.workers.backends import BACKENDS, finish
from stretto.workers.process_group import ProcessGroup, Rendezvous, cancel_groups, reach, wait_for_all
from tiny import CPU


class Call:
    """A collective call that is over after so many looks."""

    def __init__(self, looks, error=None):
        self.looks, self.error, self.waited = looks, error, False

    def is_completed(self):
        self.looks -= 1
        return self.looks < 0

    def wait(self):
        self.waited = True
        if self.error:
            raise self.error


def ended(call, *, seconds=20.0, off=False):
    """What was aborted while a call was waited for."""
    aborted = []
    try:
        finish(call, seconds=seconds, off=lambda: off, abort=lambda: aborted.append(call))
    except RuntimeError as error:
        return aborted, str(error)
    return aborted, None


def test_a_call_that_ends_is_waited_for_and_nothing_is_aborted():
    call = Call(5)
    assert ended(call) == ([], None)
    assert call.waited


def test_a_call_whose_group_was_called_off_is_aborted():
    call = Call(10**9)
    assert ended(call, off=True) == ([call], "called off, because a member was lost")
    assert not call.waited


def test_a_call_that_takes_too_long_is_aborted():
    call = Call(10**9)
    assert ended(call, seconds=0.05) == ([call], "not answered for 0.05 s")


def test_what_went_wrong_in_a_call_is_told_when_it_is_over():
    assert ended(Call(1, RuntimeError("no memory"))) == ([], "no memory")


def test_every_path_between_processes_has_a_backend():
    assert BACKENDS.keys() == {TensorPath.GLOO, TensorPath.NCCL}


@pytest.mark.skipif(is_nccl_available(), reason="this build of torch has NCCL")
def test_nccl_where_torch_has_none_is_told_with_the_key_that_asks_for_it():
    meeting = Rendezvous(store=HashStore(), name="here", rank=0, size=1, seconds=5, path=TensorPath.NCCL)
    with pytest.raises(TrainingError, match=r"has no NCCL; leave placement\.nccl out"):
        ProcessGroup(meeting, CPU)


def test_a_meeting_stays_called_off_when_the_last_of_its_members_comes():
    store = HashStore()
    one, other = (Rendezvous(store=store, name="here", rank=rank, size=2, seconds=5) for rank in (0, 1))
    reach(one).add("come", 1)  # and died
    cancel_groups(one)
    with pytest.raises(TrainingError, match="called off"):
        wait_for_all(other)


def test_a_group_of_one_adds_up_and_hands_round_what_it_has():
    group = ProcessGroup(Rendezvous(store=HashStore(), name="here", rank=0, size=1, seconds=5), CPU)
    tensor = torch.arange(3.0)
    group.add(tensor)
    group.hand_round(tensor, source=0)
    group.close()
    assert tensor.tolist() == [0, 1, 2]
