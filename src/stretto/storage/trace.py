"""timeline.json: a Chrome trace that grows by a step at a time and is a whole JSON document all the while.

Rewriting the file at every step would cost the square of the run's length, so the closing bracket is overwritten in
place: first blanks are added behind it, which JSON allows and which reserves the room, so that a full disk is noticed
while the document is still whole; then one write replaces bracket and blanks by the new events and the bracket. Only a
kill within that one write can tear the file, and `reopen` drops what it tore: every event is a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from stretto.storage.atomic import read_small, replace, storing, to_json, write_all
from stretto.storage.json_lines import parsed, whole

HEAD = '{"displayTimeUnit": "ms", "traceEvents": [\n'
TAIL = "\n]}\n"


class TraceFile:
    """The file, ready for more events."""

    def __init__(self, path: Path, events: Iterable[Mapping[str, Any]] = ()) -> None:
        lines = [to_json(event) for event in events]
        replace(path, [HEAD, ",\n".join(lines), TAIL])
        self._path = path
        self._alone = Lock()  # a checkpoint that is written beside the steps adds to it, too
        self._empty = not lines
        self._end = path.stat().st_size

    @classmethod
    def reopen(cls, path: Path, *, step: int, again: bool = False) -> TraceFile:
        """Goes on with a file, without the events of later steps and whatever is torn or damaged.

        With `again` the evaluation of `step` itself is dropped too, because it will be made again.
        """
        with storing(path):
            lines = read_small(path).split(b"\n") if path.exists() else []
        events = [event for event in map(_event, lines) if event is not None]
        kept = [event for event in events if event["args"]["step"] <= step]
        return cls(path, [e for e in kept if not (again and e["name"] == "evaluate" and e["args"]["step"] == step)])

    def append(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds events behind those that are there."""
        lines = [to_json(event) for event in events]
        if not lines:
            return
        with self._alone:
            text = ("" if self._empty else ",\n") + ",\n".join(lines) + TAIL
            data = text.encode("ascii")
            start = self._end - len(TAIL)
            with storing(self._path), self._path.open("r+b", buffering=0) as file:
                write_all(file.fileno(), b" " * (len(data) - len(TAIL)), self._end)
                write_all(file.fileno(), data, start)
            self._end, self._empty = start + len(data), False


def _event(line: bytes) -> dict[str, Any] | None:
    """The event on a line, or none where the line is the document's head, its tail, torn or damaged."""
    event = parsed(line.rstrip().rstrip(b","))
    if event is None or not {"name", "ph", "args"} <= event.keys() or not isinstance(event["args"], dict):
        return None
    return event if whole(event["args"].get("step")) is not None else None
