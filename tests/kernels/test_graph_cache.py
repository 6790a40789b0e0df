"""Recordings when memory is short, when there are many, and when a capture fails. No GPU: what torch does is played."""

import sys
import warnings

import pytest
import torch

from stretto.kernels.cuda import graph_cache as recordings
from stretto.kernels.cuda.graph_cache import Graph, Recordings

ONE = [torch.tensor([1.0])]


class Tape:
    """Plays by computing; `refused` is how many more of its kind find no memory."""

    refused = 0

    def __init__(self, function, inputs, shared):
        if type(self).refused:
            type(self).refused -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.function = function

    def __call__(self, inputs):
        return self.function(*inputs)


def double(tensor):
    return (tensor * 2,)


def met(made, *keys, times=2):
    """Sizes that come so often, one after the other."""
    for _ in range(times):
        for key in keys:
            (result,) = made.run(key, double, ONE)
            assert result.tolist() == [2.0]


def recorded(made):
    return [key for key, tape in made.made.items() if tape is not None]


@pytest.fixture
def refused(monkeypatch):
    """The first tape finds no memory."""
    monkeypatch.setattr(Tape, "refused", 1)


@pytest.mark.usefixtures("refused")
def test_a_size_that_found_no_memory_is_recorded_in_the_next_round():
    made = Recordings(Tape)
    with pytest.warns(UserWarning, match="too little memory to record decode steps"):
        met(made, "a size", times=5)
    assert recorded(made) == [], "within the round it is not tried again"
    made.rest()
    met(made, "a size")
    assert recorded(made) == ["a size"]


def test_when_memory_is_short_all_recordings_give_theirs_back(monkeypatch):
    made = Recordings(Tape)
    met(made, "one", "two")
    monkeypatch.setattr(Tape, "refused", 1)
    with pytest.warns(UserWarning, match="too little memory"):
        met(made, "three")
    assert recorded(made) == []


def test_what_is_computed_after_a_failed_recording_has_the_memory_of_the_failed_one(monkeypatch):
    """The exception holds the frames of the capture, and they its tensors."""
    monkeypatch.setattr(Tape, "refused", 1)
    made, seen = Recordings(Tape), []

    def watched(tensor):
        seen.append(sys.exc_info()[1])
        return (tensor,)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            made.run("a size", watched, ONE)
    assert set(seen) == {None}


def test_the_sizes_that_were_met_longest_ago_are_forgotten(monkeypatch):
    monkeypatch.setattr(recordings, "MOST_SIZES", 3)
    made = Recordings(Tape)
    met(made, "one", "two", "three")
    met(made, "one", times=1)
    met(made, "four")
    assert recorded(made) == ["three", "one", "four"]


class Streams:
    """What torch does with streams around a capture."""

    def __init__(self, monkeypatch, *, end):
        self.current, self.end = "the usual stream", end
        monkeypatch.setattr(recordings, "capture_stream", lambda device: "the stream of captures")
        for name, played in {
            "current_device": lambda: 0,
            "graph_pool_handle": lambda: "a pool",
            "CUDAGraph": object,
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "graph": lambda graph, stream, **settings: Capture(self, stream),
        }.items():
            monkeypatch.setattr(torch.cuda, name, played)


class Capture:
    """As `torch.cuda.graph`: where the capture cannot be ended, the stream is not given back."""

    def __init__(self, streams, stream):
        self.streams, self.stream = streams, stream

    def __enter__(self):
        self.before, self.streams.current = self.streams.current, self.stream

    def __exit__(self, *raised):
        if raised[0] is not None and self.streams.end is not None:
            raise self.streams.end
        self.streams.current = self.before


BROKEN = RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("end", [None, BROKEN])
def test_after_a_failed_capture_the_stream_is_the_one_of_before(monkeypatch, end):
    streams = Streams(monkeypatch, end=end)

    def waits(tensor):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError):
        Graph(waits, ONE, {})
    assert streams.current == "the usual stream"


@pytest.mark.parametrize("end", [None, BROKEN])
def test_a_capture_that_found_no_memory_says_that_and_not_how_it_ended(monkeypatch, end):
    Streams(monkeypatch, end=end)

    def large(tensor):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        Graph(large, ONE, {})
