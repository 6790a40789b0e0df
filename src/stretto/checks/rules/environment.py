"""Environments: whether they get from the task what they need, and whether credit gets from them what it needs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from stretto import plugins
from stretto.algorithms.catalog import CATALOG, find_facts
from stretto.checks.rules.base import CheckContext
from stretto.checks.rules.own_code import is_function, methods_of_tool_class
from stretto.environments.corpus import Corpus
from stretto.environments.game import GameEnvironment
from stretto.environments.program import executable
from stretto.environments.project import ProjectEnvironment
from stretto.environments.tool_class import columns_of
from stretto.errors import Problem, RecipeError, RolloutError
from stretto.extras import missing_extra
from stretto.plugins import is_plugin
from stretto.recipe.schema import (
    EnvironmentSection,
    GameSection,
    MemorySection,
    OwnEnvironmentSection,
    ProgramSection,
    ProjectSection,
    Recipe,
    Scratch,
    SignalReward,
    SingleTurnSection,
    ToolsSection,
    VerifiersSection,
    VerifiersSource,
)
from stretto.sandbox import signatures
from stretto.types import Prompt

SIGNALS: dict[type[EnvironmentSection], tuple[str, ...]] = {
    SingleTurnSection: ("tokens", "truncated"),
    ProgramSection: (),
    ToolsSection: ("turns", "tokens", "tool_calls", "tool_errors", "truncated"),
    GameSection: ("won", "turns", "invalid"),
    MemorySection: ("chunks", "memory_cut", "memory_characters", "truncated"),
    ProjectSection: ("files", "missing", "truncated", "notes_characters"),
}
"""The signals of environments whose signals are known before they run."""

SCRIPTS = (".py", ".sh", ".js", ".mjs", ".ts", ".rb", ".pl")
"""How the files end that interpreters are given."""


def turns_can_be_credited(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Credit per turn needs an algorithm that gives it and an environment that says what turns are worth."""
    if recipe.algorithm.credit != "turn" or not scene.training:
        return
    facts = find_facts(recipe.algorithm.name)
    if facts is not None and not facts.turns:
        able = ", ".join(name for name, each in CATALOG.items() if each.turns)
        reason = f"turn is not available with {recipe.algorithm.name}"
        yield Problem(field="algorithm.credit", reason=reason, fix=f"use trajectory, or one of {able}")
    may = isinstance(recipe.environment, (ToolsSection, GameSection, OwnEnvironmentSection))
    if not may or methods_of_tool_class(recipe.environment.kind, scene.root):
        reason = f"is turn, and environment {recipe.environment.kind} says of no turn what it was worth"
        fix = "use trajectory, or an environment of your own that returns turn_rewards"
        yield Problem(field="algorithm.credit", reason=reason, fix=fix)


