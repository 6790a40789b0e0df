"""One resolver for everything of a user's own: what it finds, and what it says of what it cannot use."""

import asyncio
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stretto import plugins
from stretto.algorithms.base import build
from stretto.algorithms.catalog import OWN, AlgorithmFacts, facts_of, find_facts
from stretto.algorithms.own_facts import announce
from stretto.environments import own
from stretto.errors import Problem, RecipeError
from stretto.plugin_kinds import KINDS
from stretto.plugins import REGISTERED, problems, register, resolve
from stretto.recipe.schema import AlgorithmSection, Kl, TaskSection
from stretto.sandbox.imports import sources
from stretto.tasks.source import load_prompts, peek
from stretto.types import Outcome, Prompt

CODE = """
from functools import partial, wraps
from stretto.types import Outcome, Prompt

def decorated(function):
    @wraps(function)
    async def inner(*arguments):
        return await function(*arguments)
    return inner

async def play(prompt, model): return Outcome(answer="played")
async def more(prompt, model, depth=1, *, hint="x"): return Outcome(answer=f"{depth}{hint}")
async def anything(*arguments): return Outcome(answer=str(len(arguments)))
@decorated
async def wrapped(prompt, model): return Outcome(answer="wrapped")
partly = partial(more, depth=2)
alias = play

class Game:
    def __init__(self): self.turns = 0
    async def run(self, prompt, model):
        self.turns += 1
        return Outcome(answer=str(self.turns))
class Inherited(Game): pass
class Called:
    async def __call__(self, prompt, model): return Outcome(answer="called")
shared = Game()
called = Called()

def plain(prompt, model): ...
async def one(prompt): ...
async def three(prompt, model, other): ...
async def swapped(model, prompt): ...
async def keyword(prompt, model, *, hint): ...
async def stream(prompt, model): yield 1
number = 7
made = [1, 2]
computed = int("7")
class Nothing: ...
class Sync:
    def run(self, prompt, model): ...
class Narrow:
    async def run(self, prompt): ...
class Greedy:
    def __init__(self, size): ...
    async def run(self, prompt, model): ...
class Tools:
    def add(self, amount: int) -> int:
        '''Adds.

        Args:
            amount: How much.
        '''
        return amount
class MoreTools(Tools): ...
class Undescribed:
    def add(self, amount): ...
class OnlyBegins:
    def reset(self): ...
class Derived(int):
    "Nobody can see in the file whether int has a method run."

def reward(answer, prompt, signals): return 1.0
async def late(answer, prompt, signals): return 1.0
def short(answer): return 1.0

def make(policy): return policy
def make_two(policy, section): return policy
class Log:
    def __init__(self, folder): ...
    def metrics(self, step, values): ...
    def close(self): ...
class Bare:
    def metrics(self, step, values): ...

def rows(config): return [{"text": str(n), "answer": str(n)} for n in range(config.get("count", 3))]
def prompts(config): return (Prompt(id=str(n), messages=({"role": "user", "content": "?"},)) for n in range(3))
def twice(config): return [Prompt(id="a", messages=({"role": "user", "content": "?"},))] * 2
def nothing(config): return []
def text(config): return "rows"
def raises(config): raise ValueError("no data here")
def odd(config): return [{"text": object()}]
def words(config): return ["row"]
def no_config(): return []
"""
FOLDERS_CODE = {
    "mine.py": CODE,
    "broken.py": "def f(:\n",
    "failing.py": "import nothing_of_that_name\nasync def play(prompt, model): ...\n",
    "leaving.py": "import sys\nsys.exit(3)\nasync def play(prompt, model): ...\n",
    "statistics.py": "async def play(prompt, model): ...\n",
    "package/__init__.py": "",
    "package/inside.py": "from .other import HINT\nasync def play(prompt, model): return HINT\n",
    "package/other.py": "HINT = 'in a package'\n",
    "plain/folders/inside.py": "from plain.folders.other import HINT\nasync def play(prompt, model): return HINT\n",
    "plain/folders/other.py": "HINT = 'in plain folders'\n",
}
PROMPT = Prompt(id="p", messages=())


