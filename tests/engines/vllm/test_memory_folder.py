"""Folders in memory, of processes that live and of some that were killed."""

import shutil
import subprocess
import sys
from pathlib import Path

from stretto.engines.vllm.memory_folder import new_folder


def test_folders_of_processes_that_were_killed_are_removed_and_no_others():
    script = (
        "import os, signal; from stretto.engines.vllm.memory_folder import new_folder as f; print(f(), flush=True);"
    )
    killed = subprocess.run([sys.executable, "-c", f"{script} os.kill(os.getpid(), 9)"], capture_output=True, text=True)
    mine = new_folder()
    other = new_folder()
    try:
        assert killed.returncode == -9 and killed.stdout.strip()
        assert not Path(killed.stdout.strip()).exists()
        assert mine.is_dir() and other.is_dir()
    finally:
        shutil.rmtree(mine)
        shutil.rmtree(other)
