"""Compiles the kernels in C of this folder with the machine's own compiler."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDER = Path(__file__).parent
"""Every file in C here is a part of the library."""
COMPILERS = ("gcc", "cc")
OPTIONS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-lm", "-Wl,--as-needed")
RUNTIME = b"libgomp"
"""What the kernels compute with, if it is to be the threads of torch; clang brings another."""
SECONDS = 60
"""Most that a compiler is waited for."""


def compiler() -> list[str]:
    """The command that compiles C: what CC says, or the first that is there; nothing where none is."""
    named = os.environ.get("CC", "")
    try:
        told = shlex.split(named)
    except ValueError:  # a quote that does not end
        told = [named]
    return told or [found for name in COMPILERS if (found := shutil.which(name))][:1]


def runtime() -> list[str]:
    """The file of the OpenMP that torch brings, whatever its name: linked first, it takes the place of the system's."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return []
    return [str(path) for path in sorted(Path(found.origin).with_name("lib").glob(f"{RUNTIME.decode()}*.so*"))][:1]


def load(*, bf16: bool) -> ctypes.CDLL | str:
    """The kernels for states in bfloat16 or float32, compiled and loaded; why not, where that fails."""
    try:
        with TemporaryDirectory() as folder:
            target = Path(folder, "kernels.so")
            return build(target, bf16=bf16) or ctypes.CDLL(str(target))
    except OSError as error:  # no folder for it, or one from which nothing may be started
        return f"what is compiled cannot be loaded: {error}"


def build(target: Path, *, bf16: bool) -> str | None:
    """Writes the kernels for states in bfloat16 or float32 as a shared library; why not, where that fails."""
    command = compiler()
    if not command:
        return f"there is no C compiler ({', '.join(COMPILERS)})"
    sources = map(str, sorted(FOLDER.glob("*.c")))
    command = [*command, *(["-DBF16"] if bf16 else []), *sources, "-o", str(target), *OPTIONS, *runtime()]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    except subprocess.CalledProcessError as error:
        told = error.stderr.decode(errors="replace").strip() or f"exit code {error.returncode}"
        return f"{command[0]} says: {told.splitlines()[0]}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not ended after {SECONDS} s"
    except OSError as error:
        return f"{command[0]} does not start: {error.strerror}"
    if not target.exists():
        return f"{command[0]} writes no library"
    if RUNTIME not in target.read_bytes():
        return f"{command[0]} has another OpenMP than {RUNTIME.decode()}, which torch has"
    return None
