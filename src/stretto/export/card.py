"""The model card of a run's model: what it is made of, what it was rewarded for, how good it is and how it was made.

Every number is one that the run has written down or that the proof has measured. What the recipe holds is quoted in
blocks that nothing in it can close.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

from huggingface_hub import ModelCardData

from stretto import __version__
from stretto.errors import RecipeError
from stretto.export.proof import ExportProof
from stretto.export.saved_model import SavedModel
from stretto.models.source import HUB_ID
from stretto.recipe.describe import objective
from stretto.recipe.resolve import dump
from stretto.storage.json_lines import read_rows

LICENCE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,63}")
"""How the hub writes licences, such as apache-2.0; `other` for one that it has no name for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says besides what the run's folder does."""

    repo: str
    """Its name on the hub."""
    licence: str | None
    """Its licence, if one was given."""
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
        training=_training(model),
        rewards="\n".join(_rewards(model)),
        accuracy=accuracy(model),
        usage=_usage(facts.repo, adapter=adapter),
        stop=", ".join(map(str, sorted(facts.stop))),
        proof=f"Before it was published, it was compared with the run: {facts.proof.sentence}.",
        version=__version__,
        command="stretto train recipe.yaml",
        recipe=quoted(recipe_text(model), "yaml"),
    )


def metadata(model: SavedModel, facts: CardFacts, *, adapter: bool) -> str:
    """The fields that the hub reads."""
    name = model.recipe.model.name
    on_hub = model.files.on_hub
    data = ModelCardData(
        license=facts.licence,
        base_model=name if on_hub else None,
        base_model_relation=("adapter" if adapter else "finetune") if on_hub else None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["stretto", "reinforcement-learning", model.recipe.algorithm.name],
        ignore_metadata_errors=True,
    )
    return str(data.to_yaml())


def refuse_names(repo: str, licence: str | None) -> None:
    """Refuses what the hub would, before anything is made."""
    if not HUB_ID.fullmatch(repo) or "/" not in repo or ".." in repo or "--" in repo:
        raise RecipeError.of("--to", f"{repo!r} is not of the form ORG/NAME", "use letters, digits, '.', '-' and '_'")
    if licence is not None and not LICENCE.fullmatch(licence):
        raise RecipeError.of("--licence", f"{licence!r} is no licence's name", "write one such as apache-2.0, or other")


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
    recipe = model.recipe
    return (
        f"{what} {verb} {_code(recipe.model.name)}, trained by reinforcement learning ({recipe.algorithm.name}) for "
        f"{model.step} steps of {recipe.batch.prompts} prompts with {recipe.batch.samples} answers each."
    )


def _training(model: SavedModel) -> str:
    source = model.recipe.task.source
    named = getattr(source, "name", None) or getattr(source, "path", None)
    prompts = f"Prompts: {source.kind}" + (f", {_code(str(named))}" if named else "")
    return f"{prompts}. The objective:\n\n{quoted(objective(model.recipe), 'text')}"


def _rewards(model: SavedModel) -> Iterator[str]:
    for part in model.recipe.rewards:
        yield f"- {_code(part.name)}: {_code(part.kind)}, weight {part.weight:g}"


def accuracy(model: SavedModel) -> str:
    """What the run has measured at this checkpoint, or nearest before it, beside the model before training."""
    measured = [row for row in rows(model) if row.get("eval/accuracy") is not None and row["step"] <= model.step]
    if not measured:
        return "The run has measured no accuracy on held-out prompts."
    first, last = measured[0], measured[-1]
    before = f", from {first['eval/accuracy']:.3f} {_interval(first)}before training" if first["step"] == 0 else ""
    asked = last.get("eval/asked") or last.get("eval/n")
    return (
        f"Accuracy on {f'{asked:g} ' if asked else ''}held-out prompts, greedy, one answer each: "
        f"{last['eval/accuracy']:.3f} {_interval(last)}at step {last['step']}{before}."
    )


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row.get("eval/low"), row.get("eval/high")
    return "" if low is None or high is None else f"({low:.3f} to {high:.3f}) "


def rows(model: SavedModel) -> list[dict[str, Any]]:
    """The run's metrics, step by step."""
    return [dict(row) for row in read_rows(model.run / "metrics.jsonl")]


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
