"""Chats become tokens once: deltas add up to what the template would have written, and what they cannot is refused."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.environments.render import MARK, Renderer
from stretto.errors import RolloutError
from stretto.models.scratch import ASSISTANT, END, SYSTEM, USER, character_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|user|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\\n' }}{% endif %}"
)
"""Every turn ends with a token and a newline, as ChatML's do."""

STRIPS_EARLIER = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' and loop.index0 < last.user %}"
    "{{ '<|assistant|>' + m['content'].split('</think>')[-1].lstrip('\\n') + '<|end|>' }}"
    "{% else %}{{ '<|' + m['role'] + '|>' + m['content'] + ('<|end|>' if m['role'] == 'assistant' else '') }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Thinking is dropped from turns before the last question, as Qwen3's template does."""

STRIPS_ALWAYS = STRIPS_EARLIER.replace("and loop.index0 < last.user", "")
"""Thinking is dropped from every turn, as DeepSeek-R1's template does."""

TRIMS = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] | trim) }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""White space around a turn is dropped, as Llama 3's template does."""

SEPARATES = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
"""Turns end with empty lines and no token of their own, as Alpaca's do."""

THINKS = (
    "{% for m in messages %}{{ '<|user|>' + m['role'] + '\n' + ('<think></think>' if loop.last and "
    "m['role'] == 'assistant' else '') + m['content'] + '\n<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n<think></think>' }}{% endif %}"
)
"""The last turn is written with a thought in front, which later ones take away, as Qwen3's template does."""

ASKS_ALWAYS = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}{{ '<|assistant|>' }}"
"""Ends every chat with the model's turn, whether it is asked for or not."""

LETTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz</>\n"


def renderer_with(template=None):
    tokenizer = copy.deepcopy(character_tokenizer(LETTERS))
    if template is not None:
        tokenizer.chat_template = template
    return Renderer(tokenizer, stop=frozenset({tokenizer.convert_tokens_to_ids(END)}))


def ids(renderer, text):
    return renderer.tokenizer.encode(text, add_special_tokens=False)


def user(text):
    return {"role": "user", "content": text}


def model(text):
    return {"role": "assistant", "content": text}


def test_a_chat_opens_where_the_model_speaks():
    renderer = renderer_with()
    tokens = renderer.open([{"role": "system", "content": "be 1"}, user("2+2=")])
    assert tokens.tolist() == ids(renderer, "<|system|>be 1<|user|>2+2=<|assistant|>")
    assert tokens.dtype == np.int64
    assert renderer.tokenizer.unk_token_id not in tokens


def test_an_answer_is_the_models_words_and_the_end_of_its_turn():
    renderer = renderer_with()
    assert renderer.answer([user("2+2=")], "4").tolist() == ids(renderer, "4<|end|>")
    assert renderer_with(CHATML).answer([user("2+2=")], "4").tolist() == ids(renderer, "4<|end|>"), "no newline behind"
    assert renderer.answer([user("2+2=")], "").tolist() == ids(renderer, "<|end|>")


def base_renderer(template):
    """Of a base model: what its files name as the end is the end of a text, which is no turn's."""
    renderer = renderer_with(template)
    renderer.tokenizer.eos_token = SYSTEM
    renderer.stop = frozenset({renderer.tokenizer.eos_token_id})
    return renderer


@pytest.mark.parametrize("template", [CHATML, TRIMS, THINKS], ids=["chatml", "no newline", "thinks"])
def test_a_turn_ends_with_the_special_token_of_the_template_where_the_files_name_another(template):
    renderer = base_renderer(template)
    text, end = renderer.tokenizer.eos_token_id, renderer.tokenizer.convert_tokens_to_ids(END)
    assert renderer.ends == {text, end}
    renderer.stop = renderer.ends
    answer = renderer.answer([user("2+2=")], "4")
    assert answer[-1] == end and renderer.text(answer).strip() == "4"
    goes_on = renderer.delta([user("1"), model("2")], [user("3")], last=end) is not None
    assert goes_on == (template != THINKS), "that one rewrites the turn"


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("<|end|>", "<|end|><|system|>"),
        SEPARATES,
        CHATML.replace("<|end|>", "."),
        ASKS_ALWAYS,
        "{{ raise_exception('no') }}",
        None,
    ],
    ids=["writes the files' end too", "no token", "an unknown character", "a role", "fails", "scratch"],
)
def test_what_is_no_end_of_a_turn_does_not_end_answers(template):
    renderer = base_renderer(template) if template else renderer_with()
    assert renderer.ends == renderer.stop == {renderer.tokenizer.eos_token_id}


