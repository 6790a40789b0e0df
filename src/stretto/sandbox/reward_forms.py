"""The ways in which a reward function may be written, told apart by the names of its parameters.

    stretto   reward(answer, prompt, signals) -> float | None
    group     reward(answers, prompt, signals) -> list[float | None]                for all answers of a group at once
    trl       reward(completions, prompts, **columns) -> list[float | None]         as TRL's trainers call it
    verl      compute_score(data_source, solution_str, ground_truth, extra_info)    as verl's workers call it

Only names tell them apart: by position, a function of verl's would be given an answer for its data source. `call` runs
in a worker process, where the function is at hand; `written` reads the same from a syntax tree and runs nothing.
Functions of TRL's and verl's are given one answer at a time. Any of them may be async.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import asyncio

Form = Literal["stretto", "group", "trl", "verl"]

OWN = ("answer", "prompt", "signals")
"""What stretto's own form is called with, by position."""
GROUP = ("answers", "prompt", "signals")
"""What a function of a whole group is called with, by position."""
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What verl passes, by name."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL passes besides the columns of the data, by name."""
TRL_GIVEN = ("prompts", "completions")
"""What of it can be given here."""
OPENRLHF = ("queries", "prompts", "labels")
"""What OpenRLHF passes, by position: texts of prompt and answer together, which there are none of here."""
REFERENCES = ("answer", "answers", "solution", "ground_truth", "reference", "target", "label")
"""Columns that mean the reference answer to a function of TRL's, where the data have no column of that name."""
WANTED = "def reward(answer, prompt, signals) -> float, or def reward(answers, prompt, signals) -> list for a group"
"""What to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of a function, as far as they decide how it is called."""

    positional: tuple[str, ...]
    """Those that can be given by position, in order."""
    named: tuple[str, ...]
    """Those that can be given by name, in order."""
    required: frozenset[str]
    """Those without a default."""
    more: bool
    """True if it takes any others by position."""
    words: bool
    """True if it takes any others by name."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Parameters | None:
        """Those of a function that is at hand; none where it does not say."""
        try:
            found = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return None
        kinds = inspect.Parameter
        return cls(
            positional=tuple(p.name for p in found if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)),
            named=tuple(p.name for p in found if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)),
            required=frozenset(
                p.name
                for p in found
                if p.default is kinds.empty and p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
            ),
            more=any(p.kind == kinds.VAR_POSITIONAL for p in found),
            words=any(p.kind == kinds.VAR_KEYWORD for p in found),
        )


def written(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters | None:
    """Those of a function as it is written down; none for a decorated one, which may have others."""
    if node.decorator_list:
        return None
    told = node.args
    positional = [each.arg for each in (*told.posonlyargs, *told.args)]
    without = positional[: len(positional) - len(told.defaults)]
    bare = [each.arg for each, default in zip(told.kwonlyargs, told.kw_defaults, strict=True) if default is None]
    return Parameters(
        positional=tuple(positional),
        named=tuple(each.arg for each in (*told.args, *told.kwonlyargs)),
        required=frozenset({*without, *bare}),
        more=told.vararg is not None,
        words=told.kwarg is not None,
    )


def form_of(parameters: Parameters | None) -> Form:
    """How a function with these parameters is meant to be called."""
    names = set() if parameters is None else {*parameters.positional, *parameters.named}
    if "completions" in names:
        return "trl"
    if "solution_str" in names:
        return "verl"
    return "group" if "answers" in names else "stretto"


def refusal(parameters: Parameters) -> str | None:
    """Why a function with these parameters cannot be called in its form, or none."""
    form = form_of(parameters)
    if parameters.positional[: len(OPENRLHF)] == OPENRLHF:
        return "has the form of OpenRLHF's reward functions, whose queries are texts of prompt and answer together"
    if form in ("stretto", "group"):
        return _position_refusal(parameters, GROUP if form == "group" else OWN)
    if form == "verl":
        if unknown := sorted(parameters.required - set(VERL)):
            return f"has the form of verl's compute_score, but also needs {unknown[0]!r}, which verl does not pass"
    elif unknown := sorted(parameters.required & set(TRL) - set(TRL_GIVEN)):
        return f"has the form of TRL's reward functions, and needs {unknown[0]!r}, which only TRL's trainers have"
    if unnamed := [name for name in parameters.positional if name not in parameters.named]:
        return f"takes {unnamed[0]!r} by position only, where {'verl' if form == 'verl' else 'TRL'} gives it by name"
    return None


def _position_refusal(parameters: Parameters, wanted: Sequence[str]) -> str | None:
    """Why it cannot be called with these by position: their number, or names that stand in other places."""
    places = parameters.positional
    for place, name in enumerate(places[: len(wanted)]):
        if name in wanted and wanted.index(name) != place:
            return f"takes ({', '.join(places)}): {name!r} is in another place than in ({', '.join(wanted)})"
    if words := sorted(parameters.required - set(places)):
        return f"needs the keyword {words[0]!r}, which nobody gives"
    needed = sum(name in parameters.required for name in places)
    if needed <= len(wanted) and (len(wanted) <= len(places) or parameters.more):
        return None
    return f"takes {len(places)} parameter{'' if len(places) == 1 else 's'}, not {len(wanted)}: ({', '.join(wanted)})"


class MissingKey(KeyError):
    """A key that a prompt does not have; the message says where it is."""

    def __str__(self) -> str:
        return str(self.args[0])


class AskedPrompt(dict[str, Any]):
    """A prompt as a function of stretto's own form gets it."""

    def __missing__(self, key: object) -> Any:
        tags, where = self["tags"], f"a prompt has {', '.join(self)}"
        if key in tags:
            where = f'this column is prompt["tags"][{key!r}]'
        elif key in REFERENCES:
            where = 'the reference answer is prompt["reference"]'
        elif tags:
            where += f'; other columns are in prompt["tags"]: {", ".join(map(str, tags))}'
        raise MissingKey(f"{key!r}: {where}")


