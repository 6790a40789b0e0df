"""Which system calls a program may make (seccomp), and which files it may open (Landlock), where the kernel has them.

Seccomp goes through libseccomp, which every Debian and Fedora has because their package managers need it, with four of
its functions. The Python packages around it are not kept up. Landlock is three system calls without a library; it is
for machines that allow no namespaces, where it stands in for a root folder of one's own.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable
from contextlib import suppress

from stretto.sandbox.isolated.kernel import NEWUSER, libc, prctl

DENIED = {
    "programs of the host": "execve execveat",
    # A pair of sockets stays allowed: event loops need one.
    "the network, and sockets of the host": "socket socketcall connect bind listen accept accept4",
    "memory that no limit counts": "memfd_create memfd_secret shmget shmat msgget semget mq_open",
    "other processes": "ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd kcmp process_madvise "
    "migrate_pages move_pages setpriority ioprio_set",
    "views of the host": "unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount "
    "fspick mount_setattr open_by_handle_at name_to_handle_at",
    "parts of the kernel where faults were found before": "bpf userfaultfd perf_event_open io_uring_setup "
    "io_uring_enter io_uring_register keyctl add_key request_key modify_ldt lookup_dcookie fanotify_init",
    "the machine": "quotactl quotactl_fd swapon swapoff reboot kexec_load kexec_file_load init_module finit_module "
    "delete_module acct settimeofday clock_settime clock_adjtime adjtimex syslog personality iopl ioperm vhangup "
    "nfsservctl setxattr fsetxattr lsetxattr",
}
"""What a program may not reach -> the system calls that would."""
SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
OF_OTHERS = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Limits and places on the cores, of the process whose id comes first; 0 is the one that asks."""
SIGNALLED = (8, 10, 15)
"""Commands of fcntl by which the kernel sends signals to another process: F_SETOWN, F_SETSIG, F_SETOWN_EX."""
PR_SET_SECCOMP, MODE_FILTER = 22, 2
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NOT_EQUAL, EQUAL, MASKED_EQUAL = 1, 4, 7

RULESET, ADD_RULE, RESTRICT = 444, 445, 446
"""Landlock's system calls, the same on every architecture."""
VERSION_FLAG, BENEATH = 1, 1
READ, WRITE = (1 << 0) | (1 << 2) | (1 << 3), 1 << 1
ACCESS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""From which version Landlock knows which rights on files."""


class _Comparison(ctypes.Structure):
    """libseccomp's `scmp_arg_cmp`."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


class _Program(ctypes.Structure):
    """The kernel's `sock_fprog`: how many instructions of eight bytes, and where."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def library() -> ctypes.CDLL | None:
    """libseccomp, if it is installed and the kernel filters."""
    with suppress(OSError):
        found = ctypes.CDLL("libseccomp.so.2")
        found.seccomp_init.restype = ctypes.c_void_p
        found.seccomp_rule_add_array.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_void_p,
        ]
        found.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
        found.seccomp_release.argtypes = [ctypes.c_void_p]
        return found if os.path.exists("/proc/sys/kernel/seccomp") else None
    return None


def compiled(found: ctypes.CDLL, *, only: int | None = None) -> bytes:
    """The filter that refuses what is `DENIED`. With `only`, signals may be sent to the process of this id alone."""
    context = found.seccomp_init(ALLOW)
    refused = ERRNO | errno.EPERM

    def rule(name: str, action: int, comparison: _Comparison | None = None) -> None:
        number = found.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # not on this architecture, or newer than the library
            return
        many, address = (0, None) if comparison is None else (1, ctypes.byref(comparison))
        if wrong := found.seccomp_rule_add_array(context, action, number, many, address):
            raise OSError(-wrong, f"libseccomp takes no rule for {name}")

    for name in " ".join(DENIED.values()).split():
        rule(name, refused)
    rule("clone3", ERRNO | errno.ENOSYS)  # its flags lie in memory, which no filter reads; the C library uses clone
    rule("clone", refused, _Comparison(0, MASKED_EQUAL, NEWUSER, NEWUSER))
    for name in OF_OTHERS:
        rule(name, refused, _Comparison(0, NOT_EQUAL, 0, 0))
    for command in SIGNALLED:
        rule("fcntl", refused, _Comparison(1, EQUAL, command, 0))
    for name in SIGNALS if only is not None else ():
        rule(name, refused, _Comparison(0, NOT_EQUAL, only, 0))
    with os.fdopen(os.memfd_create("filter"), "rb") as file:
        wrong = found.seccomp_export_bpf(context, file.fileno())
        found.seccomp_release(context)
        if wrong:
            raise OSError(-wrong, f"libseccomp: {os.strerror(-wrong)}")
        file.seek(0)
        return file.read()


def deny(program: bytes) -> None:
    """Puts a filter on this process and all that it starts, for good."""
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = _Program(len(program) // 8, ctypes.addressof(code))
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(filter_))


def landlock_version() -> int:
    """Which Landlock the kernel has; 0 for none."""
    return 0 if libc is None else max(0, libc.syscall(RULESET, None, 0, VERSION_FLAG))


def confine(readable: Iterable[str], scratch: str, version: int) -> None:
    """Files below `readable` may be read and those below `scratch` be written, others not even opened; for good."""
    assert libc is not None
    handled = 0
    for since, rights in ACCESS:
        handled |= rights if version >= since else 0
    attributes = (ctypes.c_uint64 * 3)(handled, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    ruleset = _checked(libc.syscall(RULESET, attributes, 8 * (1 + (version >= 4) + (version >= 6)), 0))
    for path, rights in [
        *((path, READ) for path in readable),
        *((f"/dev/{name}", READ | WRITE) for name in ("null", "zero", "full", "random", "urandom")),
        (scratch, handled),
    ]:
        with suppress(FileNotFoundError, PermissionError):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & ((1 << 2) | WRITE)
            rule = (ctypes.c_uint32 * 3)(allowed & handled, 0, folder)
            _checked(libc.syscall(ADD_RULE, ruleset, BENEATH, rule, 0))
            os.close(folder)
    _checked(libc.syscall(RESTRICT, ruleset, 0))
    os.close(ruleset)


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: {os.strerror(code)}")
    return result
