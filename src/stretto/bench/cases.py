"""What is measured: cases, the lengths of answers, the prompts, and which shapes. The same on every machine; no torch.

Lengths are drawn once and forced on both sides, so that no side is faster because its answers happened to be shorter.
The longer prompt is the same question after worked examples. Each prompt has examples of its own unless the case says
`common`, so that what its group shares is all there is to share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stretto.errors import RecipeError
from stretto.planner.cost.shapes import ModelShape, named_shape
from stretto.types import Prompt

MEDIAN, SIGMA, CAP, SEED = 24, 0.6, 64, 0
"""Answers are lognormal with this median and sigma, never longer than the cap."""

ADDITIONS = 100
"""Two-digit additions: as many prompts as there are."""

TRIES = 400
"""How many sets of worked examples are tried for a prompt of the exact length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase:
    """One thing to measure."""

    name: str
    """The case's name on the command line."""
    prompt: int
    """Tokens of a prompt; worked examples fill it up to here."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What both sides compute in."""
    adapter: bool = False
    """LoRA of rank 16 on all linear layers; otherwise every weight is trained."""
    common: bool = False
    """All prompts have the same worked examples, as few-shot prompts do."""
    prompts: int = 8
    """Prompts a step."""
    samples: int = 8
    """Answers per prompt."""
    answer: int | None = None
    """Tokens of every answer; none for the lengths that are drawn."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """What makes the update."""
    median: float = MEDIAN
    """Median of the lengths that are drawn."""
    sigma: float = SIGMA
    """Standard deviation of the logarithms of the lengths."""
    cap: int = CAP
    """The longest."""
    reference: bool = False
    """A KL term asks a reference, which is the adapter switched off."""
    judge: float = 0.0
    """A reward model scores each answer, with so many times the layers of the model; its head is noise."""
    critic: float = 0.0
    """PPO: a critic is trained beside the model, with so many times its layers."""
    values: int = 0
    """More answers to each prompt, by the reference, from which V* is estimated in every step."""

    @property
    def answers(self) -> int:
        """Answers a step."""
        return self.prompts * self.samples


STEP = (
    BenchCase(name="full-43", prompt=43),
    BenchCase(name="lora-43", prompt=43, adapter=True),
    BenchCase(name="full-43-8bit", prompt=43, optimizer="adamw8bit"),
    BenchCase(name="full-512", prompt=512),
    BenchCase(name="lora-512", prompt=512, adapter=True),
    BenchCase(name="full-43-fp32", prompt=43, dtype="float32"),
    BenchCase(name="lora-43-fp32", prompt=43, dtype="float32", adapter=True),
    BenchCase(name="full-512-fp32", prompt=512, dtype="float32"),
    BenchCase(name="full-512-common", prompt=512, common=True),
)
"""Cases of `stretto bench step`."""

ROLLOUT = (
    BenchCase(name="prompt-43", prompt=43),
    BenchCase(name="prompt-512", prompt=512),
    BenchCase(name="prompt-43-fp32", prompt=43, dtype="float32"),
)
"""Cases of `stretto bench rollout`."""

STUDY = (
    BenchCase(name="astar-po", prompt=128, prompts=16, samples=1, answer=256, optimizer="adamw8bit"),
    BenchCase(name="astar-po-online", prompt=128, prompts=16, samples=1, answer=256, optimizer="adamw8bit", values=5),
)
"""Cases of `stretto bench study`."""

WIDE = BenchCase(name="", prompt=43, adapter=True, median=30, sigma=1.0, cap=256)
"""What several cells work on: a few answers are much longer than the others, as they are in practice."""

STRATEGIES = (
    replace(WIDE, name="plain-43"),
    replace(WIDE, name="plain-512", prompt=512),
    replace(WIDE, name="reference-43", reference=True),
    replace(WIDE, name="reference-512", prompt=512, reference=True),
    replace(WIDE, name="models-43", reference=True, judge=1.0),
    replace(WIDE, name="models-512", prompt=512, reference=True, judge=1.0),
    replace(WIDE, name="four-equal", adapter=False, cap=128, reference=True, judge=1.0, critic=1.0),
    replace(WIDE, name="four-unequal", adapter=False, cap=128, reference=True, judge=0.25, critic=1.5),
)
"""Cases of `stretto bench strategies`."""

SCALING = (replace(WIDE, name="cells-43"), replace(WIDE, name="cells-512", prompt=512))
"""Of `stretto bench scaling`; prompts are those of one cell."""

PUBLISH = (
    BenchCase(name="adapter", prompt=43, adapter=True, prompts=1, samples=1),
    BenchCase(name="full", prompt=43, prompts=1, samples=1),
)
"""Cases of `stretto bench publish`; what is trained, and so handed over, is all there is to them."""

STUDY_SECONDS, STUDY_NAME = 15.3, "a published A*PO study, 3B, one H100"
"""Of a step of that study, V* from 5 new answers to each prompt included, as its authors report it."""


def choose(
    known: Sequence[BenchCase], names: Sequence[str], *, prompts: int | None = None, samples: int | None = None
) -> tuple[BenchCase, ...]:
    """The cases of these names, the first where none is named, every one for `all`; with other numbers of prompts and
    answers where these are given."""
    by_name = {case.name: case for case in known}
    if wrong := [name for name in names if name not in by_name and name != "all"]:
        reason = f"there is no case {', '.join(wrong)}"
        raise RecipeError.of("--case", reason, f"use all, or some of {', '.join(by_name)}")
    chosen = known if "all" in names else [by_name[name] for name in dict.fromkeys(names)] or known[:1]
    return tuple(replace(case, prompts=prompts or case.prompts, samples=samples or case.samples) for case in chosen)


def plain_shape(name: str) -> ModelShape:
    """The shape of this name, if it is of a decoder whose layers are all alike and dense."""
    shape = named_shape(name, field="--shape")
    if shape.experts or shape.kv_rank or shape.windowed_layers or not shape.gated:
        reason = f"{name} has experts, windows or other layers that are not made with random weights"
        raise RecipeError.of("--shape", reason, "use a dense Llama or Qwen, such as qwen2.5-0.5b")
    return shape


def enough_prompts(*, prompts: int, steps: int) -> None:
    """Refuses more repetitions than there are prompts for, the one that does not count included."""
    if prompts * (1 + steps) > ADDITIONS:
        reason = f"{1 + steps} steps of {prompts} prompts need {prompts * (1 + steps)}, and there are {ADDITIONS}"
        raise RecipeError.of("--steps", reason, "use fewer steps or prompts")


def answer_lengths(case: BenchCase) -> NDArray[np.int64]:
    """(prompts, samples) tokens of each answer, the same for every side and step."""
    if case.answer is not None:
        return np.full((case.prompts, case.samples), case.answer)
    drawn = np.random.default_rng(SEED).lognormal(np.log(case.median), case.sigma, (case.prompts, case.samples))
    return drawn.round().clip(1, case.cap).astype(np.int64)


def make_prompts(case: BenchCase, tokens_of: Callable[[Sequence[Any]], int], *, rounds: int = 1) -> tuple[Prompt, ...]:
    """Additions of two digits, each filled up with worked examples to the case's tokens, as `tokens_of` counts them.

    Every repetition of the work has prompts of its own, so that nothing can be drafted from earlier answers to the same
    prompt. Where no number of examples gives exactly that many tokens, the nearest below is taken.
    """
    order = np.random.default_rng(SEED).permutation(ADDITIONS)
    made = []
    for index, number in enumerate(order[: case.prompts * rounds]):
        a, b = divmod(int(number), 10)
        question = f"What is {a}+{b}? Answer with just the number."
        messages = _filled(question, case.prompt, tokens_of, stream=0 if case.common else index)
        made.append(Prompt(id=f"bench/{a}+{b}", messages=messages, reference=str(a + b)))
    return tuple(made)


def _filled(
    question: str, wanted: int, tokens_of: Callable[[Sequence[Any]], int], *, stream: int
) -> tuple[dict[str, str], ...]:
    """The chat whose worked examples bring it nearest to the wanted number of tokens, never above."""
    best = ({"role": "user", "content": question},)
    shortest = nearest = tokens_of(best)
    if wanted <= shortest:
        return best
    rng = np.random.default_rng([SEED, stream])
    per_example = max(1, tokens_of(_chat([(3, 4), (7, 8)], question)) - shortest) / 2
    for _ in range(TRIES):
        count = int((wanted - shortest) / per_example + rng.integers(-1, 2))
        chat = _chat(rng.integers(0, 10, (max(0, count), 2)).tolist(), question)
        if nearest < (tokens := tokens_of(chat)) <= wanted:
            best, nearest = chat, tokens
        if nearest == wanted:
            break
    return best


def _chat(examples: Sequence[Sequence[int]], question: str) -> tuple[dict[str, str]]:
    shown = "".join(f"{a}+{b}={a + b}\n" for a, b in examples)
    return ({"role": "user", "content": shown + question},)
