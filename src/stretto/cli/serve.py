"""`stretto serve RUN|RECIPE`: serve a model over HTTP until Ctrl-C."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from stretto.api import calls as api
from stretto.cli import render
from stretto.environments.base import Address

KEY = "STRETTO_API_KEY"


def serve(
    target: Annotated[Path, typer.Argument(metavar="RUN|RECIPE", help="Run folder or recipe (YAML).")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Recipe keys to override.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 picks a free port.")] = 8000,
) -> None:
    """Serve a run's newest checkpoint, or a recipe's initial model, over the OpenAI API.

    The API key is $STRETTO_API_KEY, or a random one.
    """

    def ready(address: Address) -> None:
        shown = f"  OPENAI_API_KEY={address.key}" if not os.environ.get(KEY) else f"  (the key is ${KEY})"
        render.screen().print(f"serving  OPENAI_BASE_URL={address.base_url}{shown}\nCtrl-C ends it")

    api.serve(target, port=port, key=os.environ.get(KEY) or None, changes=changes or (), ready=ready, note=render.note)
