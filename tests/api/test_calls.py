"""stretto from Python: what the functions take, give back and refuse, with functions of this file's as objects."""

import asyncio
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path

import pytest
import yaml

import stretto
from running import RECIPE, data_with, lines, metrics, written
from stretto import Outcome, Recipe, RecipeError, StrettoError
from stretto.api.functions import collect
from stretto.api.recipes import check_changed, open_recipe
from stretto.cli.main import main
from stretto.recipe.load import parse_recipe
from stretto.runtime.answers import only_sampling

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"


CELLS = [
    {"role": role, "devices": [f"localhost/cpu:{place}"]} for place, role in enumerate(("generate", "train", "reward"))
]
"""A device for each role, with a reward model."""


def longer(answer, prompt, signals):
    """Lives in no folder that workers look in, so it runs as an object."""
    return len(answer) / 4


async def twice(prompt, model):
    """Asks, and asks again in another conversation."""
    reply = await model.chat(prompt.messages)
    again = await model.chat([{"role": "user", "content": "0="}])
    return Outcome(answer=reply.text + again.text, signals={"turns": 2.0})


def mine(section):
    """An algorithm."""
    from stretto.algorithms.grpo import build

    return replace(build(section), name="mine")


def others(function):
    """Another of the same name."""

    def mine(section):
        return function(section)

    return mine


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with everything given as an object, what its callbacks saw, and what it was made from."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    scale, seen, pairs, spoken = 0.25, [], [], []

    def scaled(answer, prompt, signals):
        print("not shown")
        return signals["turns"] * scale

    def fails(event):
        spoken.append(event.step)
        raise LookupError(f"at {event.step}")

    given = {"rewards": [longer, {"kind": scaled, "weight": 0.5}], "environment": twice}
    callbacks = [seen.append, lambda step, metrics: pairs.append((step, metrics)), fails]
    notes = Notes()
    with pytest.MonkeyPatch.context() as place:
        place.chdir(folder.parent)  # away from this file, so that it cannot be imported by name
        recipe = data_with(run__steps=2, evaluate__every=0)
        run = stretto.train(recipe, **given, callbacks=callbacks, folder=folder, progress=notes)
    return run, given, seen, pairs, spoken, notes


