"""System calls (seccomp) and files (Landlock) that a program may use, where the kernel has them.

A filter is written here, instruction by instruction, because most arguments that it compares have 32 bits: the kernel
ignores the upper half of the register, and so must the filter. libseccomp, which every Debian and Fedora has because
their package managers need it, only gives the numbers of system calls. Landlock is three system calls without a
library; it is for machines that allow no namespaces, where it stands in for a root folder of one's own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress

from stretto.sandbox.isolated.kernel import NEWUSER, libc, prctl

DENIED = {
    "programs of the host": "execve execveat",
    # A pair of connected streams stays allowed: event loops need one.
    "the network, and sockets of the host": "socket socketcall connect bind listen accept accept4",
    "memory that no limit counts": "memfd_create memfd_secret shmget shmat msgget semget mq_open vmsplice splice tee",
    # A small number names a queue, a semaphore or shared memory of the user, which needs no opening first.
    "queues, semaphores and shared memory of the host": "shmctl semctl semop semtimedop msgctl msgsnd msgrcv mq_unlink "
    "ipc",
    "other processes": "ptrace process_vm_readv process_vm_writev pidfd_open pidfd_getfd pidfd_send_signal kcmp "
    "process_madvise process_mrelease migrate_pages move_pages setpriority ioprio_set",
    "views of the host": "unshare setns mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount "
    "fspick mount_setattr open_by_handle_at name_to_handle_at inotify_init inotify_init1 fanotify_init",
    "parts of the kernel where faults were found before": "bpf userfaultfd perf_event_open io_uring_setup "
    "io_uring_enter io_uring_register keyctl add_key request_key modify_ldt lookup_dcookie",
    "the machine": "quotactl quotactl_fd swapon swapoff reboot kexec_load kexec_file_load init_module finit_module "
    "delete_module acct settimeofday clock_settime clock_adjtime adjtimex syslog personality iopl ioperm vhangup "
    "nfsservctl io_setup sync syncfs",
}
"""System calls that end with EPERM, by what they would reach."""
ATTRIBUTES = (
    "setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr "
    "lremovexattr fremovexattr"
)
"""Extended attributes end with ENOTSUP, after which `shutil.copy2` continues."""
ABSENT = "clone3 openat2"
"""Calls with flags in memory, which no filter reads, end with ENOSYS; the C library then uses `clone` and `openat`."""
UNCHANGED = "chmod fchmod fchmodat chown lchown fchown fchownat utime utimes utimensat futimesat"
"""Without a root folder of its own, a program changes no mode, owner or time, since Landlock knows no right for them.
The calls return 0 and do nothing, so that `shutil.copy` and `tarfile` work."""
NEWER = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "openat2": 437,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
}
"""Numbers of calls that an old libseccomp has no name for, the same on every architecture."""
UNKNOWN = 452
"""First number that ends with ENOSYS, whatever it means: a program sees the system calls of Linux 6.5."""

STREAMS = tuple(1 | flags for flags in (0, os.O_NONBLOCK, os.O_CLOEXEC, os.O_NONBLOCK | os.O_CLOEXEC))
"""Types of a pair of sockets; one of datagrams could send to every socket of the host."""
COMMANDS = (
    "F_DUPFD F_DUPFD_CLOEXEC F_GETFD F_SETFD F_GETFL F_SETFL F_GETLK F_SETLK F_SETLKW F_OFD_GETLK F_OFD_SETLK "
    "F_OFD_SETLKW F_GETOWN F_GETSIG F_GETLEASE F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS"
)
FCNTL = tuple(getattr(fcntl, name) for name in COMMANDS.split() if hasattr(fcntl, name))
"""Commands of fcntl. Others send signals to any process, watch folders, or hold files."""
REQUESTS = "TCGETS TIOCGWINSZ TIOCOUTQ FIONREAD FIONBIO FIOCLEX FIONCLEX"
IOCTL = (
    *(getattr(termios, name) for name in REQUESTS.split() if hasattr(termios, name)),
    *(0x802C542A, 0x40049409, 0x4020940D),  # TCGETS2, FICLONE, FICLONERANGE
)
"""Requests of ioctl. Others send signals to any process, or change files that were opened for reading."""
OF_OTHERS = "prlimit64 sched_setaffinity sched_setscheduler sched_setparam sched_setattr"
AMONG = (
    ("socketpair", 0, (1,)),
    ("socketpair", 1, STREAMS),
    ("fcntl", 1, FCNTL),
    ("ioctl", 1, IOCTL),
    *((name, 0, (0,)) for name in OF_OTHERS.split()),
)
"""Call, argument, and the values that it may have. 0 is the process that asks, whose limits and
places on the cores it may change."""
SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
"""Calls whose first argument is the process that gets a signal."""
MAP_HUGETLB = 0x40000
EXCEPT = (("clone", 0, NEWUSER, NEWUSER), ("mmap", 3, MAP_HUGETLB, MAP_HUGETLB))
"""Call, argument, mask, and the value that it may not have behind the mask: user namespaces, huge pages in reserve."""
BOTH = os.O_RDONLY | os.O_WRONLY | os.O_RDWR
OPENED = ((BOTH, BOTH), (BOTH | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC))
"""Mask and value of flags with which Landlock opens files that may not be written: mode 3, and to read and empty."""

PR_SET_SECCOMP, MODE_FILTER = 22, 2
KILL, ERRNO, ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
"""Instructions of a filter: load 32 bits of the call, compare and jump, mask, end."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16 + 4 * (sys.byteorder == "big")
"""Where the call has them; of an argument the lower half."""

