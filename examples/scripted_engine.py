"""Debug a reward without a model: the answers come from a script, everything else is the real loop.

    .venv/bin/python examples/scripted_engine.py [key=value ...]

It runs two steps of the recipe in own_reward/ with an engine that says what `answer_to` returns, and prints what every
answer was worth. The tiny network is still there, because something has to be trained, but it generates nothing. It
is not a way to learn: the log-probabilities of the script are made up, so the guard on `max_k3` is switched off.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.api.recipes import open_recipe
from stretto.engines.base import Request
from stretto.engines.scripted import ScriptedEngine
from stretto.environments.render import Renderer
from stretto.errors import StrettoError
from stretto.models.load import Policy
from stretto.recipe.load import folder_of
from stretto.runtime import session

RECIPE = Path(__file__).parent / "own_reward" / "letters.yaml"
SETTINGS = [
    "model.scratch.warmup_steps=0",
    "batch.prompts=2",
    "batch.samples=4",
    "evaluate.every=0",
    "guards.max_k3=null",
    "log=[]",
    "run.steps=2",
]


def answer_to(question: str, key: int) -> str:
    """What "the model" says. `key` differs from sample to sample, so that a group holds different answers."""
    letter, times = question[0], int(question[1])
    return letter * (times + key % 3 - 1)


def scripted(policy: Policy) -> ScriptedEngine:
    """An engine whose answers are `answer_to`; the policy lends its tokenizer."""
    renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens)

    def script(request: Request) -> list[int]:
        chat = renderer.all_text(request.tokens.tolist())
        question = chat.partition("=")[0][-2:]
        answer = policy.tokenizer.encode(answer_to(question, request.key), add_special_tokens=False)
        return [*answer, *policy.stop_tokens]

    return ScriptedEngine(script)


def main(changes: Sequence[str] = ()) -> None:
    """Runs the steps and prints the samples of the last one."""
    recipe = open_recipe(RECIPE, [*SETTINGS, *changes], deep=True)
    finished = session.start(recipe, name="scripted", root=folder_of(RECIPE), make_engine=scripted)
    last = finished.folder / "samples" / f"step-{recipe.run.steps:06d}.jsonl"
    for row in map(json.loads, last.read_text().splitlines()):
        verdict = row["reward"]["parts"] if row["reward"] else row["failure"]
        print(f"{row['prompt']:>4}  asked for {row['reference']!r}, got {row['answer']!r}: {verdict}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except StrettoError as error:
        sys.exit(str(error))
