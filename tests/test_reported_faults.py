"""Neighbors of faults that users, auditors and attackers reported: 40 inputs of the same kinds that no report names.

Each heading below is one of the kinds: starts, words, mathematics, comforts, sandbox, runs, code of others, endpoint,
scorers. A case uses an interface only and depends on no other case. New reports of these kinds get a row here.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import shutil
from pathlib import Path

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, TopKLogitsWarper, TopPLogitsWarper

from environments.test_endpoint import CHAT, play, post
from families import SIZES
from running import scripted, start, written
from stretto.api.deploying import deploy
from stretto.cli.main import main
from stretto.engines.native.truncation import NOBODY, Truncation
from stretto.environments.base import messages_of
from stretto.errors import RecipeError, RewardError, RolloutError, StrettoError
from stretto.models.lora import add_adapter
from stretto.models.scratch import character_tokenizer
from stretto.planner.model_shapes import read_config
from stretto.planner.workload import adapted
from stretto.recipe.schema import Adapter
from stretto.report.compare_runs import compare
from stretto.report.read_run import RunRecord
from stretto.rewards.expression import judge
from stretto.rewards.program import program_in
from stretto.sandbox.isolated import ProgramLimits, Sandbox
from stretto.sandbox.isolated.kernel import libc
from stretto.sandbox.reward_forms import AskedPrompt
from stretto.training.accumulators import square_sum
from stretto.types import Outcome

assert play  # a fixture
ROWS = "\n".join(json.dumps({"prompt": f"{number:b}=", "answer": "1"}) for number in range(20))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The working directory, with nothing in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run of two steps."""
    return start(tmp_path_factory.mktemp("trained"), run__steps=2).folder


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of that folder, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "copied"))


@pytest.fixture(scope="session")
def tokenizer():
    return character_tokenizer("0123456789=")


# --- starts: runs that cannot start where they are sent


def jsonl(path):
    return {"task": {"source": {"kind": "jsonl", "path": path}, "holdout": {"prompts": 4}}}


def test_deploy_refuses_rows_behind_a_linked_folder(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "rows.jsonl").write_text(ROWS)
    (project / "data").symlink_to(outside)
    with pytest.raises(RecipeError, match=r"task\.source\.path: .*lies outside"):
        deploy("docker", written(project, **jsonl("data/rows.jsonl")), cluster="1xH100")


@pytest.mark.parametrize("name", [".venv-old/rows.jsonl", "certificates/rows.pem"])
def test_deploy_copies_rows_that_an_image_leaves_out(project, name):
    (project / name).parent.mkdir()
    (project / name).write_text(ROWS)
    folder = deploy("docker", written(project, **jsonl(name)), cluster="1xH100").folder
    assert [path.read_text() for path in (folder / "inputs").rglob("*rows*")] == [ROWS]


@pytest.mark.parametrize("kind", ["folder", "empty"])
def test_check_refuses_a_table_of_values_without_rows(project, capsys, kind):
    table = project / "table.jsonl"
    table.mkdir() if kind == "folder" else table.write_text("")
    recipe = written(project, algorithm={"name": "astar_po", "vstar": {"table": "table.jsonl"}})
    assert main(["check", str(recipe)]) == 2
    assert "algorithm.vstar.table" in capsys.readouterr().err
    assert not (project / "runs").exists()


# --- words: wrong or missing words at the wrong moment


def test_compare_refuses_one_run_under_two_names(trained, tmp_path):
    (tmp_path / "link").symlink_to(trained)
    with pytest.raises(RecipeError, match="named twice"):
        compare([RunRecord(trained), RunRecord(tmp_path / "link")])


@pytest.mark.parametrize(
    ("key", "says"),
    [("question", r'prompt\["tags"\]\[.question.\]'), ("solution", r'prompt\["reference"\]')],
)
def test_a_missing_key_of_a_prompt_names_where_it_is(key, says):
    prompt = AskedPrompt({"id": "1", "messages": [], "reference": "7", "tags": {"question": "3+4?", "level": 2}})
    with pytest.raises(KeyError, match=says):
        prompt[key]


@pytest.mark.parametrize("given", [b"1=", [("user", "1=")]])
def test_chat_names_what_it_was_given_instead_of_messages(given):
    with pytest.raises(ValueError, match=r"(?s)messages.*fix: give \["):
        messages_of(given)


