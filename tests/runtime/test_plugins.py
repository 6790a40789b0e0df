"""Runs whose environment, reward and algorithm are files beside it: one device or several, resumed, evaluated."""

import asyncio
import json
import os
import sys
from dataclasses import replace

import pytest

import stretto
from crewed import STEPS, alone, distance, together
from running import Quiet, assert_same_run, metrics, recipe_in, resume, samples, start, tensors
from stretto.cli.main import main
from stretto.errors import RecipeError, WeightsError
from stretto.runtime import questions, session
from stretto.workers.launchers.inprocess import ThreadLauncher
from stretto.workers.launchers.ray import RayLauncher
from stretto.workers.worker import Worker

FILES = {
    "mygame.py": """
from stretto import Outcome
from hints import HINT

async def play(prompt, model):
    messages = list(prompt.messages)
    for turn in (1, 2):
        reply = await model.chat(messages)
        if reply.text == prompt.reference:
            break
        messages += [reply, {"role": "user", "content": HINT}]
    return Outcome(answer=reply.text, signals={"turns": float(turn)})
""",
    "hints.py": "HINT = '0='\n",
    "judge.py": """
def early(answer, prompt, signals):
    return (answer == prompt["reference"]) / signals["turns"] + 0.1 * answer.count("1")

def long(answer, prompt, signals):
    return float(len(answer))
""",
    "mine.py": """
from functools import partial
from stretto.algorithms.base import Algorithm, keep
from stretto.algorithms.catalog import AlgorithmFacts
from stretto.algorithms.credit import credit_by_group, needed_streams
from stretto.algorithms.losses import policy_terms

FACTS = AlgorithmFacts(scope="group", min_samples=2)

def halved(rewards):
    return (rewards - rewards.mean()) / 2

def build(section):
    return Algorithm(name="halved", scope="group", needs=needed_streams(section), min_samples=2,
        terms=policy_terms(section, denominator="tokens", scale="token"),
        advantage=partial(credit_by_group, advantages=halved, kl=section.kl), drop=keep)
""",
    "logs.py": """
class Log:
    def __init__(self, folder): self.file = folder / "log.txt"
    def metrics(self, step, values):
        with self.file.open("a") as file: file.write(f"{step} ")
    def close(self): pass
print("what a plug-in prints")
class Raising(Log):
    def metrics(self, step, values): raise OSError("no such server")
""",
    "waits.py": "import time\ntime.sleep(3)\nclass Log:\n    def __init__(self, folder): ...\n",
    "engines.py": """
from stretto.types import Receipt
from stretto.engines.scripted import ScriptedEngine
from stretto.weights.tensors import checksums
def one(policy):
    one = policy.tokenizer.convert_tokens_to_ids("1")
    return ScriptedEngine(lambda request: [one] * (1 + request.key % 2) + [*policy.stop_tokens])
class Apart(ScriptedEngine):
    def __init__(self, policy):
        super().__init__(one(policy).script)
        self.policy, self.held = policy, {}
        self.take()
    def take(self):
        network = self.policy.network
        self.held = checksums([*network.named_parameters(), *network.named_buffers()])
    def receive(self, weights):
        self.take()
        return super().receive(weights)
    def holds(self): return Receipt(version=self.version, manifest={}, shared=False)
    def checksums(self, names): return {name: self.held[name] for name in names}
class Stale(Apart):
    def receive(self, weights): return ScriptedEngine.receive(self, weights)
class Silent(Apart):
    def checksums(self, names): return None
def bad(policy): return policy
def here(policy): raise RuntimeError("only here")
""",
}
OWN = {
    "environment__kind": "mygame:play",
    "rewards": [{"name": "early", "kind": "judge:early"}],
    "algorithm__name": "mine:build",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_all_three_give_two_cells_the_weights_of_one(project):
    recipe = recipe_in(project, model__dtype="float64", algorithm__kl={"coef": 0.1}, **OWN)
    single, reports = asyncio.run(alone(recipe, project))
    weights, *_ = asyncio.run(together(recipe, project, "elastic"))
    assert distance(single, weights) < 1e-10
    assert len(reports) == STEPS


def test_a_run_of_ones_own_parts_resumes_to_the_bit_and_is_evaluated(project):
    whole = start(project, **OWN).folder
    halves = start(project, run__steps=2, **OWN).folder
    resume(halves, changes=["run.steps=3"], allow=["run.steps"])
    assert_same_run(whole, halves, step=3)
    rows = [json.loads(line) for text in samples(whole).values() for line in text.splitlines()]
    assert {row["environment"] for row in rows} == {"mygame:play"}
    assert any("0=" in row["conversations"][0]["text"].partition("=")[2] for row in rows), "a second turn"
    assert questions.evaluate_run(whole).n == 4
    assert metrics(whole)[-1]["eval/accuracy"] is not None
    (project / "mine.py").write_text("raise RuntimeError('whoever asks builds no algorithm')\n")
    assert questions.evaluate_run(whole).n == 4
    (project / "mine.py").unlink()
    assert len(stretto.sample(whole, "0=", n=2)) == 2
    assert stretto.evaluate(whole, changes="log=[absent:Log]").n == 4


def test_changed_files_are_refused_on_resume_unless_they_are_allowed(project):
    run = start(project, run__steps=1, evaluate__every=0, **OWN).folder
    files = {"environment.kind": "hints", "rewards": "judge", "algorithm.name": "mine"}
    record = json.loads((run / "inputs.json").read_text())["inputs"]
    assert all(module in record[field] for field, module in files.items())
    for module in files.values():
        (project / f"{module}.py").write_text(FILES[f"{module}.py"] + "# changed\n")
    allow = ["run.steps"]
    for field in list(files):
        with pytest.raises(RecipeError) as caught:
            resume(run, changes=["run.steps=2"], allow=allow)
        refused = {problem.field: problem.reason for problem in caught.value.problems}
        assert refused.keys() == files.keys()
        assert f"{files.pop(field)}.py differs" in refused[field]
        allow.append(field)
    assert resume(run, changes=["run.steps=2"], allow=allow).model.name == "step-000002"


def test_metrics_go_to_a_logger_of_ones_own_and_one_that_raises_costs_nothing(project, capsys):
    recipe = recipe_in(project, run__folder=str(project / "run"), run__steps=2, log=["logs:Log", "logs:Raising"])
    assert main(["check", "--deep", "--json", str(project / "tiny.yaml")]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["ok"] and "what a plug-in prints" in error
    quiet = Quiet()
    session.start(recipe, name="tiny", root=project, progress=quiet)
    assert (project / "run" / "log.txt").read_text() == "0 1 2 "
    assert quiet.notes().count("logs:Raising raised OSError: no such server") == 1


def test_an_engine_of_ones_own_says_what_it_likes(project):
    run = start(project, engine__kind="engines:one", guards__max_k3=None, run__steps=1, evaluate__every=0).folder
    rows = [json.loads(line) for text in samples(run).values() for line in text.splitlines()]
    assert {row["conversations"][0]["text"].rpartition("|>1")[1] for row in rows} == {"|>1"}


@pytest.mark.parametrize(
    ("kind", "when"), [("Apart", None), ("Stale", "after step 1"), ("Silent", "before the first step")]
)
def test_an_engine_with_weights_of_its_own_must_show_that_they_are_the_trainers(kind, when, project):
    own = {"engine__kind": f"engines:{kind}", "rewards": [{"name": "long", "kind": "judge:long"}]}
    own |= {"guards__max_k3": None, "run__steps": 1, "evaluate__every": 0}
    if when is None:
        start(project, **own)
        return
    with pytest.raises(WeightsError, match=rf"publish: {when}, (\d+) of \1 tensors .* differ (.|\n)*engine.kind"):
        start(project, **own)


@pytest.mark.slow
def test_host_processes_give_the_weights_of_this_process_and_a_death_costs_its_trajectories(project):
    here = start(project, run__steps=2, evaluate__every=0, **OWN).folder
    apart = start(project, run__steps=2, evaluate__every=0, environment__hosts=2, **OWN).folder
    one, two = (tensors(folder / "checkpoints" / "step-000002") for folder in (here, apart))
    model = [key for key in one if key[0] == "model.safetensors"]
    assert max(float((one[key] - two[key]).abs().max()) for key in model) < 1e-5
    dying = "import os\n" + FILES["mygame.py"].replace(
        "    for turn", "    if prompt.tags['die']: os._exit(3)\n    for turn"
    )
    (project / "mygame.py").write_text(dying)
    rows = [{"id": str(n), "text": f"{n:b}", "answer": f"{n:b}", "die": n > 5} for n in range(8)]
    (project / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"task__source": {"kind": "jsonl", "path": "data.jsonl"}, "task__holdout": {"prompts": 1}}
    size = {"batch": {"prompts": 7, "samples": 2}, "guards__reward_error_share": 0.9, "run__steps": 1}
    run = start(project, environment__hosts=7, evaluate={"every": 0, "prompts": 1}, **source, **size, **OWN).folder
    failures = [json.loads(line)["failure"] for text in samples(run).values() for line in text.splitlines()]
    died = [failure for failure in failures if failure]
    assert 2 <= len(died) < len(failures)
    few = "group too small after failures"
    assert {*died} - {few} == {"environment: its host process exited with code 3"}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("engines:bad", "made Policy, which has no "),
        ("engines:here", "raised RuntimeError: only here .*engines.py, line"),
        ("engines:gone", "defines no 'gone'.* in the worker of localhost/cpu:[01] on .*which looks in "),
    ],
)
def test_an_engine_that_a_worker_cannot_make_is_named(kind, says, project):
    recipe = recipe_in(project, engine__kind="engines:one")
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"kind": kind})})
    with pytest.raises(RecipeError, match=f"engine.kind: .*{says}"):
        asyncio.run(together(recipe, project, "flatten"))


