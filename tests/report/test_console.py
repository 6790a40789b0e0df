"""Progress says the same in a terminal and in a pipe, and leaves the terminal as it was."""

import io

import pytest
from rich.console import Console

from stretto.report.console import LiveProgress, PlainProgress, console_for
from stretto.report.curve import BLOCKS
from stretto.report.live_view import lines

METRICS = {"reward/mean": 0.5, "tokens/generated": 900, "seconds/step": 2.0, "loss": 0.1}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def told(progress):
    with progress:
        progress.note("warm-up 120/200")
        progress.start(4, 0)
        progress.evaluated(0, 0.25, 0.2, 0.31)
        for step in range(1, 5):
            progress.step(step, {**METRICS, "reward/mean": step / 4})
        progress.evaluated(4, 0.9, 0.8, 0.95)
        progress.finish(["held-out accuracy 0.25 -> 0.90", "model in runs/demo-001"])


def plain(encoding=None):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding) if encoding else io.StringIO()
    told(PlainProgress(stream))
    stream.seek(0)
    return stream.read()


def live():
    stream = Terminal()
    told(LiveProgress(Console(file=stream, force_terminal=True, width=100, color_system=None)))
    return stream.getvalue()


def test_plain_progress_is_one_line_per_step_then_curves_and_summary():
    lines = plain().splitlines()
    assert lines[:4] == [
        "warm-up 120/200",
        "step 0/4: starting",
        "step 0: held-out accuracy 0.25 [0.20, 0.31]",
        "step 1/4  reward 0.250  450 tokens/s  2.0 s  ETA 0:00:06",
    ]
    assert "reward, step 1 to 4" in lines
    assert "held-out accuracy, step 0 to 4" in lines
    assert lines[-2:] == ["held-out accuracy 0.25 -> 0.90", "model in runs/demo-001"]


def test_a_stream_that_cannot_encode_blocks_gets_plain_characters():
    assert "█" in plain()
    drawn = plain("ascii")
    assert "?" not in drawn
    assert "#" in drawn


def test_plain_text_that_the_stream_cannot_encode_does_not_stop_the_run():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainProgress(stream).note("Größe ✓")
    stream.seek(0)
    assert stream.read() == "Gr??e ?\n"


def test_live_progress_shows_the_same_numbers_and_ends_with_curves_and_summary():
    shown = live()
    for text in ("4/4", "reward 1.000  450 tokens/s", "held-out accuracy 0.90 [0.80, 0.95]"):
        assert text in shown
    assert shown.index("4/4") < shown.index("reward, step 1 to 4") < shown.index("model in runs/demo-001")


def test_notes_stay_above_the_bar_whatever_follows():
    stream = Terminal()
    with LiveProgress(Console(file=stream, force_terminal=True, width=80)) as progress:
        progress.note("model.dtype: float32")
        progress.note("warm-up 120/200")
        progress.start(4, 0)
        progress.step(1, METRICS)
    lines = stream.getvalue().splitlines()  # the bar is drawn in a line of its own, with what it shows beside it
    assert any(line.endswith("model.dtype: float32") for line in lines)
    assert any(line.endswith("warm-up 120/200") for line in lines)


def test_live_progress_gives_the_cursor_back_when_the_run_fails():
    stream = Terminal()
    with (
        pytest.raises(RuntimeError),
        LiveProgress(Console(file=stream, force_terminal=True, width=80)) as progress,
    ):
        progress.start(4, 2)
        raise RuntimeError("the run failed")
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("live", [False, True])
def test_what_a_model_said_cannot_steer_the_terminal(live):
    stream = Terminal()
    with LiveProgress(Console(file=stream, force_terminal=True)) if live else PlainProgress(stream) as progress:
        progress.note("[red]\x1b]0;owned\x07")
        progress.finish(["[bold]\x1b[2J done"])
    assert "\x1b]0;" not in stream.getvalue()
    assert "\x1b[2J" not in stream.getvalue()
    assert "[red]" in stream.getvalue()
    assert "[bold][2J done" in stream.getvalue()


def test_metrics_that_are_missing_are_left_out():
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.start(10, 3)
    progress.step(4, {})
    progress.finish([])
    assert stream.getvalue() == "step 3/10: continuing\nstep  4/10\n"


def test_a_pipe_that_nobody_reads_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    told(PlainProgress(Closed()))


def test_the_display_follows_from_the_stream(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(console_for(Terminal()), LiveProgress)
    assert isinstance(console_for(io.StringIO()), PlainProgress)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_for(Terminal()), PlainProgress)


ROW = {
    "messages": [{"role": "user", "content": "what is\n3+4?"}], "answer": "\x1b[2J7", "reward": {
        "value": 1.0, "parts": {"correct": 1.0, "format": 0.0}
    }, "step": 1,
}  # fmt: skip


def test_a_live_view_shows_the_course_the_parts_where_time_goes_and_an_answer():
    metrics = METRICS | {"reward/part/correct": 0.4, "reward/part/format": 0.1, "length/mean": 12, "idle": 0.1}
    metrics |= {"seconds/generate": 1.2, "seconds/train": 0.6}
    shown = lines([0.1, 0.5], [0.2], metrics, ROW, 100, BLOCKS)
    text = "\n".join(shown)
    assert [line.split()[0] for line in shown] == [
        "reward", "accuracy", "parts", "generate", "train", "idle", "asked", "answered", "reward"
    ]  # fmt: skip
    assert "correct 0.400  format 0.100" in text and "idle" in text and "10%" in text
    generate, train = (line.count("█") for line in shown if line.startswith(("generate", "train")))
    assert (generate, train) == (18, 9)
    assert "what is 3+4?" in text and "\x1b" not in text
    assert lines([], [], {}, None, 100, BLOCKS) == []
    assert all(len(line) <= 40 for line in lines([0.1], [], metrics, ROW, 40, BLOCKS))


def test_the_live_view_is_gone_when_the_run_is_done_and_in_a_low_terminal():
    for height, wanted in ((40, True), (6, False)):
        stream = Terminal()
        console = Console(file=stream, force_terminal=True, width=100, height=height, color_system=None)
        with LiveProgress(console) as progress:
            progress.start(2, 0)
            progress.step(1, METRICS)
            progress.sampled(ROW)
            drawn = [str(each) for each in progress._view().renderables[1:]]
            assert any("3+4?" in line for line in drawn) is wanted
            progress.finish([])
            assert len(progress._view().renderables) == 1
