"""Programs without namespaces, as root and as an ordinary user, with Landlock old or off: none harms what is beside it.

Whatever a program tries ends with a verdict of its own, and other programs keep theirs. Ordinary programs work.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stretto.sandbox.isolated import filters
from stretto.sandbox.isolated.programs import NEWEST
from stretto.sandbox.isolated.protection import Protection

USER = 54321
TWO = 1 << 32
HEAD = """
import ctypes, fcntl, os, platform, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # x86_64, aarch64
    "fcntl": (72, 25), "ioctl": (16, 29), "socketpair": (53, 199), "kill": (62, 129), "openat": (257, 56),
    "utimensat": (280, 88), "truncate": (76, 45), "fchmodat": (268, 53), "fchownat": (260, 54), "tkill": (200, 130),
    "io_setup": (206, 0), "vmsplice": (278, 75),
}
def call(name, *arguments):
    number = NUMBERS[name][platform.machine() == "aarch64"] if isinstance(name, str) else name
    words = [each if isinstance(each, (bytes, ctypes._SimpleCData, ctypes.Array)) else ctypes.c_long(each)
             for each in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    return result if result >= 0 else -ctypes.get_errno()
def each_of(*tries):
    for one in tries:
        try: print(one())
        except Exception as error: print(repr(error))
UP = 1 << 32
FILE, MINE = "FOLDER/kept", "FOLDER/mine/__init__.py"
"""
ATTACKS = {
    "fcntl: a signal by a command of 64 bits": """
r, w = os.pipe()
for owner in (VICTIM, -VICTIM):
    each_of(lambda: call("fcntl", r, 8 | UP, owner), lambda: call("fcntl", r, 10 | UP, 9),
            lambda: call("fcntl", r, 8, owner), lambda: call("fcntl", r, 8 | UP << 7, owner))
    fcntl.fcntl(r, fcntl.F_SETFL, 0o20000)
    os.write(w, b"x")
""",
    "fcntl: a signal by F_SETOWN_EX": """
r, w = os.pipe()
for kind in (0, 1, 2):
    owner = (ctypes.c_int * 2)(kind, VICTIM)
    each_of(lambda: call("fcntl", r, 15 | UP, owner), lambda: call("fcntl", r, 15, owner))
    each_of(lambda: call("fcntl", r, 10 | UP, 9), lambda: fcntl.fcntl(r, fcntl.F_SETFL, 0o20000))
    os.write(w, b"x")
""",
    "ioctl: a signal by the owner of a descriptor": """
a, b = socket.socketpair()
for owner in (VICTIM, -VICTIM):
    for request in (0x8901, 0x8902):
        word = ctypes.c_int(owner)
        for up in (0, UP, UP << 30):
            print(call("ioctl", a.fileno(), request | up, ctypes.addressof(word)))
    on = ctypes.c_int(1)
    print(call("ioctl", a.fileno(), 0x5452, ctypes.addressof(on)))
    each_of(lambda: fcntl.fcntl(a, fcntl.F_SETFL, 0o20000), lambda: b.send(b"x"))
""",
    "signals by number": """
for name in ("kill", "tkill"):
    for up in (0, UP): each_of(lambda: call(name, VICTIM | up, 9))
def send():
    place = os.open("/proc/VICTIM", os.O_RDONLY | os.O_DIRECTORY)
    return call(424, place, 9, 0, 0)
each_of(lambda: call("kill", -VICTIM, 9), send, lambda: call("kill", -1, 9))
""",
    "modes and owners": """
for path in (FILE, MINE):
    each_of(lambda: os.chmod(path, 0), lambda: call("fchmodat", -100, path.encode(), 0),
            lambda: call(452, -100, path.encode(), 0, 0), lambda: call(452, -100, path.encode(), 0, 0x100),
            lambda: call("fchownat", -100, path.encode(), os.getuid(), os.getgid(), 0))
each_of(lambda: os.fchmod(os.open(MINE, os.O_RDONLY), 0), lambda: os.chmod("FOLDER", 0o777))
""",
    "times": """
for path in (FILE, MINE):
    each_of(lambda: os.utime(path, (5, 5)), lambda: os.utime(path),
            lambda: call("utimensat", -100, path.encode(), 0, 0))
each_of(lambda: os.utime(os.open(MINE, os.O_RDONLY), (7, 7)))
""",
    "extended attributes": """
for path in (FILE, MINE):
    each_of(lambda: os.getxattr(path, "user.kept"), lambda: os.listxattr(path),
            lambda: os.removexattr(path, "user.kept"), lambda: os.setxattr(path, "user.more", b"1"),
            lambda: call(466, -100, path.encode(), 0, b"user.kept"))
each_of(lambda: os.removexattr(os.open(MINE, os.O_RDONLY), "user.kept"))
""",
    "flags of files": """
file = os.open(MINE, os.O_RDONLY)
word = (ctypes.c_ulong * 8)(0xC0)
for request in (0x40086602, 0x40046602, 0x401C5820, 0x40087602, 0x40806685):
    for up in (0, UP): print(call("ioctl", file, request | up, ctypes.addressof(word)))
print(call(469, -100, MINE.encode(), ctypes.addressof(word), 24, 0))
""",
    "emptying by name": """
each_of(lambda: os.truncate(FILE, 0), lambda: os.truncate(MINE, 0), lambda: call("truncate", FILE.encode(), 1))
""",
    "emptying by opening to read": """
for path in (FILE, MINE):
    for flags in (os.O_RDONLY | os.O_TRUNC, 3 | os.O_TRUNC, 3):
        for up in (0, UP): print(call("openat", -100, path.encode(), flags | up, 0))
    how = struct.pack("QQQ", os.O_TRUNC, 0, 0)
    print(call(437, -100, path.encode(), how, 24))
    each_of(lambda: open(path, opener=lambda name, flags: os.open(name, os.O_TRUNC)))
""",
    "datagrams to sockets of the host": """
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    for address in ("FOLDER/socket", "\\0ABSTRACT"):
        def send(how):
            a, b = socket.socketpair(socket.AF_UNIX, kind)
            return how(a, address)
        each_of(lambda: send(lambda a, to: a.sendto(b"x", to)),
                lambda: send(lambda a, to: a.sendmsg([b"x"], [], 0, to)))
two = (ctypes.c_int * 2)()
for kind in (2, 2 | UP, 5 | UP, 2 | 0o4000, 3):
    print(call("socketpair", 1, kind, 0, ctypes.addressof(two)))
""",
    "streams to sockets of the host": """
for address in ("FOLDER/socket", "\\0ABSTRACT"):
    a, b = socket.socketpair()
    each_of(lambda: a.sendto(b"x", address), lambda: a.sendmsg([b"x"], [], 0, address), lambda: a.connect(address))
""",
    "a lease, and news of folders": """
file = os.open(MINE, os.O_RDONLY)
each_of(lambda: call("fcntl", file, 1024 | UP, 0), lambda: call("fcntl", file, 1024, 0), libc.inotify_init)
place = os.open("FOLDER/mine", os.O_RDONLY)
for up in (0, UP): print("dnotify", call("fcntl", place, 1026 | up, 0x4))
""",
}
WATCHING = """
import time
watch = libc.inotify_init()
libc.inotify_add_watch(watch, b"FOLDER", 0x180)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    try:
        found = os.read(watch, 4096)[16:].split(b"\\0")[0].decode()
    except OSError:
        found = ""
    try: names = [found] if found else os.listdir("FOLDER")
    except OSError: names = []
    for name in names:
        if name.startswith("stretto-program") and "FOLDER/" + name != os.getcwd(): os.chmod("FOLDER/" + name, 0)
print("right")
"""
FOLDERS = (
    "import os\nwhile True: os.mkdir('d'); os.chdir('d')",
    "import itertools, os\nfor n in itertools.count(): os.mkdir(f'{n:05}')",
    "import itertools, os\nopen('a', 'w').close()\nfor n in itertools.count(): os.link('a', f'{n:05}')",
)
ORDINARY = {
    "asyncio": """
import asyncio
async def main():
    reader, writer = asyncio.StreamReader(), None
    async with asyncio.timeout(5):
        await asyncio.gather(*(asyncio.sleep(0.001) for _ in range(20)))
        await asyncio.to_thread(sum, range(1000))
    import socket
    a, b = socket.socketpair()
    (reader, writer), (other, _) = await asyncio.open_connection(sock=a), await asyncio.open_connection(sock=b)
    writer.write(b"x" * 500_000)
    assert await asyncio.gather(writer.drain(), other.readexactly(500_000))
asyncio.run(main())
""",
    "numpy": "import numpy as n\nassert (n.linalg.inv(n.eye(50)) == n.eye(50)).all()\nn.save('a.npy', n.arange(3))\n"
    "assert n.load('a.npy', mmap_mode='r')[2] == 2",
    "threads": """
import queue, threading
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, range(-9, 0))) == list(range(9, 0, -1))
done = threading.Event(); threading.Thread(target=done.set).start(); assert done.wait(5)
""",
    "shutil": """
