"""What a rank of several refuses comes to the host by a file: its log is all that vLLM tells it."""

import logging

import pytest

from stretto.engines.vllm.rank_failures import FailureFile, read_failure


@pytest.fixture
def log(tmp_path):
    """A rank's, whose failures are written down."""
    found = logging.Logger("rank")
    found.addHandler(FailureFile(tmp_path))
    return found


def fail(log, error):
    try:
        raise error
    except Exception:
        log.exception("WorkerProc hit an exception.")


def test_a_refusal_that_cannot_be_written_down_harms_nobody(log, tmp_path):
    log.handlers[0].folder = tmp_path / "gone"
    fail(log, ValueError("nowhere"))
    assert read_failure(tmp_path) is None


def test_the_last_refusal_is_read_once_in_its_words(log, tmp_path):
    for error in (ValueError("first"), NotImplementedError("no kernel here"), RuntimeError("connection closed")):
        fail(log, error)
    log.error("it is an error without an exception")
    found = read_failure(tmp_path)
    assert type(found) is NotImplementedError and str(found) == "no kernel here"
    assert read_failure(tmp_path) is None and list(tmp_path.iterdir()) == []
