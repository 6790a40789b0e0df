"""What the pages say is true: links, commands, recipe keys, metrics, errors, and the code of the worked examples."""

import ast
import re
import shlex
from pathlib import Path
from typing import get_args, get_origin

import numpy as np
import pytest
import typer
import yaml

from running import END, ZERO, lines, start, written
from stretto import errors
from stretto.algorithms.base import build
from stretto.algorithms.catalog import CATALOG, find_facts
from stretto.algorithms.gae import generalized_advantages
from stretto.algorithms.optimal import optimal_value
from stretto.api.recipes import PROBES
from stretto.checks.recipe import check, examine
from stretto.checks.rules import not_available as reserved
from stretto.checks.rules import unused_keys as idle
from stretto.checks.rules.base import CheckContext
from stretto.cli.main import app_of
from stretto.environments import adapted
from stretto.recipe import schema_text as words
from stretto.recipe.foreign_keys import foreign_keys
from stretto.recipe.load import parse_recipe, read_recipe
from stretto.recipe.schema import AlgorithmSection, Recipe
from stretto.types import Conversation, Group, Prompt, Reward, Trajectory, trajectory_key
from talking import played
from test_imports import ARROWS, BASE
from test_recipes import made_before
from tiny import SAMPLING

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
GROUPS = typer.main.get_command(app_of()).commands
COMMANDS = {
    f"{name} {below}".strip(): command
    for name, group in GROUPS.items()
    for below, command in getattr(group, "commands", {"": group}).items()
}
"""Every command by its words, such as `task check`."""

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMAND = re.compile(r"^(?:\S*/)?stretto (?=\S)")


RULES = (
    reserved.keys_wait_for_their_part,
    reserved.logs_exist,
    idle.keys_have_an_effect,
    idle.warmup_rate_is_used,
    idle.best_is_measured,
)
"""The rules that a part of a recipe must keep too."""


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page, language):
    """The code blocks of a page in a language."""
    return [body for found, body in FENCE.findall(text_of(page)) if found == language]


def spans(page):
    """The words in backquotes, outside of code blocks."""
    return SPAN.findall(FENCE.sub("", text_of(page)))


def marked(name, mark):
    """The Python blocks of a page that follow the comment <!-- test: MARK -->."""
    return re.findall(rf"<!-- test: {mark} -->\n```python\n(.*?)^```$", text_of(DOCS / name), re.MULTILINE | re.DOTALL)


