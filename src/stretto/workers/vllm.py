"""How a worker comes to vLLM for its policy: which Python, on which device, with how much memory and until when."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from stretto import host_memory
from stretto.checks.machine.engine_python import VLLM, engine_python
from stretto.engines.apart import EngineDeadlines, EngineTransport
from stretto.engines.native.admission import CACHE_SHARE
from stretto.engines.native.cache import memory_of, token_bytes
from stretto.engines.vllm.engine import VllmEngine, VllmSettings
from stretto.engines.vllm.engine_args import NATIVE
from stretto.engines.vllm.process import PROGRAM, EngineProcess
from stretto.engines.vllm.published import base_sizes
from stretto.engines.vllm.start_probe import refuse_other_results
from stretto.errors import RecipeError
from stretto.models.load import Policy
from stretto.models.memory import give_back_gpu
from stretto.recipe.schema import VllmEngineSection
from stretto.workers.worker_spec import WorkerSpec

EARLIER = 0.9
"""The process is given this share of a deadline, so that what is said when it passes has the engine's last lines."""

GB = 2**30

SLACK = 2 * GB
"""What vLLM takes of a GPU besides weights and cache, about: its context, activations and recorded graphs."""


BLOCK = 256
"""Most tokens of a block of vLLM's cache; others have a half of that, or a half of a half. One block it keeps empty."""


