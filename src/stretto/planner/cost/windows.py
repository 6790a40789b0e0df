"""Which layers of a model see a window of tokens only, from what its files say and what its family does unasked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PATTERNS = {
    "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4,
}  # fmt: skip
"""Type of model -> every so many layers one sees everything, where the files do not list layers."""

EVERYWHERE = ("mistral", "mixtral", "ministral", "phi3", "starcoder2")
"""Types all of whose layers have the window that their files state."""


def windows_of(kind: str, layers: int, told: Mapping[str, Any]) -> tuple[int, int]:
    """How many layers see a window and how many tokens it has, from a config.json or what a GGUF file has of it; no
    layer where all see everything, or nobody knows better."""
    window, listed = _count(told.get("sliding_window")), told.get("layer_types")
    every = _count(told.get("sliding_window_pattern")) or PATTERNS.get(kind, 0)
    if not window or told.get("use_sliding_window") is False:
        return 0, 0
    if isinstance(listed, list):
        windowed = listed.count("sliding_attention")
    elif told.get("use_sliding_window") is True:
        whole = told.get("max_window_layers")
        windowed = layers - whole if isinstance(whole, int) else 0
    elif every:
        windowed = layers - layers // every
    else:
        windowed = layers if kind in EVERYWHERE else 0
    windowed = max(0, min(windowed, layers))
    return windowed, window if windowed else 0


def _count(value: Any) -> int:
    """A whole number above 0, and 0 for everything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
