"""Whether the numbers that a model's files say of themselves can be those of a model.

A stranger's config.json or GGUF header may hold text where a number belongs, no heads, or a million layers that
would be built for hours before anything fails. Only what decides on sizes is looked at, and only what is there;
whether the rest makes a model is for transformers to say, on a model without weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
"""What families call the longest sequence."""

WIDTH_KEYS = ("hidden_size", "n_embd", "d_model")
"""What families call the hidden size."""

LAYERS, HEADS, WIDTH, WIDE, TOKENS, LONG, EXPERTS = (
    (1, 2000), (1, 2**16), (1, 2**20), (1, 2**26), (1, 2**26), (1, 2**31), (0, 2**14),
)  # fmt: skip
"""The least and the most of each: some ten times what the largest models have."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How a config.json of a mixture says how many experts it has."""

BOUNDS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads"), HEADS),
    **dict.fromkeys((*WIDTH_KEYS, "head_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), WIDE),
    **dict.fromkeys(EXPERT_KEYS, EXPERTS),
    **dict.fromkeys(CONTEXT_KEYS, LONG),
    "vocab_size": TOKENS,
}
"""Key of a config.json -> its least and its greatest value; null is a default, and a list has one for each layer."""

GGUF_BOUNDS = {
    "block_count": LAYERS,
    "embedding_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "feed_forward_length": WIDE,
    "expert_count": EXPERTS,
    "context_length": LONG,
    "vocab_size": TOKENS,
}
"""The same for a GGUF file, without the architecture in front."""

TOKEN_KEYS = ("eos_token_id", "bos_token_id", "pad_token_id")
DTYPES = frozenset({"auto", "float64", "double", "float32", "float", "float16", "half", "bfloat16"})
"""Types of weights, besides those of eight bits."""
KERNEL_KEYS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


def implausible(config: Mapping[str, Any]) -> str | None:
    """Which entry of a config.json cannot be and why, or none. Its language part is looked at too."""
    text = config.get("text_config")
    parts = [config, *([text] if isinstance(text, dict) else [])]
    return next((why for part in parts for why in _against(part)), None)


def implausible_gguf(sizes: Mapping[str, int]) -> str | None:
    """The same for the whole numbers of a GGUF header."""
    told = [_size(key, sizes[key], bounds) for key, bounds in GGUF_BOUNDS.items() if key in sizes]
    return next((why for why in told if why), None)


def wrong_token_id(key: str, value: Any) -> str | None:
    """What is wrong with the id of a token; of those that end a text there may be several. -1 stands for none."""
    several = key == "eos_token_id"
    ids = value if several and isinstance(value, list) else [value]
    if value is None or all(_whole(each) and -1 <= each <= TOKENS[1] for each in ids):
        return None
    more = ", or a list of such numbers" if several else ""
    return f"{key} is {shown(value)}, and should be the number of a token{more}"


def _against(part: Mapping[str, Any]) -> Iterator[str]:
    """Everything that cannot be in one section."""
    for key, bounds in BOUNDS.items():
        for value in part[key] if isinstance(part.get(key), list) else [part.get(key)]:
            if value is not None and (why := _size(key, value, bounds)):
                yield why
    for key in TOKEN_KEYS:
        if why := wrong_token_id(key, part.get(key)):
            yield why
    for key in ("dtype", "torch_dtype"):
        value = part.get(key)
        if value is not None and not (isinstance(value, str) and _is_type(value)):
            yield f"{key} is {shown(value)}, which is no type of weights"
    for key, value in part.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key} is {value}, which is no number"
    for key in KERNEL_KEYS:
        if "/" in str(part.get(key)):
            yield f"{key} is {shown(part[key])}, code of a repository, and stretto runs no code of models"


def _is_type(name: str) -> bool:
    plain = name.removeprefix("torch.")
    return plain in DTYPES or plain.startswith("float8_")


def _size(key: str, value: Any, bounds: tuple[int, int]) -> str | None:
    least, most = bounds
    if _whole(value) and least <= value <= most:
        return None
    return f"{key} is {shown(value)}, and should be a whole number from {least} to {most}"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A stranger's value, short enough for a message."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:60]}…"