class Notes:
    """Keeps the notes of a run."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def __getattr__(self, name):
        return lambda *rest: None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


# What comes back ------------------------------------------------------------------------------------------------------


def test_a_run_has_its_metrics_samples_folder_steps_and_model(trained):
    run, _, _, _, _, _ = trained
    assert run.metrics == lines(run.folder / "metrics.jsonl")
    assert run.steps == 2
    assert run.samples() == run.samples(2) == lines(run.folder / "samples" / "step-000002.jsonl")
    assert run.model == run.folder / "checkpoints" / "step-000002"
    assert run.recipe.run.steps == 2
    assert stretto.Run(run.folder).metrics == run.metrics
    with pytest.raises(FrozenInstanceError):
        run.folder = Path()


def test_what_is_not_there_is_said_with_what_is(trained, elsewhere):
    with pytest.raises(RecipeError, match=r"samples\(7\).*\n.*from 1 to 2"):
        trained[0].samples(7)
    with pytest.raises(RecipeError, match="is not a run"):
        stretto.Run(elsewhere)
    with pytest.raises(RecipeError, match="is not a run"):
        stretto.resume(elsewhere)


def test_rewards_and_environment_that_nobody_can_import_are_called(trained):
    run = trained[0]
    for row in run.samples(1):
        assert len(row["conversations"]) == 2
        parts = row["reward"]["parts"]
        assert parts == {"longer": len(row["answer"]) / 4, "scaled": 0.5}
        assert row["reward"]["value"] == pytest.approx(parts["longer"] + 0.25)


def test_the_recipe_of_the_run_says_what_was_given(trained):
    recipe = trained[0].recipe
    assert [part.kind for part in recipe.rewards] == ["<function longer>", "<function scaled>"]
    assert [part.weight for part in recipe.rewards] == [1.0, 0.5]
    assert recipe.environment.kind == "<function twice>"
    inputs = json.loads((trained[0].folder / "inputs.json").read_text())["inputs"]
    assert set(inputs["rewards"]) == {"<function longer>", "<function scaled>"}
    assert inputs["environment.kind"]["<function twice>"]["sha256"]


def test_callbacks_are_called_after_each_step_and_a_failure_is_told_once(trained):
    run, _, seen, pairs, spoken, notes = trained
    assert [(event.step, event.steps, event.folder) for event in seen] == [(1, 2, run.folder), (2, 2, run.folder)]
    for event, (step, numbers), row in zip(seen, pairs, run.metrics, strict=True):
        assert dict(event.metrics) == numbers == {key: value for key, value in row.items() if key != "step"}
        assert step == event.step
    assert spoken == [1, 2]
    told = [note for note in notes.notes if "callback" in note]
    assert told == ["callback fails: step 1: LookupError: at 1; the run goes on, and this is said once"]


def test_an_evaluation_asks_with_the_same_functions(trained):
    run, given, *_ = trained
    result = run.evaluate()
    assert (result.n, result.asked) == (4, 4)
    assert result == stretto.evaluate(run.folder, **given)
    with pytest.raises(RecipeError, match=r"rewards\.0\.kind: <function longer> was given as a Python object"):
        stretto.evaluate(run.folder)


def test_answers_are_greedy_repeatable_and_in_order(trained):
    run = trained[0]
    asked = ["01=", [{"role": "user", "content": "1="}]]
    answers = stretto.sample(run, asked, n=2, temperature=0)
    assert [(answer.prompt, answer.attempt) for answer in answers] == [("01=", 0), ("01=", 1), ("1=", 0), ("1=", 1)]
    assert answers[0].text == answers[1].text
    assert all(answer.failure is None and 1 <= answer.tokens <= 4 for answer in answers)
    hot = run.sample("01=", n=8)
    assert hot == run.sample("01=", n=8) != run.sample("01=", n=8, seed=6)
    (short,) = run.sample("01=", max_new_tokens=1)
    assert short.tokens == 1


def test_a_prompt_that_does_not_fit_has_a_failure_and_no_answer(trained):
    answers = trained[0].sample(["0" * 40, "0="])
    assert [answer.failure is None for answer in answers] == [False, True]
    assert (answers[0].text, answers[0].stop) == ("", None)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": "x"}, "seed"),
        ({"prompts": [1]}, "prompts.0"),
        ({"prompts": ["0=", []]}, "prompts.1"),
        ({"prompts": 3}, "prompts"),
        ({"prompts": [[{"role": "user"}]]}, "prompts.0"),
    ],
)
def test_what_cannot_be_asked_is_refused(trained, options, field):
    with pytest.raises(RecipeError) as refused:
        stretto.sample(trained[0], **({"prompts": "0="} | options))
    assert [problem.field for problem in refused.value.problems] == [field]


# Resuming -------------------------------------------------------------------------------------------------------------


JUDGED = {
    "roles": {"reward_model": {"name": "scratch"}},
    "rewards": [{"name": "right", "kind": "exact"}, {"name": "quality", "kind": "model"}],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"kind": "tools"}, "algorithm": {"name": "grpo", "credit": "turn"}},
        JUDGED | {"placement": {"cluster": "3xcpu", "strategy": "separate", "cells": CELLS}},
        JUDGED | {"placement": {"cluster": "2xcpu", "strategy": "interleave", "fractions": "I2"}},
        {"placement": {"cluster": "2xcpu", "strategy": "separate", "staleness": 1}},
    ],
    ids=["turns", "cells", "fractions", "lag"],
)
def test_a_run_can_be_asked_whatever_its_rewards_environment_and_devices_were(elsewhere, changes):
    """What asking leaves out of a run's recipe must not be missed by what is left of it."""
    recipe = open_recipe(data_with(**changes), deep=False)
    check_changed(only_sampling(recipe), elsewhere, training=False)


def test_a_resume_asks_for_the_same_functions_again(trained):
    run, given, *_ = trained
    more = {"changes": {"run.steps": 3}, "allow": ["run.steps"], "quiet": True}
    with pytest.raises(RecipeError) as refused:
        stretto.resume(run, **more)
    assert {problem.field for problem in refused.value.problems} == {
        "rewards.0.kind", "rewards.1.kind", "environment.kind",
    }  # fmt: skip
    assert all("stretto.resume(folder, " in problem.fix for problem in refused.value.problems)

    def longer(answer, prompt, signals):
        return 1.0

    other = given | {"rewards": [longer, given["rewards"][1]]}
    with pytest.raises(RecipeError, match="<function longer> differs from what this run was trained with"):
        stretto.resume(run, **other, **more)
    assert stretto.Run(run.folder).steps == 2


def test_the_command_line_says_so_too(trained, capsys):
    assert main(["resume", str(trained[0].folder)]) == 2
    assert "was given as a Python object" in capsys.readouterr().err


