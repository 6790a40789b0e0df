"""Whether the chat template of a model that may call tools has a place for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.checks.rules.own_code import methods_of_tool_class
from stretto.environments.render import Renderer
from stretto.errors import Problem, RolloutError
from stretto.plugins import folders_of, is_plugin, resolve
from stretto.recipe.schema import EnvironmentSection, OwnEnvironmentSection, Recipe, ToolsSection
from stretto.types import Prompt


def template_problems(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: Any, root: Path) -> list[Problem]:
    """A template that cannot tell of tools, of calls or of what they came to, or calls that nobody can read."""
    if not _calls_tools(recipe.environment, root):
        return []
    renderer = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template)
    try:
        for prompt in prompts[:1]:
            renderer.try_tools(prompt.messages)
    except RolloutError as error:
        reason = f"cannot be used with tools (environment.kind): {error}"
        fix = "use a task.chat_template that has a place for tools, or another model"
        return [Problem(field="model.name", reason=reason, fix=fix)]
    return []


def _calls_tools(section: EnvironmentSection, root: Path) -> bool:
    """Of a class that inherits its tools only importing it tells, which was done before; not of one that has processes
    of its own."""
    if isinstance(section, ToolsSection) or methods_of_tool_class(section.kind, root):
        return True
    if not isinstance(section, OwnEnvironmentSection) or section.processes or not is_plugin(section.kind):
        return False
    return isinstance(resolve("environment", section.kind, folders_of(root), field="environment.kind"), type)