@pytest.fixture(autouse=True)
def as_before():
    """Nothing of a test's own stays in this process."""
    yield
    plugins._forget()
    REGISTERED.clear()
    OWN.clear()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("own")
    for name, text in FOLDERS_CODE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return (str(root),)


def found(kind, name, folders):
    return list(problems(kind, name, folders, field="here"))


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("mine:play", "played"),
        ("mine:more", "1x"),
        ("mine:anything", "2"),
        ("mine:wrapped", "wrapped"),
        ("mine:partly", "2x"),
        ("mine:alias", "played"),
        ("mine:Game", "1"),
        ("mine:Inherited", "1"),
        ("mine:shared", "1"),
        ("mine:called", "called"),
    ],
)
def test_functions_classes_and_objects_are_environments(name, answer, folders):
    assert found("environment", name, folders) == []
    environment = own(name, folders, turns=8)
    assert asyncio.run(environment(PROMPT, None)).answer == answer


@pytest.mark.parametrize("name", ["mine:Tools", "mine:MoreTools"])
def test_a_class_without_run_is_one_of_tools(name, folders):
    assert found("environment", name, folders) == []
    assert [tool["function"]["name"] for tool in own(name, folders, turns=8).schemas] == ["add"]


def test_a_class_of_tools_that_the_model_cannot_be_told_of_is_refused(folders):
    (problem,) = found("environment", "mine:Undescribed", folders)
    assert "has methods that are no tools: add has no docstring" in problem.reason
    with pytest.raises(RecipeError, match="no tools: add has no docstring") as caught:
        own("mine:Undescribed", folders, turns=8)
    assert caught.value.problems[0].field == "environment.kind"


GOES = '"""Goes.\n\n        Args:\n            {}: There.\n        """'


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("def go(self, place: str):\n        pass", "go has no docstring"),
        (f"def go(self, place):\n        {GOES.format('place')}", "place of go has no type"),
        (f"async def go(self, *, at: int, by):\n        {GOES.format('at')}", "by of go has no type hint"),
        ('def go(self, place: str):\n        """Goes to a place: there."""', "place of go has no line under Args"),
        ('def go(self, *places):\n        """Goes."""', "places of go has no type hint"),
        ('def go(self):\n        """Goes."""', None),
        (f"def go(self, place: 'str' = ''):\n        {GOES.format('place (str)')}", None),
        ('@staticmethod\n    def go(place):\n        """Goes."""', None),
    ],
)
def test_the_file_of_a_tool_class_says_which_methods_are_no_tools(method, why, tmp_path):
    (tmp_path / "walks.py").write_text(f"class Walk:\n    {method}\n")
    reasons = [problem.reason for problem in found("environment", "walks:Walk", (str(tmp_path),))]
    assert len(reasons) == (why is not None)
    assert why is None or why in reasons[0]


def test_an_import_that_changes_torchs_defaults_changes_nothing(tmp_path):
    (tmp_path / "careless_top.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.bfloat16)\ntorch.set_float32_matmul_precision('medium')\n"
        "async def play(prompt, model): ...\n"
    )
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    resolve("environment", "careless_top:play", (str(tmp_path),), field="here")
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == before


def test_a_class_is_made_for_every_trajectory_and_an_object_is_shared(folders):
    def twice(name):
        environment = own(name, folders, turns=8)
        return [asyncio.run(environment(PROMPT, None)).answer for _ in range(2)]

    assert (twice("mine:Game"), twice("mine:shared")) == (["1", "1"], ["1", "2"])


@pytest.mark.parametrize(
    ("module", "said"), [("package.inside", "in a package"), ("plain.folders.inside", "in plain folders")]
)
def test_a_module_in_a_package_or_in_plain_folders_finds_its_neighbors(module, said, folders):
    assert asyncio.run(own(f"{module}:play", folders, turns=8)(PROMPT, None)) == said
    assert {path.name for path in sources(f"{module}:play", folders).values()} >= {"inside.py", "other.py"}


