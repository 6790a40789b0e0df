"""Whatever a program leaves in its scratch folder, nothing of it stays, and nothing outside of it goes."""

import os
from pathlib import Path

from stretto.sandbox.isolated.scratch import remove


def test_folders_without_rights_and_links_and_depth_are_no_obstacle(tmp_path: Path):
    outside, scratch = tmp_path / "outside", tmp_path / "scratch"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    scratch.mkdir()
    (scratch / "link").symlink_to(outside)
    (scratch / "closed" / "below").mkdir(parents=True)
    (scratch / "closed" / "below" / "file").write_text("x")
    (scratch / "closed" / "up").symlink_to("..")
    os.mkfifo(scratch / "pipe")
    before = os.getcwd()
    os.chdir(scratch)
    for _ in range(3000):
        os.mkdir("d" * 50)
        os.chdir("d" * 50)
    os.chdir(before)
    (scratch / "closed" / "below").chmod(0)
    (scratch / "closed").chmod(0)
    remove(str(scratch))
    assert not scratch.exists()
    assert (outside / "kept").read_text() == "kept"


def test_a_folder_that_is_gone_is_removed_already(tmp_path: Path):
    remove(str(tmp_path / "nothing"))
