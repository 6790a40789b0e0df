"""`stretto chat RUN`: talk with a run's model in the terminal. What it says is shown as text, whatever it is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer

from stretto.api import exports as api
from stretto.cli import render

HELP = "/new begins again, /quit or Ctrl-D ends, Ctrl-C stops an answer"


def chat(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[str, typer.Option(metavar="N", help="The checkpoint: its step, newest or best.")] = "newest",
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: as in training.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest answer; default: as in training.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Another seed gives other answers; default: the run's.")] = None,
) -> None:
    """Talk with a run's newest model: its chat template, its end of turn, word by word. Nothing is recorded."""
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
                show("\n(stopped; neither question nor answer count)\n")
                continue
            if not reply.tokens:
                show("(the conversation fills the model's context; /new begins another)\n")
            else:
                show("\n" if reply.stop == "stop" else f"\n(cut off after {len(reply.tokens)} tokens)\n")
    finally:
        session.close()


def writer(out: TextIO) -> Callable[[str], None]:
    """Shows pieces of text at once, without what would move a terminal's cursor or change its colours."""

    def show(text: str) -> None:
        out.write(render.plain(text))
        out.flush()

    return show


def _lines(asks: bool) -> Iterator[str]:
    """What is typed or piped in, without empty lines."""
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
