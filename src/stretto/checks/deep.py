"""The second tier of checks: what only the tokenizer, all prompts and the model's layers can tell. Loads no weights.

The first tier (`checks.recipe`) reads the recipe and the first rows of the data without torch; `train` runs both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.algorithms.catalog import find_facts, learns_from_rows
from stretto.checks.own_code import plugin_problems
from stretto.checks.played import environment_problems
from stretto.checks.rules.roles import CLASSIFIERS, classifier_problems
from stretto.checks.rules.task import budgets, comparisons, untestable
from stretto.checks.tool_templates import template_problems
from stretto.environments import templates
from stretto.environments.render import Renderer
from stretto.environments.rows import row_tokens
from stretto.errors import Problem, RecipeError, RolloutError
from stretto.models.load import describe, refuse_moving_positions, refuse_unknown_attention
from stretto.models.load_errors import reading_model
from stretto.models.lora_targets import target_problems
from stretto.models.quantised import quantise_problems
from stretto.models.scratch import UNKNOWN, character_tokenizer, configuration
from stretto.models.source import ModelFiles, facts, locate
from stretto.models.stop_tokens import generation_stop_tokens, stop_tokens
from stretto.models.template_file import use_template
from stretto.models.tensor_parallel import cut_problems
from stretto.placement.build import read_cells
from stretto.readings import numbers
from stretto.recipe.resolve import longest_prompt
from stretto.recipe.schema import Recipe, Scratch
from stretto.rewards.parts import unreadable_tests
from stretto.tasks.examples import chats_of
from stretto.tasks.source import load_prompts, places, split_task
from stretto.tasks.template import TEACHERS, reworded
from stretto.types import Message, Prompt

MOST_PROMPTS = 20_000
"""Prompts whose length is measured; a longer one that slips through costs its own trajectory, not the run."""

UNLIMITED = 1 << 30
"""Context of a model that does not say one."""

MOST_ROWS = 10
"""Rows with which something is wrong that are told at once."""

SHOWN = 3
"""Offending prompts named in a message."""


def deep_problems(recipe: Recipe, root: Path, *, training: bool = True) -> list[Problem]:
    """Every problem of the second tier; `training` is as in `CheckContext`."""
    problems = device_problems(recipe)
    if own := list(plugin_problems(recipe, root, training=training)):
        return [*problems, *own]
    try:
        prompts = load_prompts(recipe.task, root)
        split_task(recipe, prompts)
        files = locate(recipe.model.name, root)
        if not files.scratch:
            templates.shared().begin()  # it starts while the tokenizer is read
        config, tokenizer = describe_model(recipe, files)
        use_template(tokenizer, recipe.task, root)
        network = without_weights(files, config, tokenizer)
    except RecipeError as error:
        return [*problems, *error.problems]
    others, context = other_models(recipe, root, tokenizer)
    context = min(context, int(getattr(config.get_text_config(), "max_position_embeddings", None) or context))
    problems += [
        *comparisons(recipe, prompts, numbers),
        *budgets(recipe, prompts),
        *untestable(recipe, prompts, unreadable_tests),
        *(row_problems(recipe, prompts, context, tokenizer, root) if learns_from_rows(recipe.algorithm.name) else ()),
        *prompt_problems(recipe, prompts, context, tokenizer, vocabulary=config.get_text_config().vocab_size),
        *teachers_prompt_problems(recipe, prompts, context, tokenizer),
        *environment_problems(recipe, prompts[:MOST_PROMPTS], context, tokenizer),
        *others,
        *template_problems(recipe, prompts, tokenizer, root),
        *end_problems(recipe, tokenizer, network, files),
    ]
    if recipe.model.adapter is not None:
        problems += target_problems(recipe.model.adapter.targets, network, network.get_output_embeddings())
    if recipe.model.in_few_bits:
        problems += quantise_problems(network)
    return problems + shared_matrix_problems(recipe, network)


def end_problems(recipe: Recipe, tokenizer: Any, network: PreTrainedModel, files: ModelFiles) -> list[Problem]:
    """Who imitates answers has to be shown where they end."""
    known = find_facts(recipe.algorithm.name)
    if known is None or known.rows != "demonstrations":
        return []
    named = stop_tokens(network, tokenizer) or generation_stop_tokens(files)
    if Renderer(tokenizer, stop=named, arguments=recipe.task.template).ends:
        return []
    reason = "neither its files nor its chat template name a token that ends an answer, so it would learn never to stop"
    fix = "set eos_token in its tokenizer_config.json, or use a task.chat_template that ends turns with a special token"
    return [Problem(field="model.name", reason=reason, fix=fix)]


def shared_matrix_problems(recipe: Recipe, network: PreTrainedModel) -> list[Problem]:
    """What devices of a cell by hand that trains or generates cannot share of this model."""
    found: dict[Problem, None] = {}
    for cell in read_cells(recipe.placement.cells or ()):
        if cell.role in ("train", "generate"):
            tensor, spread = (cell.mesh.get(axis, 1) for axis in ("tp", "ep"))
            experts = max(1, spread // tensor) if spread > 1 else None
            found |= dict.fromkeys(cut_problems(network, tensor=tensor, experts=experts))
    return list(found)


def device_problems(recipe: Recipe) -> list[Problem]:
    """A GPU that was asked for must be there."""
    if recipe.placement.cluster != "1xgpu" or torch.cuda.is_available():
        return []
    return [
        Problem(
            field="placement.cluster",
            reason="asks for a GPU, and torch sees none on this machine",
            fix="use auto or 1xcpu, or install a torch build for this machine's GPU",
        )
    ]


def describe_model(recipe: Recipe, files: ModelFiles) -> tuple[Any, Any]:
    """Configuration and tokenizer of the model that would be trained."""
    if files.scratch:
        scratch = recipe.model.scratch or Scratch()
        return configuration(scratch), character_tokenizer(scratch.characters)
    with reading_model(files.name, failing="cannot be read"):
        described = describe(files)
    facts(files)  # files of the hub are on this machine only now
    return described


def without_weights(files: ModelFiles, config: Any, tokenizer: Any) -> PreTrainedModel:
    """The model as its files describe it, tried out; nothing of its weights is read or made."""
    with reading_model(files.name, failing="describes no model that can be built"):
        refuse_moving_positions(config)
        with torch.device("meta"):
            network: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        stop_tokens(network, tokenizer)
        tokenizer.decode(tokenizer.encode("1 + 1 = 2"))
    return network


def other_models(recipe: Recipe, root: Path, tokenizer: Any) -> tuple[list[Problem], int]:
    """What is wrong with the models beside the one that is trained, and the shortest of their contexts.

    They read token ids, which nobody decodes, so each id has to mean the same to them.
    """
    problems, contexts = list[Problem](), [UNLIMITED]
    for key in (*CLASSIFIERS, "teacher"):
        section = getattr(recipe.roles, key)
        if section is None or section.name in (None, "scratch"):
            continue
        try:
            config, its = describe_model(recipe, locate(section.name, root))
            refuse_unknown_attention(config)
        except RecipeError as error:
            problems += [replace(problem, field=f"roles.{key}.name") for problem in error.problems]
            continue
        if key in CLASSIFIERS:  # a model of the hub is on this machine only now
            heads = key == "critic" and section.optimizer is not None
            problems += classifier_problems(section.name, key, root, gets_a_head=heads)
        text = config.get_text_config()
        contexts.append(int(getattr(text, "max_position_embeddings", None) or UNLIMITED))
        ids, its_ids = tokenizer.get_vocab(), its.get_vocab()
        if others := [token for token, number in ids.items() if its_ids.get(token) != number]:
            reason = f"{len(others)} of the {len(ids)} tokens of model.name have other ids in it, such as {others[0]!r}"
            fix = "name one that was made from a model with the same tokenizer"
            problems.append(Problem(field=f"roles.{key}.name", reason=reason, fix=fix))
        elif text.vocab_size <= max(ids.values()):
            reason = f"it has embeddings for {text.vocab_size} tokens, and model.name has ids up to {max(ids.values())}"
            problems.append(Problem(field=f"roles.{key}.name", reason=reason, fix="name one with all of them"))
    return problems, min(contexts)


def row_problems(recipe: Recipe, prompts: Sequence[Prompt], context: int, tokenizer: Any, root: Path) -> list[Problem]:
    """Rows to learn from that are longer than the context, or that a scratch model cannot spell."""
    renderer = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template)
    longest = longest_prompt(recipe, context)
    limit, found = context if longest is None else min(longest, context), list[Problem]()
    placed: Mapping[str, str] = {}
    rows = [chats_of(prompt) for prompt in prompts]
    for prompt, chats, tokens in zip(prompts, rows, row_tokens(renderer, rows, most=limit), strict=True):
        if isinstance(tokens, RolloutError):
            return [template_problem(prompt, tokens)]
        scratch = recipe.model.scratch or Scratch() if recipe.model.name == "scratch" else None
        strange = set().union(*(str(m["content"]) for chat in chats for m in chat)) if scratch else set()
        strange -= set(scratch.characters if scratch else "")
        if strange or (tokens > limit and longest is None):
            placed = placed or places(recipe.task, root)
            where = placed.get(prompt.id, f"task.source: {prompt.id}")
            reason = f"the row has {tokens} tokens, more than the context of {context}"
            fix = "shorten it, or set task.drop_longer_than: auto to leave such rows out"
            if strange:
                reason = f"the row uses {''.join(sorted(strange))!r}, not in model.scratch.characters"
                fix = "add them to the characters, or take the row out"
            found.append(Problem(field=where, reason=reason, fix=fix))
        if len(found) == MOST_ROWS:
            break
    return found


def prompt_problems(
    recipe: Recipe, prompts: Sequence[Prompt], context: int, tokenizer: Any, *, vocabulary: int
) -> list[Problem]:
    """Prompts without room, or with tokens that the model lacks, or that a scratch model cannot spell or answer."""
    renderer = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template)
    rows = learns_from_rows(recipe.algorithm.name)
    room = _room(recipe, context)
    longest = longest_prompt(recipe, context)
    scratch = recipe.model.scratch or Scratch() if recipe.model.name == "scratch" else None
    unknown = tokenizer.convert_tokens_to_ids(UNKNOWN) if scratch else None
    # A text of more characters has too many tokens, whatever they are, and is not given to the tokenizer.
    most = renderer.most_characters(room)
    asked, dropped = prompts[:MOST_PROMPTS], 0
    too_long, unknown_ids, misspelt, endless = list[str](), list[str](), list[str](), list[str]()
    for prompt, text in zip(asked, renderer.openings([prompt.messages for prompt in asked]), strict=True):
        if isinstance(text, RolloutError):
            return [template_problem(prompt, text)]
        tokens = renderer.encode_opening(text) if len(text) <= most else None
        if longest is not None and (tokens is None or len(tokens) > longest):
            dropped += 1
            continue
        if tokens is None:
            too_long.append(f"{prompt.id} ({len(text)} characters)")
            continue
        if len(tokens) > room:
            too_long.append(f"{prompt.id} ({len(tokens)} tokens)")
        if tokens.max(initial=0) >= vocabulary:
            unknown_ids.append(prompt.id)
        if scratch is None:
            continue
        words = tokenizer.encode(prompt.reference or "") if len(prompt.reference or "") <= most else None
        if unknown in [*tokens, *(words or ())]:
            misspelt.append(prompt.id)
        fits = words is not None and len(tokens) + len(words) < scratch.context
        if scratch.warmup_steps and len(tokens) <= room and not fits:
            endless.append(prompt.id)
    return [
        *_drop_problems(longest, context if rows else room, all_dropped=dropped == len(asked) > 0),
        *_named(recipe, context, vocabulary, too_long, unknown_ids, misspelt, endless),
    ]


def teachers_prompt_problems(recipe: Recipe, prompts: Sequence[Prompt], context: int, tokenizer: Any) -> list[Problem]:
    """Prompts that lack what `roles.teacher.prompt` names, or that leave no room for an answer as the teacher is asked
    them. The latter are left out where the recipe drops what is too long."""
    teacher = recipe.roles.teacher
    if teacher is None or (template := teacher.prompt) is None:
        return []
    chats, unfilled, too_long = list[Sequence[Message]](), list[Problem](), list[str]()
    for prompt in prompts:
        try:
            chats.append(reworded(prompt, template))
        except RecipeError as error:
            unfilled += error.problems
    if unfilled:
        more = f", and {len(unfilled) - 1} more cannot be asked with it" if unfilled[1:] else ""
        return [replace(unfilled[0], reason=f"{unfilled[0].reason}{more}")]
    renderer, room = Renderer(tokenizer, stop=frozenset(), arguments=recipe.task.template), _room(recipe, context)
    most = renderer.most_characters(room)
    asked = prompts[:MOST_PROMPTS]
    for prompt, text in zip(asked, renderer.openings(chats[:MOST_PROMPTS]), strict=True):
        if isinstance(text, RolloutError):
            return [template_problem(prompt, text)]
        if len(text) > most:
            too_long.append(f"{prompt.id} ({len(text)} characters)")
        elif (tokens := len(renderer.encode_opening(text))) > room:
            too_long.append(f"{prompt.id} ({tokens} tokens)")
    if recipe.task.drop_longer_than is not None and len(too_long) < len(asked):
        return []
    reason = f"prompts leave no room for {recipe.engine.max_new_tokens} new tokens in a context of {context}"
    fix = "shorten the template, set task.drop_longer_than: auto, or lower engine.max_new_tokens"
    return _listed((TEACHERS, too_long, f"{reason} as the teacher is asked them", fix))


def _room(recipe: Recipe, context: int) -> int:
    """Most tokens of a prompt that leave room for an answer, or of a row to learn from for one token."""
    return context - (1 if learns_from_rows(recipe.algorithm.name) else recipe.engine.max_new_tokens)


def _named(recipe: Recipe, context: int, vocabulary: int, *found: list[str]) -> list[Problem]:
    """A problem for each kind of prompt that was found."""
    too_long, unknown_ids, misspelt, endless = found
    return _listed(
        (
            "task",
            too_long,
            f"prompts leave no room for {recipe.engine.max_new_tokens} new tokens in a context of {context}",
            "set task.drop_longer_than: auto, lower engine.max_new_tokens, or use a model with a longer context",
        ),
        (
            "model.name",
            unknown_ids,
            f"prompts have tokens of its tokenizer that it has no embedding for (it has {vocabulary})",
            "use a model with the tokenizer that belongs to it",
        ),
        (
            "model.scratch.characters",
            misspelt,
            "prompts or their answers use characters that are not in it",
            "add every character that prompts and answers use",
        ),
        (
            "model.scratch.warmup_steps",
            endless,
            f"prompts leave no room in a context of {context} for the reference answers that the warm-up imitates",
            "shorten or drop them, raise model.scratch.context, or set warmup_steps: 0",
        ),
    )


def _drop_problems(longest: int | None, room: int, *, all_dropped: bool) -> list[Problem]:
    """A limit that drops everything, or that drops too little."""
    field = "task.drop_longer_than"
    if longest is not None and longest > room:
        reason = f"{longest} tokens leave no room for an answer, which {room} would"
        return [Problem(field=field, reason=reason, fix="use auto, or less")]
    if all_dropped:
        reason = f"all prompts have more than {longest} tokens"
        return [Problem(field=field, reason=reason, fix="use a larger number, or shorter prompts")]
    return []


def _listed(*told: tuple[str, list[str], str, str]) -> list[Problem]:
    """A problem for each (field, offending prompts, reason, fix) that has any."""
    return [
        Problem(field=field, reason=f"{len(names)} {reason}: {', '.join(names[:SHOWN])}", fix=fix)
        for field, names, reason, fix in told
        if names
    ]


def template_problem(prompt: Prompt, failure: RolloutError) -> Problem:
    """A chat template that cannot render a prompt, or must not."""
    if isinstance(failure, templates.TemplateOutOfBounds):
        fix = "use another model, or one whose chat template ends soon and repeats the chat once"
        return Problem(field="model.name", reason=f"{failure}, for prompt {prompt.id}", fix=fix)
    reason = f"the model's chat template cannot render prompt {prompt.id}: {failure}"
    return Problem(field="task", reason=reason, fix="drop task.system, or use another model")