def test_a_resumed_run_equals_one_that_was_not_interrupted(elsewhere):
    given = {"rewards": [longer], "quiet": True}
    whole = stretto.train(data_with(), folder="whole", **given)
    half = stretto.train(data_with(run__steps=2), folder="half", **given)
    seen = []
    again = stretto.resume(
        half, **given, callbacks=[seen.append], callbacks_strict=True, changes="run.steps=3", allow=["run.steps"]
    )
    assert [event.step for event in seen] == [3]
    assert metrics(again.folder) == metrics(whole.folder)


# Recipes --------------------------------------------------------------------------------------------------------------


def test_path_dict_and_recipe_are_the_same_recipe(elsewhere):
    path = written(elsewhere)
    of_path = stretto.check(path, changes=["batch.samples=1"])
    assert [problem.field for problem in of_path] == ["batch.samples"]
    for source in (str(path), data_with(), parse_recipe(data_with())):
        assert stretto.check(source, changes=["batch.samples=1"]) == of_path
        assert stretto.check(source, changes={"batch.samples": 1}) == of_path
        assert stretto.check(source) == []
    assert stretto.check(data_with(), deep=True) == []


def test_a_recipe_by_hand_keeps_every_rule():
    assert [problem.field for problem in stretto.check(Recipe(algorithm={"name": "ppo"}))] == ["roles.critic"]
    copied = Recipe().model_copy(update={"seed": "many", "color": 1})
    assert {problem.field for problem in stretto.check(copied)} == {"seed", "color"}
    with pytest.raises(RecipeError, match=r"roles\.critic"):
        stretto.train(parse_recipe(data_with(algorithm={"name": "ppo"})))
    assert not Path("runs").exists()


ENDLESS = {}
ENDLESS["again"] = ENDLESS


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (3, "recipe"),
        (None, "recipe"),
        ("absent.yaml", "absent.yaml"),
        ({"seed": {1, 2}}, "seed"),
        ({"seed": float("nan")}, "seed"),
        ({5: {}}, "5"),
        ({None: 2}, "None"),
        ({"optimizer": {1: 2}}, "optimizer.1"),
        (ENDLESS, "again.again"),
        ({"batch": {"sampels": 1}}, "batch.sampels"),
    ],
)
def test_what_is_no_recipe_is_refused(source, field):
    assert field in [problem.field for problem in stretto.check(source)]
    with pytest.raises(RecipeError) as refused:
        stretto.train(source)
    assert field in [problem.field for problem in refused.value.problems]


def test_a_dict_is_read_and_not_kept_and_an_algorithm_from_a_notebook_is_given_again(elsewhere):
    data = {**RECIPE, "run": {"steps": 1}, "batch": {"prompts": 2, "samples": 2}, "seed": 3}
    before = json.dumps(data)
    changes = ["seed=4", {"evaluate.every": 0}]
    run = stretto.train(data, changes=changes, algorithm=mine, name="mine", quiet=True)
    assert json.dumps(data) == before
    assert (run.folder, run.recipe.seed) == (Path("runs/mine-001"), 4)
    assert run.recipe.algorithm.name == "<function mine>"
    assert run.evaluate().n == 4 and len(stretto.sample(run.folder, "0=")) == 1, "whoever asks needs none"
    more = {"changes": {"run.steps": 2}, "allow": ["run.steps"], "quiet": True}
    with pytest.raises(RecipeError, match=r"algorithm\.name: <function mine> was given as a Python object"):
        stretto.resume(run, **more)
    with pytest.raises(RecipeError, match=r"algorithm\.name: <function mine> differs from what this run was trained"):
        stretto.resume(run, algorithm=others(mine), **more)
    assert stretto.resume(run, algorithm=mine, **more).steps == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"changes": None}, "changes"),
        ({"changes": 5}, "changes"),
        ({"changes": [("optimizer.lr", 1e-4)]}, "changes"),
        ({"changes": {5: 1}}, "5"),
        ({"name": "a/b"}, "name"),
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\0b"}, "name"),
    ],
)
def test_changes_and_names_that_are_none_are_refused(given, field):
    with pytest.raises(RecipeError) as refused:
        stretto.train(data_with(), **given)
    assert [problem.field for problem in refused.value.problems] == [field]
    assert not Path("runs").exists()


