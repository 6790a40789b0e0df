"""Tasksets of verifiers: played by its own machinery, recorded by ours, judged by its rewards; refused where they would
need what a coroutine in this process has not."""

import asyncio
import json
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rolled import rolled
from running import RECIPE, lines
from stretto.algorithms.base import build
from stretto.cli.main import main
from stretto.environments import resolve
from stretto.environments.verifiers import tasksets
from stretto.errors import RecipeError
from stretto.models.load import load
from stretto.recipe.schema import (
    AlgorithmSection,
    ModelSection,
    Scratch,
    TaskSection,
    VerifiersSection,
    VerifiersSource,
)
from stretto.tasks.source import load_prompts, peek
from stretto.training.trainer import Trainer
from talking import Talk
from tiny import CPU, SCRATCH_FILES, SETTINGS, Recorder

HERE = Path(__file__).parent
SECTION = VerifiersSection()


def again(count=8, root=HERE, taskset="again", **config):
    """Prompts of a taskset; the one of `again.py` asks twice."""
    return load_prompts(TaskSection(source=VerifiersSource(taskset=taskset, count=count, config=config)), root)


@pytest.mark.slow
def test_32_episodes_of_two_turns_have_all_ids_and_masks_and_the_engines_logprobs():
    scratch = Scratch(layers=1, width=16, heads=2, characters="0123456789+", context=64, warmup_steps=0)
    policy = load(
        ModelSection(name="scratch", scratch=scratch, dtype="float64", adapter=None), SCRATCH_FILES, seed=0, device=CPU
    )
    before = set(Path(tempfile.gettempdir()).glob("stretto-*"))
    environment = resolve(SECTION, (str(HERE),))
    made = rolled(policy, environment, again(), attempts=4, served=True)
    assert len(made) == 32 and [each.failure for each in made] == [None] * 32
    talks = [talk for each in made for talk in each.conversations]
    assert len(talks) == 32 and all(len(talk.turns) == 2 for talk in talks)
    for talk in talks:
        assert len(talk.tokens) == len(talk.trained) == len(talk.logprobs)
        assert int(talk.trained.sum()) == sum(tokens for _, tokens in talk.turns) >= 2
    with closing(Trainer(policy, build(AlgorithmSection()), Recorder(), **SETTINGS)) as trainer:
        for talk, found in zip(talks, trainer.score(talks), strict=True):
            np.testing.assert_allclose(found, talk.logprobs[talk.trained], atol=1e-9)
    assert environment.open is None, "the last episode closes what they shared"
    assert set(Path(tempfile.gettempdir()).glob("stretto-*")) <= before, "boxes disappear"


def played(say, prompt=None, environment=None, **config):
    """The outcome of one episode, and the model that was talked to."""
    prompt = prompt or again(**config)[1]
    talk = Talk(prompt, say)
    environment = environment or resolve(SECTION, (str(HERE),))
    return asyncio.run(served(environment, prompt, talk)), talk


async def served(environment, prompt, talk):
    """Runs an episode with an address, as a run does."""
    from stretto.environments.addresses import Addresses

    addresses = Addresses(vocabulary=200)
    talk.reach = addresses.open
    try:
        with addresses.running(talk):
            return await environment(prompt, talk)
    finally:
        await addresses.close()


def test_rewards_and_metrics_are_signals_and_the_last_reply_is_the_answer():
    outcome, talk = played(["7", "1"])
    assert outcome.answer == "1"
    assert outcome.signals == {"turns": 2, "truncated": 0, "length": 1, "right": 1, "reward": 2}
    assert talk.texts() == ["<|user|>0+1<|assistant|>7<|end|><|user|>1<|assistant|>1<|end|>"]
    assert played(["1", "7"])[0].signals["reward"] == 0


def test_the_settings_of_a_taskset_reach_its_tasks_and_turns_are_limited():
    environment = resolve(VerifiersSection(turns=1), (str(HERE),))
    outcome, talk = played(["4", "5"], environment=environment, largest=1, doubt="?")
    assert outcome.signals["turns"] == 1 and outcome.signals["truncated"] == 1
    assert "?" not in talk.texts()[0]


def test_prompts_are_named_by_their_tasks_and_hide_the_answer():
    few, many = again(count=3), again(count=20)
    assert len(few) == 3 and [each.id for each in few] == [each.id for each in many[:3]]
    assert len({each.id for each in many}) == 20
    assert few[2].messages == ({"role": "user", "content": "0+2"},) and few[2].reference is None
    assert few[2].tags == {"taskset": "again", "config": {}, "count": 3, "index": 2}


PLAIN = """
import verifiers.v1 as vf
class Plain(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    {task}
class Tasks(vf.Taskset[Plain, vf.TasksetConfig]):
    def load(self):
        return [Plain(vf.TaskData(prompt="1", system_prompt="Be brief."{data}), self.config.task)]
{rest}
__all__ = ["Tasks"{names}]
"""
REWARD = "@vf.reward\n    async def fine(self, trace) -> float:\n        "
FAILURES = {
    "broken": (REWARD + "return 1 / 0", "ZeroDivisionError"),
    "runs_programs": (REWARD + "return 1.0\n    async def setup(self, trace, runtime):\n        "
                      "await runtime.run(['rm', '-rf', '/nothing'], {})", "runs programs (rm)"),
    "needs_uv": (REWARD + "return 1.0\n    async def finalize(self, trace, runtime):\n        "
                 "await runtime.run_uv_script('print(1)')", "runs programs (sh)"),
    "slow": (REWARD + "import asyncio; await asyncio.sleep(60)", "scoring_timeout"),
}  # fmt: skip