def turns_are_counted(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A function asks the model as often as it likes."""
    section = recipe.environment
    if (
        not isinstance(section, OwnEnvironmentSection)
        or section.turns == OwnEnvironmentSection.model_fields["turns"].default
    ):
        return
    if is_function(section.kind, scene.root):
        reason = f"has no effect on {section.kind}, a function, which asks the model as often as it likes"
        yield Problem(field="environment.turns", reason=reason, fix="leave it out, and count turns in the function")


def tools_have_what_they_read(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A search needs texts, and texts a search."""
    section = recipe.environment
    if not isinstance(section, ToolsSection) or scene.planning:
        return
    if twice := next((name for name in section.tools if section.tools.count(name) > 1), None):
        yield Problem(field="environment.tools", reason=f"names {twice} more than once", fix="name each tool once")
    if "search" in section.tools:
        try:
            Corpus.read(section.corpus, root=scene.root)
        except RecipeError as error:
            yield from error.problems
        return
    for key in ("corpus", "results"):
        if getattr(section, key) != ToolsSection.model_fields[key].default:
            reason = "has no effect, because search is not among environment.tools"
            yield Problem(field=f"environment.{key}", reason=reason, fix="remove it, or add search to the tools")


def hosts_can_import(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A process of its own has the environment from a file."""
    section = recipe.environment
    if isinstance(section, OwnEnvironmentSection) and section.processes and not is_plugin(section.kind):
        reason = f"has no effect: only this process has {section.kind}"
        fix = "put it in a .py file beside the recipe and name it as module:name, or leave hosts out"
        yield Problem(field="environment.hosts", reason=reason, fix=fix)


def tool_classes_get_their_columns(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What `reset` of a class of tools asks for is in every prompt, as far as its file tells."""
    kind = recipe.environment.kind
    if "reset" not in methods_of_tool_class(kind, scene.root) or not is_plugin(kind):
        return
    node = signatures.definition(kind, plugins.folders_of(scene.root))
    reset = signatures.methods(node).get("reset") if isinstance(node, ast.ClassDef) else None
    if reset is None or reset.decorator_list:
        return
    for prompt in scene.prompts:
        if lacking := [name for name in signatures.needed(reset) if name not in columns_of(prompt)]:
            reason = f"reset of {kind} asks for {', '.join(lacking)}, and prompt {prompt.id} has no such column"
            fix = f"give it a default, or name what there is: {', '.join(sorted(columns_of(prompt)))}"
            yield Problem(field="environment.kind", reason=reason, fix=fix)
            return


def games_have_secrets(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The answer of each prompt is a secret of the game."""
    section = recipe.environment
    if not isinstance(section, GameSection):
        return
    game = GameEnvironment(section)
    for prompt in scene.prompts:
        if not game.is_secret(prompt.reference):
            reason = f"the answer of prompt {prompt.id}, {str(prompt.reference)[:40]!r}, is no secret of this game"
            fix = "let the source draw secrets as the game has them: the same range, or the same alphabet and length"
            yield Problem(field="task.source", reason=reason, fix=fix)
            return


def memories_have_documents(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Every prompt has a text to be read, and the templates show it."""
    section = recipe.environment
    if not isinstance(section, MemorySection):
        return
    for prompt in scene.prompts:
        text = prompt.tags.get(section.document)
        if not isinstance(text, str) or not text:
            reason = f"prompt {prompt.id} has no text in a column {section.document!r}"
            yield Problem(field="environment.document", reason=reason, fix=_columns(prompt))
            break
    if why := _never_shown(recipe, section, scene.prompts):
        yield Problem(field="environment.shown", reason=f"has no effect: {why}", fix="leave it out")
    yield from _unshown(section, "update", ("memory", "chunk"))
    yield from _unshown(section, "answer", ("memory",))


def _never_shown(recipe: Recipe, section: MemorySection, prompts: Sequence[Prompt]) -> str | None:
    """Why nobody is shown how a memory is kept where a share of the prompts is told, or none."""
    scratch = recipe.model.scratch or Scratch()
    facts = find_facts(recipe.algorithm.name)
    imitates = facts is not None and facts.rows == "demonstrations"
    if section.shown == type(section).model_fields["shown"].default:
        return None
    if not imitates and (recipe.model.name != "scratch" or scratch.warmup_steps == 0):
        return "it is for the warm-up of a scratch model, and there is none"
    if scratch.ways:
        return "model.scratch.demonstration says what is shown"
    if prompts and not any("evidence" in prompt.tags for prompt in prompts):
        return "a memory is shown by the pattern in a column 'evidence', and prompts have none"
    return None


def projects_have_files(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Every prompt lists its files, and the template shows what each is to be."""
    section = recipe.environment
    if not isinstance(section, ProjectSection):
        return
    project = ProjectEnvironment(section)
    for prompt in scene.prompts:
        try:
            project.files(prompt)
        except RolloutError as error:
            yield Problem(field="environment.files", reason=str(error), fix=_columns(prompt))
            break
    yield from _unshown(section, "write", ("notes", "file"))


def programs_can_be_started(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The program is there, and the server that it asks can be."""
    section = recipe.environment
    if not isinstance(section, ProgramSection) or scene.planning:
        return
    if executable(section.command[0], scene.root) is None:
        reason = f"{section.command[0]} is no program in the recipe's folder or on PATH"
        fix = "correct the name, or make the file executable (chmod +x); a script can be named with its interpreter"
        yield Problem(field="environment.command", reason=reason, fix=fix)
    script = next((word for word in section.command[1:] if not word.startswith("-")), "")
    if script.endswith(SCRIPTS) and " " not in script and not (scene.root / script).is_file():
        reason = f"there is no {script} in the recipe's folder, where the program is started"
        yield Problem(field="environment.command", reason=reason, fix="correct the name, or write the file")
    if lacking := missing_extra("aiohttp", "environment.kind"):
        yield lacking


def tasksets_are_played(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A taskset belongs to the environment that plays it, and to no other."""
    source, environment = recipe.task.source, recipe.environment
    asked = isinstance(environment, SingleTurnSection) and not scene.training  # prompts of anybody's, judged by nobody
    if isinstance(source, VerifiersSource) and not (isinstance(environment, VerifiersSection) or asked):
        reason = f"is {environment.kind}, and only verifiers plays and judges the tasks of a taskset"
        yield Problem(field="environment.kind", reason=reason, fix="write environment: {kind: verifiers}")
    if isinstance(environment, VerifiersSection) and not isinstance(source, VerifiersSource):
        reason = f"is verifiers, which plays tasksets, and task.source.kind is {source.kind}"
        yield Problem(field="environment.kind", reason=reason, fix="use another one, or a source of kind verifiers")


def signals_are_given(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What is known of an environment's signals before it runs; most say only afterwards."""
    known = next((names for kind, names in SIGNALS.items() if isinstance(recipe.environment, kind)), None)
    if methods := methods_of_tool_class(recipe.environment.kind, scene.root):
        known = (*SIGNALS[ToolsSection], *(("reward",) if "get_reward" in methods else ()))
    for index, part in enumerate(recipe.rewards):
        if known is not None and isinstance(part, SignalReward) and part.signal not in known:
            there = ", ".join(known) or "none"
            reason = f"{part.signal!r} is no signal of environment {recipe.environment.kind}; there are: {there}"
            yield Problem(field=f"rewards.{index}.signal", reason=reason, fix="use another reward or environment")


def _columns(prompt: Prompt) -> str:
    """What to do about a column that is not there."""
    return f"name the column; there are: {', '.join(sorted(prompt.tags)) or 'none'}"


def _unshown(section: MemorySection | ProjectSection, key: str, needed: Sequence[str]) -> Iterator[Problem]:
    """What a template leaves out that the model cannot do without."""
    for name in needed:
        if f"{{{name}}}" not in getattr(section, key):
            reason = f"does not show the model {{{name}}}"
            yield Problem(field=f"environment.{key}", reason=reason, fix=f"put {{{name}}} where it belongs")
