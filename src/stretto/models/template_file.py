"""A chat template of the user's own, put in the place of the model's, so that a saved model has it too.

It is only read here, never applied: `environments.templates` does that, in another process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.recipe.schema import TaskSection

LONGEST = 200_000
"""Characters of a template; the longest that models come with have some ten thousand."""
FIELD = "task.chat_template"


def template_path(task: TaskSection, root: Path) -> Path | None:
    """Where the file is: beside the recipe, or in the working folder. RecipeError if it is in neither."""
    if task.chat_template is None:
        return None
    given = os.path.expanduser(task.chat_template)
    for place in (root / given, Path.cwd() / given):
        if os.path.isfile(place):
            return place
    raise RecipeError.of(FIELD, f"there is no file {root / given}", "correct the path; it is relative to the recipe")


def use_template(tokenizer: Any, task: TaskSection, root: Path) -> None:
    """Gives a tokenizer the recipe's template, if it has one."""
    path = template_path(task, root)
    if path is None:
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError.of(FIELD, f"{path} cannot be read: {error}", "write a Jinja template as UTF-8 text") from None
    if len(text) > LONGEST:
        raise RecipeError.of(FIELD, f"{path} has {len(text):,} characters, which is no chat template", "name another")
    tokenizer.chat_template = text