class OnceAllAreAssigned(ThreadLauncher):
    """Whoever assigns work to the second worker has the files, in this same process."""

    async def start(self, assignment):
        await asyncio.sleep(0)
        return await super().start(assignment)


class Elsewhere(Worker):
    """A worker on a host that has none of the files, and that must load nothing before it says so."""

    def __init__(self, assignment):
        from stretto.algorithms.catalog import OWN

        OWN.clear()
        sys.modules.pop("mine", None)
        super().__init__(replace(assignment, folders=("/nowhere",)))

    def _load(self, device):
        raise AssertionError("loaded")


@pytest.mark.parametrize(
    ("field", "module", "parts"),
    [("algorithm.name", "mine", OWN), ("engine.kind", "engines", {"engine__kind": "engines:one"})],
)
def test_what_only_a_worker_lacks_is_named_with_where_that_looks_before_anything_is_loaded(
    field, module, parts, project
):
    recipe = recipe_in(project, **parts)
    said = rf"{field}: .*'{module}' .* in the worker of localhost/cpu:\d on .*/nowhere"
    with pytest.raises(RecipeError, match=said):
        asyncio.run(together(recipe, project, "flatten", launcher=OnceAllAreAssigned(Elsewhere)))


BAD = [
    ("environment.kind=absent:play", "environment.kind: there is no module 'absent'"),
    ("environment.kind=mygame:ply", "did you mean 'play'?"),
    ("environment.kind=judge:early", "judge:early is not async"),
    ("algorithm.name=absent:build", "algorithm.name: there is no module 'absent'"),
    ("algorithm.name=judge:early", "takes 3 parameters, not 1: (section)"),
    ("rewards.0.kind=absent:f", "rewards.0.kind: there is no module 'absent'"),
    ("rewards.0.kind=mygame:play", "rewards.0.kind: mygame:play takes (prompt, model)"),
    ("engine.kind=absent:make", "engine.kind: there is no module 'absent'"),
    ("log=[absent:Log]", "log: there is no module 'absent'"),
    ("log=[waits:Log]", "log: waits:Log is still being imported after 0.2 s"),
    ("task.source={kind: absent:rows}", "task.source.kind: there is no module 'absent'"),
]


