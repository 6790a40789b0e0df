"""What a model wrote becomes calls of tools, or an error that it can read; nothing that it writes raises."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.environments.base import ToolCall
from stretto.environments.render import Renderer
from stretto.environments.tool_calls import MOST, ToolCallReader, renders_tools
from stretto.environments.tool_forms import INTRODUCTION, introduced
from stretto.errors import RolloutError
from stretto.models.scratch import character_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
CALL = '{"name": "find", "arguments": {"query": "a"}}'
MADE = ToolCall(name="find", arguments={"query": "a"})
HERMES = "{% if tools %}{{ tools }} write <tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
LLAMA = HERMES.replace("<tool_call>", '{"name": function, "parameters": {}}')
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
UNKNOWN = HERMES.replace("<tool_call>", "<call>")
SILENT = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"


class Words:
    """A tokenizer whose tokens are characters."""

    def __init__(self, template, name=""):
        self.chat_template, self.name_or_path = template, name

    def decode(self, tokens, **keywords):
        return "".join(map(chr, tokens))


def read(text, template=HERMES):
    return ToolCallReader(Words(template)).read([ord(letter) for letter in text], TOOLS)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES, f"I look.\n<tool_call>\n{CALL}\n</tool_call>"),
        (SILENT, f"<tool_call>{CALL}</tool_call>"),
        (LLAMA, '{"name": "find", "parameters": {"query": "a"}}'),
        (LLAMA, '<|python_tag|>{"name": "find", "parameters": {"query": "a"}}'),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]"),
        (MISTRAL, '[TOOL_CALLS]find[ARGS]{"query": "a"}'),
        (MISTRAL, 'I look.[TOOL_CALLS]find[CALL_ID]abcdefghi[ARGS]{"query": "a"}'),
        (HERMES, '<tool_call>{"name": "find", "arguments": "{\\"query\\": \\"a\\"}"}</tool_call>'),
        (character_tokenizer("a").chat_template, "find(a)"),
    ],
)
def test_a_call_is_read_in_the_format_that_the_template_shows(template, text):
    assert read(text, template) == (MADE,)


@pytest.mark.parametrize(
    ("template", "text", "words"),
    [
        (HERMES, f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "I look."),
        (LLAMA, '{"name": "find", "parameters": {"query": "a"}}', ""),
        (MISTRAL, f"I look.[TOOL_CALLS][{CALL}]", "I look."),
        (character_tokenizer("a").chat_template, "find(a)", ""),
    ],
)
def test_words_beside_calls_are_told_without_them(template, text, words):
    assert ToolCallReader(Words(template)).words([ord(letter) for letter in text]) == words


def test_several_calls_come_in_order_and_a_broken_one_among_them_says_so():
    text = f"<tool_call>{CALL}</tool_call><tool_call>{{</tool_call><tool_call>{CALL}</tool_call>"
    first, broken, last = read(text)
    assert (first, last) == (MADE, MADE)
    assert "no JSON object" in broken.error


@pytest.mark.parametrize(
    ("template", "text", "says"),
    [
        (HERMES, f"<tool_call>{CALL}", "not closed"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        (HERMES, '<tool_call>["find"]</tool_call>', '"name"'),
        (HERMES, '<tool_call>{"name": "find", "arguments": [1]}</tool_call>', "no object"),
        (HERMES, f"<tool_call>{'[' * 100_000}</tool_call>", "no JSON"),
        (MISTRAL, "[TOOL_CALLS] find", "no JSON list"),
        (MISTRAL, "[TOOL_CALLS]find[ARGS]a", "no object"),
        (character_tokenizer("a").chat_template, "find(a", "parenthesis"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_for_the_model(template, text, says):
    (call,) = read(text, template)
    assert says in call.error


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL, SILENT, character_tokenizer("a").chat_template])
@pytest.mark.parametrize("text", ["", "42", "find", "find the (a)", "other(a)", "{", "I would call find."])
def test_words_are_no_call(template, text):
    assert read(text, template) == ()


@given(st.text(max_size=200), st.sampled_from([HERMES, LLAMA, MISTRAL, SILENT]))
def test_nothing_that_a_model_writes_raises(text, template):
    for wrapped in (text, f"<tool_call>{text}</tool_call>", f"[TOOL_CALLS]{text}", f'{{"name"{text}'):
        assert all(isinstance(call, ToolCall) for call in read(wrapped, template))


def test_a_reply_calls_no_more_than_so_many_tools():
    assert len(read(f"<tool_call>{CALL}</tool_call>" * (2 * MOST))) == MOST


XML = HERMES.replace("<tool_call>", "<tool_call><function=NAME> Required parameters MUST be given, as {} </tool_call>")
"""As of Qwen's coders."""
TYPESCRIPT = HERMES.replace("<tool_call>", "namespace functions: {{ tools[0].function.parameters }}")
"""As of gpt-oss."""


@pytest.mark.parametrize("template", [UNKNOWN, XML, TYPESCRIPT])
def test_a_template_that_tells_of_tools_in_an_unknown_format_is_refused(template):
    with pytest.raises(RolloutError, match="not known here"):
        ToolCallReader(Words(template))


def test_a_template_without_tools_gets_them_in_the_system_message():
    assert [renders_tools(each) for each in (SILENT, HERMES)] == [False, True]
    user = {"role": "user", "content": "hi"}
    told, asked = introduced([user], TOOLS)
    assert asked is user
    assert told["role"] == "system"
    assert json.dumps(TOOLS[0]) in told["content"]
    (both, _) = introduced([{"role": "system", "content": "Be brief."}, user], TOOLS)
    text = INTRODUCTION.format(tools=json.dumps(TOOLS[0]))
    assert both["content"] == f"Be brief.\n\n{text}"
    (first,) = introduced([user], TOOLS, system=False)
    assert (first["role"], first["content"]) == ("user", f"{text}\n\nhi")


@pytest.mark.parametrize("template", [SILENT, HERMES])
def test_tools_reach_the_model_through_its_own_template_or_ours(template):
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer, stop=frozenset({0}))
    text = tokenizer.decode(renderer.open([{"role": "user", "content": "hi"}], tools=TOOLS))
    call = {"function": {"name": "find", "arguments": {"query": "z"}}}
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    made = '<tool_call>\n{"name": "find", "arguments": {"query": "z"}}\n</tool_call>'
    assert (made in tokenizer.decode(renderer.open(said, tools=TOOLS))) == (template == SILENT)
    assert '"find"' in text or "'find'" in text
    assert "<tool_call>" in text
    assert "find" not in tokenizer.decode(renderer.open([{"role": "user", "content": "hi"}]))


def test_renderers_reads_the_calls_of_a_family_that_it_knows():
    pytest.importorskip("renderers.base")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    special += ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    inner = Tokenizer(models.BPE(vocab={}, merges=[], byte_fallback=False))
    inner.add_tokens([*map(chr, range(32, 127)), "\n"])
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.name_or_path = "Qwen/Qwen3-0.6B"
    tokenizer.chat_template = UNKNOWN  # its own reader is not asked
    reader = ToolCallReader(tokenizer)
    good, bad = (f"<tool_call>{text}</tool_call>" for text in (CALL, "{"))
    first, second = reader.read(tokenizer.encode(good + bad), TOOLS)
    assert first == MADE
    assert second.error
    assert reader.words(tokenizer.encode(f"I look.{good}")) == "I look."