def test_a_plan_is_what_the_command_line_prints(elsewhere, capsys):
    path = elsewhere / "r.yaml"
    path.write_text(yaml.safe_dump({"batch": {"prompts": 16, "samples": 8}, "placement": {"price_per_gpu_hour": 2}}))
    plans = stretto.plan(path, cluster="2xH100")
    assert main(["plan", str(path), "--cluster", "2xH100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plans.document()))
    assert plans.best == plans.plans[0]
    assert plans.best.cost_per_step == pytest.approx(4 * plans.best.seconds["step"] / 3600)
    assert plans.rejected.keys() == {"interleave I1", "interleave I2"}
    with pytest.raises(RecipeError, match="does not say which devices"):
        stretto.plan(path)


# Functions ------------------------------------------------------------------------------------------------------------


class Judge:
    """Callable, with state."""

    def __call__(self, answer, prompt, signals):
        return 1.0


async def slow(answer, prompt, signals):
    """It would be a reward, and is nothing else."""


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        ({"rewards": [3]}, None, None),
        ({"rewards": longer}, "rewards", r"write rewards=\[...\]"),
        ({"rewards": [lambda answer: 1.0]}, "rewards.0", r"takes 1 parameter, not 3: \(answer, prompt, signals\)"),
        ({"rewards": [eval]}, "rewards.0", "is no function of a Python file of yours"),
        ({"rewards": [partial(os.system)]}, "rewards.0", "is no function of a Python file of yours"),
        ({"environment": longer}, "environment", "is not async"),
        ({"environment": slow}, "environment", r"cannot be called with \(prompt, model\)"),
        ({"environment": 3}, "environment", "is an object of int without a method run"),
        ({"algorithm": longer}, "algorithm", r"cannot be called with \(section\)"),
        ({"algorithm": lambda section: None}, "algorithm.name", "returned NoneType, which is no Algorithm"),
        ({"callbacks": [print, slow]}, "callbacks.1", "is async"),
        ({"callbacks": ["print"]}, "callbacks.0", "is a str and no function"),
        ({"callbacks": longer}, "callbacks", "no list"),
        ({"callbacks": [longer]}, "callbacks.0", "cannot be called with event"),
        ({"callbacks": 3}, "callbacks", "is a int and no list"),
    ],
)
def test_a_function_that_does_not_fit_is_named_before_anything_loads(given, field, text):
    with pytest.raises(RecipeError) as refused:
        stretto.train(data_with(), **given)
    if field is None:
        assert [problem.field for problem in refused.value.problems] == ["rewards.0.kind"]
        return
    assert refused.value.problems[0].field == field
    assert re.search(text, str(refused.value))
    assert not Path("runs").exists()


def test_functions_have_names_of_their_own_in_the_recipe(elsewhere):
    functions, changes = collect(rewards=[lambda *_: 1, lambda *_: 2, Judge(), "math"], root=elsewhere)
    assert [part["kind"] for part in changes["rewards"]] == [
        "<function lambda>", "<function lambda_2>", "<function Judge>", "math",
    ]  # fmt: skip
    assert [part["name"] for part in changes["rewards"]] == ["lambda", "lambda_2", "Judge", "math"]
    assert set(functions.rewards) == {"<function lambda>", "<function lambda_2>", "<function Judge>"}


class Asks:
    """An environment."""

    async def run(self, prompt, model):
        return await twice(prompt, model)


class Adds:
    """An environment of tools."""

    def add(self, amount: int) -> int:
        """Adds.

        Args:
            amount: How much.
        """
        return amount


def graded(scale, answer, prompt, signals):
    return scale * len(answer)


def test_what_was_given_is_told_by_its_own_source(elsewhere):
    """Not by that of what stretto wraps it in; what a partial fills in belongs to it."""

    def told(**given):
        functions, _ = collect(**given, root=elsewhere)
        (digest,) = functions.sources(functions.kinds).values()
        return digest

    rewards = [partial(graded, 1.0), partial(graded, 2.0), Judge(), Judge().__call__, longer]
    digests = [told(environment=each) for each in (twice, Asks, Asks(), Asks().run, Adds)]
    digests += [told(rewards=[each]) for each in rewards]
    assert None not in digests and len(set(digests)) == 7
    assert digests[1] == digests[2] == digests[3] and digests[7] == digests[8]
    assert told(algorithm=mine) != told(algorithm=others(mine))


def test_a_function_that_workers_find_is_named_as_they_do(elsewhere, monkeypatch):
    (elsewhere / "judges_of_mine.py").write_text(
        "def first(*_):\n    return 1.0\n\n\ndef outer():\n    return lambda *_: 1.0\n"
    )
    monkeypatch.syspath_prepend(elsewhere)
    import judges_of_mine

    functions, changes = collect(rewards=[judges_of_mine.first, judges_of_mine.outer(), longer], root=elsewhere)
    assert [part["kind"] for part in changes["rewards"]] == [
        "judges_of_mine:first", "<function lambda>", "<function longer>",
    ]  # fmt: skip
    assert set(functions.nameless) == {"<function lambda>", "<function longer>"}
    elsewhere_again = elsewhere / "nowhere"
    elsewhere_again.mkdir()
    monkeypatch.chdir(elsewhere_again)
    assert collect(rewards=[judges_of_mine.first], root=elsewhere_again)[1]["rewards"][0]["kind"] == "<function first>"


