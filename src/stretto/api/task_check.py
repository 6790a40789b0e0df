"""What a task looks like to the model, and whether its rewards tell right answers from others. Loads no weights.

The reference answer of a prompt has to get full marks; an empty answer, half of the reference and the reference of
another prompt must not. Each is given to the rewards as a model's answer would be, four of them as a group. Of a prompt
without a reference no answer is known to be right, but some are known to say nothing: an empty one, fixed ones, and
copies of the prompt. What an environment with signals of its own would notice cannot be pretended, so that only prompts
are shown there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from stretto.algorithms.catalog import learns_from_rows
from stretto.checks.deep import describe_model
from stretto.environments.render import Renderer
from stretto.environments.rows import row_tokens
from stretto.errors import Problem, RecipeError, RolloutError
from stretto.models.source import locate
from stretto.models.template_file import use_template
from stretto.plugins import folders_of
from stretto.recipe.resolve import longest_prompt
from stretto.recipe.schema import ModelReward, Recipe, RewardPart, Scratch
from stretto.rewards.combine import Rewards
from stretto.rewards.rehearsal import pretended
from stretto.rewards.score import Scored, score
from stretto.sandbox.pool import Pool
from stretto.tasks.examples import chats_of
from stretto.tasks.source import load_prompts, split_task
from stretto.types import FULL_MARKS, Prompt, Reward, Trajectory

SHOWN = 2
"""Prompts that are shown."""
JUDGED = 50
"""Prompts whose answers are judged, the first that have a reference answer."""
TIMED = 10
"""Answers that a part is timed with, references where there are any."""
FIXED = ("0", "x", "True")
"""Answers to a prompt without a reference, next to an empty one and to copies."""
COPIED = 4
"""Lines of a prompt that are copied, from its end; the whole prompt is another copy."""
CASES = {
    "reference": range(1),
    "empty": range(1, 2),
    "truncated": range(2, 3),
    "wrong": range(3, 4),
    "fixed": range(4, 4 + len(FIXED)),
    "copied": range(4 + len(FIXED), 5 + len(FIXED) + COPIED),
}
"""Kind of answer -> its attempts: the reference, nothing, half of the reference, another prompt's, and answers to a
prompt without a reference."""
ITEM = re.compile(r"^[\s.]*(?:\d+[.)]|[-*\N{BULLET}])\s+")
"""Mark of an item of a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPrompt:
    """A prompt as the model reads it."""

    id: str
    """The prompt's id."""
    text: str
    """The rendered chat, special tokens included."""
    tokens: int
    """How many tokens it has."""
    reference: str | None
    """The reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """The prompts of a task, in tokens; rows to learn from are measured with their answers."""

    training: int
    """Prompts to train on, those that are dropped included."""
    heldout: int
    """Prompts that are held out."""
    tokens_median: float
    """Median length."""
    tokens_longest: int
    """The longest."""
    context: int
    """Tokens that the model was made for."""
    max_new_tokens: int
    """Tokens of an answer, for which there must be room; 0 where rows are learned from, which have theirs."""
    too_long: int
    """Prompts that leave no such room, and are not dropped."""
    dropped: int
    """Prompts that task.drop_longer_than drops."""
    shown: tuple[ShownPrompt, ...]
    """The first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReport:
    """What rewards make of one kind of answer."""

    case: str
    """One of `CASES`."""
    judged: int
    """Answers with a verdict."""
    full: int
    """Those with full marks."""
    reward: float | None
    """Mean reward."""
    parts: dict[str, float]
    """Mean of each part."""
    failures: tuple[str, ...]
    """Why answers have no verdict; the first of each reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskReport:
    """Everything that `stretto task check` says."""

    problems: tuple[Problem, ...]
    """What is wrong."""
    prompts: PromptReport
    """The prompts."""
    answers: tuple[AnswerReport, ...]
    """How answers are judged; none where they cannot be pretended."""
    seconds: dict[str, float]
    """Part -> seconds for a verdict, without the import; of parts that are called for each answer."""

    def document(self) -> dict[str, Any]:
        """As `--json` prints it."""
        told = asdict(self)
        return {
            "ok": not self.problems,
            "problems": told["problems"],
            "prompts": told["prompts"],
            "answers": told["answers"],
            "parts": {name: {"seconds": seconds} for name, seconds in self.seconds.items()},
        }


def check_task(recipe: Recipe, root: Path, *, answer: str = "{reference}") -> TaskReport:
    """Looks at a resolved recipe's task; `answer` is how a right answer is worded around the reference."""
    files = locate(recipe.model.name, root)
    config, tokenizer = describe_model(recipe, files)
    use_template(tokenizer, recipe.task, root)
    renderer = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template)
    scratch = recipe.model.scratch or Scratch()
    told = getattr(config.get_text_config(), "max_position_embeddings", None)
    context = scratch.context if files.scratch else int(told or 1 << 30)
    training, heldout = split_task(recipe, load_prompts(recipe.task, root))
    prompts = _prompts(recipe, training, heldout, renderer, context)
    answers: tuple[AnswerReport, ...] = ()
    seconds: dict[str, float] = {}
    known = [prompt for prompt in training if prompt.reference is not None][:JUDGED]
    unknown = [prompt for prompt in training if prompt.reference is None][:JUDGED]
    parts = tuple(part for part in recipe.rewards if not isinstance(part, ModelReward))
    tried = [*_answers(known, renderer, answer), *_empty_words(unknown, renderer, answer)]
    if tried and parts and recipe.environment.kind == "single_turn":
        scored, seconds = asyncio.run(_judged(recipe, root, parts, tried))
        kinds = [case for case, attempts in CASES.items() if any(each.attempt in attempts for each in tried)]
        answers = tuple(_case(case, scored) for case in kinds)
    problems = (*_prompt_problems(prompts), *_dropped_problems(prompts), *_answer_problems(answers))
    return TaskReport(problems=problems, prompts=prompts, answers=answers, seconds=seconds)


