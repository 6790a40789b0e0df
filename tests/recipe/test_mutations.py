"""A thousand recipes made wrong at random: each is accepted or refused in readable problems, never anything else."""

import copy
import random
import string
from collections import Counter

import pytest
import yaml

from stretto.cli.main import main
from stretto.recipe.schema import Recipe
from tiers import slow_but

NUMBERS = [0, 1, -1, 2, 3.7, -0.5, 1e-9, 1e300, 10**12, 10**40, float("inf"), float("nan")]
WORDS = ["", " ", "auto", "none", "null", "x", "8", "scratch", "grpo", "native", "module:name", "a:b:c", "{text}", "{"]
WORDS += ["\x00", "\ud800", "é" * 300, "../..", "/", "~", "C:\\x", "(", "package:x/y", "org/name"]
OTHERS = [None, True, False, [], [1, 2], ["a"], [[]], [None], {}, {"kind": "exact"}, {"a": {"b": 1}}]
ODD = [*NUMBERS, *WORDS, *OTHERS]
KEYS = [
    key
    for name, field in Recipe.model_fields.items()
    for key in (name, *getattr(field.annotation, "model_fields", {}))
]  # fmt: skip


def paths(data, path=()):
    """Every place in the data."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield (*path, key)
        yield from paths(value, (*path, key))


def parent_of(data, path):
    for key in path[:-1]:
        data = data[key]
    return data


def misspelt(word, chance):
    at = chance.randrange(len(word))
    more = word[:at] + chance.choice(string.ascii_lowercase) + word[at:]
    return chance.choice([word[:at] + word[at + 1 :], more, word[::-1]])


def mutate(data, chance):
    """One change: a key dropped, misspelt, moved or added, a value replaced, misspelt, nudged or swapped."""
    places = list(paths(data))
    path = chance.choice(places)
    parent, key = parent_of(data, path), path[-1]
    match chance.choice(["drop", "misspell key", "move", "add", "replace", "misspell value", "nudge", "nudge", "swap"]):
        case "drop":
            del parent[key]
        case "misspell key" if isinstance(parent, dict):
            parent[misspelt(key, chance)] = parent.pop(key)
        case "move":
            there = chance.choice([data, *(section for section in data.values() if isinstance(section, dict))])
            there[str(key)] = copy.deepcopy(parent[key])
        case "add" if isinstance(parent, dict):
            parent[chance.choice(KEYS)] = copy.deepcopy(chance.choice(ODD))
        case "misspell value" if isinstance(parent[key], str) and parent[key]:
            parent[key] = misspelt(parent[key], chance)
        case "nudge" if isinstance(parent[key], int | float):
            parent[key] = chance.choice([parent[key] + 1, parent[key] * 2, parent[key] // 2, -parent[key]])
        case "swap":
            other = chance.choice(places)
            if other[: len(path)] != path and path[: len(other)] != other:
                there = parent_of(data, other)
                parent[key], there[other[-1]] = there[other[-1]], parent[key]
        case _:
            parent[key] = copy.deepcopy(chance.choice(ODD))


def bases(right):
    """The small recipe, everything spelt out, and one that uses what the small one does not."""
    rich = copy.deepcopy(right)
    rich["rewards"] = [
        {"name": "a", "kind": "regex", "pattern": "[0-9]+", "weight": 0.5},
        {"name": "b", "kind": "numeric"},
    ]
    rich["algorithm"] = {
        "name": "grpo",
        "kl": {"coef": 0.1, "where": "reward"},
        "correction": {"kind": "token", "cap": 3},
    }
    rich["model"]["adapter"] = {"rank": 4, "targets": ["q_proj"]}
    rich["checkpoint"] = {"every": 2, "best": "reward/mean"}
    whole = Recipe().model_dump(mode="json") | copy.deepcopy(right)
    return [right, rich, whole]


def mutants(right, seeds):
    for seed in seeds:
        chance = random.Random(seed)
        data = copy.deepcopy(chance.choice(bases(right)))
        for _ in range(chance.choice([1, 1, 1, 1, 1, 2, 3, 6])):
            if data:
                mutate(data, chance)
        yield data


def as_text(data, chance):
    """The data as YAML, sometimes torn."""
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    for _ in range(chance.choice([0, 0, 0, 0, 0, 1, 3])):
        at = chance.randrange(len(text) + 1)
        noise = chance.choice("{}[]:,&*!|>'\"%@`\t\n#-?")
        text = chance.choice([text[:at], text[:at] + noise + text[at:], text[at:]])
    return text.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("first", slow_but(0, 300, 700, of=range(0, 1000, 100)))
def test_a_thousand_mutated_recipes_are_accepted_or_refused_with_a_list(right, tmp_path, capfd, first):
    codes = Counter()
    for seed, data in enumerate(mutants(right, range(first, first + 100))):
        path = tmp_path / "mutant.yaml"
        path.write_bytes(as_text(data, random.Random(seed)))
        code = main(["check", str(path)])
        out, error = capfd.readouterr()
        codes[code] += 1
        if code == 0:
            assert "nothing wrong was found" in out
            assert error == ""
        else:
            assert code == 2, error
            assert out == ""
            count, _, rest = error.partition(" ")
            assert rest.startswith("problem")
            assert int(count) == error.count("    fix: ") > 0
            assert all(part.partition(": ")[2].strip() for part in error.split("\n\n")[1:])
    assert codes[0] >= 1
    assert codes[2] >= 50