def headings(page):
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def command_lines(page):
    """Every command line of the page, in code blocks and in backquotes, without its comment."""
    code = [line.strip() for line in text_of(page).splitlines() if line.startswith("    ")]
    code += [line.strip() for _, body in FENCE.findall(text_of(page)) for line in body.splitlines()]
    for line in [*code, *spans(page)]:
        if COMMAND.match(line):
            yield COMMAND.sub("", line).partition("  #")[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_relative_link_leads_somewhere(page):
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in headings(there), target


def test_every_page_is_in_the_index():
    index = {(DOCS / target).resolve() for target in LINK.findall(text_of(DOCS / "README.md"))}
    pages = {page for page in DOCS.rglob("*.md") if page.name != "README.md"}
    assert pages - index == set()


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_line_is_one(page):
    for line in command_lines(page):
        words = shlex.split(line.replace("[", "").replace("]", "").replace("...", ""))
        if words[0].startswith("-") or words[0] == "COMMAND":
            assert words[0] in ("--help", "--version", "COMMAND")
            continue
        command = COMMANDS[words[0]] if words[0] in COMMANDS else COMMANDS[" ".join(words[:2])]
        options = {name for option in command.params for name in option.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= options, line
        for word in words[1:]:
            assert not word.startswith(("recipes/", "examples/")) or (ROOT / word).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_change_on_a_command_line_is_possible(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("stretto.models.source.offline", lambda: False)
    for line in command_lines(page):
        changes = [word for word in shlex.split(line) if re.match(r"[a-z][\w.]*=", word)]
        if line.startswith("sweep "):
            changes = [change.partition(",")[0] for change in changes]  # the first of several values
        shipped = next((word for word in shlex.split(line) if word.startswith(("recipes/", "examples/"))), None)
        path = ROOT / (shipped or "recipes/tiny.yaml")
        made_before(tmp_path, path.read_text())
        if "algorithm.name=centered" not in changes:  # the worked example, which is tested below
            planning = line.startswith("plan ")
            _, problems = examine(path, changes, root=path.parent, probes=PROBES, planning=planning)
            wrong = [str(problem) for problem in problems if problem.field != "algorithm.vstar.table"]  # made before
            assert wrong == [], line


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_snippet_of_a_recipe_loads_and_asks_for_what_there_is(page):
    for body in blocks(page, "yaml"):
        recipe = parse_recipe(yaml.safe_load(body))
        scene = CheckContext(root=ROOT, probes=PROBES, prompts=(), complete=False, planning=page.name == "plan.md")
        assert [str(problem) for rule in RULES for problem in rule(recipe, scene)] == [], body


def test_the_recipe_on_the_first_page_has_nothing_wrong_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (body,) = blocks(ROOT / "README.md", "yaml")
    path = tmp_path / "first.yaml"
    path.write_text(body)
    reading = read_recipe(path)
    assert reading.problems == ()
    assert [str(problem) for problem in check(reading.recipe, root=tmp_path, probes=PROBES)] == []


def test_the_ten_lines_of_python_on_the_first_page_run_as_they_are(tmp_path, monkeypatch, capsys):
    """In a folder whose recipes/tiny.yaml is a recipe as tiny as those of tests."""
    (body,) = blocks(ROOT / "README.md", "python")
    assert len(body.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    characters = "0123456789="
    written(tmp_path / "recipes", model__scratch__characters=characters, run__steps=1, evaluate__every=0)
    exec(compile(body, "README.md", "exec"), {})
    numbers, answers = capsys.readouterr().out.splitlines()[-2:]
    row = lines(tmp_path / "runs" / "tiny-001" / "metrics.jsonl")[-1]
    assert float(numbers.split()[0]) == row["reward/mean"]
    assert {key for key in row if key.startswith("reward/part/")} == {"reward/part/exact", "reward/part/length"}
    assert len(ast.literal_eval(answers)) == 2


def exists(key):
    """Whether a recipe has such a key; N stands for any item of a list."""
    places = [Recipe]
    for part in key.split("."):
        if part == "N" or part.isdigit():
            continue
        found = [keys[part].annotation for place in places if part in (keys := words.keys_of(place))]
        if not found:
            return False
        alternatives = [kind for annotation in found for kind in words.kinds(annotation)]
        if any(get_origin(kind.type) is dict for kind in alternatives):
            return True
        items = [item for kind in alternatives for each in get_args(kind.type) for item in words.kinds(each)]
        places = [kind.type for kind in (*alternatives, *items) if words.is_section(kind)]
    return True


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_dotted_key_that_a_page_names_exists(page):
    for span in spans(page):
        key = span.partition(": ")[0]
        if re.fullmatch(r"[a-z_]+(\.[a-z_0-9N]+)+", key) and key.split(".")[0] in Recipe.model_fields:
            module = ROOT / "src" / "stretto" / (key.replace(".", "/") + ".py")
            known = exists(key) or module.exists() or key in foreign_keys()  # what other projects call their keys
            assert known or key.endswith((".py", ".json", ".safetensors")), key


def test_the_search_for_keys_finds_them_and_no_others():
    assert exists("rewards.0.deadline")
    assert exists("rewards.N.deadline")
    assert exists("model.adapter.targets")
    assert exists("roles.reference.name")
    assert not exists("model.adapter.target")
    assert not exists("rewards.0.deadlines")


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_block_compiles(page):
    for body in blocks(page, "python"):
        compile(body, str(page), "exec")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_the_reference(name):
    page = text_of(DOCS / "reference" / "cli.md")
    _, _, section = page.partition(f"## stretto {name}\n")
    assert section
    section = section.partition("\n## ")[0]
    for parameter in COMMANDS[name].params:
        for option in parameter.opts:
            assert not option.startswith("--") or option == "--help" or f"`{option}" in section, option


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run that writes everything that a run can write, but for what A*PO adds."""
    changes = {"algorithm__kl": {"coef": 0.01}, "evaluate__pass_k": 2, "log": ["tensorboard"], "run__steps": 2}
    changes |= {"engine__top_k": 9}
    return start(tmp_path_factory.mktemp("run"), **changes).folder


def test_the_glossary_names_exactly_the_metrics_of_a_run(run):
    rows = re.findall(r"^\| `([^`]+)` \| ", text_of(DOCS / "guides" / "reading-a-run.md"), re.MULTILINE)
    named = {row for row in rows if "." not in row and not row.endswith("/")}
    patterns = {name: re.compile(re.sub(r"<\w+>", r"\\w+", name)) for name in named}
    found = {key for line in lines(run / "metrics.jsonl") for key in line} - {"step"}
    assert {key for key in found if not any(pattern.fullmatch(key) for pattern in patterns.values())} == set()
    unseen = {name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, found))}
    watched = {metric for term in build(AlgorithmSection(name="astar_po")).terms for metric in term.watch}
    few = {"micro_batches/overhead"}  # which takes more micro-batches than these steps have
    assert {name for name in unseen if not name.startswith("critic/")} == {"kl/coef", "distill/kl"} | watched | few


def test_every_file_of_a_run_is_in_the_reference(run):
    page = text_of(DOCS / "reference" / "run-folder.md")
    names = {re.sub(r"\d{6}", "NNNNNN", path.name) for path in [*run.iterdir(), *(run / "checkpoints").iterdir()]}
    state = {path.name for path in next((run / "checkpoints").iterdir()).joinpath("state").iterdir()}
    assert {name for name in names | state if name not in page} == set()


def test_every_field_of_a_sample_is_in_the_reference(run):
    page = text_of(DOCS / "reference" / "run-folder.md")
    row = lines(run / "samples" / "step-000001.jsonl")[0]
    assert {key for key in [*row, *row["conversations"][0]] if f"| `{key}` |" not in page} == set()


def test_every_kind_of_event_is_in_the_reference():
    sources = [*(ROOT / "src").rglob("*.py")]
    kinds = {kind for path in sources for kind in re.findall(r"\.event\(\"(\w+)\"", text_of(path))}
    page = text_of(DOCS / "reference" / "run-folder.md")
    assert kinds
    assert {kind for kind in kinds if f"| `{kind}` |" not in page} == set()


def test_every_error_is_on_its_page_with_its_exit_code():
    page = text_of(DOCS / "concepts" / "failures.md")
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.StrettoError):
            assert f"| `{error.__name__}` | {error.exit_code} |" in page


def test_every_algorithm_is_in_the_reference_with_its_formula():
    page = text_of(DOCS / "reference" / "algorithms.md")
    for facts in CATALOG.values():
        row = f"| `{facts.name}` | `{facts.advantage}` | `{facts.average}` | at least {facts.min_samples} |"
        assert row in page


@pytest.mark.parametrize(
    "name", [name for name in SAMPLING if CATALOG[name].scope != "batch" and not CATALOG[name].taught]
)
def test_the_example_of_the_reference_is_computed_right(name):
    page = text_of(DOCS / "reference" / "algorithms.md")
    (row,) = re.findall(rf"^\|[^|]*`{name}`[^|]*\| ([-\d./]+, [-\d./]+, [-\d./]+, [-\d./]+) \|$", page, re.MULTILINE)
    shown = [float(a) / float(b or 1) for a, _, b in (number.partition("/") for number in row.split(", "))]
    assert advantages(build(AlgorithmSection(name=name)), [1, 0, 0, 0]) == pytest.approx(shown, abs=1e-4)


def test_the_example_of_generalized_advantages_is_computed_right():
    page = text_of(DOCS / "reference" / "algorithms.md")
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d., ]+) \| ([\d., ]+) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.2, 0.5, 0.4])
    for gamma, lam, shown, returns in rows:
        found = generalized_advantages(rewards, values, gamma=float(gamma), lam=float(lam))
        assert found == pytest.approx([float(number) for number in shown.split(", ")])
        assert found + values == pytest.approx([float(number) for number in returns.split(", ")])


def test_every_room_has_a_paragraph():
    page = text_of(DOCS / "concepts" / "rooms.md")
    rooms = {path.name for path in (ROOT / "src" / "stretto").iterdir() if (path / "__init__.py").exists()}
    assert {room for room in rooms if not re.search(rf"^\*\*{room}\.\*\*", page, re.MULTILINE)} == set()


def test_the_table_of_rooms_is_the_one_that_is_enforced():
    page = text_of(DOCS / "concepts" / "rooms.md")
    table = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    rooms = {room: allowed - BASE for room, allowed in ARROWS.items() if (ROOT / "src" / "stretto" / room).is_dir()}
    assert table.pop("cli") == "everything"
    assert table.pop("api") == "everything but `cli`"
    said = {room: set(re.findall(r"`([\w.]+)`", text)) for room, text in table.items()}
    assert said == {room: allowed for room, allowed in rooms.items() if room not in ("api", "cli")}


def test_the_loop_follows_a_batch_through_at_most_fifteen_files():
    """Each is there, once in the table, and has what the table says a batch meets in it first."""
    page = text_of(DOCS / "concepts" / "the-loop.md")
    table = dict(
        re.findall(r"^\| [\w, ]+ \| \[[\w/.]+\]\(\.\./\.\./(src/[\w/]+\.py)\) \| `([\w.]+)` \|", page, re.MULTILINE)
    )
    assert set(re.findall(r"\.\./\.\./(src/[^)]+)", page)) == table.keys()
    assert 12 <= len(table) <= 15
    for file, name in table.items():
        tree = ast.parse(text_of(ROOT / file))
        for part in name.split("."):
            (tree,) = [node for node in tree.body if getattr(node, "name", None) == part]
    rooms = {file.split("/")[2] for file in table}
    assert rooms >= {"tasks", "environments", "engines", "rewards", "algorithms", "training", "workers"}
    beside = re.findall(r"`(\w+/[\w/]+(?:\.py|/))`", page)
    assert len(beside) > 6 and all((ROOT / "src" / "stretto" / file).exists() for file in beside)


def test_contributing_names_the_files_to_read_with_their_lines():
    page = text_of(ROOT / "CONTRIBUTING.md")
    files = re.findall(r"^\| \[[\w/.]+\]\((src/[\w/]+\.py)\) \|", page, re.MULTILINE)
    told = int(re.search(r"^About ([\d,]+) lines, in this order", page, re.MULTILINE)[1].replace(",", ""))
    assert len(files) == 12 and abs(sum(text_of(ROOT / file).count("\n") for file in files) - told) < 100


def test_the_readme_has_at_most_140_lines():
    assert text_of(ROOT / "README.md").count("\n") <= 140


def test_the_guarantees_name_tests_that_exist():
    """Links to them are checked above; here, that the table has any."""
    assert len(re.findall(r"\]\(\.\./\.\./(tests/[\w/]+\.py)\)", text_of(DOCS / "concepts" / "on-policy.md"))) >= 8


WORKED = "centered_of_the_docs:build"


@pytest.fixture
def centered(tmp_path):
    """The worked example as its page says: a file and an entry, here as FACTS in the file."""
    (file,), (entry,) = (
        marked("concepts/algorithms.md", "centered file"),
        marked("concepts/algorithms.md", "centered facts"),
    )
    imported = "from stretto.algorithms.catalog import CLIPPED, AlgorithmFacts\n"
    future, rest = file.split("\n\n", 2)[:2], file.split("\n\n", 2)[2]
    text = "\n\n".join([*future, imported + rest, f"FACTS = {entry}"])
    (tmp_path / "centered_of_the_docs.py").write_text(text)
    assert len(ast.parse(file).body) < 30
    return file


def advantages(algorithm, rewards):
    """What an algorithm credits the answers of a group of these rewards with."""
    conversation = Conversation(
        tokens=np.array([ZERO, ZERO, END]),
        trained=np.array([False, True, True]),
        logprobs=np.array([0.0, -1.0, -1.0]),
        stop="stop",
        version=0,
    )
    prompt = Prompt(id="p", messages=({"role": "user", "content": "0"},))
    trajectories = tuple(
        Trajectory(prompt=prompt, visit=0, attempt=attempt, conversations=(conversation,), outcome=None)
        for attempt in range(len(rewards))
    )
    verdicts = tuple(Reward(value=float(value), outcome=float(value), parts={}) for value in rewards)
    group = Group(prompt=prompt, trajectories=trajectories, rewards=verdicts)
    return [sample.advantage[0] for sample in algorithm.advantage([group], streams(algorithm, group))]


def streams(algorithm, group):
    """What an algorithm needs beside rewards: the reference agrees with the engine, and its answers are these."""
    keys = [(*trajectory_key(trajectory), 0) for trajectory in group.trajectories]
    largest = algorithm.name == "astar_po_course"
    vstar = optimal_value([reward.value for reward in group.rewards], 0.0 if largest else 0.5)
    known = {"reference": np.array([-1.0, -1.0]), "vstar": np.array([vstar])}
    return {name: dict.fromkeys(keys, known[name]) for name in algorithm.needs}


def test_the_worked_algorithm_computes_what_its_page_says(centered, tmp_path):
    algorithm = build(AlgorithmSection(name=WORKED), [str(tmp_path)])
    assert find_facts(WORKED).summary.startswith("Rewards less the mean of their group")
    assert advantages(algorithm, [1, 0, 0, 0]) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert [term.denominator for term in algorithm.terms] == ["tokens"]


def test_the_worked_algorithm_trains(centered, tmp_path):
    run = start(tmp_path, algorithm={"name": WORKED}, run__steps=2).folder
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == [0, 1, 2]


def test_the_worked_algorithm_and_the_example_are_the_same_code(centered):
    def functions(text):
        return {node.name: ast.dump(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}

    example = functions(text_of(ROOT / "examples" / "own_parts" / "centered.py"))
    worked = functions(centered)
    assert worked.keys() == {"centered", "build"}
    assert all(example[name] == code for name, code in worked.items())


def test_the_worked_environment_and_the_example_are_the_same_code():
    (page,) = marked("guides/your-own-environment.md", "environment")
    found = []
    for text in (page, text_of(ROOT / "examples" / "own_parts" / "game.py")):
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.AsyncFunctionDef)]
        found.append([[ast.dump(line) for line in function.body] for function in functions])
    assert found[0] == found[1] != []


def test_the_worked_class_of_tools_is_an_environment():
    (page,) = marked("guides/your-own-environment.md", "tools")
    namespace = {}
    exec(page, namespace)
    prompt = Prompt(
        id="p", messages=({"role": "user", "content": "Buy."},), tags={"prices": {"tea": 3, "milk": 2}, "other": 1}
    )
    with pytest.warns(UserWarning, match="the tool price failed, and the model was told so: KeyError: 'ham'"):
        outcome, talk = played(adapted(namespace["Shop"], turns=6), prompt, ["price(tea)", "price(ham)", "3"])
    assert "Buy. There are: milk, tea.<|assistant|>price(tea)<|end|><|user|>3<|assistant|>" in talk.texts()[0]
    assert "error: KeyError" in talk.texts()[0]
    assert (outcome.answer, outcome.signals["reward"]) == ("3", 1.0)


def test_the_tree_of_errors_is_drawn_as_it_is():
    drawn, path = {}, []
    for indent, name in re.findall(r"^    ([| ]*)(?:\+-- )?(\w+Error|WorkerLost) ", errors.__doc__, re.MULTILINE):
        depth = len(indent) // 4 + (name not in ("StrettoError", "ChangedInputsError"))
        path = [*path[:depth], name]
        drawn[name] = path[-2] if depth else None
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    real = {kind.__name__: kind.__bases__[0].__name__ for kind in kinds}
    assert drawn == real | {"StrettoError": None, "ChangedInputsError": None}
