"""Whatever a terminal does, a run goes on; and a command whose output is lost says so."""

import errno
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from running import metrics, recipe_in, written
from stretto.cli.main import main
from stretto.report.console import LiveProgress, PlainProgress, SilentProgress, console_for
from stretto.report.stream import OutputLost, RequiredStream, delivered, tolerant
from stretto.runtime import session

METRICS = {"reward/mean": 0.5, "tokens/generated": 900, "seconds/step": 2.0}


class Dying(io.StringIO):
    """A terminal that takes so many writes."""

    left = 0

    def __init__(self, error, *, left=0):
        super().__init__()
        self.error, self.left = error, left

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)

    def flush(self):
        if self.left < 0:
            raise self.error

    def isatty(self):
        return True


def told(progress):
    with progress:
        progress.start(2, 0)
        progress.note("warm-up 120/200")
        progress.evaluated(0, 0.25, 0.2, 0.31)
        progress.step(1, METRICS)
        progress.finish(["model in runs/demo-001"])


ERRORS = [OSError(number, os.strerror(number)) for number in (errno.EIO, errno.EPIPE, errno.ENOSPC, errno.EBADF)]
ERRORS += [ValueError("I/O operation on closed file."), BrokenPipeError(), UnicodeEncodeError("ascii", "✓", 0, 1, "no")]


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_that_fails_ends_no_run(live, error, left):
    stream = Dying(error, left=left)
    told(LiveProgress(Console(file=stream, force_terminal=True)) if live else PlainProgress(stream))


@pytest.mark.parametrize("live", [True, False])
def test_a_stream_that_was_closed_ends_no_run(live):
    stream = io.StringIO()
    progress = LiveProgress(Console(file=stream, force_terminal=True)) if live else PlainProgress(stream)
    stream.close()
    told(progress)
    assert isinstance(console_for(stream), PlainProgress)
    assert isinstance(console_for(None), SilentProgress)


def test_a_terminal_that_goes_away_ends_no_run(tmp_path, monkeypatch):
    """A real one, whose other side is closed after the first step."""
    master, slave = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        display = console_for(stream)
        assert isinstance(display, LiveProgress)
        step, gone = display.step, []

        def leaves(*values):
            if not gone:
                gone.append(os.close(master))
                with pytest.raises(OSError):
                    os.write(slave, b"x")
            step(*values)

        display.step = leaves
        recipe = recipe_in(tmp_path, run__folder=str(tmp_path / "run"))
        session.start(recipe, name="tiny", root=tmp_path, progress=display)
        delivered(tolerant(stream))
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_live_display_shows_what_a_terminal_cannot_encode_as_question_marks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with LiveProgress(Console(file=stream, force_terminal=True)) as progress:
        progress.note("Größe ✓")
    stream.seek(0)
    assert "Gr??e ?" in stream.read()


def test_what_is_needed_is_missed_once_and_a_reader_that_has_enough_is_not():
    for error in (OSError(28, "No space left on device"), ValueError("closed")):
        needed = RequiredStream(Dying(error))
        with pytest.raises(OutputLost):
            needed.write("x")
        assert needed.why in ("No space left on device", "closed")
    with pytest.raises(BrokenPipeError):
        RequiredStream(Dying(BrokenPipeError())).write("x")


# Commands -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return str(written(tmp_path).name)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("check tiny.yaml", 1),
        ("check tiny.yaml --json", 1),
        ("check absent.yaml --json", 2),
        ("--help", 1),
        ("--version", 1),
        ("doctor --json", 1),
        ("plan tiny.yaml --cluster 2xcpu --json", 1),
    ],
)
@pytest.mark.parametrize("buffered", [True, False])
def test_a_command_whose_output_does_not_fit_says_so(tiny, monkeypatch, capsys, command, code, buffered):
    with open("/dev/full", "w", buffering=-1 if buffered else 1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(command.split()) == code
    error = capsys.readouterr().err
    assert error.splitlines() == [
        "standard output: cannot be written (No space left on device)",
        "    fix: free space there, or redirect the output",
    ]


def test_a_command_whose_errors_nobody_can_read_exits_with_its_code(tiny, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["check", "absent.yaml"]) == 2


def test_a_run_whose_output_does_not_fit_goes_on(tiny, tmp_path, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["train", tiny, "run.steps=1", "run.folder=run"]) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1]


ENDING = "import sys; from stretto.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        (">&-", 1, "standard output: cannot be written (Bad file descriptor)"),
        ("<&- >/dev/full", 1, "standard output: cannot be written (No space left on device)"),
        ("2>&- >/dev/full", 1, ""),
    ],
)
def test_streams_that_were_closed_or_full_before_the_start(tiny, shell, code, said):
    """Python's own end does not fail on top, with a code and words of its own."""
    command = f'exec "$0" -c "$1" check tiny.yaml --json {shell}'
    done = subprocess.run(["sh", "-c", command, sys.executable, ENDING], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.partition("\n")[0], done.stdout) == (code, said, "")


def test_a_page_that_the_terminal_cannot_encode_is_shown_all_the_same(tiny, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["check", tiny, "task.prompt='größe {text}='", "model.scratch.characters='größe 01='"]) == 0
    stream.seek(0)
    assert "nothing wrong was found" in stream.read()
