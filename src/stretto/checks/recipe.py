"""The first tier of refusal: everything that can be told from the recipe, the first prompts and the model's header.

Every rule is run, so all problems come at once. No torch; about a second. The second tier, which needs a tokenizer
and a model without weights, is `stretto.checks.deep`.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from stretto.algorithms.catalog import OWN
from stretto.algorithms.own_facts import announce
from stretto.checks.rules import (
    environment,
    files,
    kl,
    limits,
    not_available,
    own_code,
    roles,
    rows,
    served,
    task,
    teacher,
    unused_keys,
    vllm,
)
from stretto.checks.rules.base import CheckContext, Lookups, Rule
from stretto.errors import Problem, RecipeError
from stretto.models.source import width_of
from stretto.plugins import folders_of
from stretto.recipe.load import Changes, RecipeSource, read_recipe
from stretto.recipe.resolve import resolve
from stretto.recipe.schema import Recipe

__all__ = ["RULES", "Lookups", "check", "checked_recipe", "examine"]

RULES: tuple[Rule, ...] = (
    not_available.keys_wait_for_their_part,
    not_available.shape_is_that_of_a_model,
    not_available.strategy_exists,
    own_code.functions_are_there,
    not_available.reference_is_the_base,
    not_available.logs_exist,
    own_code.plugins_can_be_found,
    unused_keys.keys_have_an_effect,
    unused_keys.own_algorithm_reads_them,
    unused_keys.correction_is_used,
    unused_keys.betas_are_used,
    unused_keys.warmup_rate_is_used,
    unused_keys.graphs_have_a_gpu,
    unused_keys.nccl_has_gpus,
    unused_keys.stops_can_come,
    unused_keys.best_is_measured,
    roles.values_have_a_critic,
    roles.critics_keys_are_used,
    roles.one_lambda_is_told,
    roles.warmup_of_the_critic_ends,
    teacher.distillation_has_a_teacher,
    teacher.teacher_can_be_found,
    teacher.teachers_prompt_can_be_filled,
    teacher.exact_distillation_sees_everything,
    teacher.nobody_is_asked_for_verdicts,
    roles.reward_model_is_read,
    roles.classifiers_can_be_found,
    roles.accuracy_has_a_verdict,
    rows.rewards_are_there,
    rows.sampling_is_used,
    rows.rows_are_what_is_learned_from,
    rows.pairs_are_judged_by_themselves,
    rows.answers_are_shown,
    rows.steps_can_be_planned,
    limits.group_is_large_enough,
    limits.updates_have_trajectories,
    limits.budget_holds_an_answer,
    limits.lengths_make_sense,
    limits.step_fits,
    limits.warmup_ends,
    limits.time_is_readable,
    limits.moments_decay,
    limits.narrow_moments_are_possible,
    limits.quantised_base_is_frozen,
    limits.rounded_sums_are_possible,
    limits.cache_has_memory,
    limits.temperature_is_sane,
    limits.updates_are_sane,
    limits.engine_says_what_it_kept,
    vllm.engine_apart_can_do_it,
    served.server_can_be_used,
    limits.adapter_is_small,
    limits.heads_divide_width,
    limits.scratch_is_tiny,
    limits.scratch_holds_an_answer,
    limits.evaluation_has_prompts,
    kl.kl_has_a_reference,
    kl.kl_in_the_reward_pulls,
    kl.kl_can_adapt,
    limits.stale_answers_are_corrected,
    limits.seeds_fit,
    limits.counts_fit,
    task.rewards_make_sense,
    task.rewards_have_weight,
    task.scorers_have_their_task,
    task.programs_can_be_tested,
    task.budgets_are_told,
    task.answers_can_be_compared,
    task.template_is_used,
    task.characters_cover_the_task,
    task.some_prompts_are_left,
    environment.turns_can_be_credited,
    environment.turns_are_counted,
    environment.tools_have_what_they_read,
    environment.hosts_can_import,
    environment.tool_classes_get_their_columns,
    environment.games_have_secrets,
    environment.memories_have_documents,
    environment.projects_have_files,
    environment.programs_can_be_started,
    environment.tasksets_are_played,
    environment.signals_are_given,
    files.plan_is_sound,
    files.model_can_be_found,
    files.adapter_can_go_on,
    files.values_are_there,
    files.lengths_are_recorded,
    files.run_folder_is_free,
    files.logs_can_be_written,
)
"""In the order in which their problems are listed."""

PRICED: tuple[Rule, ...] = tuple(rule for rule in RULES if rule.__module__ not in (files.__name__, task.__name__))
"""Those that hold where nothing is run either: no data, no files and no packages are asked for."""

MOST_ROWS = 1000
"""Rows of data that are read at most; enough to see whether holding some out leaves any."""


def check(
    recipe: Recipe, *, root: Path, probes: Lookups, planning: bool = False, training: bool = True
) -> list[Problem]:
    """Everything wrong with a well-formed recipe. `root` is its folder, where its files are looked for first.

    `planning` and `training` are as in `CheckContext`: only what holds without running anything, or for asking a
    model, is asked.
    """
    # What is filled in follows from the algorithm. Of one that is neither found nor needed, rules know nothing.
    if announce(recipe.algorithm.name, folders_of(root)) and not training:
        OWN.pop(recipe.algorithm.name, None)
    recipe = resolve(recipe, partial(width_of, root=root))
    if planning:
        scene = CheckContext(root=root, probes=probes, prompts=(), complete=False, planning=True)
        return [problem for rule in PRICED for problem in rule(recipe, scene)]
    most = min(recipe.held_out(MOST_ROWS) + 1, MOST_ROWS)
    prompts, problems, complete = probes.task(recipe.task, root, most)
    scene = CheckContext(root=root, probes=probes, prompts=tuple(prompts), complete=complete, training=training)
    return [*problems, *(problem for rule in RULES for problem in rule(recipe, scene))]


def examine(
    source: RecipeSource,
    changes: Changes = (),
    *,
    root: Path,
    probes: Lookups,
    planning: bool = False,
    training: bool = True,
) -> tuple[Recipe | None, tuple[Problem, ...]]:
    """A recipe, resolved, with everything the first tier finds in it.

    Rules are run on what is left without the keys that could not be read; what a rule then says about such a key, or by
    way of it, is left out, because it would judge a value that nobody gave.
    """
    reading = read_recipe(source, changes)
    if reading.recipe is None:
        return None, reading.problems
    found = check(reading.recipe, root=root, probes=probes, planning=planning, training=training)
    sound = [problem for problem in found if not _leans_on(problem, reading.doubtful)]
    return resolve(reading.recipe, partial(width_of, root=root)), (*reading.problems, *sound)


def checked_recipe(
    source: RecipeSource,
    changes: Changes = (),
    *,
    root: Path,
    probes: Lookups,
    planning: bool = False,
    training: bool = True,
) -> Recipe:
    """The resolved recipe; raises a RecipeError with everything that the first tier finds wrong with it."""
    recipe, problems = examine(source, changes, root=root, probes=probes, planning=planning, training=training)
    if problems or recipe is None:
        raise RecipeError(*problems)
    return recipe


def _leans_on(problem: Problem, doubtful: frozenset[str]) -> bool:
    """True if the problem is at, below, above or in terms of a key whose value could not be read.

    A `kind` or `name` decides what its whole section means.
    """
    doubtful |= {name.rpartition(".")[0] for name in doubtful if name.endswith((".kind", ".name"))}
    words = set(re.findall(r"[a-z_0-9]+(?:\.[a-z_0-9]+)+", f"{problem.reason} {problem.fix}")) | {problem.field}
    return any(
        word == name or word.startswith(f"{name}.") or name.startswith(f"{word}.")
        for word in words
        for name in doubtful
    )
