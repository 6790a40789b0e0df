"""Tools: what is called is answered, what cannot be called is explained, and only the model's own words are trained."""

import asyncio
import copy
import time

import numpy as np
import pytest

from stretto.checks.rules.environment import SIGNALS
from stretto.environments import adapted
from stretto.environments.base import ToolCall
from stretto.environments.tools import ToolsEnvironment
from stretto.environments.toolset import ABANDONED, LONGEST, Toolset, called
from stretto.errors import RecipeError, RolloutError
from stretto.recipe.schema import ToolsSection
from stretto.types import Prompt
from talking import TOKENIZER, played

PROMPT = Prompt(id="p", messages=({"role": "user", "content": "12+7?"},), reference="19", tags={"goal": "7"})


def spoken_by(template):
    """The tokenizer of these tests with another template."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = template
    return tokenizer


def tools(tmp_path, **section):
    return ToolsEnvironment(ToolsSection(**section), root=tmp_path)


def test_a_tool_is_called_and_its_answer_is_context(tmp_path):
    outcome, talk = played(tools(tmp_path), PROMPT, ["calculator(12+7)", "19"])
    assert outcome.answer == "19"
    assert outcome.turn_rewards == (0.0, 0.0)
    assert outcome.signals == {"turns": 2, "tokens": 20, "tool_calls": 1, "tool_errors": 0, "truncated": 0}
    assert outcome.signals.keys() == set(SIGNALS[ToolsSection])
    assert talk.texts() == [
        "<|user|>12+7?<|assistant|>calculator(12+7)<|end|><|user|>19<|assistant|>19<|end|>",
    ]
    assert talk.trained() == ["calculator(12+7)<|end|>19<|end|>"]
    assert talk.conversations()[0].turns == ((0, 17), (1, 3))
    assert talk.rewritten == 0


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("calculator(1/0)", "error: ValueError: division by zero"),
        ("calculator(12+7", "error: the call has no closing parenthesis at its end"),
        ("calculator()", "error: expression: Missing required argument"),
    ],
)
def test_a_call_that_fails_is_told_and_the_model_may_try_again(tmp_path, said, told):
    outcome, talk = played(tools(tmp_path), PROMPT, [said, "calculator(12+7)", "19"])
    assert outcome.answer == "19"
    assert outcome.turn_rewards == (-1.0, 0.0, 0.0)
    assert (outcome.signals["tool_calls"], outcome.signals["tool_errors"]) == (2, 1)
    assert told in talk.texts()[0]


STRICT = """{%- set ns = namespace(n=0) %}{%- for m in messages if m.role != 'tool' and m.tool_calls is not defined %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.n = ns.n + 1 %}{% endfor %}{% for m in messages %}
{%- if m.role == 'user' %}{{ '[TOOLS]' + tools | tojson if tools else '' }}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS]{{ m.tool_calls | tojson }}<|end|>
{%- elif m.role == 'assistant' %}{{ m.content }}<|end|>
{%- elif m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}
{%- else %}[RESULT]{{ m.content }} of {{ m.tool_call_id }}{% endif %}{% endfor %}"""
"""As of Mistral."""
CONTENT_ONLY = """{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|' + m.role + '|>' + m.content + ('<|end|>' if m.role == 'assistant' else '') }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt else '' }}"""
"""As of Gemma."""


def test_a_template_that_wants_calls_apart_and_nine_letters_each_gets_them(tmp_path):
    call = '{"name": "calculator", "arguments": {"expression": "12+7"}'
    calls = [call + ', "id": "abcDEF123"}', call + "}"]
    say = [*(f"[TOOL_CALLS][{call}]" for call in calls), "19"]
    outcome, talk = played(tools(tmp_path), PROMPT, say, tokenizer=spoken_by(STRICT))
    assert outcome.signals["tool_errors"] == 0 and talk.rewritten == 0
    (text,) = talk.texts()
    assert text.endswith(f"{say[0]}<|end|>[RESULT]19 of abcDEF123{say[1]}<|end|>[RESULT]19 of 00001000019<|end|>")
    assert talk.trained() == ["<|end|>".join([*say, ""])]


def test_a_template_without_system_and_tools_is_told_of_them_by_the_user(tmp_path):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+7"}}</tool_call>'
    outcome, talk = played(tools(tmp_path), PROMPT, [call * 2, call, "19"], tokenizer=spoken_by(CONTENT_ONLY))
    assert (outcome.signals["tool_calls"], outcome.signals["tool_errors"], talk.rewritten) == (3, 0, 0)
    (text,) = talk.texts()
    answer = "<tool_response>\n19\n</tool_response>"
    assert text.startswith("<|user|>You may call") and "12+7?<|assistant|><tool_call>" in text
    assert f"<|user|>{answer}\n{answer}<|assistant|>{call}<|end|><|user|>{answer}<|assistant|>19<|end|>" in text


def test_an_episode_ends_after_so_many_turns_or_with_a_reply_that_is_cut_off(tmp_path):
    outcome, talk = played(tools(tmp_path, turns=3), PROMPT, lambda text: "calculator(1)")
    assert len(talk.read) == 3
    assert outcome.answer == "calculator(1)"
    outcome, talk = played(tools(tmp_path), PROMPT, lambda text: "calculator(1)", limit=5)
    assert (len(talk.read), outcome.signals["truncated"]) == (1, 1)


def test_the_corpus_is_searched(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "Twelve and seven are nineteen."}\n{"text": "No."}\n')
    made = tools(tmp_path, tools=("search",), corpus="texts.jsonl")
    _, talk = played(made, PROMPT, ["search(seven)", "19"])
    assert "<|user|>Twelve and seven are nineteen.<|assistant|>19" in talk.texts()[0]


@pytest.mark.parametrize(
    ("code", "told"),
    [("print(6*7)", "42"), ("1/0", "ZeroDivisionError: division by zero"), ("pass", "(it printed nothing)")],
)
def test_a_program_runs_in_the_sandbox_and_the_model_sees_what_it_printed(tmp_path, code, told):
    _, talk = played(tools(tmp_path, tools=("python",)), PROMPT, [f"python({code})", "42"])
    assert told in talk.texts()[0]


RAISED = {201: SystemExit(2), 202: KeyboardInterrupt(), 203: StopIteration("x"), 204: GeneratorExit()}
"""What Python itself acts upon, by the amount that raises it."""


class Counter:
    """A class as TRL users write it; `made` counts its objects."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.total = 0

    def reset(self, goal, answer):
        self.goal = int(goal)
        return f" Reach {goal}, not {answer}."

    def add(self, amount: int) -> str:
        """Adds to the total.

        Args:
            amount: How much.
        """
        if amount > 100:
            raise RAISED.get(amount, OverflowError("too much"))
        self.total += amount
        return f"total {self.total}"

    async def later(self, text: str) -> dict:
        """Waits.

        Args:
            text: Anything.
        """
        await asyncio.sleep(0)
        return {"said": text}

    def get_reward(self):
        return self.total == self.goal

    def _hidden(self):
        raise AssertionError


def test_the_public_methods_of_a_class_are_tools_and_its_reward_is_a_signal():
    environment, before = adapted(Counter, turns=8), Counter.made
    with pytest.warns(UserWarning, match='the tool add failed.*OverflowError: too much\n  File ".*test_tools.py"'):
        outcome, talk = played(environment, PROMPT, ["add(3)", "add(four)", "add(400)", "add(4)", "later(x)", "done"])
    assert Counter.made == before + 1
    assert (outcome.answer, outcome.signals["reward"], outcome.signals["tool_errors"]) == ("done", 1.0, 2)
    (text,) = talk.texts()
    assert text.startswith("<|user|>12+7? Reach 7, not 19.<|assistant|>add(3)")
    for told in ("total 3", "amount: Input should be a valid integer", "OverflowError: too much", '{"said": "x"}'):
        assert told in text
    again, _ = played(environment, PROMPT, ["add(3)", "done"])
    assert again.signals["reward"] == 0.0


@pytest.mark.parametrize("reward", [[1.0], "1.0x", None, {"score": 1.0}, float("nan")])
def test_a_reward_of_a_class_that_is_no_number_is_refused_with_a_fix(reward):
    class Listed(Counter):
        def get_reward(self):
            return reward

    with pytest.raises(RolloutError, match=r"Listed.get_reward returned .*, which is no number\n    fix: return one"):
        played(adapted(Listed, turns=8), PROMPT, ["done"])


def test_a_class_whose_methods_cannot_be_described_is_refused_with_each_of_them():
    class Undescribed:
        def one(self, x):
            """Does."""

        def two(self, x: int):
            """Does.

            Args:
                x: A number.
            """

        def three(self, x: int):
            pass

    with pytest.raises(RecipeError) as caught:
        adapted(Undescribed, turns=3)
    assert {problem.reason.partition(" ")[0] for problem in caught.value.problems} == {
        "Undescribed.one",
        "Undescribed.three",
    }


def test_numbers_of_numpy_are_rewards_and_no_name_of_a_parameter_is_taken():
    class Named(Counter):
        def plot(self, function: str) -> str:
            """Plots.

            Args:
                function: What to plot.
            """
            return f"plotted {function}"

        def get_reward(self):
            return np.float32(0.5)

    outcome, talk = played(adapted(Named, turns=3), PROMPT, ["plot(sine)", "done"])
    assert outcome.signals["reward"] == 0.5 and "plotted sine" in talk.texts()[0]


def test_what_reset_and_get_reward_return_is_checked():
    class Numbers(Counter):
        def reset(self, goal):
            return 3

    class Words(Counter):
        def get_reward(self):
            return "good"

    for made, says in ((Numbers, "reset returned int"), (Words, "get_reward returned str")):
        with pytest.raises(RolloutError, match=says):
            played(adapted(made, turns=2), PROMPT, ["done"])


def test_a_method_that_blocks_does_not_block_the_others():
    class Slow(Counter):
        def add(self, amount: int) -> str:
            """Waits.

            Args:
                amount: How long.
            """
            while not self.goal:
                time.sleep(0.01)
            return "woken"

    slow = Slow()
    slow.goal = 0

    async def both():
        tools = Toolset([slow.add])
        waiting = asyncio.ensure_future(tools.answer(ToolCall(name="add", arguments={"amount": 1})))
        await asyncio.sleep(0.05)
        given_up = asyncio.ensure_future(tools.answer(ToolCall(name="add", arguments={"amount": 2})))
        await asyncio.sleep(0.05)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert given_up.cancelled()
        assert len(ABANDONED) == 1
        slow.goal = 1
        assert await waiting == ("woken", True)
        while ABANDONED:
            await asyncio.sleep(0.01)

    asyncio.run(both())
    assert not ABANDONED


def test_what_ends_programs_or_loops_is_told_to_the_model_like_any_other_error():
    environment = adapted(Counter, turns=8)
    outcome, talk = played(environment, PROMPT, [*(f"add({amount})" for amount in RAISED), "done"])
    assert (outcome.answer, outcome.signals["tool_errors"]) == ("done", len(RAISED))
    for error in RAISED.values():
        assert f"RuntimeError: it raised {type(error).__name__}: {error}" in talk.texts()[0]

    class Ends(Counter):
        def get_reward(self):
            return next(iter(()))

    async def leaves():
        raise SystemExit(2)

    with pytest.raises(RuntimeError, match="it raised StopIteration"):
        played(adapted(Ends, turns=2), PROMPT, ["done"])
    with pytest.raises(RuntimeError, match="it raised SystemExit: 2"):
        asyncio.run(called(leaves))


def test_long_answers_are_cut_and_unknown_tools_are_named():
    async def long() -> str:
        """Says much."""
        return "a" * (LONGEST + 5)

    tools = Toolset([long])
    text, made = asyncio.run(tools.answer(ToolCall(name="long")))
    assert made
    assert text.endswith("(the other 5 characters are cut)")
    text, made = asyncio.run(tools.answer(ToolCall(name="short")))
    assert not made
    assert "there are long" in text