SEEN = [
    ("environment", "absent:play", "there is no module 'absent' in"),
    ("environment", "package.absent:play", "there is no module 'package.absent' in"),
    ("environment", "plain.folders:play", "'plain.folders' is a folder without code of its own"),
    ("environment", "mine:ply", "defines no 'ply'; did you mean 'play'?"),
    ("environment", "__main__:play", "was written in a notebook or a script"),
    ("environment", "mine:", "not of the form module:name"),
    ("environment", ":play", "not of the form module:name"),
    ("environment", "mine.py:play", "there is no module 'mine.py'"),
    ("environment", "a/b:play", "not of the form module:name"),
    ("environment", "broken:f", "is not valid Python"),
    ("environment", "mine:plain", "mine:plain is not async"),
    ("environment", "mine:stream", None),
    ("environment", "mine:one", "takes 1 parameter, not 2: (prompt, model)"),
    ("environment", "mine:three", "takes 3 parameters, not 2"),
    ("environment", "mine:swapped", "in another order, (model, prompt); it is called with (prompt, model)"),
    ("environment", "mine:keyword", "needs the keyword 'hint'"),
    ("environment", "mine:number", "is not callable"),
    ("environment", "mine:made", "is not callable"),
    ("environment", "mine:computed", None),
    ("environment", "mine:Nothing", "is a class without a method run"),
    ("environment", "mine:OnlyBegins", "is a class without a method run"),
    ("environment", "mine:Sync", "is a class whose method run is not async"),
    ("environment", "mine:Narrow", "is a class whose method run takes 1 parameter, not 2"),
    ("environment", "mine:Greedy", "is a class whose __init__ takes 1 parameter, not 0"),
    ("environment", "mine:Derived", None),
    ("environment", "asyncio:sleep", "belongs to Python itself"),
    ("environment", "statistics:play", "has the name of a module of Python's own"),
    ("reward", "mine:short", "takes 1 parameter, not 3"),
    ("reward", "numpy:mean", "belongs to an installed package"),
    ("source", "numpy:load", "belongs to an installed package"),
    ("source", "mine:no_config", "takes 0 parameters, not 1"),
    ("algorithm", "mine:plain", "takes 2 parameters, not 1: (section)"),
    ("algorithm", "mine:number", "is not callable"),
    ("engine", "mine:make_two", "takes 2 parameters, not 1"),
    ("logger", "mine:Bare", "is a class that is made without arguments"),
    ("logger", "os:system", "belongs to Python itself"),
]


