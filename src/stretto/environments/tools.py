"""The built-in tools as an environment: the model may calculate, search a corpus and run Python before it answers.

Each tool is a function with type hints and a docstring, as a user would write one in a class (`tool_class`). A program
runs in the sandbox, a process of its own, and nothing of it is left when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stretto.environments.base import Model
from stretto.environments.calculator import calculator
from stretto.environments.corpus import Corpus
from stretto.environments.episode import converse
from stretto.environments.toolset import ToolFailure, Toolset
from stretto.recipe.schema import ToolsSection
from stretto.sandbox.isolated import run_program
from stretto.types import Outcome, Prompt

MOST = 4000
"""Characters of what a program printed that the model is shown."""


class ToolsEnvironment:
    """One question, which the model may answer with the help of tools."""

    def __init__(self, section: ToolsSection, *, root: Path) -> None:
        """Reads the corpus, if there is one. `root` is the recipe's folder."""
        self.turns = section.turns
        self.tools = Toolset([_tool(name, section, root) for name in section.tools])

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """One trajectory. A turn with a call that could not be made is worth -1, others 0."""
        talk = await converse(model, prompt.messages, self.tools, turns=self.turns)
        worth = tuple(-1.0 if errors else 0.0 for errors in talk.turn_errors)
        return Outcome(answer=talk.reply.text, signals=talk.signals, turn_rewards=worth)


async def python(code: str) -> str:
    """Runs a Python program and says what it printed. Nothing is kept from one program to the next.

    Args:
        code: The program; it prints what is to be known.
    """
    result = await run_program(code)
    if result.verdict == "infra":
        raise ToolFailure(f"the sandbox broke: {result.detail}")
    failed = "" if result.verdict == "ok" else f"\n{result.verdict}: {result.stderr.strip()[-MOST:] or result.detail}"
    return f"{result.stdout[:MOST]}{failed}".strip() or "(it printed nothing)"


def _tool(name: str, section: ToolsSection, root: Path) -> Callable[..., Any]:
    if name == "calculator":
        return calculator
    if name == "python":
        return python
    corpus = Corpus.read(section.corpus, root=root)
    most = section.results

    async def search(query: str) -> str:
        """Finds the passages of a text collection that fit a query best.

        Args:
            query: Some words.
        """
        return corpus.shown(query, most)

    return search
