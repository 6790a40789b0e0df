"""What vLLM is started with, and how its refusals are told. The engine's own Python reads this file too, so it imports
nothing of the project, nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of an adapter that vLLM has room for."""

NATIVE = "use engine.kind: native"
"""What can be done about anything that vLLM cannot."""

SHOWN = 400
"""Characters of vLLM's own words that are shown."""


class Refused(Exception):
    """What was asked cannot be: (recipe key, reason, fix)."""


def engine_args(
    *,
    dtype: str,
    context: int,
    cache_bytes: int,
    rank: int | None,
    targets: Sequence[str],
    device: str,
    devices: int,
    arguments: Mapping[str, Any],
    share: float | None,
) -> dict[str, Any]:
    """All of them; what the recipe says itself comes last."""
    told: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": context,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "tensor_parallel_size": devices,
        "worker_extension_cls": "host_tensors.TensorRpc",
        "kv_cache_memory_bytes": cache_bytes,
    }
    if rank is not None:
        room = next((size for size in RANKS if size >= rank), None)
        if room is None:
            reason = f"vLLM has no room for adapters of rank {rank}; {RANKS[-1]} is the highest"
            raise Refused("model.adapter.rank", reason, f"use {RANKS[-1]} or less, or engine.kind: native")
        told |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1, "max_cpu_loras": 1}
        # Other layers stay as they are: experts with room for adapters need kernels that CPUs have not.
        told |= {"lora_target_modules": list(targets)}
    if devices > 1:  # where Ray is at hand vLLM would ask that
        told["distributed_executor_backend"] = "mp"
    # vLLM takes back what it drew before all parts of a prompt were computed, which generators of CPUs cannot.
    whole = {"enforce_eager": True, "enable_chunked_prefill": False}
    told |= whole if device == "cpu" else {"enable_sleep_mode": True, "gpu_memory_utilization": share}
    return told | dict(arguments)


def words_of(error: Exception) -> str:
    """vLLM's own words, on one line."""
    return " ".join(str(error).split())[:SHOWN] or type(error).__name__


def refusal(error: Exception, arguments: Mapping[str, Any], *, short: bool) -> Refused:
    """vLLM's own words for why it does not start, at the key that they are about; `short` of memory or not."""
    why = words_of(error)
    named = [f".{name}" for name in arguments if name in why] + [""] * (bool(arguments) and "validation error" in why)
    if named:
        return Refused(f"engine.arguments{named[0]}", f"vLLM refuses it: {why}", "mend it, or leave it out")
    if not short and "kv cache" in why.lower():  # whose size vLLM calls by names that no recipe has
        return Refused("engine.memory_share", f"vLLM says: {why}", f"raise or lower it accordingly, or {NATIVE}")
    if short:
        reason = f"vLLM had too little memory to start: {why}"
        return Refused("engine.memory_share", reason, f"lower it, stop what else uses the device, or {NATIVE}")
    return Refused("engine.kind", f"vLLM cannot serve this: {why}", f"see its log, or {NATIVE}")
