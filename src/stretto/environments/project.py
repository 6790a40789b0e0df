"""A program of several files, written one file per conversation, with notes instead of the files before.

Each conversation has the goal, what this file is to be, and the notes that the one before left; it ends with a reply
that holds the file as a block of code and, behind it, the new notes. What was written before is not shown: whoever
forgets to note how a function is called cannot call it. The files together are the answer, one block of code, which
a reward of kind code runs in the sandbox; nothing is run here.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence

from stretto.environments.base import Model
from stretto.errors import RolloutError
from stretto.readings import program_block
from stretto.recipe.schema import ProjectSection
from stretto.types import Message, Outcome, Prompt

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.py")
BUNDLE = """\
import sys, types
for name, text in {files}:
    module = sys.modules[name] = types.ModuleType(name)
    if name == {last}:
        module.__name__ = "__main__"
    exec(compile(text, name + ".py", "exec"), module.__dict__)
globals().update({{key: value for key, value in vars(module).items() if not key.startswith("__")}})
"""
"""A program that is several: each file is a module for those after it, and the last one is the program."""


class ProjectEnvironment:
    """Writes the files that are listed in a column of the prompt."""

    def __init__(self, section: ProjectSection) -> None:
        self.section = section

    async def __call__(self, prompt: Prompt, model: Model) -> Outcome:
        """One trajectory: a conversation per file."""
        notes, written, missing, cut = self.section.empty, dict[str, str](), 0, 0
        for name, task in self.files(prompt):
            reply = await model.chat(self._chat(prompt, notes, name, task))
            code, notes = taken_apart(reply.text)
            missing += code is None
            cut += reply.stop == "length"
            written[name.removesuffix(".py")] = code or ""
        signals = {
            "files": float(len(written)),
            "missing": float(missing),
            "truncated": float(cut > 0),
            "notes_characters": float(len(notes)),
        }
        return Outcome(answer=bundled(written), signals=signals)

    def openings(self, prompt: Prompt) -> Iterator[list[Message]]:
        """What the model is shown for each file, without notes."""
        for name, task in self.files(prompt):
            yield self._chat(prompt, self.section.empty, name, task)

    def conversations(self, prompt: Prompt) -> int:
        """Return the number of conversations of a trajectory: one for each file."""
        return len(self.files(prompt))

    def files(self, prompt: Prompt) -> list[tuple[str, str]]:
        """(name, what it is to be) of every file. RolloutError where the column holds something else."""
        rows = prompt.tags.get(self.section.files)
        if isinstance(rows, Sequence) and not isinstance(rows, str) and rows and all(map(_is_file, rows)):
            return [(row["name"], row["task"]) for row in rows]
        raise RolloutError(
            f"prompt {prompt.id} has no list of files in its column {self.section.files!r}, such as "
            '[{"name": "parse.py", "task": "..."}]'
        )

    def _chat(self, prompt: Prompt, notes: str, name: str, task: str) -> list[Message]:
        texts = {"goal": str(prompt.messages[-1]["content"]), "notes": notes, "name": name, "file": task}
        told = re.sub(r"\{(goal|notes|name|file)\}", lambda match: texts[match[1]], self.section.write)
        return [*prompt.messages[:-1], {"role": "user", "content": told}]


def _is_file(row: object) -> bool:
    if not isinstance(row, Mapping) or not isinstance(row.get("task"), str) or not isinstance(row.get("name"), str):
        return False
    return NAME.fullmatch(row["name"]) is not None and not keyword.iskeyword(row["name"].removesuffix(".py"))


def taken_apart(text: str) -> tuple[str | None, str]:
    """(the program of a reply, or none; the notes behind it). Without a closed block all of it is notes."""
    block = program_block(text)
    if block is None or not block.closed:
        return None, text.strip()
    return block.code, block.behind.strip()


def bundled(files: Mapping[str, str]) -> str:
    """Files as one program in a block of code; what they say stands in it as texts, so none can end the block."""
    return f"```python\n{BUNDLE.format(files=list(files.items()), last=repr(list(files)[-1]))}```"
