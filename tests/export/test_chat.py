"""A chat says what the run's model says, piece by piece, and nothing that it says moves the terminal."""

import io

import pytest
from typer.testing import CliRunner

from exported import trained
from stretto.api import exports as api
from stretto.cli.chat import writer
from stretto.cli.main import app_of
from stretto.export.proof import ask_run


def test_a_greedy_chat_says_what_the_run_answers_and_shows_it_as_it_comes(run):
    model = trained(run)
    asked = ask_run(model, model.load("float32"), most=2)
    session = api.chat(run, temperature=0.0)
    for prompt, text in zip(asked.prompts, asked.texts, strict=True):
        session.begin()
        pieces = []
        reply = session.say(prompt.messages[-1]["content"], pieces.append)
        assert reply.text == text == "".join(pieces)
        assert len(reply.tokens) < 2 or len(pieces) > 1
    second = session.say("0=")
    assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    assert len(session.handle.drafts) == 1, "the second turn goes on with the tokens of the first"
    assert second.tokens
    session.close()


def test_an_interrupted_answer_was_never_asked_for(run):
    session = api.chat(run, temperature=0.0)

    def stop(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.say("0=", stop)
    assert session.messages == [] and not session.engine.active
    assert session.say("0=").tokens
    session.close()


def test_the_terminal_gets_text_and_no_commands(run):
    out = io.StringIO()
    writer(out)("\x1b[2J\x9b31m\rred\u202e\n")
    gone = "\N{REPLACEMENT CHARACTER}"
    assert out.getvalue() == f"{gone}[2J{gone}31m{gone}red{gone}\n"
    options = ["chat", str(run), "--temperature", "0", "--max-new-tokens", "3"]
    result = CliRunner().invoke(app_of(["chat"]), options, input="0=\n\n/new\n0=\n/quit\n")
    assert result.exit_code == 0, result.output
    first, second = result.output.strip("\n").split("\n", 1) if "cut off" not in result.output else ("", "")
    assert first == second, "greedy, and begun again"
