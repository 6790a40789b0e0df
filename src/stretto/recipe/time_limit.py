"""How long a run may take: what `run.until` says in words, and what the scheduler of a cluster says in its environment.

    3h30m    90m    1d    45s                          from the start of this session, a resume being another one
    06:30Z    18:00+02:00    18:00 Europe/Berlin       the next time that it is so late there
    2026-12-24T18:00+01:00                             that very moment

Slurm puts the end of a job into $SLURM_JOB_END_TIME. The earlier of the two counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

DURATION = re.compile(r"(?=\d)(?:(?P<days>\d+)d)?(?:(?P<hours>\d+)h)?(?:(?P<minutes>\d+)m)?(?:(?P<seconds>\d+)s)?")
MOMENT = re.compile(
    r"(?:(?P<date>\d{4}-\d\d-\d\d)[T ])?(?P<hour>\d\d?):(?P<minute>\d\d)(?::(?P<second>\d\d))?\s*(?P<zone>\S+)?"
)
OFFSET = re.compile(r"([+-])(\d\d):?(\d\d)?")

SLURM = "SLURM_JOB_END_TIME"
"""Seconds since 1970 at which Slurm ends the job."""

UNTIL = "run.until"
"""Who says so, where it is the recipe."""

EXAMPLES = "use a duration such as 3h30m, or a time with its zone such as 06:30Z or 18:00+02:00"


def seconds_until(text: str, now: datetime) -> float:
    """Seconds from `now` (with a zone) to what the text says; ValueError with the reason if it says nothing."""
    try:
        return _seconds_until(text, now)
    except OverflowError as error:
        raise ValueError(f"{text!r} is farther away than any calendar goes") from error


def _seconds_until(text: str, now: datetime) -> float:
    if (span := DURATION.fullmatch(text)) is not None:
        return timedelta(**{unit: int(number) for unit, number in span.groupdict("0").items()}).total_seconds()
    if (told := MOMENT.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is neither a duration nor a time")
    if told["zone"] is None:
        raise ValueError(f"{text!r} has no time zone, and hosts differ in theirs")
    zone = _zone(told["zone"])
    try:
        clock = time(int(told["hour"]), int(told["minute"]), int(told["second"] or 0))
        day = datetime.fromisoformat(told["date"]).date() if told["date"] else now.astimezone(zone).date()
    except ValueError as error:
        raise ValueError(f"{text!r} is no time: {error}") from error
    moment = datetime.combine(day, clock, tzinfo=zone)
    if not told["date"] and moment <= now:
        moment = datetime.combine(day + timedelta(days=1), clock, tzinfo=zone)
    return (moment.astimezone(UTC) - now.astimezone(UTC)).total_seconds()


def time_left(until: str | None, environ: Mapping[str, str], now: datetime) -> tuple[float, str] | None:
    """Seconds until the run must be over, and who says so; none where nobody does."""
    told = [(seconds_until(until, now), UNTIL)] if until is not None else []
    if (slurm := environ.get(SLURM, "")).isdecimal() and (left := int(slurm) - now.timestamp()) > 0:
        told.append((left, f"${SLURM}"))
    return min(told, default=None)


def counts_from_the_start(until: str | None) -> bool:
    """True for a time that each session has of its own, false for a moment that is the same for all, or none."""
    return until is not None and DURATION.fullmatch(until) is not None


def _zone(name: str) -> tzinfo:
    """The zone of a name or an offset."""
    if name in ("Z", "z"):
        return UTC
    if (offset := OFFSET.fullmatch(name)) is not None:
        sign, hours, minutes = offset.groups("0")
        found = datetime.fromisoformat(f"2000-01-01T00:00{sign}{hours}:{minutes.zfill(2)}").tzinfo
        assert found is not None
        return found
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"there is no time zone {name!r}") from error
