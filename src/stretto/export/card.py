"""The model card of a run's model: what it is made of, what it was rewarded for, how good it is and how it was made.

Every number is one that the run has written down or that the proof has measured. What the recipe holds is quoted in
blocks that nothing in it can close.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from huggingface_hub import ModelCardData

from stretto import __version__
from stretto.algorithms.catalog import facts_of, learns_from_rows
from stretto.errors import RecipeError
from stretto.export.proof import ExportProof
from stretto.export.saved_model import SavedModel
from stretto.models.source import HUB_ID
from stretto.recipe.describe import objective
from stretto.recipe.resolve import dump
from stretto.storage.json_lines import read_rows

LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
"""How the hub writes licenses, such as apache-2.0; `other` for one that it has no name for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says besides what the run's folder does."""

    repo: str
    """Its name on the hub."""
    license: str | None
    """Its license, if one was given."""
    merged: bool
    """True if it is a whole model, though the run trained an adapter."""
    proof: ExportProof
    """How it compares with the run."""
    stop: frozenset[int]
    """Tokens that end an answer."""


def write_card(model: SavedModel, facts: CardFacts) -> str:
    """The README.md of the model's repository."""
    text = files("stretto.export").joinpath("card.md").read_text("utf-8")
    adapter = model.recipe.model.adapter is not None and not facts.merged
    return Template(text).substitute(
        metadata=metadata(model, facts, adapter=adapter),
        name=facts.repo.rpartition("/")[2],
        summary=_summary(model, adapter=adapter),
        training="\n\n".join((*_training(model), *_rewards(model))),
        measured="\n\n".join(_measured(model)),
        usage=_usage(facts.repo, adapter=adapter),
        stop=", ".join(map(str, sorted(facts.stop))),
        proof=f"Before it was published, it was compared with the run: {facts.proof.sentence}.",
        version=__version__,
        command=f"stretto {'sft' if _unit(model) == 'demonstration' else 'train'} recipe.yaml",
        recipe=quoted(recipe_text(model), "yaml"),
    )


def metadata(model: SavedModel, facts: CardFacts, *, adapter: bool) -> str:
    """The fields that the hub reads."""
    base = model.hub_base
    data = ModelCardData(
        license=facts.license,
        base_model=base,
        base_model_relation=("adapter" if adapter else "finetune") if base else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["stretto", _method(model).replace(" ", "-"), model.recipe.algorithm.name],
        ignore_metadata_errors=True,
    )
    return str(data.to_yaml())


def refuse_names(repo: str, license: str | None) -> None:
    """Refuses what the hub would, before anything is made."""
    if not HUB_ID.fullmatch(repo) or "/" not in repo or ".." in repo or "--" in repo:
        raise RecipeError.of("--to", f"{repo!r} is not of the form ORG/NAME", "use letters, digits, '.', '-' and '_'")
    if license is not None and not LICENSE.fullmatch(license):
        raise RecipeError.of("--license", f"{license!r} is no license's name", "write one such as apache-2.0, or other")


def recipe_text(model: SavedModel) -> str:
    """The recipe, without where files lay on the machine that trained."""
    return str(dump(model.recipe))


def quoted(text: str, language: str) -> str:
    """A block of Markdown that holds a text, whatever backquotes it has."""
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _summary(model: SavedModel, *, adapter: bool) -> str:
    what = "A LoRA adapter" if adapter else "A language model"
    verb = "for" if adapter else "made from"
    recipe, batch = model.recipe, model.recipe.batch
    each = f"{batch.prompts} {_unit(model)}{'' if batch.prompts == 1 else 's'}"
    if not learns_from_rows(recipe.algorithm.name):
        each += f" with {batch.samples} answer{'' if batch.samples == 1 else 's'} each"
    return (
        f"{what} {verb} {_code(model.hub_base or recipe.model.name)}, trained by {_method(model)} "
        f"({recipe.algorithm.name}) for {model.step} step{'' if model.step == 1 else 's'} of {each}."
    )


def _method(model: SavedModel) -> str:
    """How it was trained."""
    facts = facts_of(model.recipe.algorithm.name)
    if facts.rows != "prompts":
        return "supervised fine-tuning"
    return "on-policy distillation" if facts.taught else "reinforcement learning"


