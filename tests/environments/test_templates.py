"""Chat templates are programs of strangers: what they may take of time, memory and text, and what a run says then."""

import os
import signal
from concurrent.futures import Future

import pytest
from transformers import PreTrainedTokenizerFast

from stretto.environments import render, templates
from stretto.environments.render import Renderer
from stretto.environments.templates import LONGEST, TOGETHER, TemplateOutOfBounds, Templates, chat_of
from stretto.errors import DeadlineError, RolloutError, SandboxDeadlineError, SandboxDiedError
from stretto.models.scratch import character_tokenizer
from stretto.recipe.schema import SCRATCH_TEMPLATE

LOOP = "{% for a in range(99999) %}"
ENDLESS = f"{LOOP * 4}{'{% endfor %}' * 4}"
SAYS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def worker():
    """The process, patient because machines that test are busy."""
    made = Templates(seconds=60)
    yield made
    made.close()


class Scripted(Templates):
    """Without a process: says what it is asked, and passes its deadline where an x is in it."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def _call(self, name, *args, deadline):
        answer = Future()
        chats = [] if name == "begin" else args[2]
        self.asked += [len(chats)] if chats else []
        if "deadly" in "".join(chats):
            answer.set_exception(SandboxDiedError("killed"))
        elif "x" in "".join(chats):
            answer.set_exception(SandboxDeadlineError("too long"))
        else:
            answer.set_result([{"text": chat} for chat in chats])
        return answer


def user(text, **more):
    return {"role": "user", "content": text, **more}


def made_of(worker, template, *texts):
    return list(worker.texts(template, {"bos_token": "<s>"}, [chat_of([user(text)], ask=True) for text in texts]))


@pytest.mark.parametrize(
    "template",
    [ENDLESS, "{{ messages | length + (7 + messages | length) ** (9 ** 9) }}"],
    ids=["it loops", "it calculates"],
)
def test_a_template_that_never_ends_is_ended(worker, monkeypatch, template):
    made_of(worker, SAYS, "hi")
    monkeypatch.setattr(worker, "seconds", 0.2)
    (failure,) = made_of(worker, template, "hi")
    assert isinstance(failure, TemplateOutOfBounds)
    assert str(failure) == "the chat template takes longer than 0.2 s"
    monkeypatch.undo()
    assert made_of(worker, SAYS, "hi") == ["user: hi\n"], "and the next chat has a worker again"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'x' * 300000000 }}", "needs more than 256 MiB"),
        ("{{ 'x' * 2000001 }}", "makes a text of 2,000,001 characters, more than the 2,000,000 that are read"),
        ("{{ messages[0]['content'] * 3000000000 }}", "needs more than 256 MiB"),
        ("{{ 'x' | center(3000000000) }}", "needs more than 256 MiB"),
        ("{{ '%3000000000d' % 1 }}", "needs more than 256 MiB"),
    ],
    ids=["300 MB", "one too many", "memory", "a filter", "a format"],
)
def test_a_template_without_bounds_is_refused(worker, template, said):
    (failure,) = made_of(worker, template, "hi")
    assert isinstance(failure, TemplateOutOfBounds)
    assert f"the chat template {said}" in str(failure)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        (7, "compile"),
    ],
)
def test_what_a_template_says_against_a_chat_is_told(worker, template, said):
    (failure,) = made_of(worker, template, "hi")
    assert isinstance(failure, RolloutError)
    assert not isinstance(failure, TemplateOutOfBounds)
    assert said in str(failure)


def test_one_chat_that_never_ends_costs_no_other():
    scripted, texts = Scripted(), [*("abc" * 30), "x", *("abc" * 30)]
    made = made_of(scripted, SAYS, *texts)
    assert [text for text, found in zip(texts, made, strict=True) if isinstance(found, RolloutError)] == ["x"]
    assert "c" in made[-1]
    assert scripted.asked == [1, TOGETHER, TOGETHER, *[1] * TOGETHER, 181 - 1 - 2 * TOGETHER]


def test_a_template_that_takes_too_long_again_and_again_ends_the_run():
    with pytest.raises(DeadlineError, match="longer than 10 s for 3 chats, one after another"):
        made_of(Scripted(), SAYS, "x", "x", "x", "x")
    assert len(made_of(Scripted(), SAYS, "x", "x", "a", "x", "x")) == 5, "not one after another"


def test_a_template_that_ends_its_process_twice_is_out_of_bounds():
    scripted = Scripted()
    (failure,) = made_of(scripted, SAYS, "deadly")
    assert str(failure) == "the chat template ends its process: killed"
    assert scripted.asked == [1, 1]


def test_many_long_chats_come_in_several_replies(worker):
    texts = [str(number) + "é" * 700_000 for number in range(5)]
    assert made_of(worker, SAYS, *texts) == [f"user: {text}\n" for text in texts]


def test_a_worker_that_was_killed_is_replaced_by_one_with_the_same_bounds(worker):
    made_of(worker, SAYS, "hi")
    (pid,) = worker._pool.pids
    os.kill(pid, signal.SIGKILL)
    assert "256 MiB" in str(made_of(worker, "{{ 'x' * 3000000000 }}", "hi")[0])
    assert worker._pool.pids != (pid,)


def test_what_is_no_json_in_a_message_is_only_named(worker):
    (text,) = worker.texts("{{ messages[0]['picture'] }}", {}, [chat_of([user("hi", picture=b"\0")], ask=False)])
    assert text == "<bytes>"
    around = []
    around.append(around)
    with pytest.raises(RolloutError, match="cannot be written as JSON"):
        chat_of([user("hi", picture=around)], ask=False)


CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '\n' }}"
    "{% if m.get('thought', 1) is none %}never{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'model:' }}{% endif %}"
)


@pytest.mark.parametrize("ask", [True, False])
@pytest.mark.parametrize("text", ["hi", "é\U0001f600\x00", "</s>{{ 7 }}", " \n", '"\\'])
def test_the_text_is_that_of_transformers(worker, text, ask):
    tokenizer = foreign(CHATML)
    chat = [{"role": "system", "content": text, "thought": None}, user(text)]
    (made,) = worker.texts(tokenizer.get_chat_template(), tokenizer.special_tokens_map, [chat_of(chat, ask=ask)])
    assert made == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask)


def foreign(template):
    """A tokenizer with somebody's template."""
    plain = character_tokenizer("0123456789: abcdefghijklmnopqrstuvwxyz\n")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, eos_token="<|end|>", bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def test_the_attempts_of_a_group_are_rendered_once_and_fail_once():
    scripted = Scripted()
    renderer = Renderer(foreign(SAYS), stop=frozenset(), templates=scripted)
    assert [renderer.open([user("hi")]).tolist() for _ in range(8)] == [renderer.open([user("hi")]).tolist()] * 8
    assert scripted.asked == [1]
    for _ in range(8):
        with pytest.raises(TemplateOutOfBounds):
            renderer.open([user("x")])
    assert scripted.asked == [1, 1]
    for number in range(render.REMEMBERED):
        renderer.open([user(str(number))])
    renderer.open([user("hi")])
    assert len(scripted.asked) == 2 + render.REMEMBERED + 1, "only the last ones are kept"


