"""Recipes that learn from the rows of a task as they are: what such rows need, and which keys then have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.algorithms.catalog import find_facts, learns_from_rows
from stretto.checks.rules.base import DEFAULTS, CheckContext, is_default, value_of
from stretto.errors import Problem
from stretto.recipe.resolve import taught_alone
from stretto.recipe.schema import ColumnsSource, Recipe, Section

SAMPLING = (
    "algorithm.kl.coef",
    "algorithm.correction.kind",
    "algorithm.correction.cap",
    "algorithm.credit",
    "batch.updates",
    "batch.epochs",
    "guards.max_k3",
    "guards.min_entropy",
    "guards.reward_error_share",
    "placement.staleness",
    "placement.fractions",
    "roles.reward_model",
)
"""Keys about answers that are sampled in a step."""

ASKED_LATER = ("max_new_tokens", "temperature", "top_p", "top_k", "stop")
"""Keys of `engine` that say how the finished model is asked: in a chat, when served, in the proof of an export."""

ASKING = ("evaluate.pass_k", "deadlines.generate", "deadlines.reward")
"""Keys about answers that are sampled for an evaluation."""


def sampling_is_used(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Where nothing is sampled, most keys about sampling would change nothing."""
    name = recipe.algorithm.name
    if not learns_from_rows(name):
        return
    why = f"has no effect: {name} learns from rows, and nothing is sampled"
    if recipe.batch.samples != 1:
        yield Problem(field="batch.samples", reason=f"{recipe.batch.samples} {why}", fix="leave it out")
    for key in SAMPLING:
        if not is_default(recipe, key):
            yield Problem(field=key, reason=why, fix="leave it out")
    if recipe.rewards:
        return
    judged = f"{why}, not for evaluations either, as there are no rewards"
    for key in ASKING:
        if not is_default(recipe, key):
            yield Problem(field=key, reason=judged, fix="leave it out, or add rewards")
    facts = find_facts(name)
    answers = facts is not None and facts.rows == "demonstrations"
    yield from _differing(recipe.engine, "engine", judged, but=ASKED_LATER if answers else ())


def _differing(section: Section, name: str, reason: str, *, but: Sequence[str]) -> Iterator[Problem]:
    """A problem for each key of a section that is not what leaving it out gives, but for some."""
    usual = value_of(DEFAULTS, name)
    for key in type(section).model_fields:
        if key not in but and getattr(section, key) != getattr(usual, key, None):
            yield Problem(field=f"{name}.{key}", reason=reason, fix="leave it out, or add rewards")


def rows_are_what_is_learned_from(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """An algorithm needs rows of its kind."""
    facts, source = find_facts(recipe.algorithm.name), recipe.task.source
    if facts is None:
        return
    if isinstance(source, ColumnsSource):
        if source.rows != facts.rows:
            reason = f"{source.rows} are nothing for {facts.name} (algorithm.name), which learns from {facts.rows}"
            yield Problem(field="task.source.rows", reason=reason, fix="leave it out")
        if facts.rows != "pairs" and source.ranking != type(source.ranking)():
            reason = f"has no effect, because {facts.name} (algorithm.name) learns from no pairs"
            yield Problem(field="task.source.ranking", reason=reason, fix="leave it out")
    elif facts.rows == "pairs":
        reason = f"a source of kind {source.kind} has no pairs of a better and a worse answer"
        yield Problem(field="task.source.kind", reason=reason, fix="use jsonl, hf, or a function of yours, module:name")


def answers_are_shown(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Each of the first rows has an answer to imitate; those of a file were read with that in mind."""
    facts = find_facts(recipe.algorithm.name)
    if facts is None or facts.rows != "demonstrations" or recipe.environment.kind != "single_turn":
        return
    lacking = next((prompt for prompt in scene.prompts if not (prompt.reference or "").strip()), None)
    if lacking is not None:
        reason = f"the prompt {lacking.id!r} has no reference answer, so there is nothing to imitate"
        yield Problem(field="task.source", reason=reason, fix="use a source whose prompts have answers")


def pairs_are_judged_by_themselves(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """A reward model is held against pairs; it answers nothing."""
    facts = find_facts(recipe.algorithm.name)
    if facts is None or facts.rows != "pairs":
        return
    if recipe.rewards:
        reason = "has no effect: a reward model answers nothing, and is held against held-out pairs"
        yield Problem(field="rewards", reason=reason, fix="leave it out")
    if recipe.environment.kind != "single_turn":
        reason = f"has no effect: the answers of a pair are there, and nobody plays {recipe.environment.kind}"
        yield Problem(field="environment.kind", reason=reason, fix="leave it out")


def rewards_are_there(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """What is sampled is judged, unless a teacher says all that is learned."""
    if recipe.rewards or learns_from_rows(recipe.algorithm.name) or taught_alone(recipe):
        return
    reason, fix = "is empty, so nothing would be learned", "name one, or leave the key out"
    if weight := getattr(recipe.algorithm, "reward_weight", 0.0):
        reason, fix = f"is empty, and algorithm.reward_weight is {weight:g}", "name one, or leave the weight out"
    yield Problem(field="rewards", reason=reason, fix=fix)


def steps_can_be_planned(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """The planner knows steps that sample."""
    if scene.planning and learns_from_rows(recipe.algorithm.name):
        reason = f"a plan for {recipe.algorithm.name}, which samples nothing, is not available yet"
        yield Problem(field="algorithm.name", reason=reason, fix="plan the training that follows it")
