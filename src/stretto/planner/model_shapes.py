"""The shape of every model that a recipe names: from numbers, a well-known name, or what its files say of themselves.

Nothing is downloaded and no weights are read. A model of the hub that is not on this machine is looked for among the
families; what nobody knows has to be given in numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stretto.errors import RecipeError
from stretto.models.gguf_header import has_head, read_header, read_sizes
from stretto.models.plausible import implausible_gguf
from stretto.models.source import locate
from stretto.planner.cost.shapes import WIDE_TYPES, ModelShape, named_shape, read_config, shape_of
from stretto.planner.cost.windows import windows_of
from stretto.recipe.schema import ModelSection, RoleModel, Scratch, Shape

SPECIAL = 6
"""Tokens of a scratch model that are no characters, about; a plan does not feel one more or less."""

GGUF_KEYS = {
    "layers": "block_count",
    "hidden": "embedding_length",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab": "vocab_size",
    "experts": "expert_count",
    "top_k": "expert_used_count",
    "expert_ffn": "expert_feed_forward_length",
}
"""Our names -> what GGUF files call them."""


def shape_of_model(section: ModelSection | RoleModel, root: Path, *, field: str) -> ModelShape | None:
    """The shape of a model; none where the section names none. `field` is the section's name in the recipe."""
    if section.shape is not None:
        told = section.shape
        if isinstance(told, str) and (root / told).exists():
            told = str(root / told)
        return shape_of(told, field=f"{field}.shape")
    if section.name == "scratch" and isinstance(section, ModelSection):
        return _scratch(section.scratch or Scratch())
    return None if section.name is None else _of_files(section.name, root, field=f"{field}.name")


def _scratch(section: Scratch) -> ModelShape:
    """The tiny decoder, as `models.scratch` makes it."""
    return ModelShape(
        name="scratch",
        layers=section.layers,
        hidden=section.width,
        heads=section.heads,
        kv_heads=section.heads,
        head_dim=section.width // section.heads,
        ffn=4 * section.width,
        vocab=len(set(section.characters)) + SPECIAL,
        tied=True,
    )


def _of_files(name: str, root: Path, *, field: str) -> ModelShape:
    try:
        files = locate(name, root)
    except RecipeError:
        return named_shape(name, field=field)
    if files.gguf is not None:
        return _of_gguf(files.gguf, field=field)
    config = files.config
    return read_config(config, field=field) if config else named_shape(name, field=field)


def _of_gguf(path: Path, *, field: str) -> ModelShape:
    """What the header of a GGUF file says."""
    try:
        told = read_sizes(path)
        if why := implausible_gguf(told):
            raise ValueError(why)
        known = {ours: told[theirs] for ours, theirs in GGUF_KEYS.items() if theirs in told}
        sizes, kind = Shape(**known, tied=not has_head(path)), read_header(path).architecture.replace("-", "_")
    except (OSError, ValueError) as wrong:
        reason = f"the sizes in {path.name} cannot be read: {str(wrong).splitlines()[0]}"
        raise RecipeError.of(field, reason, "give model.shape, as a well-known name or in numbers") from None
    shape = shape_of(sizes, field=field)
    said = {name.removeprefix("attention."): number for name, number in told.items()}
    windowed, window = windows_of(kind, shape.layers, said)
    # Nothing was tried cut that came from such a file.
    few, named = kind not in WIDE_TYPES, path.stem
    return replace(shape, name=named, windowed_layers=windowed, window=window, uncut=True, narrows=few)
