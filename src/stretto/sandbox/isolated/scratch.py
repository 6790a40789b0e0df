"""Removing a scratch folder, whatever a program has made of it: folders within folders by the thousand, without rights.

Nothing here recurses or spells a path out, and no link is followed: folders are moved to the top before they are
emptied. Whoever calls it knows that no process is left that could put something there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import count


def remove(folder: str) -> None:
    """Removes a folder with everything in it; what cannot be removed stays."""
    with suppress(OSError):
        os.chmod(folder, 0o700)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder)


def _empty(top: int) -> None:
    """Removes what is in an open folder: files at once, folders when what they hold has been moved up."""
    free = (f".removing-{os.getpid()}-{number}" for number in count())
    while folders := _folders(top):
        for name in folders:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for below in _folders(inner):
                    os.rename(below, next(free), src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


def _folders(place: int) -> list[str]:
    """The names of folders in an open one, in which they may now be read and moved; its files are removed."""
    found: list[str] = []
    with os.scandir(place) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=place)
                found.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=place)
    return found
