"""A run whose engine's process dies three times in a row. The process is a program of this test, and no vLLM."""

import os
import sys
from pathlib import Path

from running import written
from stretto.cli.main import main

TESTS = Path(__file__).parents[2]

PROGRAM = f"""#!{sys.executable}
import os, sys
if sys.argv[1] == "-c":  # what is installed there?
    print('{{"vllm": "0.32.0"}}')
    sys.exit()
born = os.path.join(os.path.dirname(__file__), "born")
with open(born, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
life = len(open(born).read().split())
print(f"life {{life}}: out of memory", flush=True)
if life > 1:
    os.kill(os.getpid(), 9)
sys.path[:0] = ["{TESTS.parent / "src"}", "{TESTS}"]
import json
from multiprocessing.connection import Connection
from fake_vllm import FakeHost
host, connection = FakeHost(), Connection(int(sys.argv[-2]))
while True:
    asked = json.loads(connection.recv_bytes())
    what = asked.pop("call")
    if what == "step":
        os.kill(os.getpid(), 9)
    connection.send_bytes(json.dumps(getattr(host, what)(**asked)).encode())
"""


def test_three_deaths_in_a_row_end_the_run_with_the_last_lines_and_leave_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(PROGRAM)
    python.chmod(0o755)
    recipe = written(tmp_path, engine__kind="vllm", engine__python=str(python), run__folder="run")
    code = main(["train", str(recipe)])
    error = capfd.readouterr().err
    assert code == 1 and "Traceback" not in error
    assert "its process was ended by SIGKILL" in error and "it died 3 times in a row" in error
    assert "| life 3: out of memory" in error and "fix: see its log" in error
    processes = [int(line) for line in (tmp_path / "born").read_text().split()]
    assert len(processes) == 3 and not any(os.path.exists(f"/proc/{each}") for each in processes)