def test_several_devices_need_functions_with_a_name():
    with pytest.raises(RecipeError) as refused:
        stretto.train(data_with(placement__cluster="2xcpu"), rewards=[longer], environment=twice, algorithm=mine)
    assert [problem.field for problem in refused.value.problems] == [
        "rewards.0.kind", "environment.kind", "algorithm.name",
    ]  # fmt: skip
    assert "name it as module:name" in str(refused.value)
    assert not Path("runs").exists()


def test_an_environment_given_as_an_object_runs_in_hosts_if_these_can_import_it(elsewhere, monkeypatch):
    (elsewhere / "game_of_mine.py").write_text(
        "import os\nfrom stretto import Outcome\n\nasync def play(prompt, model):\n"
        "    reply = await model.chat(prompt.messages)\n"
        "    return Outcome(answer=reply.text, signals={'pid': os.getpid()})\n"
    )
    monkeypatch.syspath_prepend(elsewhere)
    import game_of_mine

    here = os.getpid()
    data = data_with(environment__hosts=1, run__steps=1, evaluate__every=0)
    given = {"rewards": [lambda answer, prompt, signals: float(signals["pid"] != here)], "quiet": True}
    run = stretto.train(data, environment=game_of_mine.play, **given)
    assert run.metrics[0]["reward/mean"] == 1
    with pytest.raises(RecipeError, match=r"environment\.hosts: has no effect: only this process has <function twice>"):
        stretto.train(data, environment=twice, **given)


# Callbacks that end a run ---------------------------------------------------------------------------------------------


def stops(error, *, at=1):
    """A callback that raises after a step."""

    def callback(event):
        if event.step == at:
            raise error

    return callback


@pytest.mark.parametrize(
    ("error", "raised", "strict"),
    [(KeyboardInterrupt(), KeyboardInterrupt, None), (OSError("full"), StrettoError, True)],
)
def test_a_callback_ends_a_run_with_a_checkpoint(error, raised, strict):
    recipe = data_with(checkpoint__every=100, evaluate__every=0)
    with pytest.raises(raised) as ended:
        stretto.train(recipe, callbacks=[stops(error)], callbacks_strict=strict, folder="run", quiet=True)
    assert strict is None or "callback callback: step 1: OSError: full" in str(ended.value)
    run = stretto.Run("run")
    assert (run.steps, run.model.name) == (1, "step-000001")
    assert stretto.resume(run, quiet=True).steps == 3


# Where it is called ---------------------------------------------------------------------------------------------------


def test_it_can_be_called_where_a_loop_runs_and_ctrl_c_leaves_a_checkpoint():
    """As in a notebook: the key reaches the main thread, the run is in another."""
    main_thread = threading.get_ident()

    def press(event):
        assert threading.get_ident() != main_thread
        signal.pthread_kill(main_thread, signal.SIGINT)
        threading.Event().wait(0.1)

    async def cell():
        answers = stretto.sample(data_with(model__scratch__warmup_steps=1), "0=")
        with pytest.raises(KeyboardInterrupt):
            stretto.train(
                data_with(checkpoint__every=100, evaluate__every=0),
                rewards=[longer],
                callbacks=[press],
                folder="run",
                quiet=True,
            )
        return answers

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        assert len(loop.run_until_complete(cell())) == 1
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)
    run = stretto.Run("run")
    assert 1 <= run.steps < 3
    assert run.model.name == f"step-{run.steps:06d}"


def test_copies_of_a_launcher_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="started 2 copies"):
        stretto.train(data_with())


def test_importing_the_package_and_its_functions_loads_nothing_heavy():
    code = (
        "import sys, stretto\nassert 'stretto.api' not in sys.modules and 'pydantic' not in sys.modules\n"
        "assert set(stretto.__all__) <= set(dir(stretto))\nfrom stretto import train, plan\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True, encoding="utf-8")
    assert done.stdout == "[]\n"


# The page -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train", "resume", "evaluate", "sample", "plan", "check"])
def test_the_page_names_every_argument_of_a_function(name):
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"## {name}\n")
    rows = re.findall(r"^\| `(\w+)` \| ", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == list(inspect.signature(getattr(stretto, name)).parameters)
