"""What vLLM and SGLang cannot do of what a recipe may ask of an engine, told before one is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stretto.checks.rules.base import CheckContext
from stretto.errors import Problem, RecipeError
from stretto.models.source import facts, locate
from stretto.recipe.schema import ApartEngineSection, Recipe, VllmEngineSection
from stretto.recipe.validation_errors import nearest

HIGHEST = 512
"""Highest rank of an adapter that vLLM has room for."""

HOTTEST = 2.0
"""Highest temperature at which vLLM 0.32 samples."""

NUMBER, SWITCH, WORD, NUMBERS, MAPPING = (
    "a whole number of at least 1", "true or false", "text", "a list of whole numbers", "a mapping",
)  # fmt: skip

ARGUMENTS = {
    "async_scheduling": SWITCH,
    "attention_backend": WORD,
    "attention_config": MAPPING,
    "compilation_config": MAPPING,
    "cudagraph_capture_sizes": NUMBERS,
    "disable_cascade_attn": SWITCH,
    "enable_flashinfer_autotune": SWITCH,
    "enforce_eager": SWITCH,
    "kernel_config": MAPPING,
    "kv_cache_dtype": WORD,
    "linear_backend": WORD,
    "max_cudagraph_capture_size": NUMBER,
    "max_num_batched_tokens": NUMBER,
    "max_num_seqs": NUMBER,
    "performance_mode": WORD,
}
"""Argument of vLLM that a recipe may say -> its value. They say how it computes, and not what: the proofs hold."""

ELSEWHERE = {
    "data_parallel_size": "placement.cells says which devices generate, each by itself",
    "dtype": "model.dtype says it",
    "gpu_memory_utilization": "engine.memory_share says it, of the cache alone",
    "kv_cache_memory_bytes": "engine.memory_share says it, as a share of the device's memory",
    "max_lora_rank": "model.adapter.rank says it",
    "max_model_len": "it is the model's context, or what the cache has room for (engine.memory_share)",
    "model": "model.name says it",
    "quantization": "vLLM multiplies with what a base in few bits (model.quantize) stands for, in model.dtype",
    "seed": "every request has its own, which follows from the key seed",
    "tensor_parallel_size": "placement.cells says which devices generate together, with mesh: {tp: N}",
}
"""Argument that many look for -> what says it here."""


def engine_apart_can_do_it(recipe: Recipe, scene: CheckContext) -> Iterator[Problem]:
    """Number types, adapters, temperatures, and keys that are the native engine's business."""
    engine = recipe.engine
    if not isinstance(engine, ApartEngineSection):
        return
    fix = "use engine.kind: native"
    if recipe.model.dtype == "float64":
        reason = f"{engine.kind} does not compute in float64"
        yield Problem(field="model.dtype", reason=reason, fix=f"use bfloat16, or {fix}")
    adapter = recipe.model.adapter
    wide = adapter is not None and adapter.targets == "all-linear" and not recipe.model.in_few_bits
    if wide and not scene.planning and _is_mixture(recipe, scene):
        reason = f"adapters on experts with {engine.kind} are not available yet, and all-linear has them"
        yield Problem(field="model.adapter.targets", reason=reason, fix=f"use attention, or {fix}")
    if engine.speculate != "auto":
        reason = f"has no effect on {engine.kind}: drafts that change no answer are the native engine's"
        yield Problem(field="engine.speculate", reason=reason, fix="leave it out")
    if isinstance(engine, VllmEngineSection):
        if engine.temperature > HOTTEST:
            reason = f"vLLM samples at temperatures up to {HOTTEST:g}, and this is {engine.temperature:g}"
            yield Problem(field="engine.temperature", reason=reason, fix=f"use {HOTTEST:g} or less, or {fix}")
        if adapter is not None and adapter.rank > HIGHEST:
            reason = f"vLLM has no room for adapters of rank {adapter.rank}; {HIGHEST} is the highest"
            yield Problem(field="model.adapter.rank", reason=reason, fix=f"use {HIGHEST} or less, or {fix}")
        yield from _wrong_arguments(engine.arguments)


def _wrong_arguments(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Those that vLLM has not, that would change what it samples, and that are no values."""
    for name, value in given.items():
        field = f"engine.arguments.{name}"
        if name in ELSEWHERE:
            yield Problem(field=field, reason=ELSEWHERE[name], fix="take it out")
        elif name not in ARGUMENTS:
            near = nearest(name, ARGUMENTS)
            fix = f"did you mean {near}?" if near else f"take it out; those that may be said are {', '.join(ARGUMENTS)}"
            yield Problem(field=field, reason="is no argument of vLLM that may be said here", fix=fix)
        elif not _is(ARGUMENTS[name], value):
            reason = f"{value!r} is not {ARGUMENTS[name]}"
            yield Problem(field=field, reason=reason, fix="give one, or take it out, and vLLM decides")


def _is(kind: str, value: Any) -> bool:
    whole = isinstance(value, int) and not isinstance(value, bool)
    numbers = isinstance(value, (list, tuple)) and all(type(each) is int for each in value)
    fits = {NUMBER: whole and value > 0, NUMBERS: numbers, MAPPING: isinstance(value, Mapping)}
    return fits.get(kind, isinstance(value, bool if kind == SWITCH else str))


def _is_mixture(recipe: Recipe, scene: CheckContext) -> bool:
    try:
        found = facts(locate(recipe.model.name, scene.root))
    except RecipeError:  # told by another rule
        return False
    return found is not None and found.mixture
