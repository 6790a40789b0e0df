"""What a worker process does with a chat template: a program of strangers, which may loop or write without end.

It runs in a process of its own (`stretto.environments.templates` is the other side), so that a deadline can end it and
what it takes of memory is bounded. The template is applied by transformers' own function, in its sandboxed Jinja.
"""

from __future__ import annotations

import json
import os
import resource
from functools import cache

ROOM = 2**28
"""Bytes of address space that templates may take, beyond what the process had before."""
REPLY = 2_000_000
"""Characters of one reply after which the rest of the chats is left to the next one."""


@cache
def begin() -> int:
    """Once: loads what applies templates, then bounds the memory; the number of the process."""
    os.environ["USE_TORCH"] = "0"  # only text is made here
    from transformers.utils import chat_template_utils

    assert callable(chat_template_utils.render_jinja_template)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux: there the deadline alone bounds it
        return os.getpid()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = taken + ROOM if hard == resource.RLIM_INFINITY else min(taken + ROOM, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return os.getpid()


def render(template: str, variables: dict[str, str], chats: list[str], longest: int) -> list[dict[str, str]]:
    """For the first chats, or all of them: the `text`, what is `wrong` with it, or which bound it would `exceed`.

    A chat is JSON: its messages, whether the model is to speak next, and the tools it may call. `longest` is the most
    characters of a text.
    """
    begin()  # a process that took the place of a dead one has not been told to
    replies: list[dict[str, str]] = []
    characters = 0
    for chat in chats:
        replies.append(_render_one(template, variables, chat, longest))
        characters += sum(map(len, replies[-1].values()))
        if characters > REPLY:
            break
    return replies


def _render_one(template: str, variables: dict[str, str], chat: str, longest: int) -> dict[str, str]:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, ask, tools = json.loads(chat)
    conversation = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        (text,), _ = render_jinja_template(
            conversations=[conversation],
            tools=tools,
            chat_template=template,
            add_generation_prompt=ask,
            **variables,
        )
    except MemoryError:
        return {"exceeds": f"needs more than {ROOM // 2**20} MiB of memory"}
    except Exception as error:  # a template is a program of the model's authors and may raise anything
        return {"wrong": str(error)[:500].strip() or type(error).__name__}
    if len(text) > longest:
        return {"exceeds": f"makes a text of {len(text):,} characters, more than the {longest:,} that are read"}
    return {"text": text}
