"""YAML text to plain data and back, with the surprises of YAML left out.

Values are null, true/false, decimal numbers, text, lists and sections, and that is all: `2e-4` is a number (PyYAML
alone reads text), `no`, `010` and `2024-01-01` are what they look like, a key is always text, and a key given twice
is a problem. Anchors, aliases, merge keys and tags are refused, which also rules out documents that unfold without
end. What is written here reads back equal.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from stretto.errors import Problem, RecipeError

NULL, BOOL, INT, FLOAT, TEXT, LIST, SECTION = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")
)
SCALARS = {
    NULL: (re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    BOOL: (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    INT: (re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    FLOAT: (
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
}
"""How plain scalars are told apart (the core schema of YAML 1.2): tag -> what matches, and how it may begin."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []
        self.repeated: list[Problem] = []

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not read here", problem_mark=event.start_mark)
        if getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem="tags (!...) are not read here", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def section(self, node: yaml.MappingNode) -> dict[str, Any]:
        first: dict[str, int] = {}
        values = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key.start_mark)
            if key.value in first:
                reason = f"line {line} gives it again, and line {first[key.value]} already did"
                self.repeated.append(
                    Problem(field=".".join([*self.path, key.value]), reason=reason, fix="keep one of the two")
                )
            first.setdefault(key.value, line)
            values[key.value] = self.below(key.value, value)
        return values

    def items(self, node: yaml.SequenceNode) -> list[Any]:
        return [self.below(str(index), value) for index, value in enumerate(node.value)]

    def below(self, name: str, node: yaml.Node) -> Any:
        self.path.append(name)
        value = self.construct_object(node, deep=True)
        self.path.pop()
        return value

    def number(self, node: yaml.ScalarNode) -> int:
        try:
            return int(node.value)
        except ValueError:  # Python reads at most 4300 digits
            raise yaml.MarkedYAMLError(problem="a number of too many digits", problem_mark=node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """Keeps PyYAML's own resolvers besides ours, so that text which either would read as something else is quoted."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def text(self, data: str) -> yaml.ScalarNode:
        # Unless in double quotes, PyYAML writes these three line breaks as they are, and reads them as others.
        style = '"' if any(character in data for character in "\x85\u2028\u2029") else None
        return self.represent_scalar(TEXT, data, style=style)


_Loader.yaml_constructors = {}
_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor(NULL, lambda loader, node: None)
_Loader.add_constructor(BOOL, lambda loader, node: node.value.lower() == "true")
_Loader.add_constructor(INT, _Loader.number)
_Loader.add_constructor(FLOAT, lambda loader, node: float(re.sub(r"\.(?=[iInN])", "", node.value)))
_Loader.add_constructor(TEXT, lambda loader, node: node.value)
_Loader.add_constructor(LIST, _Loader.items)
_Loader.add_constructor(SECTION, _Loader.section)
_Dumper.add_representer(str, _Dumper.text)
for _tag, (_pattern, _begins) in SCALARS.items():
    _Loader.add_implicit_resolver(_tag, _pattern, _begins)
    _Dumper.add_implicit_resolver(_tag, _pattern, _begins)


def read(text: str, *, name: str) -> tuple[Any, list[Problem]]:
    """The data in a YAML text, with a problem for every key that is given twice.

    `name` stands for the text in messages. A text that is no YAML raises a RecipeError with the line.
    """
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        fix = "indent with spaces, not tabs" if "'\\t'" in str(error.problem) else "correct it there, or just above"
        raise RecipeError.of(name, f"cannot be read as YAML: {where}{error.problem}", fix) from None
    except yaml.reader.ReaderError as error:
        reason = f"holds a character that no text file has (number {error.character!r}, position {error.position})"
        raise RecipeError.of(name, reason, "give a recipe, written as YAML") from None
    except RecursionError:
        raise RecipeError.of(name, "is nested too deeply", "a recipe has few levels; write it flat") from None
    return data, loader.repeated


def write(data: object) -> str:
    """Plain data as YAML, in its own order; small sections and lists stand on one line."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return text