@pytest.mark.parametrize(("kind", "name", "says"), SEEN)
def test_what_is_wrong_is_told_with_name_reason_and_fix(kind, name, says, folders):
    """What the file cannot tell (no words here), importing it does; both before anything else is loaded."""
    wrong = found(kind, name, folders)
    if says is not None:
        (problem,) = wrong
        assert says in problem.reason and problem.field == "here" and problem.fix
    with pytest.raises(RecipeError) as caught:
        resolve(kind, name, folders, field="here")
    (problem,) = caught.value.problems
    assert (says or name) in problem.reason and problem.field == "here"
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("reward", "mine:reward"), ("reward", "mine:late"), ("engine", "mine:make"), ("logger", "mine:Log")],
)
def test_the_other_kinds_are_found_alike(kind, name, folders):
    assert found(kind, name, folders) == []
    assert callable(resolve(kind, name, folders, field="here"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("failing:play", "No module named 'nothing_of_that_name'"), ("leaving:play", "SystemExit: 3")],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(name, says, folders):
    with pytest.raises(RecipeError, match=f"environment.kind: {name} cannot be imported: .*{says}.* line"):
        own(name, folders, turns=8)


def test_a_worker_that_cannot_find_it_names_itself_and_where_it_looks():
    with pytest.raises(RecipeError) as caught:
        build(AlgorithmSection(name="only_there:build"), ("/far/away",), where="the worker of host/gpu:0 on host")
    assert str(caught.value).count("only_there") and "in the worker of host/gpu:0 on host" in str(caught.value)
    assert "/far/away" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems, "it is sent between processes"


def test_a_file_that_changed_is_imported_anew_and_so_is_another_of_its_name(tmp_path):
    def answer(folder):
        return asyncio.run(own("again:play", [str(folder)], turns=8)(PROMPT, None))

    for folder, said in (("a", "first"), ("b", "second")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "again.py").write_text("import hint\nasync def play(prompt, model): return hint.TEXT\n")
        (tmp_path / folder / "hint.py").write_text(f"TEXT = {said!r}\n")
    assert [answer(tmp_path / name) for name in ("a", "b", "a")] == ["first", "second", "first"]
    (tmp_path / "a" / "hint.py").write_text("TEXT = 'something longer'\n")
    assert answer(tmp_path / "a") == "something longer"


def test_a_file_beside_the_recipe_replaces_no_library(tmp_path):
    (tmp_path / "yaml.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "uses.py").write_text("import yaml\nasync def play(prompt, model): return yaml.safe_load('3')\n")
    assert asyncio.run(own("uses:play", [str(tmp_path)], turns=8)(PROMPT, None)) == 3
    with pytest.raises(RecipeError, match="also the name of a library that is in use"):
        (tmp_path / "yaml.py").write_text("async def play(prompt, model): ...\n")
        own("yaml:play", [str(tmp_path)], turns=8)
    assert sys.modules["yaml"].__file__ != str(tmp_path / "yaml.py")


def test_what_python_hands_over_is_found_by_its_name():
    async def mine(prompt, model):
        return Outcome(answer="from Python")

    name = register("environment", mine)
    assert found("environment", name, ()) == []
    assert asyncio.run(own(name, (), turns=8)(PROMPT, None)).answer == "from Python"
    wrong = register("environment", lambda prompt: None)
    assert "is not async" in found("environment", wrong, ())[0].reason

    async def swapped(model, prompt): ...

    assert "another order" in found("environment", register("environment", swapped), ())[0].reason

    async def build(section): ...

    assert "is async, and nobody would await it" in found("algorithm", register("algorithm", build), ())[0].reason


def test_every_kind_says_what_to_write():
    assert all(kind.wanted and kind.parameters for kind in KINDS.values())


# Algorithms ----------------------------------------------------------------------------------------------------------

ALGORITHM = """
raise_on_import = {raises}
if raise_on_import: raise RuntimeError("nobody runs this to read facts")
from functools import partial
from stretto.algorithms.advantages import group_normalized
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.catalog import CLIPPED, AlgorithmFacts
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms
ONE = 1
FEW = ONE
{facts}
def build(section):
    return Algorithm(name="x", scope="{scope}", needs=needed_streams(section) | {needs}, min_samples=2, drop=keep,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        advantage=partial(credit_by_group, advantages=group_normalized, kl=section.kl))
def other(section): return 3
def raising(section): return section.nothing
"""


def algorithm(folder, facts="", *, raises=False, scope="group", needs="set()", name="build"):
    text = ALGORITHM.format(facts=facts and f"FACTS = {facts}", raises=raises, scope=scope, needs=needs)
    (Path(folder) / "theirs.py").write_text(text)
    OWN.clear()
    return AlgorithmSection(name=f"theirs:{name}"), (str(folder),)


def test_facts_are_read_without_running_the_file(tmp_path):
    written = "AlgorithmFacts(scope='batch', min_samples=FEW, clip=None, surrogate=CLIPPED, needs=frozenset({'vstar'}))"
    section, folders = algorithm(tmp_path, written, raises=True)
    assert announce(section.name, folders) == []
    facts = facts_of("theirs:build")
    assert (facts.scope, facts.min_samples, facts.clip, facts.needs) == ("batch", 1, None, {"vstar"})
    assert facts.name == "theirs:build" and "min(rho*A" in facts.surrogate
    assert "theirs" not in sys.modules


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("AlgorithmFacts(scope='everything')", "is wrong at scope"),
        ("AlgorithmFacts(min_samples='two')", "is wrong at min_samples"),
        ("AlgorithmFacts(samples=2)", "has 'samples', which is no fact"),
        ("AlgorithmFacts(needs=open('x').read())", "cannot be read without running it"),
        ("AlgorithmFacts('x')", "is not written as a call with keywords"),
        ("AlgorithmFacts(surrogate='{other}')", "braces that mean nothing"),
        ("7", "is not written as a call with keywords"),
    ],
)
def test_facts_that_make_no_sense_are_told(written, says, tmp_path):
    section, folders = algorithm(tmp_path, written, raises=True)
    (problem,) = announce(section.name, folders)
    assert problem.field == "algorithm.name" and says in problem.reason and "theirs.py" in problem.reason
    assert find_facts(section.name) is not None, "other rules have something to go on"


