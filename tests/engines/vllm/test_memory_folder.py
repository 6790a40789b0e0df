"""Folders in memory, of processes that live and of some that were killed."""

import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

from stretto.engines.vllm import memory_folder
from stretto.engines.vllm.memory_folder import new_folder
from stretto.errors import RecipeError


def test_folders_of_processes_that_were_killed_are_removed_and_no_others():
    script = (
        "import os, signal; from stretto.engines.vllm.memory_folder import new_folder as f; print(f(1), flush=True);"
    )
    killed = subprocess.run([sys.executable, "-c", f"{script} os.kill(os.getpid(), 9)"], capture_output=True, text=True)
    mine = new_folder(1)
    other = new_folder(1)
    try:
        assert killed.returncode == -9 and killed.stdout.strip()
        assert not Path(killed.stdout.strip()).exists()
        assert mine.is_dir() and other.is_dir()
    finally:
        shutil.rmtree(mine)
        shutil.rmtree(other)


def test_a_folder_lies_where_there_is_room_and_is_refused_where_there_is_none(tmp_path, monkeypatch):
    small, large = tmp_path / "shm", tmp_path / "tmp"
    small.mkdir()
    large.mkdir()
    monkeypatch.setattr(memory_folder, "SHARED", small)
    monkeypatch.setattr(tempfile, "tempdir", str(large))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(64 * 2**20 if place == small else 2**30))
    assert new_folder(2**20).parent == small
    assert new_folder(2**29).parent == large
    with pytest.raises(RecipeError, match=r"2.00 GB, and .*shm has 0.06 GB and (?s:.*)docker run --shm-size=3g"):
        new_folder(2**31)
