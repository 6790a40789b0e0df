"""The kernel calls that Python 3.11 has no names for, through the C library: namespaces, mounts, capabilities, prctl.

Everything here acts on the calling process and raises OSError where the kernel does not permit it; what to do then is
the caller's decision. `enter` gives a server a root folder that holds Python, the system's libraries and nothing else;
`isolate` gives one program new namespaces; `drop` takes every right away.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CAPABILITIES_V3 = 0x20080522
DEVICES = ("null", "zero", "full", "random", "urandom")
INNER_UID = 1000
"""What an unprivileged user is called inside of a user namespace."""

libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _call(name: str, *arguments: object) -> None:
    """One function of the C library that returns 0 where all is well."""
    if libc is None:
        raise OSError(f"{name}: not on {sys.platform}")
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def prctl(option: int, *values: int) -> None:
    """One switch of this process."""
    four = (*values, 0, 0, 0, 0)[:4]
    _call("prctl", option, *(ctypes.c_ulong(value) for value in four))


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """As mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def spare_uid() -> int | None:
    """A user that nobody is, other for every process of this machine that asks; none where this process is not root.

    A container may know few users, or only root: then there is no other to become.
    """
    if os.geteuid() != 0:
        return None
    ranges = [(0, 2**32 - 1)]
    with suppress(OSError), open("/proc/self/uid_map", encoding="ascii") as lines:
        ranges = [(int(first), int(count)) for first, _, count in (line.split() for line in lines)]
    first, count = max(ranges, key=lambda each: each[1])
    if count > 2_100_000_000:
        return 2_000_000_000 + os.getpid()
    return first + count - 1 - os.getpid() % (count // 2) if count > 2 else None


def scratch_among(visible: Iterable[str]) -> str:
    """Where programs get their scratch folder: /tmp, unless what they are to see lies there."""
    return "/scratch" if any(path.startswith("/tmp/") for path in visible) else "/tmp"


def enter(visible: Sequence[str]) -> None:
    """A mount namespace whose root holds the `visible` paths, read-only, a few devices and an empty scratch folder.

    As root its mounts are made with root's own rights; anybody else makes a user namespace to have any.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _call("unshare", NEWNS)
    else:
        _call("unshare", NEWNS | NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{INNER_UID} {uid} 1"),
            ("gid_map", f"{INNER_UID} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "mode=0755,size=4m")
    os.mkdir("/tmp/host", 0o700)
    _call("pivot_root", b"/tmp", b"/tmp/host")
    os.chdir("/")
    for path in visible:
        _show(path)
    for name in DEVICES:
        _show(f"/dev/{name}", device=True)
    os.mkdir(scratch_among(visible), 0o755)
    os.symlink(scratch_among(visible), "/dev/shm")
    _call("umount2", b"/host", DETACH)
    os.rmdir("/host")
    mount(None, "/", None, REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def _show(path: str, *, device: bool = False) -> None:
    """Makes a path of the host visible at the same place. What is not there is left out; links stay links."""
    source = f"/host{path}"
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    kind = os.lstat(source).st_mode
    if stat.S_ISLNK(kind):
        os.symlink(os.readlink(source), path)
        return
    if stat.S_ISDIR(kind):
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, path, None, BIND)
    # What the host's own mount forbids has to stay forbidden, or a user namespace may not change it.
    kept = os.statvfs(path).f_flag & (NODEV | NOEXEC)
    if not device:
        mount(None, path, None, REMOUNT | BIND | RDONLY | NOSUID | kept)


def isolate(scratch: str, scratch_mb: int, owner: int) -> None:
    """New namespaces for the next process that this one forks, and a `scratch` folder in memory, for `owner`."""
    _call("unshare", NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS)
    options = f"mode=0700,uid={owner},gid={owner},size={scratch_mb}m,nr_inodes=4096"
    mount("tmpfs", scratch, "tmpfs", NOSUID | NODEV, options)


def drop(uid: int | None) -> None:
    """Becomes `uid` where given, and gives every capability up, for good."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if libc is not None:
        header = (ctypes.c_uint32 * 2)(CAPABILITIES_V3, 0)
        _call("capset", header, (ctypes.c_uint32 * 6)())
        prctl(PR_SET_NO_NEW_PRIVS, 1)


def limit(kind: int, value: int) -> None:
    """One resource limit, or what is left of it where it is lower already."""
    hard = resource.getrlimit(kind)[1]
    allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (allowed, allowed))