def _unit(model: SavedModel) -> str:
    """What it learned from."""
    return facts_of(model.recipe.algorithm.name).rows.removesuffix("s")


def _training(model: SavedModel) -> Iterator[str]:
    source = model.recipe.task.source
    named = getattr(source, "name", None) or getattr(source, "path", None)
    where = f"{source.kind}, {_code(str(named))}" if named else source.kind
    yield f"{_unit(model).capitalize()}s: {where}. The objective:"
    yield quoted(objective(model.recipe), "text")
    if (kind := model.recipe.model.quantize) != "none":
        yield f"The base was frozen in {kind} meanwhile. How far these files are from that is said below."


def _rewards(model: SavedModel) -> Iterator[str]:
    """What judges answers, if anything does, and whether that is learned from."""
    recipe = model.recipe
    if not recipe.rewards:
        return
    weight = getattr(recipe.algorithm, "reward_weight", 1.0)  # of a distillation, which has a teacher to learn from
    if learns_from_rows(recipe.algorithm.name) or weight == 0:
        yield "Answers were judged by the sum of the following, and nothing was learned from that:"
    else:
        yield "The reward is the sum of:"
    yield "\n".join(f"- {_code(part.name)}: {_code(part.kind)}, weight {part.weight:g}" for part in recipe.rewards)


def _measured(model: SavedModel) -> Iterator[str]:
    """What the run has measured at this checkpoint, or nearest before it, beside the model before training."""
    accuracy, loss = _rows(model, "eval/accuracy"), _rows(model, "eval/loss")
    if accuracy:
        asked = accuracy[-1].get("eval/asked") or accuracy[-1].get("eval/n")
        course = _course(accuracy, "eval/accuracy", "eval/low", "eval/high")
        yield f"Accuracy on {f'{asked:g} ' if asked else ''}held-out prompts, greedy, one answer each: {course}."
        yield "Prompts that were held out were never trained on. The interval is a 95 % Wilson interval."
    if loss:
        tokens = loss[-1].get("eval/tokens")
        course = _course(loss, "eval/loss", "eval/loss_low", "eval/loss_high")
        yield f"Loss on held-out rows, in nats{f', mean over {tokens:g} tokens' if tokens else ''}: {course}."
        yield "Rows that were held out were never trained on. The interval is one of 95 %, over rows."
    if not accuracy and not loss:
        learned = learns_from_rows(model.recipe.algorithm.name)
        yield f"The run has measured no {'loss on held-out rows' if learned else 'accuracy on held-out prompts'}."


def _course(rows: Sequence[Mapping[str, Any]], name: str, low: str, high: str) -> str:
    """A measure with its interval, and what it was before training."""
    first, last = rows[0], rows[-1]
    before = f", from {_number(first, name, low, high)} before training" if first["step"] == 0 else ""
    return f"{_number(last, name, low, high)} at step {last['step']}{before}"


def _number(row: Mapping[str, Any], name: str, low: str, high: str) -> str:
    ends = [row[key] for key in (low, high) if row.get(key) is not None]
    return f"{row[name]:.3f}" + (" ({:.3f} to {:.3f})".format(*ends) if len(ends) == 2 else "")


def _rows(model: SavedModel, name: str) -> list[dict[str, Any]]:
    """The run's metrics up to this checkpoint, of the steps that have this one."""
    rows = (dict(row) for row in read_rows(model.run / "metrics.jsonl"))
    return [row for row in rows if row.get(name) is not None and row["step"] <= model.step]


def _usage(repo: str, *, adapter: bool) -> str:
    module, name = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
    imports = (
        f"from peft import {name}\nfrom transformers import AutoTokenizer"
        if module == "peft"
        else f"from transformers import {name}, AutoTokenizer"
    )
    return (
        f'{imports}\n\nmodel = {name}.from_pretrained("{repo}")\ntokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
        'chat = [{"role": "user", "content": "..."}]\n'
        'inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", '
        "return_dict=True)\n"
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=256)[0]))"
    )


def _code(text: str) -> str:
    """Text of a recipe within a sentence, which nothing in it can end."""
    plain = "".join(char if char.isprintable() and char != "`" else "?" for char in text)
    return f"`{plain}`"