import os, shutil
open('a', 'w').write('a'); os.chmod('a', 0o600); os.utime('a', (5, 5))
for copy in (shutil.copy, shutil.copy2, shutil.copyfile): assert open(copy('a', 'b')).read() == 'a'
os.mkdir('d'); shutil.copytree('d', 'e'); shutil.copystat('a', 'b'); shutil.move('a', 'e/a'); shutil.rmtree('e')
with open('b', 'r+') as file: file.truncate(0)
assert os.path.getsize('b') == 0
""",
    "sqlite3": """
import sqlite3
for place in (':memory:', 'data.db'):
    base = sqlite3.connect(place); base.execute('create table t (n)')
    base.executemany('insert into t values (?)', [(n,) for n in range(99)]); base.commit()
    assert base.execute('select sum(n) from t').fetchone() == (4851,)
    base.execute('vacuum'); base.close()
""",
    "processes": """
import multiprocessing, os
fork = multiprocessing.get_context('fork'); near, far = fork.Pipe()
one = fork.Process(target=lambda: far.send([os.getpid()])); one.start(); assert near.recv() == [one.pid]; one.join()
assert one.exitcode == 0
""",
    "archives": """
import os, tarfile, zipfile
open('a', 'w').write('a' * 1000)
with zipfile.ZipFile('a.zip', 'w') as z: z.write('a')
with tarfile.open('a.tgz', 'w:gz') as t: t.add('a')
os.mkdir('out'); zipfile.ZipFile('a.zip').extractall('out'); tarfile.open('a.tgz').extractall('out', filter='data')
assert open('out/a').read() == 'a' * 1000
""",
    "temporary files": """