def vllm_engine(policy: Policy, section: VllmEngineSection, spec: WorkerSpec) -> VllmEngine:
    """vLLM on a worker's device, loaded."""
    refuse_layers(policy, spec.torch_device)
    settings = settings_of(policy, section, spec)
    engine = VllmEngine(
        policy,
        starter(engine_python(section, spec.root), spec),
        name=f"vLLM on {named(spec)}",
        settings=settings,
        deadlines=patience_of(spec),
        share=lambda: asked_share(spec.torch_device, weight_bytes(policy) // settings.devices + settings.cache_bytes),
    )
    try:
        refuse_other_results(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def refuse_layers(policy: Policy, device: torch.device) -> None:
    """Raises for layers that vLLM computes wrongly, and for an adapter where it does not multiply with it."""
    latent = any(".kv_b_proj." in name for name, _ in policy.network.named_parameters())
    if latent and device.type == "cpu":
        reason = "vLLM 0.32 computes the positions of latent attention wrongly on a CPU"
        raise RecipeError.of("engine.kind", reason, NATIVE)
    adapted = list(policy.trained()) if policy.adapted is not None else []
    if any(".experts." in name for name in adapted):
        reason = "adapters on experts with vllm are not available yet"
        raise RecipeError.of("model.adapter.targets", reason, f"use attention, or {NATIVE}")
    if any(".kv_b_proj." in name for name in adapted):
        reason = "vLLM decodes with another form of kv_b_proj, which leaves its adapter out"
        fix = f"name the other layers, such as [q_a_proj, q_b_proj, kv_a_proj_with_mqa, o_proj], or {NATIVE}"
        raise RecipeError.of("model.adapter.targets", reason, fix)


def patience_of(spec: WorkerSpec) -> EngineDeadlines:
    """How long vLLM may take."""
    given = spec.recipe.deadlines
    left = given.start if spec.start_by is None else max(1.0, spec.start_by - time.time())
    return EngineDeadlines(
        start=EARLIER * given.start,
        generate=EARLIER * given.generate,
        publish=EARLIER * given.publish,
        first=EARLIER * left,
    )


def logs_of(spec: WorkerSpec) -> Path:
    """The run's folder, if there is one here."""
    return spec.logs if spec.logs is not None and spec.logs.is_dir() else Path(tempfile.gettempdir())


def log_of(spec: WorkerSpec) -> Path:
    """Where what it says is kept: in that folder, or else in a file that is no other run's."""
    name, folder = f"engine-{spec.device.replace('/', '-').replace(':', '-')}", logs_of(spec)
    if folder == spec.logs:
        return folder / f"{name}.log"
    handle, path = tempfile.mkstemp(prefix=f"{name}-", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def settings_of(policy: Policy, section: VllmEngineSection, spec: WorkerSpec) -> VllmSettings:
    """What vLLM is started with; a RecipeError if its cache is too small, or larger than what is free beside its own
    weights."""
    device, answer, auto = spec.torch_device, section.max_new_tokens, section.memory_share == "auto"
    ranks = 1 if spec.lane is None else spec.lane.size
    sharing = ranks if device.type == "cpu" else 1  # the memory that is counted here
    share = CACHE_SHARE if section.memory_share == "auto" else section.memory_share
    every, free = memory_of(device) // sharing, free_memory(device) // sharing
    each, weights = token_bytes(policy, ranks), weight_bytes(policy) // ranks
    room = max(0, free - weights - (SLACK if device.type == "cuda" else 0))
    left = f"{free / GB:.1f} GB are free, of which vLLM's own weights take {weights / GB:.1f} GB"
    least = (-(-2 * answer // BLOCK) + 1) * BLOCK * each
    size = min(int(every * share), room // 2) if auto else int(every * share)
    if (room // 2 if auto else room) < least:
        reason = f"{left}; what remains is too little for a cache of {2 * answer} tokens"
        raise RecipeError.of("engine.memory_share", reason, "stop what else uses the device, or engine.kind: native")
    if size < least:
        reason = f"{share:g} of the memory holds {size // each} tokens, too few for a prompt and an answer of {answer}"
        raise RecipeError.of("engine.memory_share", reason, f"use at least {1.05 * least / every:.2g}")
    if size > room:
        reason = f"{share:g} of the memory is {size / GB:.1f} GB, and {left}"
        raise RecipeError.of("engine.memory_share", reason, f"use at most {int(100 * room / every) / 100:g}, or auto")
    return VllmSettings(
        versions=VLLM,
        dtype=str(policy.dtype).removeprefix("torch."),
        context=min(policy.context, (size // each // BLOCK - 1) * BLOCK),
        cache_bytes=size,
        rank=None if policy.adapted is None else policy.adapted.peft_config["default"].r,
        device=device.type,
        devices=ranks,
        arguments=section.arguments,
    )


def weight_bytes(policy: Policy) -> int:
    """What vLLM's own copy of the weights takes."""
    return sum(base_sizes(policy))


def asked_share(device: torch.device, needed: int) -> float | None:
    """The share of a GPU that vLLM is to ask for when it starts: what it needs, and never what others have.

    Without one it asks for nearly all, and does not start beside others, however small its cache.
    """
    if device.type != "cuda":
        return None
    return share_of(needed + SLACK, free=free_memory(device), total=memory_of(device))


def share_of(needed: int, *, free: int, total: int) -> float:
    """The same, in numbers. A GB is left, since what is free changes while vLLM starts."""
    return max(GB, min(needed, free - GB)) / total


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses, once this process has given back what it need not keep."""
    if device.type == "cuda":
        give_back_gpu()
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory.free()


def starter(python: Path, spec: WorkerSpec) -> Callable[[], EngineTransport]:
    """Starts the process on the worker's device, or on all of its cell, with its threads; what it says is kept beside
    the run."""
    threads = spec.threads or torch.get_num_threads()
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",  # all it needs is in files
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which answers when it is asked
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # others work on these cores too
        "VLLM_HOST_IP": "127.0.0.1",
        **({"GLOO_SOCKET_IFNAME": "lo"} if spec.lane and sys.platform == "linux" else {}),  # ranks of one host
    }
    if spec.torch_device.type == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(spec))
    return partial(
        EngineProcess,
        [str(python), "-u", str(PROGRAM)],
        name=f"vLLM on {named(spec)}",
        log=log_of(spec),
        environment=environment,
    )


def named(spec: WorkerSpec) -> str:
    """The devices, for messages."""
    return spec.device if spec.lane is None else " and ".join(spec.lane.devices)


def visible_gpus(spec: WorkerSpec) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs of a worker's cell; a RecipeError where nobody here knows that."""
    if spec.lane is None:
        visible, index = os.environ.get("CUDA_VISIBLE_DEVICES"), spec.torch_device.index
        return (visible.split(",")[index] if visible else str(index),)
    if not spec.lane.gpus:
        reason = f"{named(spec)} generate together with vLLM, and which GPUs these are only the Ray cluster knows"
        fix = "start the run without RAY_ADDRESS on their host, or give each generate cell one device"
        raise RecipeError.of("placement.cells", reason, fix)
    return spec.lane.gpus
