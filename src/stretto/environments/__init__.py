"""What happens between the prompt and the verdict: plain Python that talks to the model.

`base` is the seam (`Model`, `Reply`, `Environment`), the other modules are environments, and `resolve` finds the one
of a recipe's section: one of these, or module:name of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto import plugins
from stretto.environments import single_turn
from stretto.environments.base import Environment
from stretto.environments.game import GameEnvironment
from stretto.environments.memory import MemoryEnvironment
from stretto.environments.program import ProgramEnvironment
from stretto.environments.project import ProjectEnvironment
from stretto.environments.tool_class import ToolClassEnvironment
from stretto.environments.tools import ToolsEnvironment
from stretto.errors import RecipeError
from stretto.recipe.schema import (
    EnvironmentSection,
    GameSection,
    MemorySection,
    OwnEnvironmentSection,
    ProgramSection,
    ProjectSection,
    SingleTurnSection,
    ToolsSection,
    VerifiersSection,
)

FIELD = "environment.kind"


def resolve(section: EnvironmentSection, folders: Sequence[str] = ()) -> Environment:
    """The environment of a section; the first of the folders is the recipe's. RecipeError if there is none, or none
    yet."""
    root = Path(folders[0]) if folders else Path.cwd()
    match section:
        case SingleTurnSection():
            return single_turn.run
        case ToolsSection():
            return ToolsEnvironment(section, root=root)
        case GameSection():
            return GameEnvironment(section)
        case MemorySection():
            return MemoryEnvironment(section)
        case ProjectSection():
            return ProjectEnvironment(section)
        case ProgramSection():
            return ProgramEnvironment(section.command, root=root)
        case VerifiersSection():
            from stretto.environments.verifiers.environment import VerifiersEnvironment  # takes seconds

            return VerifiersEnvironment(section, folders)
        case OwnEnvironmentSection():
            if wrong := tuple(plugins.lost("environment", section.kind, FIELD)):
                raise RecipeError(*wrong)
            return own(section.kind, folders, turns=section.turns)
    raise RecipeError.of(FIELD, f"{section.kind} is not available yet", "use another one")


def own(kind: str, folders: Sequence[str], *, turns: int) -> Environment:
    """The environment that a module:name stands for."""
    return adapted(plugins.resolve("environment", kind, folders, field=FIELD), turns=turns)


def adapted(found: Environment | type, *, turns: int) -> Environment:
    """What a user wrote, as an environment: a class of tools is wrapped, all else is one already."""
    return ToolClassEnvironment(found, turns=turns) if isinstance(found, type) else found
