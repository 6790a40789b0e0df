"""The section `engine`: how answers are generated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Plugin, Positive, Share


class EngineSection(Choice):
    """How answers are generated."""

    kind: str
    """What generates."""
    max_new_tokens: Count = 24
    """Longest answer of one call."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probabilities are taken at it on both sides."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling."""
    speculate: Literal["auto"] | bool = "auto"
    """Draft tokens where decoding is bound by latency."""
    memory_share: Literal["auto"] | Share = "auto"
    """Share of the device's memory for the KV cache."""


class NativeEngineSection(EngineSection):
    """The engine of this project, which runs on the very modules that are trained."""

    kind: Literal["native"] = "native"
    graphs: bool = False
    """On a GPU: record decode steps as CUDA graphs and replay them; not tried on GPUs yet."""


class VllmEngineSection(EngineSection):
    """vLLM, in an environment of its own."""

    available = False
    plannable = True

    kind: Literal["vllm"] = "vllm"
    python: str | None = None
    """The interpreter that has it."""
    url: str | None = None
    """A server of your own."""


class OwnEngineSection(EngineSection):
    """A function of yours that makes an engine of a policy."""

    kind: Plugin
