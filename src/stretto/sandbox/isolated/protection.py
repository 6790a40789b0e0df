"""What stands between a program and this machine, and what does not, in sentences for whoever starts a run."""

from __future__ import annotations

import sys
from dataclasses import dataclass

LANDLOCK = (
    (3, "emptying files (Linux 6.2 has more)"),
    (6, "signals to other processes and abstract sockets (Linux 6.12 has more)"),
)
"""First version of Landlock that stops something, and what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What stands between a program and this machine, as found when the first server started."""

    namespaces: bool
    """True if a program has processes, files, network and IPC of its own."""
    bubblewrap: bool = False
    """True if instead all programs share one container, without network and files of the host."""
    unprivileged: bool
    """True if it runs as a user that owns nothing."""
    seccomp: bool
    """True if its system calls are filtered."""
    landlock: int
    """The version of Landlock that, without namespaces, confines which files it opens; 0 for none."""
    imports: bool = True
    """True if a program can import all of the standard library, and not only what a server has loaded."""
    refused: str = ""
    """What the kernel said to namespaces, where it said no."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not protected, a sentence each; empty where everything is that stretto knows how to."""
        return tuple(_missing(self))


def _missing(found: Protection) -> list[str]:
    """The sentences of `Protection.missing`."""
    said: list[str] = []
    if not found.namespaces and not found.bubblewrap:
        said.append(f"the kernel allows no namespaces ({found.refused or 'not tried'}): programs see other processes")
        if not found.seccomp:
            said.append("programs can use the network")
        if not found.landlock:
            others = "read every file that everybody may read, and write where others may"
            said.append(
                f"programs can {others if found.unprivileged else 'read, change and remove every file of yours'}"
            )
        elif lacking := [what for since, what in LANDLOCK if found.landlock < since]:
            kept = "only the filter of system calls stops" if found.seccomp else "nothing stops"
            said.append(f"Landlock is version {found.landlock}, with which {kept} {' and '.join(lacking)}")
        if not found.unprivileged:
            said.append("programs run as your user, with the processes and quotas of your user")
            if not found.seccomp:
                said.append("programs can change mode and times of every file of yours")
                if found.landlock < 6:
                    said.append("programs can kill every process of your user, this run included")
        said.append("programs can fill the disk that holds the folder for temporary files")
        if not found.imports:
            said.append("programs can import only what is loaded already, because others may not read this Python")
    if not found.seccomp:
        why = "libseccomp is not installed" if sys.platform == "linux" else f"there is none on {sys.platform}"
        said.append(f"system calls are not filtered ({why}): programs can hold memory that no limit counts")
    return said