def test_only_the_template_of_scratch_models_runs_in_this_process():
    scripted = Scripted()
    renderer = Renderer(character_tokenizer("1="), stop=frozenset(), templates=scripted)
    assert renderer.tokenizer.chat_template == SCRATCH_TEMPLATE
    renderer.open([user("1=")])
    renderer.tokenizer.chat_template = None
    renderer.open([user("1=")])
    assert scripted.asked == []
    renderer.tokenizer.chat_template = SCRATCH_TEMPLATE + " "
    renderer.open([user("1=")])
    assert scripted.asked == [1]


@pytest.mark.parametrize("template", [None, SCRATCH_TEMPLATE])
def test_a_text_without_end_is_not_given_to_the_tokenizer(template):
    tokenizer = character_tokenizer("1=")
    tokenizer.chat_template = template
    tokenizer.encode = None
    with pytest.raises(TemplateOutOfBounds, match=r"more than the 2,000,000 that are read"):
        Renderer(tokenizer, stop=frozenset()).open([user("1" * (LONGEST + 1))])


def test_several_templates_without_a_default_are_a_failure_in_words():
    renderer = Renderer(foreign({"a": SAYS, "b": SAYS}), stop=frozenset())
    with pytest.raises(RolloutError, match="multiple chat templates"):
        renderer.open([user("hi")])


def test_a_closed_worker_leaves_no_process():
    made = Templates()
    made_of(made, SAYS, "hi")
    (pid,) = made._pool.pids
    made.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert templates.shared() is templates.shared()
