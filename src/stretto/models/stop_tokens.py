"""The tokens that end a model's turns: what its files say, and what is written for whoever gets the model.

A chat template may end turns with another token than the files name. `environments.render.Renderer.ends` finds it out;
here it only comes to be where the others are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from stretto.errors import RecipeError
from stretto.models.plausible import wrong_token_id
from stretto.models.source import ModelFiles

SETTINGS = "generation_config.json"
"""The file by which `generate` and servers know where to stop."""


def stop_tokens(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Token ids that end a turn: the tokenizer's, the configuration's and the generation settings'."""
    return _named(tokenizer, network.config, getattr(network, "generation_config", None))


def generation_stop_tokens(files: ModelFiles) -> frozenset[int]:
    """Those of the generation settings alone, which a model that was built without weights does not have."""
    if files.scratch or files.gguf is not None:
        return frozenset()
    try:
        return _named(GenerationConfig.from_pretrained(files.pretrained, trust_remote_code=False))
    except OSError:  # it has none
        return frozenset()


def _named(*places: Any) -> frozenset[int]:
    """The ends that some places name, which may name one, several or none."""
    found: set[int] = set()
    for told in places:
        value = getattr(told, "eos_token_id", None)
        if why := wrong_token_id("eos_token_id", value):
            raise RecipeError.of("model.name", why, "correct it in the model's files, or use another model")
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def write_stop_tokens(folder: Path, tokens: frozenset[int]) -> None:
    """Lets the model in a folder, as others read it, stop at these; an adapter stops where its base does."""
    path = folder / SETTINGS
    if not path.is_file():
        return
    settings = json.loads(path.read_text("utf-8"))
    told = settings.get("eos_token_id")
    if frozenset(told if isinstance(told, list) else {told} - {None}) != tokens:
        settings["eos_token_id"] = sorted(tokens)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
