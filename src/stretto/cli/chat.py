"""`stretto chat RUN`: chat with a run's model in the terminal. Its replies are printed without control characters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stretto import threads
from stretto.api import exports as api
from stretto.cli import render

HELP = "/new begins again, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[str, typer.Option(metavar="N", help="Checkpoint: a step number, newest or best.")] = "newest",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy. Default: that of training.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Max new tokens per reply. Default: that of training.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Sampling seed. Default: that of the run.")] = None,
) -> None:
    """Chat with the model of a run's newest checkpoint. Nothing is saved."""
    session = api.chat(
        run, step=step, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, note=render.note
    )
    show, asks = writer(sys.stdout), sys.stdin.isatty()
    if asks:
        show(f"{session.name}: {HELP}\n")
    try:
        for text in _lines(asks):
            if text == "/new":
                session.begin()
                continue
            try:
                reply = session.say(text, show)
            except KeyboardInterrupt:
                threads.forget_interrupt()
                show("\n(stopped; neither question nor answer count)\n")
                continue
            if not reply.tokens:
                show("(the conversation fills the model's context; /new begins another)\n")
            else:
                show("\n" if reply.stop == "stop" else f"\n(cut off after {len(reply.tokens)} tokens)\n")
    finally:
        session.close()


def writer(out: TextIO) -> Callable[[str], None]:
    """Return a function that prints text chunks at once, without control characters."""

    def show(text: str) -> None:
        out.write(render.plain(text))
        out.flush()

    return show


def _lines(asks: bool) -> Iterator[str]:
    """Yield typed or piped lines, without empty ones."""
    if asks:
        with suppress(ImportError):
            import readline  # noqa: F401  # its import is what lets lines be edited
    while True:
        try:
            text = input("you: " if asks else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if text == "/quit":
            return
        if text:
            yield text
