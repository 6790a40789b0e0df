"""What `make dist` makes: a wheel that brings all of the package, and runs from a bare environment."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from running import data_with, lines

ROOT = Path(__file__).parents[1]
QUICKSTART = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[1]


@pytest.mark.slow
def test_the_wheel_alone_runs_the_quickstart_and_trains(tmp_path):
    """Its dependencies are those of this environment; stretto itself is nowhere but in the wheel."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("stretto-*.whl")
    files = {name.removeprefix("stretto/") for name in zipfile.ZipFile(wheel).namelist() if name.startswith("stretto/")}
    source = ROOT / "src" / "stretto"
    tracked = subprocess.run(["git", "ls-files", "."], cwd=source, capture_output=True, text=True, check=True)
    assert set(tracked.stdout.split()) - files == set()

    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (packages,) = (bare / "lib").glob("python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    others = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "dependencies.pth").write_text(others)  # behind the wheel's own, and without its editable install
    (tmp_path / "recipes").mkdir()
    recipe = data_with(model__scratch__characters="0123456789=", run__steps=2, evaluate__every=0)
    (tmp_path / "recipes" / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "quick.py").write_text(f"import stretto; print(stretto.__file__)\n{QUICKSTART}")
    for command in (["quick.py"], ["-m", "stretto", "train", "recipes/tiny.yaml"]):
        done = subprocess.run(
            [str(bare / "bin" / "python"), *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        if command == ["quick.py"]:
            assert done.stdout.splitlines()[0] == str(packages / "stretto" / "__init__.py")
    for name in ("tiny-001", "tiny-002"):
        assert [row["step"] for row in lines(tmp_path / "runs" / name / "metrics.jsonl")] == [1, 2]