def written(folder, name, task="pass", data="", rest="", names=""):
    (folder / f"{name}.py").write_text(PLAIN.format(task=task, data=data, rest=rest, names=names))
    return folder


@pytest.mark.parametrize("name", FAILURES)
def test_what_goes_wrong_in_a_task_is_a_failure_and_no_reward(tmp_path, name):
    task, said = FAILURES[name]
    data = ", timeout=vf.TaskTimeout(scoring=0.2)" if name == "slow" else ""
    (prompt,) = again(root=written(tmp_path, name, task, data), taskset=name)
    with pytest.raises(Exception, match=said.replace("(", r"\(").replace(")", r"\)")):
        played(["1"], prompt, resolve(SECTION, (str(tmp_path),)))


def test_a_plain_taskset_asks_once_with_its_system_message(tmp_path):
    (prompt,) = again(root=written(tmp_path, "plain", REWARD + "return 0.5"), taskset="plain")
    outcome, talk = played(["1"], prompt, resolve(SECTION, (str(tmp_path),)))
    assert outcome.signals == {"turns": 1, "truncated": 0, "fine": 0.5, "reward": 0.5}
    assert [dict(message)["role"] for message in prompt.messages] == ["system", "user"]
    assert len(talk.read) == 1 and "Be brief." in talk.read[0]


TWO = """
class Two(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()
class Both(vf.Env[Two]):
    async def run(self, task, agents): ...
"""
PINNED = """
class One(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig(harness={"id": "bash"})
class Alone(vf.Env[One]):
    async def run(self, task, agents): ...
"""
REFUSED = {
    "two_agents": ({"rest": TWO, "names": ', "Both"'}, "several agents (one, other)"),
    "own_harness": ({"rest": PINNED, "names": ', "Alone"'}, "harness of its own, bash"),
    "boxed": ({"task": "NEEDS_CONTAINER = True"}, "needs a container"),
    "imaged": ({"data": ', image="debian"'}, "needs a container"),
    "empty_names": ({"rest": "Tasks = 3"}, "cannot be loaded: TypeError"),
    "raises": ({"rest": "raise RuntimeError('out of beans')"}, "out of beans"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_this_process_cannot_give_is_refused_when_it_is_loaded(tmp_path, name):
    parts, said = REFUSED[name]
    with pytest.raises(RecipeError) as refused:
        again(root=written(tmp_path, name, **parts), taskset=name)
    (problem,) = refused.value.problems
    assert problem.field == "task.source.taskset" and said in problem.reason and problem.fix


def test_settings_that_a_taskset_does_not_know_are_named():
    with pytest.raises(RecipeError) as refused:
        again(smallest=3)
    (problem,) = refused.value.problems
    assert problem.field == "task.source.config.smallest"
    with pytest.raises(RecipeError, match="has no effect"):
        load_prompts(TaskSection(source=VerifiersSource(taskset="again"), prompt="{a}"), HERE)


@pytest.mark.parametrize(("name", "said"), [("no_such_taskset", "there is no taskset"), ("json", "belongs to Python")])
def test_a_taskset_that_is_not_there_is_seen_without_importing_anything(name, said):
    looked = peek(TaskSection(source=VerifiersSource(taskset=name)), HERE)
    assert [said in problem.reason for problem in looked.problems] == [True]
    assert not looked.prompts and not looked.complete


def test_games_that_would_download_lists_of_words_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    with pytest.raises(RecipeError, match="need the nltk data words"):
        again(taskset="textarena", game="Wordle-v0")


def test_a_taskset_of_verifiers_own_is_found():
    assert tasksets.missing("textarena", (str(HERE),)) is None
    assert tasksets.missing("again", (str(HERE),)) is None


@pytest.mark.slow
def test_two_turn_episodes_are_trained_on_for_three_steps(tmp_path):
    scratch = {"layers": 1, "width": 16, "heads": 2, "characters": "0123456789+", "context": 64, "warmup_steps": 0}
    recipe = {
        **RECIPE,
        "model": {"name": "scratch", "scratch": scratch, "dtype": "float32", "adapter": None},
        "task": {"source": {"kind": "verifiers", "taskset": "again", "count": 16}, "holdout": {"prompts": 4}},
        "environment": {"kind": "verifiers"},
        "rewards": [{"name": "right", "kind": "signal", "signal": "reward"}],
        "batch": {"prompts": 8, "samples": 4},
        "run": {"steps": 3, "folder": str(tmp_path / "run")},
    }
    (tmp_path / "again.py").write_text((HERE / "again.py").read_text())
    (tmp_path / "again.yaml").write_text(json.dumps(recipe))
    assert main(["train", str(tmp_path / "again.yaml")]) == 0
    rows = [row for path in sorted((tmp_path / "run" / "samples").glob("step-*")) for row in lines(path)]
    assert len(rows) == 3 * 32 and all(row["failure"] is None and row["used"] for row in rows)
    for talk in (talk for row in rows for talk in row["conversations"]):
        assert len(talk["tokens"]) == len(talk["trained"]) == len(talk["logprobs"])
        assert talk["text"].count("<|assistant|>") >= 2
