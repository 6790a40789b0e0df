"""What every test relies on: no network, one thread, the source tree in every process, the same examples everywhere,
and signals that do what they do in a terminal.
"""

import gc
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from stretto.plugins import APPENDED

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models of tests are tiny: threads cost them more than they bring, above all beside other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1] / "src")

settings.register_profile("stretto", derandomize=True, deadline=None, database=None)
settings.load_profile("stretto")


KEYS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGTERM: signal.SIG_DFL,
}
"""What a process that was started in the foreground does with the signals of a terminal and of those who end it."""


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal():
    """`nohup`, `setsid ... &` and CI runners start processes that ignore some signals or hold them back.

    Their children inherit that, so without this a test that presses Ctrl-C would find it ignored, as it should be.
    """
    before = {number: signal.signal(number, meaning) for number, meaning in KEYS.items()}
    held = signal.pthread_sigmask(signal.SIG_UNBLOCK, KEYS)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    for number, meaning in before.items():
        signal.signal(number, signal.SIG_DFL if meaning is None else meaning)


@pytest.fixture(autouse=True)
def modules_are_found_where_they_were():
    """Runs leave the folders of plug-ins at the end of `sys.path`; the next test must not find modules there."""
    before = [path for path in sys.path if path not in APPENDED]  # by a worker that outlived its test
    yield
    sys.path[:] = [path for path in before if path not in APPENDED]


def pytest_collection_finish():
    """The collector would walk again and again through the tests themselves, a million objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Whoever reads of a hang elsewhere does not have the file that says where every process stood."""
    report = yield
    for named in set(re.findall(r"stands is in (\S+\.txt)", report.longreprtext if report.failed else "")):
        if (stacks := Path(named)).is_file():
            report.sections.append((stacks.name, stacks.read_text("utf-8")))
    return report


@pytest.fixture
def billion(tmp_path):
    """A folder of a model of a billion parameters in bf16, and none of their weight."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "dtype": "bfloat16"}')
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(2 * 10**9)
    return str(tmp_path)


def pytest_runtest_logreport(report):
    """Name a failed test at once: a run that is cut off prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}", flush=True)