@pytest.mark.parametrize("template", [SEPARATES, ASKS_ALWAYS.split("{{ '<|assistant|>' }}")[0]])
def test_an_answer_that_the_template_does_not_end_is_ended_by_the_token_that_ends_texts(template):
    renderer = base_renderer(template)
    text = renderer.tokenizer.eos_token_id
    renderer.stop |= {0}
    assert renderer.answer([user("2+2=")], "4").tolist()[-2:] == [*ids(renderer, "4"), text], "no empty lines between"
    renderer.tokenizer.chat_template = None
    assert renderer.answer([user("2+2=")], "4").tolist() == [*ids(renderer, "4"), text]


def test_the_text_of_an_answer_leaves_out_the_token_that_ended_it():
    renderer = renderer_with()
    assert renderer.text(ids(renderer, "12<|end|>")) == "12"
    assert renderer.text(ids(renderer, "12")) == "12"
    assert renderer.text([]) == ""
    assert renderer.all_text(ids(renderer, "<|user|>1<|assistant|>2<|end|>")) == "<|user|>1<|assistant|>2<|end|>"


def test_a_delta_is_what_the_template_adds_behind_the_models_last_token():
    renderer = renderer_with(CHATML)
    before, end = [user("1"), model("2")], renderer.tokenizer.eos_token_id
    delta = renderer.delta(before, [user("3")], last=end)
    assert delta.tolist() == ids(renderer, "\n<|user|>user\n3<|end|>\n<|user|>assistant\n")
    assert not set(delta.tolist()) & set(ids(renderer, "2"))


@pytest.mark.parametrize("template", [None, CHATML], ids=["scratch", "chatml"])
def test_a_turn_that_was_cut_off_gets_the_templates_own_end(template):
    renderer = renderer_with(template)
    before = [user("1"), model("2")]
    ended = renderer.delta(before, [user("3")], last=renderer.tokenizer.eos_token_id)
    cut = renderer.delta(before, [user("3")], last=ids(renderer, "2")[0])
    assert cut.tolist() == [renderer.tokenizer.eos_token_id, *ended.tolist()]


def test_a_turn_that_ended_with_another_token_than_the_templates_cannot_go_on():
    renderer = renderer_with()
    other = renderer.tokenizer.convert_tokens_to_ids(USER)
    renderer.stop |= {other}
    assert renderer.delta([user("1"), model("2")], [user("3")], last=other) is None


@pytest.mark.parametrize("template", [STRIPS_EARLIER, STRIPS_ALWAYS], ids=["earlier turns", "every turn"])
def test_a_template_that_drops_thinking_cannot_continue_a_conversation_that_has_it(template):
    renderer = renderer_with(template)
    end, thought = renderer.tokenizer.eos_token_id, [user("1"), model("<think>so</think>2")]
    assert renderer.delta(thought, [user("3")], last=end) is None
    plain = renderer.delta([user("1"), model("2")], [user("3")], last=end)
    assert plain.tolist() == ids(renderer, "<|user|>3<|assistant|>")


def test_thinking_that_the_template_keeps_for_now_is_continued():
    renderer = renderer_with(STRIPS_EARLIER)
    before = [user("1"), model("<think>so</think>2")]
    delta = renderer.delta(before, [{"role": "system", "content": "7"}], last=renderer.tokenizer.eos_token_id)
    assert delta.tolist() == ids(renderer, "<|system|>7<|assistant|>")