import os, pathlib, tempfile
with tempfile.TemporaryDirectory() as place: (pathlib.Path(place) / 'a').write_text('a')
with tempfile.NamedTemporaryFile('w+') as file: file.write('a')
assert tempfile.gettempdir() == os.environ['TMPDIR'] == os.getcwd()
assert set(os.environ) == {'TMPDIR'}, os.environ
""",
    "files": """
import fcntl, mmap, os
with open('a', 'w+b') as file:
    fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX); file.write(b'a' * 4096); file.flush()
    with mmap.mmap(file.fileno(), 4096) as view: assert view[:1] == b'a'
    assert not file.isatty() and not os.isatty(0); os.set_inheritable(file.fileno(), True)
r, w = os.pipe(); os.set_blocking(r, False); os.write(w, b'x'); assert os.read(r, 9) == b'x'
""",
}
SETTINGS = [
    pytest.param((USER, 2), id="user-landlock-2"),
    pytest.param((USER, 0), id="user-no-landlock", marks=pytest.mark.slow),
    pytest.param((USER, NEWEST), id="user", marks=pytest.mark.slow),
    pytest.param((None, 2), id="root-landlock-2", marks=pytest.mark.slow),
    pytest.param((None, 0), id="root-no-landlock", marks=pytest.mark.slow),
]


def attacked(uid: int | None, landlock: int, programs: dict[str, Any], mode: str = "limits") -> dict[str, Any]:
    """What the programs said and what harm they did, in a process of that user."""
    if uid is None and os.getuid() != 0:
        pytest.skip("only root has programs of another user")
    request = {"uid": uid, "mode": mode, "landlock": landlock, "programs": programs}
    command = [sys.executable, str(Path(__file__).with_name("attacked.py"))]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=110, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=SETTINGS)
def ran(request: pytest.FixtureRequest) -> dict[str, Any]:
    uid, landlock = request.param
    programs: dict[str, Any] = {name: HEAD + text for name, text in ATTACKS.items()}
    programs["others"] = [HEAD + WATCHING, *["import time; time.sleep(0.05); print('right')"] * 15]
    programs["folders"] = list(FOLDERS)
    programs |= {name: f"{text}\nprint('fine')" for name, text in ORDINARY.items()}
    return attacked(uid, landlock, programs)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_without_namespaces_does_no_harm(ran, name):
    assert ran[name]["harm"] == [], ran[name]
    assert ran[name]["said"][0][0] == "ok", ran[name]


def test_leases_and_news_of_folders_are_refused(ran):
    _, said = ran["a lease, and news of folders"]["said"][0]
    assert said.replace("dnotify ", "").split() == ["-1"] * 5


def test_a_program_that_watches_the_folder_of_others_changes_no_verdict(ran):
    assert ran["others"] == {"said": [["ok", "right\n"]] * 16, "harm": []}


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_program_works(ran, name):
    assert ran[name]["said"] == [["ok", "fine\n"]]


def test_a_program_that_makes_folders_without_end_is_out_of_time(ran):
    assert [verdict for verdict, _ in ran["folders"]["said"]] == ["timeout"] * len(FOLDERS), ran["folders"]


def test_programs_leave_nothing_in_the_folder_of_temporary_files_of_the_run(ran):
    assert ran["left"] == []


@pytest.mark.slow
@pytest.mark.parametrize("uid", [None, USER])
def test_ordinary_programs_work_in_namespaces(uid):
    programs = {name: f"{text}\nprint('fine')" for name, text in ORDINARY.items()}
    found = attacked(uid, NEWEST, programs, mode="namespaces")
    assert {name: found[name]["said"] for name in ORDINARY} == {name: [["ok", "fine\n"]] for name in ORDINARY}


class OldLibrary:
    """A libseccomp that knows no name of a system call that came after the first release of the kernel's series 5."""

    def __init__(self, found: ctypes.CDLL) -> None:
        self.found, self.seccomp_arch_native = found, found.seccomp_arch_native

    def seccomp_syscall_resolve_name(self, name: bytes) -> int:
        number = self.found.seccomp_syscall_resolve_name(name)
        return -1 if number >= 424 else number