def call(function: Callable[..., Any], asked: Mapping[str, Any]) -> Any:
    """The verdict of a function of any form: a number or None, and of a function of a group a list of them.

    `asked` holds `answers`, `prompt` and `signals`: of one answer, or of all answers of a group. TypeError where the
    function cannot be called with that, or returns something else.
    """
    parameters = Parameters.of(function)
    form = form_of(parameters)
    if parameters is not None and (why := refusal(parameters)):
        raise TypeError(f"the function {why}; write {WANTED}")
    answers, prompt, signals = asked["answers"], asked["prompt"], asked["signals"]
    if (form == "group") != asked["group"]:
        raise TypeError(
            f"the function has the parameters of one that judges {'a group' if form == 'group' else 'one answer'}, and "
            "its file does not show that; write it, or a function that calls it, into a file beside the recipe"
        )
    if form == "group":
        found = _awaited(function(answers, AskedPrompt(prompt), signals))
        if isinstance(found, str | Mapping) or not hasattr(found, "__len__") or len(found) != len(answers):
            raise TypeError(f"the function returned {found!r:.80}, and no list with a number for each answer")
        return list(found)
    if form == "stretto" or parameters is None:
        return _awaited(function(answers[0], AskedPrompt(prompt), signals[0]))
    if form == "verl":
        return _score_of(_awaited(function(**_taken(parameters, _verl_columns(parameters, answers[0], prompt)))))
    columns = _trl_columns(parameters, answers[0], prompt, chats=reads_chats(function))
    return _only(_awaited(function(**_taken(parameters, columns))))


def _awaited(value: Any) -> Any:
    """What a function returned, or, of an async one, what it comes to."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return runner().run(wait())


@cache
def runner() -> asyncio.Runner:
    """The event loop of this process's calls: one for all of them, so that they share what they keep there, such as the
    servers of a sandbox or a client's connections."""
    import asyncio  # only here: most functions are not async

    return asyncio.Runner()


def reads_chats(function: Callable[..., Any]) -> bool:
    """True for a function that reads the content of messages, as TRL's do where the data are chats: itself, or in
    functions of its file that it names."""
    waiting: list[Any] = [function]
    for value in waiting:
        if (each := _function_of(value)) is None:
            continue
        names = set[str]()
        for code in _codes(each.__code__):
            if "content" in code.co_consts:
                return True
            names.update(code.co_names)
        named = (each.__globals__.get(name) for name in names)
        waiting += [other for other in named if _module(other) == each.__module__ and other not in waiting]
    return False


def _function_of(value: Any) -> FunctionType | None:
    """The function that runs where this is called, or none where that is not written in Python."""
    while isinstance(value, partial) or hasattr(value, "__wrapped__"):
        value = value.func if isinstance(value, partial) else value.__wrapped__
    value = getattr(value, "__func__", value)
    found: Any = value if isinstance(value, FunctionType) else type(value).__call__
    return found if isinstance(found, FunctionType) else None


def _module(value: Any) -> str | None:
    """The module that a function is written in."""
    return value.__module__ if isinstance(value, FunctionType) else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those within it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _taken(parameters: Parameters, given: Mapping[str, Any]) -> dict[str, Any]:
    """What of it the function takes."""
    return {name: value for name, value in given.items() if parameters.words or name in parameters.named}


def _verl_columns(parameters: Parameters, answer: str, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """What verl passes: columns of the data where they have these names. verl's own data have the truth within one."""
    tags = prompt["tags"]
    within = tags.get("reward_model")
    told = (tags.get("ground_truth"), within.get("ground_truth") if isinstance(within, Mapping) else None)
    truth = next((each for each in (*told, prompt["reference"]) if each is not None), None)
    if truth is None and "ground_truth" in parameters.required:
        raise TypeError(
            "the function needs 'ground_truth', and this prompt has no column ground_truth, no "
            "reward_model.ground_truth and no reference answer"
        )
    return {
        "data_source": tags.get("data_source"),
        "solution_str": answer,
        "ground_truth": truth,
        "extra_info": tags.get("extra_info", tags),
    }


def _trl_columns(parameters: Parameters, answer: str, prompt: Mapping[str, Any], *, chats: bool) -> dict[str, Any]:
    """What TRL passes: lists, here of one, with completion and prompt as texts or as chats, and the data's columns."""
    columns = dict(prompt["tags"])
    if prompt["reference"] is not None:
        for name in {"answer", *parameters.named} & set(REFERENCES):
            columns.setdefault(name, prompt["reference"])
    if missing := sorted(parameters.required - columns.keys() - set(TRL_GIVEN)):
        there = ", ".join(sorted(columns)) or "none"
        raise TypeError(f"the function needs the column {missing[0]!r}, which the data do not have; there are {there}")
    messages = prompt["messages"]
    completion = [{"role": "assistant", "content": answer}] if chats else answer
    asked = {"completions": completion, "prompts": messages if chats else messages[-1]["content"]}
    return {name: [value] for name, value in {**columns, **asked}.items()}


def _score_of(value: Any) -> Any:
    """The number in what a function of verl's returned."""
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise TypeError("the function returned a dict without 'score', which verl would read")
    return value["score"]


def _only(value: Any) -> Any:
    """The one number in what a function of TRL's returned."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__len__") or len(value) != 1:
        raise TypeError(f"the function returned {value!r:.80}, where TRL's form gives a list of one number")
    return value[0]
