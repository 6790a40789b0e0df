"""What a run has started ends with it, whatever it calls itself."""

import os
import subprocess
import sys
import time
import uuid

from stretto.workers.orphans import MARK, end_marked, marked

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
print(child.pid, flush=True)
time.sleep(60)
"""


def test_children_of_what_is_marked_end_too_although_they_have_lost_the_mark():
    """As Ray's agents may, whose titles are written over a part of their environment."""
    mark = uuid.uuid4().hex
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env={**os.environ, MARK: mark}, stdout=subprocess.PIPE, text=True
    )
    try:
        child = int(parent.stdout.readline())
        assert marked(mark) == sorted([parent.pid, child])
        assert marked(uuid.uuid4().hex) == []
        end_marked(mark)
        assert parent.wait(10) < 0
        end = time.monotonic() + 10
        while os.path.exists(f"/proc/{child}") and time.monotonic() < end:
            time.sleep(0.02)
        assert not os.path.exists(f"/proc/{child}") and marked(mark) == []
    finally:
        parent.stdout.close()
        parent.kill()
