"""Section `engine`: inference engine and sampling settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from stretto.recipe.schema.base import Choice, Count, Plugin, Positive, Share


class EngineSection(Choice):
    """Inference engine and sampling settings."""

    kind: str
    """Inference engine."""
    max_new_tokens: Count = 24
    """Max new tokens per completion."""
    temperature: Positive = 1.0
    """Sampling temperature. Engine and trainer compute log-probabilities at this temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: smallest set of top tokens whose probabilities sum to at least this value. Training uses the
    same truncated distribution. Not available with vLLM or SGLang."""
    speculate: Literal["auto"] | bool = "auto"
    """Speculative decoding from finished completions (native engine). `auto` enables it for small batches."""
    memory_share: Literal["auto"] | Share = "auto"
    """Share of device memory for the KV cache. `auto`: the plan's share, or 0.25. Servers configure their own."""


Texts = tuple[Annotated[str, Field(min_length=1)], ...]


class NativeEngineSection(EngineSection):
    """Built-in engine, which samples with the trainer's own modules."""

    kind: Literal["native"] = "native"
    top_k: Count | None = None
    """Sample from the k most likely tokens. Unset: all; with `top_p` alone at most 1024."""
    stop: Texts = ()
    """Stop strings. They stay in the completion, and their tokens are trained."""
    graphs: Literal["auto"] | bool = "auto"
    """Decode with CUDA graphs. `auto`: on a GPU that generates alone."""
    router_replay: bool = False
    """Mixture of experts: train each token on the experts that sampled it. Costs two bytes per token, layer and chosen
    expert."""


class ApartEngineSection(EngineSection):
    """Engine in another process with its own copy of the weights, updated by weight sync."""

    stop: Texts = ()
    """Stop strings. They stay in the completion, and their tokens are trained."""
    url: str | None = None
    """URL of a running server."""


class VllmEngineSection(ApartEngineSection):
    """vLLM in a subprocess with its own Python environment, or a running vLLM server."""

    kind: Literal["vllm"] = "vllm"
    python: str | None = None
    """Python interpreter or environment with vLLM. Unset: `.venv-vllm`, built by `make engine`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """vLLM engine arguments that affect speed or memory, e.g. {max_num_seqs: 512}."""
    url: str | None = None
    """URL of a running vLLM server, e.g. http://host:8000. It loads LoRA adapters from the run folder."""


class SglangEngineSection(ApartEngineSection):
    """A running SGLang server."""

    kind: Literal["sglang"] = "sglang"
    url: str
    """URL of the server, e.g. http://host:30000. It loads LoRA adapters from the run folder."""


class OwnEngineSection(EngineSection):
    """Engine of your own: a function that takes the policy and returns an engine."""

    kind: Plugin
