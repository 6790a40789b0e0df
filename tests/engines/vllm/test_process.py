"""A process that an engine runs in: what it sees, when it is late, when it dies. The programs here are not vLLM."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from stretto.engines.vllm.process import PROGRAM as PROGRAM_OF_VLLM
from stretto.engines.vllm.process import EngineProcess, cleaned, members
from stretto.errors import DeadlineError, EngineDiedError, EngineError, RecipeError

PROGRAM = """
import json, os, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
print("awake", flush=True)
while True:
    asked = json.loads(connection.recv_bytes())
    what = asked.pop("call")
    if what == "hang":
        print("waiting for peers", flush=True)
        time.sleep(600)
    if what == "die":
        print("out of memory", flush=True)
        os.kill(os.getpid(), 9)
    answer = {"seen": dict(os.environ)} if what == "environment" else {what: asked["text"]}
    connection.send_bytes(json.dumps(answer).encode())
"""


SHARING = """
import json, os, signal, sys, time
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
connection, memory = Connection(int(sys.argv[1])), SharedMemory(create=True, size=16)
json.loads(connection.recv_bytes())
if os.fork() == 0:
    connection.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if STUBBORN else signal.SIG_DFL)
    time.sleep(600)
connection.send_bytes(json.dumps({"name": memory.name}).encode())
connection.recv_bytes()
os.kill(os.getpid(), 9)
"""


HOST = """
import os, subprocess, sys, time
from types import SimpleNamespace
sys.path.insert(0, FOLDER)
import host
def version(self):
    DOES
host.EngineHost.version = version
host.main()
"""
ENDS = """
    said = SimpleNamespace(token_ids=[], logprobs=None, finish_reason="REASON")
    output = SimpleNamespace(request_id="a", finished=True, outputs=[said])
    self.engine = SimpleNamespace(step=lambda: [output])
    self.answers["a"] = host.RunningRequest(key=1, version="policy-v1")
    return self.step(seconds=9)
"""
CHILDREN = {"forked": "os.fork() or time.sleep(600)", "spawned": "subprocess.Popen(['sleep', '600'], close_fds=False)"}


def host(folder, does):
    """The program itself, asked for its version, in which it does what a test wants."""
    program = HOST.replace("FOLDER", repr(str(PROGRAM_OF_VLLM.parent))).replace("DOES", does)
    return EngineProcess([sys.executable, "-c", program], name="the engine", log=folder / "engine.log")


@pytest.fixture
def process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    found = EngineProcess(
        [sys.executable, "-c", PROGRAM], name="the engine", log=tmp_path / "engine.log", environment={"ITS_OWN": "1"}
    )
    yield found
    found.close()
    assert found.process.poll() is not None


def test_it_answers_and_sees_nothing_of_launchers(process):
    seen = process.call("environment", 30)["seen"]
    assert seen["ITS_OWN"] == "1" and seen["PATH"] == os.environ["PATH"]
    assert not {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTHONPATH"} & seen.keys()


def test_one_that_hangs_is_ended_at_its_deadline_and_shows_its_last_lines(process):
    process.call("environment", 30)
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match=r"(?s)hang has not answered .*\| waiting for peers.*fix:.*publish") as late:
        process.call("hang", 0.3)
    assert time.monotonic() - begun < 20 and late.value.exit_code == 3
    assert process.process.poll() is not None


def test_one_that_takes_nothing_in_is_ended_and_no_deadline_is_told_to_be_raised(tmp_path, monkeypatch):
    monkeypatch.setattr("stretto.engines.vllm.process.SEND", 1)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = EngineProcess(command, name="the engine", log=tmp_path / "engine.log")
    with pytest.raises(DeadlineError, match=r"(?s)submit was not taken in for 1 s(?!.*deadlines\.)"):
        process.call("submit", 600, requests="x" * 10_000_000)
    assert process.process.poll() is not None


def test_one_that_dies_says_how_and_shows_its_last_lines(process):
    with pytest.raises(EngineDiedError, match=r"(?s)its process was ended by SIGKILL.*\| out of memory"):
        process.call("die", 30)
    with pytest.raises(EngineDiedError):
        process.call("environment", 30)


@pytest.mark.parametrize("begins", CHILDREN.values(), ids=CHILDREN)
def test_the_death_of_the_host_is_seen_while_its_ranks_live(tmp_path, begins):
    process = host(tmp_path, f"{begins}\n    os.kill(os.getpid(), 9)")
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        process.call("version", 60)


def test_a_start_on_several_devices_that_fails_says_why(tmp_path):
    process = host(tmp_path, "self.several = True\n    raise RuntimeError('no such link')")
    with pytest.raises(EngineError, match="version failed: RuntimeError: no such link"):
        process.call("version", 60)
    process.close()


@pytest.mark.parametrize("reason", ["length", "error"])
def test_an_answer_that_vllm_has_not_finished_is_a_failure(tmp_path, reason):
    process = host(tmp_path, ENDS.strip().replace("REASON", reason))
    told = pytest.raises(EngineError, match=r"vLLM has ended an answer \(error\)")
    with told if reason == "error" else nullcontext():
        (row,) = process.call("version", 60)["done"]
        assert row["stop"] == "length"
    process.close()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="where shared memory cannot be seen")
@pytest.mark.parametrize("stubborn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_its_children_share_in_memory_is_gone_when_it_has_died(tmp_path, stubborn):
    command = [sys.executable, "-c", SHARING.replace("STUBBORN", str(stubborn))]
    process = EngineProcess(command, name="the engine", log=tmp_path / "engine.log")
    shared = Path("/dev/shm") / process.call("share", 30)["name"]
    assert shared.exists()
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        process.call("die", 30)
    assert not shared.exists() and not members(process.process.pid)


def test_what_it_refuses_or_fails_at_is_told_in_its_words(process):
    with pytest.raises(RecipeError, match=r"engine.kind: too new\n    fix: an older one"):
        process.call("refused", 30, text=["engine.kind", "too new", "an older one"])
    with pytest.raises(EngineError, match="failed failed: KeyError: x\n    fix: see"):
        process.call("failed", 30, text="KeyError: x")
    with pytest.raises(EngineError, match=r"fix: lower engine\.memory_share"):
        process.call("failed", 30, text="OutOfMemoryError: CUDA out of memory.")


def test_a_program_that_is_none_is_a_wrong_recipe(tmp_path):
    with pytest.raises(RecipeError, match=r"engine\.python: .*cannot be started"):
        EngineProcess([str(tmp_path / "none")], name="the engine", log=tmp_path / "engine.log")


def test_a_log_that_cannot_be_written_is_told_as_a_wrong_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"run\.folder: the engine's log .* cannot be written: File exists"):
        EngineProcess([sys.executable, "-c", ""], name="the engine", log=tmp_path / "file" / "engine.log")


def test_variables_of_the_engine_itself_are_kept():
    assert cleaned({"VLLM_LOGGING_LEVEL": "DEBUG", "WORLD_SIZE": "8", "HOME": "/"}) == {
        "VLLM_LOGGING_LEVEL": "DEBUG", "HOME": "/"
    }  # fmt: skip
