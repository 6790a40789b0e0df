"""Entry point of the `stretto` program: the commands, and the mapping from exceptions to exit codes and messages.

Each command is a function in a file of this folder. It raises `StrettoError` and prints its result. Heavy imports
happen after a command starts, so `--help` takes under a second. No traceback reaches the screen.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Annotated

import typer

from stretto import __version__
from stretto.cli import render
from stretto.errors import StrettoError
from stretto.report.stream import OutputLost, delivered, standard_streams
from stretto.threads import interrupted, interrupts_noted, leave

PANELS = {
    "Train": ("train", "sft", "reward-model", "resume", "value", "sweep"),
    "Inspect": ("check", "doctor", "task", "eval", "report", "samples", "compare", "chat", "replay"),
    "Plan": ("plan", "deploy"),
    "Export": ("merge", "export", "push", "serve"),
    "Develop": ("bench",),
}
"""Panel of `stretto --help` -> its commands, in order."""

COMMANDS = {
    "train": "train.train",
    "sft": "train.sft",
    "reward-model": "train.reward_model",
    "resume": "train.resume",
    "eval": "evaluate.evaluate",
    "serve": "serve.serve",
    "chat": "chat.chat",
    "merge": "merge.merge",
    "export": "merge.export",
    "push": "push.push",
    "deploy": "deploy.deploy",
    "check": "check.check",
    "plan": "plan.plan",
    "doctor": "doctor.doctor",
    "value": "value.value",
    "report": "report.report",
    "bench": "bench.bench",
    "task": "task.task",
    "replay": "replay.replay",
    "samples": "samples.samples",
    "compare": "compare.compare",
    "sweep": "sweep.sweep",
}
"""Command -> its file in this folder and its function there."""

JSON_KEYS = {
    "check": ("objective", "batch", "recipe"),
    "value": (
        "table",
        "prompts",
        "samples",
        "generated",
        "tokens",
        "seconds",
        "reward_mean",
        "value_mean",
        "alike",
        "unjudged",
    ),
    "bench": ("bench", "machine", "rows"),
    "doctor": ("checks",),
    "task": ("prompts", "answers", "parts"),
    "task play": ("prompt", "turns", "answer", "signals", "turn_rewards", "reward", "failure"),
    "report": ("page", "runs"),
    "plan": ("plans", "rejected", "assumed"),
    "replay": ("run", "begun", "weights", "steps"),
    "merge": ("folder", "step", "dtype", "lost", "proof"),
    "export": ("file", "type", "bytes", "step", "proof"),
    "eval": ("accuracy", "interval", "pass_at_k", "reward", "parts", "length_mean", "n"),
}
"""Command, or command and subcommand -> keys of its JSON document next to `ok` and `problems`; `null` on failure."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"stretto {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """RL post-training of language models from one recipe."""


def app_of(names: Iterable[str] = tuple(COMMANDS)) -> typer.Typer:
    """Build the Typer app with these commands. Files of other commands are not imported, which keeps the start fast."""
    app = typer.Typer(
        name="stretto",
        help="RL post-training of language models from one recipe.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    panels = {name: panel for panel, commands in PANELS.items() for name in commands}
    for name in sorted(names, key=list(panels).index):
        file, function = COMMANDS[name].split(".")
        command = getattr(import_module(f"stretto.cli.{file}"), function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panels[name])
        else:
            app.command(name=name, rich_help_panel=panels[name])(command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Codes: 0 done, 1 failed, 2 wrong recipe or arguments, 3 a deadline passed. A run that saved its checkpoint after
    Ctrl-C, SIGTERM (or the end of its job) or SIGHUP returns 130, 143 or 129. Without `arguments` the process exits,
    even if a thread still blocks.
    """
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    if arguments is None:
        leave(code)
    return code


def _run(given: Sequence[str]) -> int:
    """Run a command with guarded standard streams and return its exit code."""
    as_json = "--json" in given
    keys = JSON_KEYS.get(" ".join(given[:2])) or JSON_KEYS.get(" ".join(given[:1]), ())
    show = render.Failures(as_json=as_json, keys=keys)
    warnings.showwarning = render.show_warning
    for_output = given[:1] not in (["train"], ["resume"], ["sweep"], ["sft"], ["reward-model"])  # made in a folder
    with standard_streams(output_matters=for_output):
        try:
            with interrupts_noted(), render.documents_alone() if as_json else nullcontext():
                code = _done(given, show)
        except OutputLost:
            code = 1
        why = delivered(sys.stdout)
        if why is not None and for_output:
            code = max(code, show.lost(why))
        delivered(sys.stderr)
    return code


def _done(given: Sequence[str], show: render.Failures) -> int:
    """Run a command, print its failure, and return its exit code."""
    try:
        app_of([name for name in given[:1] if name in COMMANDS] or COMMANDS)(args=list(given), prog_name="stretto")
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return show.usage() if code == 2 else code
    except StrettoError as error:
        code = show.expected(error)
        return 130 if interrupted() else code
    except KeyboardInterrupt:
        return 130
    except OutputLost:
        raise
    except Exception as error:
        if interrupted():  # the import of a library swallowed it, and the half module that is left failed
            return 130
        return show.disk(error) if isinstance(error, OSError) and error.errno in render.DISK else show.bug(error)
    return 0
