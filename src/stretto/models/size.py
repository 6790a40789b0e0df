"""How many parameters a model has, as far as its files tell without reading weights: headers, and sizes of files."""

from __future__ import annotations

import json
from pathlib import Path

from stretto.errors import RecipeError
from stretto.models.gguf_header import count_parameters
from stretto.models.source import LARGEST_CONFIG, locate

WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""


def parameters(name: str, root: Path) -> int | None:
    """Parameters of a model, named as in a recipe; none where its files do not tell, or are not here yet."""
    try:
        files = locate(name, root)
        if files.gguf is not None:
            return count_parameters(files.gguf)
        config = files.config
        width = _width(config) if config else None
        if config is None or width is None:
            return None
        return sum(path.stat().st_size for path in config.parent.glob("model*.safetensors")) // width or None
    except (RecipeError, OSError, ValueError, RecursionError):
        return None


def _width(config: Path) -> int | None:
    """Bytes of a stored number, where a config.json says so and nothing is quantised."""
    if config.stat().st_size > LARGEST_CONFIG:
        return None
    told = json.loads(config.read_text("utf-8"))
    if not isinstance(told, dict) or told.get("quantization_config"):
        return None
    return WIDTHS.get(str(told.get("dtype") or told.get("torch_dtype")))
