"""Compiles the kernels in C of this folder with the machine's own compiler."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("decode_kernels.c")
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-lm")
SECONDS = 60
"""Most that a compiler is waited for."""


def compiler() -> list[str]:
    """The command that compiles C: what CC says, or the first that is there; nothing where none is."""
    told = shlex.split(os.environ.get("CC", ""))
    return told or [found for name in COMPILERS if (found := shutil.which(name))][:1]


def build(target: Path, *, bf16: bool) -> str | None:
    """Writes the kernels for states in bfloat16 or float32 as a shared library; why not, where that fails."""
    command = compiler()
    if not command:
        return f"there is no C compiler ({', '.join(COMPILERS)})"
    command = [*command, *(["-DBF16"] if bf16 else []), str(SOURCE), "-o", str(target), *OPTIONS]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    except subprocess.CalledProcessError as error:
        told = error.stderr.decode(errors="replace").strip() or f"exit code {error.returncode}"
        return f"{command[0]} says: {told.splitlines()[0]}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} has not ended after {SECONDS} s"
    except OSError as error:
        return f"{command[0]} does not start: {error.strerror}"
    return None
