"""A tokenizer in the words of GGUF: its tokens, merges, and the name of the rule that splits text before merging.

llama.cpp knows such rules by name, and nothing in the file says what they do, so the name is looked up by the rule
itself. A rule that has no name here is refused: the file would load, and read some texts as other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf

from stretto.errors import RecipeError

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {WORDS + SIGNS: "qwen2", WORDS + "{1,3}" + SIGNS: "llama-bpe"}
"""Regular expression that cuts a text into words -> what GGUF calls it: those of Qwen 2 and 3, and of Llama 3."""

FIX = "use a model with a byte-level tokenizer, as SmolLM2, Llama 3 and Qwen have"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """What a GGUF file says of a tokenizer."""

    rule: str
    """The name of how text is split before merging."""
    tokens: tuple[str, ...]
    """Every token by its id, as many as the model has embeddings."""
    types: tuple[int, ...]
    """What each of them is: ordinary, special, added or unused."""
    merges: tuple[str, ...]
    """Pairs of tokens that become one, the first ones first."""

    def write(self, writer: gguf.GGUFWriter) -> None:
        """Puts it into a file's header."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.rule)
        writer.add_token_list(list(self.tokens))
        writer.add_token_types(list(self.types))
        writer.add_token_merges(list(self.merges))


def vocabulary_of(tokenizer: Any, *, size: int) -> GgufVocabulary:
    """The tokenizer of a model with `size` embeddings; RecipeError if GGUF has no words for it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal("it is no fast tokenizer")
    described: dict[str, Any] = json.loads(backend.to_str())
    model = described["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "SentencePiece" if model.get("byte_fallback") else model.get("type")
        raise _refusal(f"it is of the kind {kind}, of which writing is not available yet")
    if described.get("normalizer") not in (None, {"type": "NFC"}):
        raise _refusal(f"it changes texts before it reads them ({described['normalizer'].get('type')})")
    added = {entry["id"]: entry for entry in described.get("added_tokens", ())}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id |= {number: entry["content"] for number, entry in added.items()}
    if max(by_id) >= size:
        raise _refusal(f"it has tokens up to {max(by_id)}, and the model has embeddings for {size}")
    return GgufVocabulary(
        rule=split_rule(described.get("pre_tokenizer")),
        tokens=tuple(by_id.get(number, f"[PAD{number}]") for number in range(size)),
        types=tuple(_type(number, by_id, added) for number in range(size)),
        merges=tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]),
    )


def _type(number: int, by_id: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> int:
    if number not in by_id:
        return int(gguf.TokenType.UNUSED)
    if number not in added:
        return int(gguf.TokenType.NORMAL)
    return int(gguf.TokenType.CONTROL if added[number].get("special") else gguf.TokenType.USER_DEFINED)


def split_rule(described: Mapping[str, Any] | None) -> str:
    """What GGUF calls the rule that a tokenizer splits texts by."""
    steps: Sequence[Mapping[str, Any]] = (described or {}).get("pretokenizers") or ([described] if described else [])
    kinds = [step.get("type") for step in steps]
    last = steps[-1] if steps else {}
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        regex = last.get("use_regex", True)
        if kinds == ["ByteLevel"] and regex:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and regex and steps[0].get("individual_digits"):
            return "smollm"
        pattern = (steps[0].get("pattern") or {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
        if not regex and pattern in SPLITS and steps[0].get("behavior") == "Isolated":
            return SPLITS[pattern]
    raise _refusal(f"its rule for splitting texts ({', '.join(map(str, kinds)) or 'none'}) has no name in GGUF here")


def _refusal(reason: str) -> RecipeError:
    return RecipeError.of("model.name", f"its tokenizer cannot be written as GGUF: {reason}", FIX)
