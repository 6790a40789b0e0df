"""The section `engine`: how answers are generated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    """Draw from the most likely tokens that have at least this probability together, among those that `top_k` leaves;
    training is on that distribution. Not with vLLM and SGLang."""
    speculate: Literal["auto"] | bool = "auto"
    """Draft tokens where decoding is bound by latency; of the native engine only."""
    memory_share: Literal["auto"] | Share = "auto"
    """Share of the device's memory for the KV cache; auto: what the plan says, or a quarter. A server has its own."""


Texts = tuple[Annotated[str, Field(min_length=1)], ...]


class NativeEngineSection(EngineSection):
    """The engine of this project, which runs on the very modules that are trained."""

    kind: Literal["native"] = "native"
    top_k: Count | None = None
    """Draw from so many of the most likely tokens, at most; with top_p alone from 1024."""
    stop: Texts = ()
    """Texts that end an answer; they are part of it, and their tokens are trained."""
    graphs: Literal["auto"] | bool = "auto"
    """Record decode steps as CUDA graphs and replay them, which makes them several times faster: `auto` on a GPU that
    generates by itself."""
    router_replay: bool = False
    """A mixture of experts is trained on the experts that computed each token when it was sampled, where rounding would
    choose others; they travel with the answers, two bytes for each expert of each layer and token."""


class ApartEngineSection(EngineSection):
    """An engine with weights of its own, to which each update is published."""

    stop: Texts = ()
    """Texts that end an answer; they are part of it, and their tokens are trained."""
    url: str | None = None
    """A server that you have started."""


class VllmEngineSection(ApartEngineSection):
    """vLLM, in a process and a Python environment of its own."""

    kind: Literal["vllm"] = "vllm"
    python: str | None = None
    """The Python that has vLLM, or its folder; left out, `.venv-vllm`, which `make engine` builds."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's own that change how fast it is or how much memory it takes, such as {max_num_seqs: 512}."""
    url: str | None = None
    """A vLLM server that you have started, such as http://host:8000: it generates with the adapter, which it reads from
    the run's folder."""


class SglangEngineSection(ApartEngineSection):
    """SGLang, as a server that you have started."""

    kind: Literal["sglang"] = "sglang"
    url: str
    """Where it answers, such as http://host:30000: it generates with the adapter, which it reads from the run's
    folder."""


class OwnEngineSection(EngineSection):
    """A function of yours that makes an engine of a policy."""

    kind: Plugin