def _prompts(
    recipe: Recipe, training: Sequence[Prompt], heldout: Sequence[Prompt], renderer: Renderer, context: int
) -> PromptReport:
    every, rows = [*training, *heldout], learns_from_rows(recipe.algorithm.name)
    lengths: list[int] = []
    measured = (
        row_tokens(renderer, [chats_of(prompt) for prompt in every], most=0)
        if rows
        else renderer.lengths([prompt.messages for prompt in every])
    )
    for prompt, length in zip(every, measured, strict=True):
        if isinstance(length, RolloutError):
            fix = "correct the chat template, or the prompt"
            raise RecipeError.of("task", f"prompt {prompt.id} cannot be rendered: {length}", fix)
        lengths.append(length)
    answer = 0 if rows else recipe.engine.max_new_tokens
    limit, room = longest_prompt(recipe, context), context - answer
    kept = [length for length in lengths if limit is None or length <= limit]
    return PromptReport(
        training=len(training),
        heldout=len(heldout),
        tokens_median=median(lengths),
        tokens_longest=max(lengths),
        context=context,
        max_new_tokens=answer,
        too_long=sum(length > room for length in kept),
        dropped=len(lengths) - len(kept),
        shown=tuple(
            ShownPrompt(
                id=p.id, text=renderer.opening(p.messages), tokens=len(renderer.open(p.messages)), reference=p.reference
            )
            for p in training[:SHOWN]
        ),
    )


