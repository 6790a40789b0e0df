"""What an engine with weights of its own is sent of a policy, and must then hold: names and tensors, and files.

Names are those of the model's own files, which an engine loads by: nothing of PEFT's wrappers is in them. An adapter is
sent with its scale multiplied into B, and says that its scale is 1: what was sent is then to the bit what the engine
multiplies with, whatever the scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stretto.models.load import Policy

HEAD = "lm_head.weight"
"""What the head is called where its tensor is the embedding's, and so has no name of its own."""


def sent_name(name: str) -> str:
    """What a parameter of the policy is called where nobody knows of adapters around it."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def base_tensors(policy: Policy) -> dict[str, Tensor]:
    """Everything but an adapter; tensors with two names under the first."""
    return {
        sent_name(name): weight.detach()
        for name, weight in policy.network.named_parameters()
        if policy.adapted is None or "lora_" not in name
    }


def file_bytes(tensors: Mapping[str, Tensor], bucket: int) -> int:
    """What is in files at once, at most: all weights while a process starts, and what travels."""
    sizes = [tensor.nbytes for tensor in tensors.values()]
    return sum(sizes) + max(min(bucket, sum(sizes)), *sizes)


def head_tensor(policy: Policy) -> dict[str, Tensor]:
    """The head under its own name: an engine may multiply with a copy of it, also where it is the embedding."""
    return {HEAD: policy.head().weight.detach()}


def adapter_tensors(policy: Policy) -> dict[str, Tensor]:
    """The adapter, scaled; nothing for full fine-tuning."""
    if policy.adapted is None:
        return {}
    scale = adapter_scale(policy)
    found = {sent_name(name): weight.detach() for name, weight in policy.trained().items()}
    return {name: weight * scale if ".lora_B." in name else weight for name, weight in found.items()}


def adapter_scale(policy: Policy) -> float:
    """What the product of A and B is multiplied with."""
    config = policy.adapted.peft_config["default"]
    return float(config.lora_alpha / config.r)


def equal(held: Tensor | None, tensor: Tensor) -> bool:
    """Whether an engine's tensor is the policy's; what is left over in it, of a larger slot, must be zero.

    Numbers too small to be normal count as zero, as some processors' products take them for that.
    """
    if held is None or held.dtype != tensor.dtype or held.dim() != tensor.dim():
        return False
    if any(mine < theirs for mine, theirs in zip(held.shape, tensor.shape, strict=True)):
        return False
    inside = held[tuple(slice(size) for size in tensor.shape)]
    if held.numel() != inside.numel() and held.count_nonzero() != inside.count_nonzero():
        return False
    tensor = tensor.to(held.device)
    if torch.equal(inside, tensor):
        return True
    tiny = torch.finfo(tensor.dtype).tiny
    return torch.equal(*(each.masked_fill(each.abs() < tiny, 0) for each in (inside, tensor)))


def write_adapter(policy: Policy, folder: Path) -> None:
    """PEFT's files of the adapter as it is sent."""
    config = policy.adapted.peft_config["default"]
    tensors = {
        f"base_model.model.{name}": weight.cpu().contiguous() for name, weight in adapter_tensors(policy).items()
    }
    targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": config.r, "lora_alpha": config.r, "bias": "none"}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": targets}), encoding="utf-8")


def write_base(policy: Policy, folder: Path) -> None:
    """The files of the model without an adapter, as transformers has them; no tokenizer, which an engine needs not."""
    folder.mkdir()
    settings: Mapping[str, Any] = policy.network.config.to_dict()
    told = {**settings, "architectures": [type(policy.network).__name__], "torch_dtype": _name(policy.dtype)}
    (folder / "config.json").write_text(json.dumps({**told, "dtype": _name(policy.dtype)}), encoding="utf-8")
    tensors = {name: weight.cpu().contiguous() for name, weight in base_tensors(policy).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
