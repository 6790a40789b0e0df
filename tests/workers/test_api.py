"""What callers are told a worker can do is what it does: the same names, arguments and answers."""

import inspect

import pytest

from stretto.workers.api import WorkerApi
from stretto.workers.worker import Worker

METHODS = {name: found for name, found in vars(WorkerApi).items() if inspect.iscoroutinefunction(found)}


@pytest.mark.parametrize("name", METHODS)
def test_a_worker_has_the_method_that_callers_are_told_of(name):
    told, does = (inspect.signature(found) for found in (METHODS[name], getattr(Worker, name)))
    assert [(p.name, p.annotation) for p in told.parameters.values()] == [
        (p.name, p.annotation) for p in does.parameters.values()
    ]
    assert told.return_annotation == does.return_annotation


def test_callers_are_told_of_all_that_it_does():
    does = {name for name, found in vars(Worker).items() if inspect.isfunction(found) and not name.startswith("_")}
    assert does - METHODS.keys() == {"make_host_buffer", "trained", "claims", "close"}
