"""Processes that a test starts. They are forked off one that has read what they need, which takes each of them seconds
otherwise; nothing has been computed in it, so it has no threads that they would miss.
"""

from torch import multiprocessing

METHOD = "forkserver"
multiprocessing.set_forkserver_preload(["lanes", "slices", "sliced_models", "cut", "peft"])


def run_together(function, size, *arguments):
    """What several processes do, each of which is given its rank first, until all of them have ended."""
    multiprocessing.start_processes(function, arguments, nprocs=size, start_method=METHOD)