def test_a_library_without_names_denies_the_same_calls_by_number():
    found = filters.library()
    if found is None:
        pytest.skip("libseccomp is not installed")
    for settings in ({}, {"only": 7, "landlock": 2}):
        assert filters.compiled(OldLibrary(found), **settings) == filters.compiled(found, **settings)


@pytest.mark.parametrize(
    ("landlock", "seccomp", "said", "unsaid"),
    [
        (2, True, ["version 2", "emptying files", "signals", "only the filter"], ["kill", "mode and times"]),
        (3, True, ["version 3", "signals"], ["emptying files"]),
        (6, True, [], ["Landlock", "kill"]),
        (2, False, ["version 2", "nothing stops emptying files", "kill every process", "mode and times"], []),
        (6, False, ["mode and times"], ["kill every process", "Landlock"]),
        (0, True, ["read, change and remove every file of yours"], ["Landlock is version"]),
    ],
)
def test_what_an_old_landlock_lacks_is_said(landlock, seccomp, said, unsaid):
    found = Protection(namespaces=False, unprivileged=False, seccomp=seccomp, landlock=landlock)
    text = " ".join(found.missing)
    assert [words for words in said if words not in text] == [], text
    assert [words for words in unsaid if words in text] == [], text
    assert replace(found, bubblewrap=True).missing == (() if seccomp else found.missing[-1:])
