"""`stretto task play`: one episode by hand, from a file or by the model, through the path of training."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from running import written
from stretto.api import task_play
from stretto.cli.main import main

HEAD = """
model: {{name: scratch, dtype: float32, adapter: null, scratch: {{characters: "{characters}", context: 200}}}}
task:
  source: {{kind: jsonl, path: rows.jsonl}}
  holdout: {{prompts: 1}}
engine: {{max_new_tokens: 40}}
batch: {{prompts: 2, samples: 2}}
evaluate: {{every: 0}}
"""
CHARACTERS = "".join(map(chr, range(32, 127))).replace("\\", "").replace('"', "").replace("%", "")
USER = """
from stretto import Outcome

async def twice(prompt, model):
    messages = list(prompt.messages)
    first = await model.chat(messages)
    second = await model.chat([*messages, first, {"role": "user", "content": "again"}], stop="!")
    return Outcome(answer=second.text, signals={"same": float(first.text == second.text)})

async def fails(prompt, model):
    try:
        await model.chat(prompt.messages)
    except Exception:
        pass
    return {}["lost"]

async def percent(prompt, model):
    reply = await model.chat(prompt.messages)
    reply = await model.chat([*prompt.messages, reply, {"role": "user", "content": "50% or 60%?"}])
    return Outcome(answer=reply.text)

def broken(answer, prompt, signals): return 1 / len(answer)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"id": f"p{n}", "prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(1, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "played.py").write_text(USER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(folder: Path, sections: str, *, characters: str = CHARACTERS) -> str:
    head = HEAD.format(characters=characters)
    rewards = "" if "rewards" in sections else "rewards: [{name: right, kind: exact}]\n"
    (folder / "recipe.yaml").write_text(f"{head}{rewards}{sections}\n")
    return str(folder / "recipe.yaml")


def played(folder: Path, capsys: pytest.CaptureFixture[str], path: str, replies: list[str], *more: str):
    """Exit code and document of an episode with these replies."""
    (folder / "replies.json").write_text(json.dumps(replies))
    code = main(["task", "play", path, "--from", str(folder / "replies.json"), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_play_single_turn_scores_the_reply_of_a_file(folder, capsys) -> None:
    code, told = played(folder, capsys, recipe(folder, ""), ["6"], "--prompt", "p3")
    assert (code, told["ok"], told["prompt"]) == (0, True, {"id": "p3", "reference": "6"})
    assert told["turns"] == [{"context": "<|user|>3+3=<|assistant|>", "reply": "6<|end|>", "tool_calls": []}]
    assert (told["answer"], told["reward"]) == ("6", {"value": 1.0, "parts": {"right": 1.0}})


def test_play_prints_the_conversation_of_paragraphs(folder, capsys) -> None:
    (folder / "replies.txt").write_text("\n8\n\nleft\n")
    code = main(["task", "play", recipe(folder, ""), "--from", "replies.txt", "--prompt", "p4"])
    shown = capsys.readouterr()
    assert code == 0
    for line in ("<|user|>4+4=<|assistant|>", "8<|end|>", "answer: 8", "reward: 1 (right 1)"):
        assert line in shown.out
    assert "1 of 2 replies in replies.txt were not used" in shown.err


def test_play_tools_makes_the_calls_of_a_reply(folder, capsys) -> None:
    path = recipe(folder, "environment: {kind: tools, tools: [calculator], turns: 3}")
    code, told = played(folder, capsys, path, ["calculator(2+2)", "4"], "--prompt", "p2")
    assert code == 0, told
    (call,) = told["turns"][0]["tool_calls"]
    assert (call["name"], call["arguments"], call["error"]) == ("calculator", {"expression": "2+2"}, None)
    assert told["turns"][1]["context"] == "<|user|>4<|assistant|>"
    assert (told["signals"]["tool_calls"], told["turn_rewards"], told["reward"]["value"]) == (1.0, [0.0, 0.0], 1.0)
    main(["task", "play", path, "--from", "replies.json", "--prompt", "p2"])
    assert 'calculator(expression="2+2")' in capsys.readouterr().out


def test_play_game_gives_feedback_to_guesses(folder, capsys) -> None:
    game = "environment: {kind: game, game: number, range: [0, 9], turns: 3, higher: up, lower: down, right: yes, "
    path = recipe(folder, game.replace("yes", '"yes"') + "invalid: what}")
    code, told = played(folder, capsys, path, ["9", "4"], "--prompt", "p2")
    assert (code, told["signals"]["won"], told["turns"][1]["context"]) == (0, 1.0, "<|user|>down<|assistant|>")


def test_play_memory_opens_one_conversation_per_chunk(folder, capsys) -> None:
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"id": f"p{n}", "prompt": "last?", "answer": "d", "document": f"abc{n}"}) for n in (1, 2))
    )
    memory = 'environment: {kind: memory, chunk: 2, memory_tokens: 2, empty: "-", '
    path = recipe(folder, memory + 'update: "{memory}{chunk}{question}", answer: "{memory}{question}"}')
    code, told = played(folder, capsys, path, ["b", "d", "d"])
    assert code == 0, told
    piece = told["prompt"]["id"].replace("p", "c")
    opened = ["-ablast?", f"b{piece}last?", "dlast?"]
    assert [turn["context"] for turn in told["turns"]] == [f"<|user|>{each}<|assistant|>" for each in opened]
    assert told["reward"]["value"] == 1.0


