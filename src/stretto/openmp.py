"""How the threads of a CPU wait for each other: bounded, so that other programs on the machine do not suffer, nor we.

torch divides an operation among OpenMP threads, which meet at its end. Whoever is early spins, by default for
milliseconds, which an idle machine likes best. On a busy one spinning takes the core that the late thread waits for: a
step was seen to take 18 times as long. OpenMP reads its variables once, when torch is loaded, so they are set when
stretto is imported, for this process and those that it starts. What the user has set there is never touched.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
"""Variables by which a user says how threads wait."""

BOUNDED = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Rounds of libgomp, which torch brings on Linux, and milliseconds of libomp and libiomp, elsewhere. As long as most
waits within a step are: `scripts/evidence/busy` compares other bounds."""

PASSIVE = {"GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Sleep at once, for machines on which others compete for every core."""

SOFT = 1
"""omp_pause_soft: a region that comes later starts threads anew."""

_SET: dict[str, str] = {}
"""What was set here, as far as nobody has changed it since."""


def bound_spinning(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds how long threads spin, unless the user, or whoever started this process, has said how they wait."""
    if not any(name in environment for name in USER):
        _SET.update(BOUNDED)
        environment.update(BOUNDED)


def wait_passively(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Has threads not spin at all; False where that comes too late or is not ours to say."""
    ours = bool(_SET) and all(environment.get(name) == value for name, value in _SET.items())
    if "torch" in sys.modules or not ours:
        return False
    _SET.update(PASSIVE)
    environment.update(PASSIVE)
    return True


def sleeps_at_once(environment: Mapping[str, str] = os.environ) -> bool:
    """True if threads do not spin while they wait for each other."""
    told = environment.get("GOMP_SPINCOUNT")
    return told == "0" if told else environment.get("OMP_WAIT_POLICY", "").lower() == "passive"


def release_threads() -> None:
    """Ends the threads that have computed for the calling one, which is to leave that to another thread.

    Each thread that computes gets threads of its own. As soon as a process has more of them than cores, libgomp has
    all of them spin for a moment only, whoever works: with a model so small that an operation takes microseconds they
    wait for each other for a third of a step. It is asked through torch, since wheels call its file by several names.
    Where torch has no libgomp nothing happens.
    """
    with suppress(OSError, AttributeError):
        torchs_library().omp_pause_resource_all(SOFT)


def torchs_library() -> ctypes.CDLL:
    """The library through which torch's runtime is asked; an OSError where torch is not loaded, or has no such file."""
    torch = sys.modules.get("torch")
    if torch is None or torch.__file__ is None:
        raise OSError("torch is not loaded")
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))


def is_torchs(library: ctypes.CDLL) -> bool:
    """True if a library computes with the threads of torch: its runtime is torch's, and not one beside it."""
    try:
        theirs, torchs = (each.omp_get_max_threads for each in (library, torchs_library()))
    except (OSError, AttributeError):
        return False
    return ctypes.cast(theirs, ctypes.c_void_p).value == ctypes.cast(torchs, ctypes.c_void_p).value
