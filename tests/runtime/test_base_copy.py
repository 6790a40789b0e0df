"""Runs side by side keep one copy of an equal base, and none depends on another."""

import os
import shutil
from pathlib import Path

from stretto.runtime.base_copy import WORTH_SHARING, share_with_others

WEIGHTS = "model.safetensors"


def base(run, *, weights=b"w" * WORTH_SHARING, config=b"{}"):
    """A run's base as it is about to get its name."""
    folder = Path(run) / "base"
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(weights)
    (folder / "config.json").write_bytes(config)
    return folder


def begun(run, **content):
    """The same of a run that begins now."""
    draft = base(run, **content).rename(Path(run) / ".base.draft")
    share_with_others(draft, Path(run) / "base")
    return draft.rename(Path(run) / "base")


def inode(folder, name=WEIGHTS):
    return (folder / name).stat().st_ino


def test_equal_weights_are_on_the_disk_once_and_small_files_are_a_runs_own(tmp_path):
    first = begun(tmp_path / "a")
    second, third = begun(tmp_path / "b"), begun(tmp_path / "c")
    assert inode(first) == inode(second) == inode(third)
    assert inode(first, "config.json") != inode(second, "config.json")
    assert sorted(path.name for path in third.iterdir()) == ["config.json", WEIGHTS], "nothing is left beside"


def test_other_weights_of_the_same_size_are_not_shared(tmp_path):
    first = begun(tmp_path / "a")
    other = begun(tmp_path / "b", weights=b"w" * (WORTH_SHARING - 1) + b"v")
    assert inode(first) != inode(other) and (other / WEIGHTS).read_bytes()[-1:] == b"v"


def test_removing_moving_or_beginning_a_run_again_harms_no_other(tmp_path):
    begun(tmp_path / "a")
    second = begun(tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert (second / WEIGHTS).read_bytes() == b"w" * WORTH_SHARING
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "b").rename(tmp_path / "elsewhere" / "b") / "base"
    assert (moved / WEIGHTS).stat().st_nlink == 1 and (moved / WEIGHTS).stat().st_size == WORTH_SHARING
    begun(tmp_path / "c")
    assert (tmp_path / "c" / "base" / WEIGHTS).stat().st_nlink == 1, "its parent folder has no other"


def test_what_is_not_on_this_disk_or_is_a_link_is_copied(tmp_path):
    first = begun(tmp_path / "a")
    linked = base(tmp_path / "b")
    (linked / WEIGHTS).unlink()
    (linked / WEIGHTS).symlink_to(first / WEIGHTS)
    shutil.rmtree(tmp_path / "a")  # the link leads nowhere now
    third = begun(tmp_path / "c")
    assert (third / WEIGHTS).stat().st_nlink == 1
    other_user = tmp_path / "d"
    base(other_user)
    if os.geteuid() == 0:
        os.chown(other_user / "base" / WEIGHTS, 12345, 12345)
        shutil.rmtree(tmp_path / "c")
        assert inode(begun(tmp_path / "e")) != inode(other_user / "base")