def test_play_own_function_ends_a_reply_at_its_stop_text(folder, capsys) -> None:
    path = recipe(folder, 'environment: {kind: "played:twice"}')
    code, told = played(folder, capsys, path, ["2", "2! and more"], "--prompt", "p1")
    assert code == 0, told
    assert [turn["reply"] for turn in told["turns"]] == ["2<|end|>", "2!"]
    assert (told["answer"], told["signals"], told["reward"]["value"]) == ("2", {"same": 1.0}, 1.0)


def test_play_fails_with_the_frames_of_the_environment(folder, capsys) -> None:
    code, told = played(folder, capsys, recipe(folder, 'environment: {kind: "played:fails"}'), ["2"])
    assert (code, told["ok"], told["reward"]) == (1, False, None)
    assert told["failure"].startswith("environment: KeyError: 'lost'")
    assert 'played.py", line 15, in fails' in told["failure"]


def test_play_fails_with_the_frames_of_a_reward(folder, capsys) -> None:
    path = recipe(folder, 'rewards: [{name: mine, kind: "played:broken"}]')
    code, told = played(folder, capsys, path, [""])
    assert (code, told["answer"]) == (1, "")
    assert told["failure"].startswith("reward mine: ZeroDivisionError") and "in broken" in told["failure"]


def test_play_ends_when_a_file_has_too_few_replies(folder, capsys) -> None:
    """Even where the environment catches every exception."""
    code, told = played(folder, capsys, recipe(folder, 'environment: {kind: "played:fails"}'), [])
    assert (code, told["ok"]) == (1, False)
    assert "replies.json has 0 replies" in told["error"] and "fix: add a reply" in told["error"]


def test_play_reads_typed_lines_until_the_input_ends(folder, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\\\n2\n"))
    code = main(["task", "play", recipe(folder, 'environment: {kind: "played:twice"}')])
    shown = capsys.readouterr()
    assert code == 1
    assert "reply> " in shown.out and "<|user|>again<|assistant|>" in shown.out
    assert "the input ended before the episode; nothing was scored" in shown.err


def test_play_ends_in_good_order_on_ctrl_c(folder, capsys, monkeypatch) -> None:
    async def pressed() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(task_play, "typed_reply", pressed)
    assert main(["task", "play", recipe(folder, "")]) == 130
    assert "ended by Ctrl-C" in capsys.readouterr().err


def test_play_warns_once_of_characters_that_the_tokenizer_lacks(folder, capsys) -> None:
    path = recipe(folder, 'environment: {kind: "played:percent"}')
    (folder / "replies.json").write_text('["2", "2"]')
    assert main(["task", "play", path, "--from", "replies.json"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("model.scratch.characters: lacks '%', which stand in 2 places") == 1
    assert "fix: add them to model.scratch.characters" in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prompt", "p9"], "no prompt has the id 'p9'"),
        (["--index", "7"], "7 is too large for 3 training prompts"),
        (["--prompt", "p1", "--index", "1"], "has no effect with --prompt"),
        (["--from", "absent.txt"], "absent.txt cannot be read"),
        (["--from", "rows.jsonl", "--model"], "has no effect with --model"),
    ],
)
def test_play_refuses_arguments_that_name_nothing(folder, capsys, arguments, reason) -> None:
    assert main(["task", "play", recipe(folder, ""), *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_play_by_model_shows_and_scores_sampled_replies(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path)
    assert main(["task", "play", str(path), "--model", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] and told["reward"] is not None and len(told["turns"]) == 1