def _answers(prompts: Sequence[Prompt], renderer: Renderer, wording: str) -> list[Trajectory]:
    """Four answers to each prompt, those that differ from the reference answer."""
    made = []
    for index, prompt in enumerate(prompts):
        reference = prompt.reference or ""
        others = (other.reference or "" for other in (*prompts[index + 1 :], *prompts[:index]))
        wrong = next((other for other in others if other.strip() != reference.strip()), None)
        half = reference[: len(reference) // 2] or None
        for attempt, text in enumerate((reference, "", half, wrong)):
            if text is None:
                continue
            made.append(
                _said(prompt, attempt, text if attempt == 1 else wording.replace("{reference}", text), renderer)
            )
    return made


def _empty_words(prompts: Sequence[Prompt], renderer: Renderer, wording: str) -> list[Trajectory]:
    """Answers that say nothing, to prompts without a reference: an empty one, fixed ones, and copies of the prompt."""
    made = []
    for prompt in prompts:
        asked = str(prompt.messages[-1]["content"])
        lines = [ITEM.sub("", line).strip() for line in asked.splitlines() if line.strip()]
        copies = dict.fromkeys([asked, *lines[-COPIED:]])
        made.append(_said(prompt, CASES["empty"][0], "", renderer))
        for case, texts in (("fixed", FIXED), ("copied", copies)):
            for attempt, text in zip(CASES[case], texts, strict=False):
                made.append(_said(prompt, attempt, wording.replace("{reference}", text), renderer))
    return made


def _said(prompt: Prompt, attempt: int, text: str, renderer: Renderer) -> Trajectory:
    tokens = len(renderer.tokenizer.encode(text, add_special_tokens=False))
    return replace(pretended(prompt, text, tokens=tokens), attempt=attempt)


async def _judged(
    recipe: Recipe, root: Path, parts: Sequence[RewardPart], answers: Sequence[Trajectory]
) -> tuple[Scored, dict[str, float]]:
    """The scores by `parts`, and seconds for one score of each. A reward model is not loaded, and not among them."""
    async with Pool(paths=folders_of(root), start_deadline=recipe.deadlines.start) as pool:
        rewards = Rewards(parts, pool)
        for name in rewards.functions.values():
            await rewards.load(name)
        scored = await score(answers, rewards, min_samples=1, deadline=recipe.deadlines.reward)
        seconds: dict[str, float] = {}
        timed = [each for each in answers if each.attempt == answers[0].attempt][:TIMED]
        for name in (name for name in rewards.names if not rewards.is_together(name)):
            if scored.failed:
                break
            begun = time.perf_counter()
            await rewards.judge_part(name, timed)
            seconds[name] = (time.perf_counter() - begun) / len(timed)
    return scored, seconds


def _case(case: str, scored: Scored) -> AnswerReport:
    found: list[Reward] = [
        reward
        for group in scored.groups
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
        if trajectory.attempt in CASES[case]
    ]
    failures = dict.fromkeys(str(each.failure) for each in scored.failed if each.attempt in CASES[case])
    names = dict.fromkeys(name for reward in found for name in reward.parts)
    return AnswerReport(
        case=case,
        judged=len(found),
        full=sum(reward.outcome >= FULL_MARKS for reward in found),
        reward=fmean(reward.value for reward in found) if found else None,
        parts={name: fmean(r.parts[name] for r in found if name in r.parts) for name in names},
        failures=tuple(failures)[:3],
    )


def _prompt_problems(prompts: PromptReport) -> Iterator[Problem]:
    if prompts.too_long:
        room = prompts.context - prompts.max_new_tokens
        reason = f"{prompts.too_long} prompts have more than the {room} tokens that leave room for an answer"
        if not prompts.max_new_tokens:
            reason = f"{prompts.too_long} rows have more tokens than the context of {room}"
        yield Problem(
            field="task", reason=reason, fix="set task.drop_longer_than: auto, or lower engine.max_new_tokens"
        )


def _dropped_problems(prompts: PromptReport) -> Iterator[Problem]:
    if prompts.dropped == prompts.training + prompts.heldout:
        reason = f"all {prompts.dropped} prompts are dropped"
        yield Problem(field="task.drop_longer_than", reason=reason, fix="use a larger number, or shorter prompts")


def _answer_problems(answers: Sequence[AnswerReport]) -> Iterator[Problem]:
    """A reference answer without full marks, and another with them."""
    for each in answers:
        if each.failures:
            fix = "mend the reward; a failure is never a reward of 0"
            yield Problem(field="rewards", reason=f"{each.case} answers have no verdict: {each.failures[0]}", fix=fix)
        if each.case == "reference" and each.full < each.judged:
            low = [f"{name} gives {value:.3g}" for name, value in each.parts.items() if value < FULL_MARKS]
            reason = f"{each.judged - each.full} of {each.judged} reference answers do not get full marks"
            fix = "give --answer 'Answer: {reference}' if a right answer is worded so, or correct reward or data"
            yield Problem(field="rewards", reason=f"{reason} ({', '.join(low)} on average)", fix=fix)
        elif each.case != "reference" and each.full:
            reason = f"{each.full} of {each.judged} {each.case} answers get full marks"
            yield Problem(
                field="rewards", reason=reason, fix="make the reward stricter, or look at these rows of the data"
            )