@pytest.mark.parametrize("words", ["2", " 2", "2 ", " ", "", "a\n"])
def test_white_space_that_a_template_trims_does_not_end_a_conversation(words):
    renderer = renderer_with(TRIMS)
    delta = renderer.delta([user("1"), model(words)], [user("3")], last=renderer.tokenizer.eos_token_id)
    assert delta.tolist() == ids(renderer, "<|user|>3<|assistant|>")


@pytest.mark.parametrize("words", ["2<|end|><|user|>3<|assistant|>4", f"{MARK}<|end|><|user|>all of it", MARK])
def test_what_looks_like_the_template_or_the_mark_stays_the_models_words(words):
    renderer = renderer_with()
    said = [user("1"), model(words), user("2"), model(words)]
    delta = renderer.delta(said, [user("5")], last=renderer.tokenizer.eos_token_id)
    assert delta.tolist() == ids(renderer, "<|user|>5<|assistant|>")


def test_a_template_that_leaves_out_a_whole_turn_cannot_continue_it():
    renderer = renderer_with("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")
    assert renderer.delta([user(MARK), model("2")], [user("3")], last=renderer.tokenizer.eos_token_id) is None


def test_without_a_template_there_is_one_turn():
    renderer = renderer_with()
    renderer.tokenizer.chat_template = None
    assert renderer.open([user("1+1="), user("2")]).tolist() == ids(renderer, "1+1=\n2")
    with pytest.raises(RolloutError, match="no chat template"):
        renderer.delta([user("1"), model("2")], [user("3")], last=0)


@pytest.mark.parametrize("template", [None, "{{ '\\ud800' }}", CHATML, "{{ '\\udfff' }}{{ messages[0]['content'] }}"])
def test_half_of_a_surrogate_pair_is_refused_whoever_writes_it(template):
    renderer = renderer_with(template)
    for chat in ([user("1\ud83d")], [user("1"), user("\udc00")]):
        with pytest.raises(RolloutError, match="half of a surrogate pair"):
            renderer.open(chat)
    if template is None:
        renderer.tokenizer.chat_template = None
        with pytest.raises(RolloutError, match="half of a surrogate pair"):
            renderer.open([user("\ud800")])
    assert len(renderer_with(CHATML).open([user("\U0001f600")])), "both halves are a character"


WORDS = st.text(alphabet="0123456789+=ab ", max_size=6)


@given(
    system=st.none() | WORDS,
    turns=st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=5),
    template=st.sampled_from([None, CHATML]),
)
def test_deltas_add_up_to_the_templates_own_rendering(system, turns, template):
    renderer = RENDERERS[template]
    messages = [] if system is None else [{"role": "system", "content": system}]
    tokens, last = None, None
    for asked, said, cut in turns:
        new = [*([user("0")] if cut and messages else []), user(asked)]
        if tokens is None:
            messages += new
            tokens = renderer.open(messages).tolist()
        else:
            tokens += renderer.delta(messages, new, last=last).tolist()
            messages += new
        answer = ids(renderer, said) if cut else renderer.answer(messages, said).tolist()
        tokens += answer
        last = answer[-1] if answer else ids(renderer, ASSISTANT)[0]
        messages.append(model(said))
    whole = renderer.tokenizer.apply_chat_template(messages, tokenize=False)
    rendered = ids(renderer, whole.removesuffix("\n").removesuffix(END))
    assert tokens == rendered + ([] if cut else ids(renderer, END))


RENDERERS = {template: renderer_with(template) for template in (None, CHATML)}


def test_a_template_is_told_the_arguments_of_the_recipe():
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '' if enable_thinking else '</' }}"
    tokenizer = copy.deepcopy(character_tokenizer(LETTERS))
    tokenizer.chat_template = template
    plain, thinking = (
        Renderer(tokenizer, stop=frozenset(), arguments=arguments) for arguments in (None, {"enable_thinking": True})
    )
    assert (plain.opening([user("1")]), thinking.opening([user("1")])) == ("1</", "1")
    assert list(thinking.lengths([[user("1")], [user("123")]])) == [1, 3]
