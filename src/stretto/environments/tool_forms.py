"""How a chat with tools is put to a template: as it is where the template takes it so, else in a form that it takes.

Templates differ in what they know of tools. Most write the model's words as they are, calls included, and then what a
tool came to. Some want calls apart from words (Mistral), some refuse a system message or the role `tool` (Gemma). Which
form one takes is found by trying it on a chat of two calls, once. `tool_calls` is the other direction.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.environments.base import Tool
from stretto.environments.tool_calls import renders_tools
from stretto.errors import RolloutError
from stretto.types import Message

INTRODUCTION = (
    "You may call one or more of these functions, given as JSON schemas:\n<tools>\n{tools}\n</tools>\n"
    "For each call, write a JSON object with the name of the function and its arguments:\n"
    '<tool_call>\n{{"name": "...", "arguments": {{...}}}}\n</tool_call>'
)
"""What a model is told whose template cannot tell it; the format is the one that Hermes introduced."""
RESPONSE = "<tool_response>\n{content}\n</tool_response>"
"""What a tool came to, in a user's message: the other half of that format."""

OpenChat = tuple[Sequence[Message], bool]
"""A chat, and whether the model is to speak next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """What a template takes."""

    told: bool
    """True if it tells the model of tools itself."""
    apart: bool = False
    """True if it wants the calls of a reply apart from its words, as OpenAI's API has them."""
    system: bool = True
    """False if it refuses a system message, so that the introduction stands in the first user message."""
    answers: bool = True
    """False if it refuses the role `tool`, so that the user says what tools came to."""

    def chat(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[Message], Sequence[Tool]]:
        """A chat as the template takes it, and what it is told of tools."""
        if self.told:
            return list(messages), tools
        found = [_with_calls(message) for message in messages]
        if not self.answers:
            found = _said_by_the_user(found)
        return introduced(found, tools, system=self.system), ()


def introduced(messages: Sequence[Message], tools: Sequence[Tool], *, system: bool = True) -> list[Message]:
    """A chat whose system message tells of the tools, or whose first message of the user's does."""
    text = INTRODUCTION.format(tools="\n".join(json.dumps(tool) for tool in tools))
    role = "system" if system else "user"
    place = 0 if system else next((at for at, each in enumerate(messages) if each["role"] == role), len(messages))
    if place < len(messages) and messages[place]["role"] == role:
        said = str(messages[place]["content"])
        both = f"{said}\n\n{text}" if system else f"{text}\n\n{said}"
        return [*messages[:place], {**messages[place], "content": both}, *messages[place + 1 :]]
    return [*messages[:place], {"role": role, "content": text}, *messages[place:]]


def _with_calls(message: Message) -> Message:
    """A message in whose text the calls stand that it has apart: a program's own, or one that it has changed."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    content = "\n".join([str(message["content"]), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)])
    return {"role": message["role"], "content": content.lstrip("\n")} if calls else message


def _said_by_the_user(messages: Sequence[Message]) -> list[Message]:
    """The answers to the calls of one reply are one message."""
    found = list[Message]()
    before = ""
    for message in messages:
        if message["role"] == "tool":
            said = RESPONSE.format(content=message["content"])
            if before == "tool":
                said = f"{found.pop()['content']}\n{said}"
            found.append({"role": "user", "content": said})
        else:
            found.append(message)
        before = message["role"]
    return found


# Trying ---------------------------------------------------------------------------------------------------------------

ID = "000000000"
"""Mistral's templates want nine letters or digits."""
MARK = "stretto7"
"""What a tool comes to; a template that takes it shows it."""
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
ASKED: Message = {"role": "user", "content": "1"}
CALL = {"id": ID, "type": "function", "function": {"name": "find", "arguments": {"query": "1"}}}
ANSWER: Message = {"role": "tool", "name": "find", "tool_call_id": ID, "content": MARK}


def form_of(template: str, shown: Callable[[OpenChat, Sequence[Tool]], str | RolloutError]) -> ToolForm:
    """The form that a template takes; `shown` applies it. RolloutError where it takes none."""
    if renders_tools(template):
        forms = [ToolForm(told=True, apart=apart) for apart in (False, True)]
    else:
        both = (True, False)
        forms = [ToolForm(told=False, system=system, answers=answers) for answers in both for system in both]
    wrong = ""
    for form in forms:
        said = {"role": "assistant", "content": "1", **({"tool_calls": [CALL]} if form.apart else {})}
        messages, tools = form.chat([ASKED, said, ANSWER, said, ANSWER], [TOOL])
        text = shown((messages, True), tools)
        told = form.told or not isinstance(text, str) or '"find"' in text
        if isinstance(text, str) and text.count(MARK) == 2 and told:
            return form
        wrong = wrong or (str(text) if isinstance(text, RolloutError) else "it leaves out what tools came to")
    raise RolloutError(f"the chat template takes no calls of tools and no answers to them: {wrong}")
