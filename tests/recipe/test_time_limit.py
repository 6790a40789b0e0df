"""How long a run may take, in words."""

from datetime import UTC, datetime

import pytest

from stretto.recipe.time_limit import SLURM, seconds_until, time_left

NOON = datetime(2026, 3, 28, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3h30m", 12_600),
        ("90m", 5_400),
        ("1d", 86_400),
        ("1d2h3m4s", 93_784),
        ("45s", 45),
        ("12:30Z", 1_800),
        ("11:30Z", 84_600),
        ("12:00Z", 86_400),
        ("14:30+02:00", 1_800),
        ("14:30 +0200", 1_800),
        ("06:30-06:00", 1_800),
        ("13:30 Europe/Berlin", 1_800),
        ("12:30 Europe/Berlin", 81_000),
        ("2026-03-29T12:00Z", 86_400),
        ("2026-03-28 11:00Z", -3_600),
    ],
)
def test_a_duration_or_a_time_with_its_zone_is_read(text, seconds):
    """In Berlin the clocks went forward in that night."""
    assert seconds_until(text, NOON) == seconds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither"),
        ("soon", "neither"),
        ("3.5h", "neither"),
        ("30m3h", "neither"),
        ("h", "neither"),
        ("06:30", "no time zone"),
        ("25:00Z", "is no time"),
        ("06:30 Mars/Olympus", "no time zone 'Mars/Olympus'"),
        ("06:30 ../../etc/passwd", "no time zone"),
        ("2026-02-30T06:30Z", "is no time"),
        ("9999999999d", "farther away than any calendar goes"),
        ("0001-01-01T00:00+02:00", "farther away"),
    ],
)
def test_what_says_nothing_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        seconds_until(text, NOON)


def test_the_earlier_of_recipe_and_cluster_counts():
    end = {SLURM: str(int(NOON.timestamp()) + 600)}
    assert time_left(None, {}, NOON) is None
    assert time_left("1h", {}, NOON) == (3_600, "run.until")
    assert time_left("1h", end, NOON) == (600, "$SLURM_JOB_END_TIME")
    assert time_left("5m", end, NOON) == (300, "run.until")
    assert time_left(None, {SLURM: "Unknown"}, NOON) is None
    assert time_left(None, {SLURM: str(int(NOON.timestamp()) - 1)}, NOON) is None