@pytest.mark.parametrize(("change", "says"), BAD)
def test_a_part_that_is_missing_or_wrong_ends_with_code_2_before_anything_starts(change, says, project, capsys):
    recipe_in(project, **OWN)
    hangs = "waits" in change
    more = ["deadlines.start=0.2"] if hangs else []
    code = main(["train", str(project / "tiny.yaml"), change, f"run.folder={project / 'run'}", *more])
    assert code == (3 if hangs else 2)
    error = capsys.readouterr().err
    assert says in error and "fix:" in error and "Traceback" not in error
    assert not (project / "run").exists()


@pytest.mark.slow
def test_all_three_under_ray_resume_to_the_weights_of_one_device(project):
    whole = start(project, **OWN).folder
    cells = {"placement__cluster": "2xcpu", "placement__strategy": "elastic"}
    worker_group = start(project, run__steps=2, **OWN, **cells).folder
    resume(worker_group, changes=["run.steps=3"], allow=["run.steps"])
    one, two, before = (tensors(folder / "checkpoints" / name) for folder, name in (
        (whole, "step-000003"), (worker_group, "step-000003"), (whole, "step-000001")))  # fmt: skip
    model = [key for key in one if key[0] == "model.safetensors"]
    moved = max(float((one[key] - before[key]).abs().max()) for key in model)
    assert max(float((one[key] - two[key]).abs().max()) for key in model) <= 1e-4 * moved
    assert questions.evaluate_run(worker_group, changes=["placement.cluster=1xcpu", "placement.strategy=auto"]).n == 4


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_in_the_processes_of_ray_is_named(project):
    only_here = f"import os\nif os.getpid() != {os.getpid()}: raise ImportError('not on this host')\n"
    (project / "mine.py").write_text(only_here + FILES["mine.py"])
    recipe = recipe_in(project, **OWN)
    launcher = RayLauncher(["localhost/cpu:0", "localhost/cpu:1"], seconds=60)
    said = "algorithm.name: mine:build cannot be imported in the worker of localhost/cpu:. on .*not on this host"
    with pytest.raises(RecipeError, match=said):
        asyncio.run(together(recipe, project, "flatten", launcher=launcher))
