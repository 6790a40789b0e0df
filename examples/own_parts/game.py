"""A source of prompts, an environment, a reward and a logger of one's own, which the recipe names as `game:NAME`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto import Outcome
from stretto.environments.base import Model
from stretto.types import Prompt


def rows(config: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """The prompts: every letter, so many times. `config` is what the recipe says at task.source.config."""
    for letter in "abcdefghij":
        for times in range(1, config["most"] + 1):
            yield {"id": f"{letter}{times}", "letter": letter, "times": times, "answer": letter * times}


async def play(prompt: Prompt, model: Model) -> Outcome:
    """Asks, and says once which letter is wanted if the answer was wrong."""
    messages = list(prompt.messages)
    for turn in (1, 2):
        reply, signals = await model.chat(messages), {"turns": float(turn)}
        if reply.text == prompt.reference:
            break
        messages += [reply, {"role": "user", "content": prompt.tags["letter"]}]
    return Outcome(answer=reply.text, signals=signals)


def early(answer: str, prompt: Mapping[str, Any], signals: Mapping[str, float]) -> float:
    """1 for the right answer, and half of it for one that needed the second turn."""
    return (answer == prompt["reference"]) / signals["turns"]


class Log:
    """Writes a line for every step into the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "rewards.txt").open("a", encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        """The numbers of metrics.jsonl. Evaluation alone, at step 0, has no reward."""
        self.file.write(f"{step} {values.get('reward/mean')}\n")

    def close(self) -> None:
        """The end of the run."""
        self.file.close()
