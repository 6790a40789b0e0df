"""Starts a sandbox server inside of bubblewrap, for systems that let that program make namespaces, and no other.

Some distributions allow user namespaces to a list of programs only. There the server and all of its programs live in
one container: it has no network, no files but Python's, and no processes but theirs. Each program is then locked in
inside of it as on a machine without namespaces.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from stretto.sandbox import worker
from stretto.sandbox.isolated.visible import visible_paths

SCRATCH_BYTES = 64 * 2**20


def python_inside(packages: Sequence[str], flags: Sequence[str]) -> tuple[str, ...] | None:
    """The command for a Python inside of a container, or none where bubblewrap is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    python = os.path.realpath(sys.executable)
    visible = [python, os.path.join(worker.PACKAGE_ROOT, "stretto"), *visible_paths(packages)]
    binds = [word for path in dict.fromkeys(visible) for word in ("--ro-bind-try", path, path)]
    own = ("--unshare-all", "--die-with-parent", "--dev", "/dev", "--proc", "/proc")
    return (program, *own, "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", *binds, "--", python, *flags)