RULESET, ADD_RULE, RESTRICT = 444, 445, 446
"""Landlock's system calls, the same on every architecture."""
VERSION_FLAG, BENEATH = 1, 1
READ, WRITE = (1 << 0) | (1 << 2) | (1 << 3), 1 << 1
ACCESS = ((1, (1 << 13) - 1), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
"""From which version Landlock knows which rights on files."""


class _Program(ctypes.Structure):
    """The kernel's `sock_fprog`: how many instructions of eight bytes, and where."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def library() -> ctypes.CDLL | None:
    """libseccomp, if it is installed and the kernel filters."""
    with suppress(OSError):
        found = ctypes.CDLL("libseccomp.so.2")
        found.seccomp_arch_native.restype = ctypes.c_uint32
        return found if os.path.exists("/proc/sys/kernel/seccomp") else None
    return None


def compiled(found: ctypes.CDLL, *, only: int | None = None, landlock: int = 0) -> bytes:
    """The filter for a program.

    `only` is for a program without namespaces of its own: the one process that gets its signals. Then the calls that
    Landlock of version `landlock` does not cover are denied, too.
    """
    code = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, found.seccomp_arch_native(), 1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
        _step(AT_LEAST, UNKNOWN, 0, 1),
        _step(RETURN, ERRNO | errno.ENOSYS),
    ]

    def numbers(names: str) -> Iterable[int]:
        for name in names.split():
            number = found.seccomp_syscall_resolve_name(name.encode())
            number = NEWER.get(name, number) if number == -1 else number
            if number >= 0:  # below -1 it is not on this architecture
                yield number

    def end(names: str, error: int) -> None:
        for number in numbers(names):
            code.extend((_step(EQUAL, number, 0, 1), _step(RETURN, ERRNO | error)))

    def checked(name: str, argument: int, *steps: bytes) -> None:
        """The steps end with EPERM or jump behind the last of them."""
        load = _step(LOAD, ARGUMENTS + 8 * argument), *steps, _step(RETURN, ERRNO | errno.EPERM), _step(LOAD, NUMBER)
        for number in numbers(name):
            code.extend((_step(EQUAL, number, 0, len(load)), *load))

    def among(name: str, argument: int, values: tuple[int, ...]) -> None:
        steps = (_step(EQUAL, value, len(values) - place) for place, value in enumerate(values))
        checked(name, argument, *steps)

    def not_behind(name: str, argument: int, mask: int, value: int) -> None:
        checked(name, argument, _step(AND, mask), _step(EQUAL, value, 0, 1))

    end(" ".join(DENIED.values()), errno.EPERM)
    end(ATTRIBUTES, errno.ENOTSUP)
    end(ABSENT, errno.ENOSYS)
    for rule in AMONG:
        among(*rule)
    for refused in EXCEPT:
        not_behind(*refused)
    if only is not None:
        end(UNCHANGED, 0)
        end("truncate" if landlock < 3 else "", errno.EPERM)
        among(SIGNALS, 0, (only,))
        for flags in OPENED:
            not_behind("open", 1, *flags)
            not_behind("openat", 2, *flags)
    return b"".join([*code, _step(RETURN, ALLOW)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction, with how many to jump over where its comparison is true, and where not."""
    return struct.pack("=HBBI", code, yes, no, value)


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
