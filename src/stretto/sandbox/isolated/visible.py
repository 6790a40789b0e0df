"""The paths of this machine that a program may read: Python, packages that it may import, the system's libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec

LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo")


def visible_paths(packages: Sequence[str]) -> list[str]:
    """All of them, as they are called; some may not be there, and some may be links."""
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    python += [os.path.join(sys.base_prefix, name) for name in ("lib", "lib64")]
    return [*LIBRARIES, *python, *(path for name in packages for path in package_paths(name))]


def package_paths(name: str) -> list[str]:
    """The folders of a package: its own, and that of the libraries that its wheel carries."""
    with suppress(ImportError, ValueError):
        spec = find_spec(name)
        if spec is not None:
            found = [os.path.abspath(place) for place in spec.submodule_search_locations or [spec.origin or ""]]
            return [*found, *(f"{place}.libs" for place in found)]
    return []
