"""Messages -> tokens, each turn once.

The first call of a conversation renders the whole chat through the tokenizer's template. Every later one renders only
what is new: the template is applied to text, and what it adds after the model's last words is encoded and appended.
What the model said is never decoded and encoded again. Where a template would rewrite earlier turns (some drop a
turn's thinking), `delta` says so, and the caller opens a new conversation.

A template is a program of strangers: `templates` applies it, in another process. Only that of scratch models, which is
stretto's own, is applied here.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.environments.base import Tool, ToolCall
from stretto.environments.templates import LONGEST, Rendered, TemplateOutOfBounds, Templates, chat_of, shared
from stretto.environments.tool_calls import ToolCallReader
from stretto.environments.tool_forms import TOOL, OpenChat, ToolForm, form_of
from stretto.errors import RolloutError
from stretto.recipe.schema import SCRATCH_TEMPLATE
from stretto.types import Message

Tokens = NDArray[np.int64]

MARK = "\ue000stretto\ue001"
"""Stands behind the model's words while a template is applied; private-use characters that no template touches."""

REMEMBERED = 64
"""Chats whose tokens are kept: the attempts of a group open with the same one."""


class LongerThanContext(RolloutError):
    """A text has more characters than the context has room for, whatever its tokens are."""


HALF = re.compile(r"[\ud800-\udfff]")
"""Half of a surrogate pair, which tokenizers cannot read."""


class Tokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    chat_template: Any
    special_tokens_map: Any
    all_special_ids: Any
    added_tokens_decoder: Any
    eos_token_id: Any
    unk_token_id: Any

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def get_chat_template(self) -> str: ...

    def apply_chat_template(self, conversation: Any, **keywords: Any) -> Any: ...

    def encode(self, text: str, **keywords: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **keywords: Any) -> Any: ...