def test_an_algorithm_without_facts_says_them_by_what_it_builds(tmp_path):
    section, folders = algorithm(tmp_path, scope="batch", needs="{'reference'}")
    assert announce(section.name, folders) == []
    assert (facts_of(section.name).scope, facts_of(section.name).needs) == ("group", frozenset())
    assert build(section, folders).scope == "batch"
    facts = facts_of(section.name)
    assert (facts.scope, facts.min_samples, facts.needs) == ("batch", 2, {"reference"})
    assert facts.learns_by_contrast and not replace(facts, contrasts=False).learns_by_contrast


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"facts": "AlgorithmFacts(scope='sample', min_samples=2)"}, "builds an algorithm with scope 'group'"),
        ({"facts": "AlgorithmFacts(min_samples=2, drops=True)"}, "builds an algorithm with drops False"),
        ({"facts": "AlgorithmFacts(min_samples=2)", "needs": "{'reference'}"}, "needs reference, and FACTS"),
        ({"needs": "{'values'}"}, "needs values, and FACTS"),
        ({"name": "other"}, "returned int, which is no Algorithm"),
        ({"name": "raising"}, "raised AttributeError: .*line"),
    ],
)
def test_what_is_built_is_held_against_what_was_said(made, says, tmp_path):
    section, folders = algorithm(tmp_path, **made)
    with pytest.raises(RecipeError, match=f"algorithm.name: theirs:.*{says}"):
        build(section, folders)


def test_a_kl_term_needs_no_word_in_the_facts(tmp_path):
    section, folders = algorithm(tmp_path, "AlgorithmFacts(min_samples=2)")
    section = section.model_copy(update={"kl": Kl(coef=0.1)})
    assert "reference" in build(section, folders).needs


def test_an_algorithm_that_python_hands_over_brings_its_facts():
    def mine(section):
        return build(AlgorithmSection(name="rloo"))

    mine.facts = AlgorithmFacts(min_samples=2, clip=None)
    name = register("algorithm", mine)
    assert build(AlgorithmSection(name=name)).min_samples == 2
    assert facts_of(name).min_samples == 2


# Sources -------------------------------------------------------------------------------------------------------------


def task(name, **more):
    return TaskSection.model_validate({"source": {"kind": f"mine:{name}", **more}, "prompt": None})


def test_rows_of_a_function_are_prompts(folders):
    root = Path(folders[0])
    asked = task("rows", config={"count": 2}).model_copy(update={"prompt": "{text}?"})
    assert [prompt.messages[-1]["content"] for prompt in load_prompts(asked, root)] == ["0?", "1?"]
    assert [prompt.id for prompt in load_prompts(task("prompts"), root)] == ["0", "1", "2"]
    assert peek(asked, root) == peek(task("prompts"), root), "checks look at the file, and run nothing"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("twice", "is that of another prompt already"),
        ("nothing", "gave no rows"),
        ("text", "returned str, which is no list of rows"),
        ("raises", "raised ValueError: no data here .*mine.py, line"),
        ("odd", "no plain value"),
        ("words", "the row is str, not a dict"),
        ("no_config", "takes 0 parameters"),
        ("absent", "defines no 'absent'"),
    ],
)
def test_what_a_source_gives_is_checked(name, says, folders):
    with pytest.raises(RecipeError, match=says) as caught:
        load_prompts(task(name), Path(folders[0]))
    assert all(isinstance(problem, Problem) for problem in caught.value.problems)
