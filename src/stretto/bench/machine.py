"""The machine that a bench runs on: what it is, how fast it multiplies, and how much memory a process came to need."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from stretto.planner.saved_calibration import processor

ROWS = 1024
"""Rows that are multiplied with each weight: a micro-batch of this order is what training computes."""
SECONDS = 0.4
"""How long each product is repeated."""
STATUS = Path("/proc/self/status")


def threads() -> int:
    """OMP_NUM_THREADS if it is set, otherwise every core this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe(*, threads: int) -> dict[str, Any]:
    """What to print beside results. `load` is the machine's before the bench began: far above 0 spoils the figures."""
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("stretto", "torch", "transformers", "peft", "trl")},
    }


BUSY = 0.3
"""Cores in use by other programs from which a measurement of time is not to be trusted."""


def busy_words(cores: float) -> str:
    """A warning that other programs use so many cores; empty where that is too little to matter."""
    return "" if cores < BUSY else f"other programs keep {cores:.1f} of {os.cpu_count()} cores busy"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def matmul_rate(shapes: Mapping[tuple[int, int], int], *, dtype: str, device: str) -> float:
    """GFLOP/s of the products of ROWS rows with weights of these (out, in) shapes, each as often as the model has it.

    The best of the repetitions counts, so that a busy moment does not make a side look good.
    """
    import torch

    flops = seconds = 0.0
    for (out, width), count in shapes.items():
        rows = torch.randn(ROWS, width, device=device).to(getattr(torch, dtype))
        weight = torch.randn(out, width, device=device).to(rows.dtype)
        times: list[float] = []
        while sum(times) < SECONDS or len(times) < 3:
            begun = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            synchronize(device)
            times.append(time.perf_counter() - begun)
        flops += 2.0 * ROWS * out * width * count
        seconds += min(times) * count
    return flops / seconds / 1e9


def synchronize(device: str) -> None:
    """Waits for a GPU, so that a clock sees its work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


class PeakMemory:
    """How far this process grows from now on; on a GPU, the most that torch had allocated on it."""

    def __init__(self, device: str) -> None:
        self.device = device
        with suppress(OSError):  # forgets a peak that imports left behind
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        self.start = _status("VmRSS")

    def gained(self) -> int:
        """Bytes."""
        if self.device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated()
        return max(0, _status("VmHWM") - self.start)


def _status(name: str) -> int:
    """A size of this process in bytes. Not from `getrusage` where it can be avoided: a child inherits that peak."""
    if STATUS.exists():
        fields = STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in fields if line.startswith(f"{name}:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