class Renderer:
    """Turns chats into token ids for one tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: frozenset[int],
        templates: Templates | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """`stop` are the tokens that end an answer. `templates` applies the tokenizer's, by default the worker that
        this process has for it; the template is told the `arguments`, too."""
        self.tokenizer = tokenizer
        self.stop = stop
        self.templates = templates or shared()
        self.arguments = dict(arguments or {})
        self._opened: OrderedDict[tuple[str, str], Tokens | RolloutError] = OrderedDict()
        self._pieces: dict[int, str] = {}
        self.unknown = Counter[str]()
        """Characters that a scratch tokenizer lacks -> how often they stood in encoded texts."""
        self._warned = False
        if self._is_foreign:
            self.templates.begin()  # it is ready when the first chat comes

    def open(self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), context: int | None = None) -> Tokens:
        """The tokens that start a conversation, up to where the model speaks.

        Raises:
            LongerThanContext: No `context` tokens could hold the text. It is not tokenized.
        """
        # A chat for another process is JSON by now; one for this process may hold other things, which JSON makes alike.
        chat = chat_of(messages, ask=True, tools=tools) if self._is_foreign else repr([*map(dict, messages)])
        key = (str(self.tokenizer.chat_template), chat)
        if key not in self._opened:
            try:
                self._opened[key] = self.encode_opening(self.opening(messages, tools=tools), context=context)
            except LongerThanContext:  # found at once the next time, so the text is not kept
                raise
            except RolloutError as failure:  # a deadline need not pass again for the others of a group
                self._opened[key] = failure
            if len(self._opened) > REMEMBERED:
                self._opened.popitem(last=False)
        found = self._opened[key]
        if isinstance(found, RolloutError):
            raise found
        return found

    def opening(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> str:
        """The text of these tokens."""
        (text,) = self.openings([messages], tools=tools)
        if isinstance(text, RolloutError):
            raise text
        return text

    def openings(self, chats: Sequence[Sequence[Message]], *, tools: Sequence[Tool] = ()) -> Iterator[Rendered]:
        """The same for many chats, each with its text or with the reason why there is none."""
        if self.tokenizer.chat_template is None:
            return (_bounded("\n".join(str(message["content"]) for message in chat)) for chat in chats)
        return self._rendered([(chat, True) for chat in chats], tools)

    def lengths(
        self, chats: Sequence[Sequence[Message]], *, context: int | None = None
    ) -> Iterator[int | RolloutError]:
        """Number of tokens that open each of many chats, or the reason why a chat has none or cannot fit."""
        for text in self.openings(chats):
            try:
                yield text if isinstance(text, RolloutError) else len(self.encode_opening(text, context=context))
            except LongerThanContext as error:
                yield error

    def encode_opening(self, text: str, *, context: int | None = None) -> Tokens:
        """The tokens of an opening. A template writes its first tokens itself, so the tokenizer adds none."""
        own = {} if self.tokenizer.chat_template is None else {"add_special_tokens": False}
        return self._encoded(text, context, **own)

    def most_characters(self, tokens: int) -> int:
        """Max number of characters of a text that has `tokens` tokens: each is as long as the longest there is."""
        return max(0, tokens) * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def _encoded(self, text: str, context: int | None, **keywords: Any) -> Tokens:
        """The tokens of a text, which is only read if `context` of them could hold it."""
        if context is not None and len(text) > self.most_characters(context):
            raise LongerThanContext(f"a text of {len(text):,} characters leaves no room in a context of {context}")
        tokens = np.array(self.tokenizer.encode(text, **keywords), dtype=np.int64)
        if self.tokenizer.chat_template == SCRATCH_TEMPLATE and self.tokenizer.unk_token_id in tokens:
            self.unknown.update(self._lacked(text))
        return tokens

    def lacking(self, text: str) -> str:
        """Return the characters of a text that a scratch tokenizer lacks, each once."""
        return "".join(sorted(set(self._lacked(text)))) if self.tokenizer.chat_template == SCRATCH_TEMPLATE else ""

    def unknown_warning(self) -> str | None:
        """Return a warning of the characters counted in `unknown`, once. `None` without any."""
        if self._warned or not self.unknown:
            return None
        self._warned, missing = True, "".join(sorted(self.unknown))
        count = self.unknown.total()
        places = f"in {count} places" if count > 1 else "in one place"
        return (
            f"model.scratch.characters: lacks {missing!r}, which stand {places} of the messages; the model reads each "
            "as an unknown character\n    fix: add them to model.scratch.characters, or change the messages"
        )

    def _lacked(self, text: str) -> list[str]:
        """Return every character of a text that is no token; special tokens are none of its characters."""
        vocabulary = self.tokenizer.get_vocab()
        special = sorted(filter(None, (each for each in vocabulary if len(each) > 1)), key=len, reverse=True)
        pieces = re.split("|".join(map(re.escape, special)), text) if special else [text]
        return [char for piece in pieces for char in piece if char not in vocabulary]

    def delta(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        last: int | None,
        tools: Sequence[Tool] = (),
        context: int | None = None,
    ) -> Tokens | None:
        """The tokens that continue a conversation whose last message is the model's.

        `last` is the model's last token: if it ended the turn it already stands in the conversation, otherwise the
        template's own end of turn is part of the delta. None if the template would rewrite what came before.

        Raises:
            LongerThanContext: No `context` tokens could hold the new text. It is not tokenized.
        """
        if self.tokenizer.chat_template is None:
            raise RolloutError("this tokenizer has no chat template, so a conversation cannot have a second turn")
        if before[-1].get("tool_calls"):
            return self._after_calls(before, new, last=last, tools=tools, context=context)
        words = str(before[-1]["content"])
        marked = [*before[:-1], {**before[-1], "content": words + MARK}]
        chats = ((marked, False), ([*marked, *new], True), (before[:-1], True))
        closed, whole, asked = self._texts(*chats, tools=tools)
        end = closed.rfind(MARK)
        # White space that a template trims does not matter; words that it leaves out do.
        kept = closed.startswith(asked) and words.strip() in closed[len(asked) : max(end, 0)]
        if not (kept and end >= len(asked) and whole.startswith(closed)):
            return None
        tail = whole[end + len(MARK) :]
        if last in self.stop:
            ended = str(self.tokenizer.decode([last], skip_special_tokens=False))
            if not tail.startswith(ended):
                return None
            tail = tail[len(ended) :]
        return self._encoded(tail, context, add_special_tokens=False)

    def _after_calls(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        last: int | None,
        tools: Sequence[Tool],
        context: int | None,
    ) -> Tokens | None:
        """The same where the template writes the calls of the last message in its own way, so that nothing of what the
        model said can be marked: the delta begins behind the token that ended its turn."""
        closed, whole, asked = self._texts((before, False), ([*before, *new], True), (before[:-1], True), tools=tools)
        ended = str(self.tokenizer.decode([last], skip_special_tokens=False)) if last in self.stop else ""
        end = closed.rfind(ended)
        kept = closed.startswith(asked) and str(before[-1]["content"]).strip() in closed[len(asked) :]
        if not ended or end < len(asked) or closed[end + len(ended) :].strip() or not kept:
            return None
        if not whole.startswith(closed):
            return None
        return self._encoded(whole[end + len(ended) :], context, add_special_tokens=False)

    def answer(self, messages: Sequence[Message], text: str) -> Tokens:
        """The tokens with which the model would have said `text`, the end of its turn included.

        Where the template writes no token that ends an answer, there is one behind the words all the same, because a
        model that is never shown one never stops.
        """
        if self.tokenizer.chat_template is None:
            return self._ended(text)
        asked, whole = self._texts((messages, True), ([*messages, {"role": "assistant", "content": text}], False))
        if not whole.startswith(asked):
            raise RolloutError(
                "the chat template writes what comes before an answer in another way than it asks for one"
            )
        said = whole[len(asked) :]
        tokens = self.tokenizer.encode(said, add_special_tokens=False)
        ends = [place for place, token in enumerate(tokens) if token in self.stop]
        if not ends:
            return self._ended(said.removesuffix(self.closing or ""))
        return np.array(tokens[: ends[0] + 1], dtype=np.int64)

    def _ended(self, words: str) -> Tokens:
        """The tokens of words, and the token that ends texts, where there is one."""
        usual = self.tokenizer.eos_token_id
        end = [usual] if usual in self.stop else sorted(self.stop)[:1]
        return np.array([*self.tokenizer.encode(words, add_special_tokens=False), *end], dtype=np.int64)

    def spoken(self, text: str, *, ended: bool) -> list[int]:
        """Return the tokens of a reply's literal text and, if it `ended`, the token that ends a turn."""
        tokens = list(self.tokenizer.encode(text, add_special_tokens=False))
        if not ended:
            return tokens
        closing = self.tokenizer.encode(self.closing or "", add_special_tokens=False)
        usual = [self.tokenizer.eos_token_id, *sorted(self.stop)]
        return [*tokens, *[token for token in (*closing, *usual) if token in self.stop][:1]]

    @cached_property
    def closing(self) -> str | None:
        """What the template writes behind the model's words, whether or not somebody speaks after it; none where that
        cannot be told."""
        chat: list[Message] = [{"role": "user", "content": "1"}, {"role": "assistant", "content": MARK}]
        try:
            texts = self._texts((chat, False), ([*chat, chat[0]], False))
        except RolloutError:  # it has no words for such chats
            return None
        last, earlier = (text.rpartition(MARK) for text in texts)
        return last[2] if last[1] and earlier[1] and earlier[2].startswith(last[2]) else None

    @property
    def ends(self) -> frozenset[int]:
        """`stop` and, where the template writes none of these behind the model's words but another special token, that.

        The files of a base model often name the end of a text alone, while its template ends turns with a token of
        its own.
        """
        if self.tokenizer.chat_template is None or not self.closing:
            return self.stop
        written = self.tokenizer.encode(self.closing, add_special_tokens=False)
        if self.stop.intersection(written):
            return self.stop
        first = next((token for token in written if self.all_text([token]).strip()), None)
        return self.stop | ((self.turn_tokens - {self.tokenizer.unk_token_id}) & {first})

    def stop_at_turns(self, note: Callable[[str], object]) -> None:
        """Lets answers end at all of its `ends`; it is noted which of them the model's files do not name."""
        found = self.ends
        for token in found - self.stop:
            note(f"the chat template ends a turn with {self.all_text([token])}, so an answer ends there, too")
        self.stop = found

    def text(self, tokens: Sequence[int]) -> str:
        """What the model said, without the token that ended its turn."""
        return str(self.tokenizer.decode(list(self._said(tokens)), skip_special_tokens=True))

    def tool_calls(self, tokens: Sequence[int], tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """The calls of tools in what the model said; nothing where it was told of none."""
        return self._tool_calls.read(self._said(tokens), tools) if tools else ()

    def words(self, tokens: Sequence[int]) -> str:
        """What the model said beside its calls of tools."""
        return self._tool_calls.words(self._said(tokens))

    def try_tools(self, messages: Sequence[Message]) -> None:
        """RolloutError where a chat with tools cannot be rendered, or calls of them cannot be read."""
        self.tool_calls((), [TOOL])
        self.opening(messages, tools=[TOOL])

    @property
    def calls_apart(self) -> bool:
        """True if the template wants the calls of a reply apart from its words."""
        return self._is_foreign and self._tool_form.apart

    @cached_property
    def _tool_form(self) -> ToolForm:
        def shown(chat: OpenChat, tools: Sequence[Tool]) -> Rendered:
            (text,) = self._applied([chat], tools)
            return text

        return form_of(self.tokenizer.get_chat_template(), shown)

    @cached_property
    def _tool_calls(self) -> ToolCallReader:
        return ToolCallReader(self.tokenizer)

    def _said(self, tokens: Sequence[int]) -> Sequence[int]:
        return tokens[:-1] if len(tokens) and tokens[-1] in self.stop else tokens

    @property
    def turn_tokens(self) -> frozenset[int]:
        """Special tokens, which no reply should hold, but for those that end it."""
        added = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added.union(self.tokenizer.all_special_ids)) - self.stop

    def all_text(self, tokens: Sequence[int]) -> str:
        """A whole conversation for people to read, special tokens included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def widths(self, tokens: Sequence[int], text: str) -> list[int]:
        """How many letters of a conversation's text each of its tokens made, for people to read; together all of it.

        A letter that several tokens make counts for the last of them, and one that a token has only beside others
        (some tokenizers leave a first space out) for the one before.
        """
        widths, place, without = list[int](), 0, 0
        for token in set(tokens) - self._pieces.keys():
            self._pieces[token] = self.all_text([token])
        pieces = [self._pieces[token] for token in tokens]
        if "".join(pieces) == text:
            return list(map(len, pieces))
        for piece in pieces:
            whole = piece and "\N{REPLACEMENT CHARACTER}" not in piece
            found = text.find(piece, place, place + len(piece) + 1 + 4 * without) if whole else -1
            if found < 0:
                widths.append(0)
                without += 1
                continue
            if widths:
                widths[-1] += found - place
            place, without = found + len(piece), 0
            widths.append(len(piece) + (0 if len(widths) else found))
        if widths:
            widths[-1] += len(text) - place
        return widths

    @property
    def _is_foreign(self) -> bool:
        return self.tokenizer.chat_template not in (None, SCRATCH_TEMPLATE)

    def _texts(self, *chats: tuple[Sequence[Message], bool], tools: Sequence[Tool] = ()) -> list[str]:
        """What the template makes of each; raises what it says against any."""
        texts: list[str] = []
        for text in self._rendered(chats, tools):
            if isinstance(text, RolloutError):
                raise text
            texts.append(text)
        return texts

    def _rendered(self, chats: Sequence[tuple[Sequence[Message], bool]], tools: Sequence[Tool]) -> Iterator[Rendered]:
        if self._is_foreign:
            if not tools or not chats:
                return self._applied(chats, ())
            try:
                formed = [(self._tool_form.chat(messages, tools), ask) for messages, ask in chats]
            except (RolloutError, ValueError) as error:
                return repeat(RolloutError(str(error).partition("\n")[0]), len(chats))
            return self._applied([(messages, ask) for (messages, _), ask in formed], formed[0][0][1])
        return (_bounded(self._own(messages, ask=ask)) for messages, ask in chats)

    def _applied(self, chats: Sequence[OpenChat], tools: Sequence[Tool]) -> Iterator[Rendered]:
        """What a template of others makes of chats as they are."""
        try:
            template, variables = self.tokenizer.get_chat_template(), self.tokenizer.special_tokens_map
        except ValueError as error:  # several templates, and none of them the default
            return repeat(RolloutError(str(error).partition("\n")[0]), len(chats))
        sent = [chat_of(messages, ask=ask, tools=tools) for messages, ask in chats]
        return map(_bounded, self.templates.texts(template, {**variables, **self.arguments}, sent))

    def _own(self, messages: Sequence[Message], *, ask: bool) -> str:
        chat = [dict(message) for message in messages]
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=ask))


def _bounded(text: Rendered) -> Rendered:
    """A text that is short enough to be read, and of which every character is one."""
    if isinstance(text, RolloutError):
        return text
    if len(text) > LONGEST:
        return TemplateOutOfBounds(f"the chat has {len(text):,} characters, more than the {LONGEST:,} that are read")
    if HALF.search(text) is not None:
        return RolloutError("the chat holds half of a surrogate pair, which is no character")
    return text