# --- mathematics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_rounded_gradients_is_exact(dtype):
    numbers = torch.full((1 << 11, 1 << 11), 0.25, dtype=dtype)
    for parts in ([numbers], [numbers.T], [torch.tensor(0.25, dtype=dtype).expand(1 << 11, 1 << 11)]):
        assert float(square_sum(parts, numbers.device)) == 2.0**18


def test_truncation_with_equal_logits_keeps_as_many_tokens_as_transformers():
    logits = torch.zeros(1, 8)
    ids, _ = Truncation(top_p=0.5, top_k=100).kept(logits)
    stock = TopPLogitsWarper(0.5)(None, TopKLogitsWarper(8)(None, logits))
    assert int((ids != NOBODY).sum()) == int(stock.isfinite().sum())


def test_an_adapter_on_some_layers_has_the_planned_size(tmp_path):
    config, adapter = LlamaConfig(**SIZES), Adapter(rank=5, targets=("q_proj", "down_proj"))
    config.save_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_config(config)
    add_adapter(network, adapter, seed=0)
    made = sum(weight.numel() for name, weight in network.named_parameters() if "lora_" in name)
    assert adapted(read_config(tmp_path / "config.json"), adapter, few_bits=False).trained(5) == (made, 0)


# --- comforts


def test_eval_asks_the_only_row_of_a_file_with_a_mark_of_bytes_and_crlf(project, capsys):
    rows = project / "test.jsonl"
    rows.write_bytes(b'\xef\xbb\xbf{"text": "1", "answer": "1"}\r\n\r\n')
    assert main(["eval", str(written(project)), "--on", str(rows), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["n"] == 1


def test_samples_names_evaluated_steps_where_another_is_wanted(trained, capsys):
    assert main(["samples", str(trained), "--held-out", "--step", "1"]) == 2
    assert "use one of the steps 0, 2" in capsys.readouterr().err


def test_plan_names_the_nearest_cards_of_an_odd_memory(project, capsys):
    assert main(["plan", str(written(project)), "--cluster", "2x79GB"]) == 2
    assert "the nearest, of 80 GB, are A100" in " ".join(capsys.readouterr().err.split())


# --- sandbox: programs without namespaces

SYSTEM = {
    "shmctl": 'libc.shmctl(int("MADE"), 0, None)',
    "semctl": 'libc.semctl(int("MADE"), 0, 0)',
    "msgctl": 'libc.msgctl(int("MADE"), 0, None)',
    "mq_unlink": 'ctypes.CDLL("librt.so.1", use_errno=True).mq_unlink(b"/MADE")',
    "syncfs": 'libc.syncfs(os.open(".", os.O_RDONLY))',
}


def made(call):
    """Make what a program must not remove. Returns its name."""
    if call == "shmctl":
        return libc.shmget(0, 4096, 0o1600)
    if call == "semctl":
        return libc.semget(0, 1, 0o1600)
    if call == "msgctl":
        return libc.msgget(0, 0o1600)
    name = f"stretto-{os.getpid()}"
    if call == "mq_unlink":
        ctypes.CDLL("librt.so.1").mq_open(f"/{name}".encode(), os.O_CREAT | os.O_RDWR, 0o600, None)
    return name


def remove(call, name):
    if call == "mq_unlink":
        ctypes.CDLL("librt.so.1").mq_unlink(f"/{name}".encode())
    elif call != "syncfs":
        getattr(libc, call)(name, *((0, 0) if call == "semctl" else (0, None)))


@pytest.mark.parametrize("call", SYSTEM)
def test_a_program_cannot_reach_what_the_kernel_keeps_for_its_user(call):
    name = made(call)
    program = f"import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nprint({SYSTEM[call]}, ctypes.get_errno())"

    async def run():
        async with Sandbox(workers=1, packages=(), isolation="limits") as sandbox:
            return await sandbox.run_program(program.replace("MADE", str(name)), limits=ProgramLimits(seconds=5.0))

    try:
        result, refused = asyncio.run(run()).stdout.split()
        assert result == "-1" and int(refused) in (errno.EPERM, errno.EACCES)  # the C library renames that of mq_unlink
    finally:
        remove(call, name)


# --- runs and their folders


def test_compare_names_the_steps_of_metrics_that_a_power_cut_left_as_zeros(trained, copied):
    (copied / "metrics.jsonl").write_bytes(b"\0" * 100)
    assert "copied: metrics.jsonl lacks steps 1 to 2" in str(compare([RunRecord(trained), RunRecord(copied)]))


def test_metrics_that_stand_there_twice_count_once(trained, copied):
    (copied / "metrics.jsonl").write_bytes(2 * (copied / "metrics.jsonl").read_bytes())
    one, other = compare([RunRecord(trained), RunRecord(copied)]).runs
    assert (one.steps, one.reward, one.accuracy) == (other.steps, other.reward, other.accuracy)


def test_samples_that_are_a_pipe_are_refused_at_once(copied):
    path = next((copied / "samples").glob("step-*"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StrettoError, match="not a regular file"):
        RunRecord(copied).samples(int(path.stem.removeprefix("step-")))


def test_eval_refuses_inputs_that_are_a_pipe(copied, capsys):
    (copied / "inputs.json").unlink()
    os.mkfifo(copied / "inputs.json")
    assert main(["eval", str(copied)]) == 2
    assert "inputs.json" in capsys.readouterr().err


# --- code of others


@pytest.mark.parametrize("value", ["Decimal('NaN')", "Fraction(10) ** 300 * 10 ** 300", "10**400"])
def test_a_reward_that_is_no_finite_number_refuses_the_recipe(project, value):
    head = "from decimal import Decimal\nfrom fractions import Fraction\n"
    (project / "odd_numbers.py").write_text(f"{head}def f(answer, prompt, signals): return {value}\n")
    with pytest.raises(RecipeError, match=r"rewards\.0\.kind"):
        start(project, rewards=[{"name": "mine", "kind": "odd_numbers:f"}])


@pytest.mark.parametrize(
    ("name", "line", "error", "says"),
    [
        (
            "ends_loop",
            "asyncio.get_running_loop().stop(); await asyncio.sleep(0)",
            RolloutError,
            "stopped the event loop",
        ),
        ("of_group", "raise BaseExceptionGroup('two', [GeneratorExit('inner')])", RewardError, "GeneratorExit: inner"),
    ],
)
def test_an_odd_end_of_an_environment_is_named(project, name, line, error, says):
    text = f"import asyncio\nasync def play(prompt, model):\n    await model.chat(prompt.messages)\n    {line}\n"
    (project / f"{name}.py").write_text(text)
    with pytest.raises(error, match=says):
        start(project, engine=scripted(lambda request: [6, 0]), environment={"kind": f"{name}:play"})


# --- endpoint

DEEP = b'{"messages": [{"role": "user", "content": "1"}], "logit_bias": %s}' % (b"[" * 900 + b"]" * 900)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (DEEP, {}),
        (b'{"messages": [{"role": "user", "content": "1"}], "max_tokens": 1e400}', {}),
        (b"no zlib", {"Content-Encoding": "deflate"}),
    ],
    ids=["deep", "infinite", "encoding"],
)
def test_an_odd_request_is_the_callers_fault(play, body, headers):
    async def agent(prompt, model):
        address = await model.address()
        allowed = {"Authorization": f"Bearer {address.key}", **headers}
        async with (
            aiohttp.ClientSession() as session,
            session.post(address.url + CHAT, data=body, headers=allowed, skip_auto_headers=["Content-Encoding"]) as got,
        ):
            assert got.status == 400, await got.text()
        assert (await post(address, CHAT, {"messages": [{"role": "user", "content": "1"}]}))[0] == 200
        return Outcome(answer="")

    (trajectory,) = play(agent)
    assert trajectory.failure is None


# --- scorers


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        (r"\framebox{7}", "7", 1),
        (r"\boxed{7 \text{ per cent}}", "7", 0),
        (r"\boxed{1 \text{ cannot be right}}", "1", 0),
        ("\\boxed{1 \\text{ isn\u2019t right}}", "1", 0),
    ],
)
def test_mathematics_is_read_as_it_is_written(answer, reference, score):
    assert judge(answer, reference) == score


@pytest.mark.parametrize("language", ["py3", "ipython"])
def test_a_block_in_another_name_of_python_is_the_program(language):
    assert program_in(f"So:\n```{language}\nx = 1\n```\nand it prints\n```text\n1\n```") == "x = 1"
