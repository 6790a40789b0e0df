"""What an engine with weights of its own is sent of a policy, and must then hold: names and tensors, and files.

Names are those of the model's own files, which an engine loads by: nothing of PEFT's wrappers is in them. An adapter is
sent with its scale multiplied into B, and says that its scale is 1: what was sent is then to the bit what the engine
multiplies with, whatever the scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from stretto.models.layers import router_names
from stretto.models.load import Policy
from stretto.models.merged import in_files, narrow_layers, narrow_tensors, wide, wide_shape
from stretto.weights.carrier import buckets
from stretto.weights.tensors import checksum

HEAD = "lm_head.weight"
"""What the head is called where its tensor is the embedding's, and so has no name of its own."""


def sent_name(name: str) -> str:
    """What a parameter of the policy is called where nobody knows of adapters around it."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def base_tensors(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Everything but an adapter, one parameter after the other; tensors with two names under the first. What is stored
    in few bits is made as wide as the trainer reads it, for as long as it is looked at."""
    network, mixture = policy.network, bool(router_names(policy.network))
    plain = ((sent_name(name), weight) for name, weight in _plain_tensors(policy).items())
    narrow = ((name, wide(layer, policy.dtype)) for name, layer in narrow_layers(network).items())
    for name, weight in chain(plain, narrow):
        yield from in_files(network, name, weight).items() if mixture else [(name, weight)]


def base_sizes(policy: Policy) -> list[int]:
    """Bytes of each parameter of the same."""
    narrow = [math.prod(wide_shape(layer)) * policy.dtype.itemsize for layer in narrow_layers(policy.network).values()]
    return [weight.nbytes for weight in _plain_tensors(policy).values()] + narrow


def _plain_tensors(policy: Policy) -> dict[str, Tensor]:
    """What files hold of a model but an adapter and what is in few bits."""
    network = policy.network
    others = dict(network.named_parameters(remove_duplicate=False)).keys() - dict(network.named_parameters()).keys()
    others |= narrow_tensors(network)
    found = {name: tensor for name, tensor in network.state_dict().items() if name not in others}
    return {name: tensor for name, tensor in found.items() if policy.adapted is None or "lora_" not in name}


def file_bytes(policy: Policy, bucket: int) -> int:
    """What is in files at once, at most: all weights while a process starts, and what travels."""
    sizes = base_sizes(policy)
    return sum(sizes) + max(min(bucket, sum(sizes)), *sizes)


def head_tensor(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The head under its own name, where it is the embedding: an engine may multiply with a copy of it."""
    head = policy.head().weight
    if not any(weight is head for name, weight in policy.network.named_parameters() if name.endswith(HEAD)):
        yield HEAD, head.detach()


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


def adapted_names(policy: Policy) -> list[str]:
    """What the adapted layers are called: the last parts of their names."""
    trained = policy.trained() if policy.adapted is not None else ()
    layers = {sent_name(name).partition(".lora_")[0] for name in trained}
    return sorted({layer.rpartition(".")[2] for layer in layers})


def differing(sent: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]]) -> dict[str, str]:
    """Name -> what an engine's ranks hold, and what they were sent, where that is not the same."""
    wrong = {}
    for name, tensor in sent.items():
        held = [tensors.get(name) for tensors in ranks]
        if not equal(held, tensor):
            told = " and ".join("nothing" if each is None else checksum(each.contiguous()) for each in held)
            wrong[name] = f"{told} where {checksum(tensor)} was published"
    return wrong


def equal(held: Sequence[Tensor | None], tensor: Tensor) -> bool:
    """Whether what an engine's ranks hold is the policy's tensor: each of them all of it, or its part along one side.
    Where there are fewer parts than ranks, neighbors have the same: heads of keys and values."""
    parts = _parts(held, tensor)
    return parts is not None and all(_same(mine, part) for mine, part in zip(held, parts, strict=True))


def _parts(held: Sequence[Tensor | None], tensor: Tensor) -> Sequence[Tensor] | None:
    """What each rank should have by the sizes that they have; none if no tensor is cut so."""
    shapes = [mine.shape for mine in held if mine is not None and mine.dim() == tensor.dim()]
    if len(shapes) < len(held):
        return None
    cut = next((side for side, size in enumerate(tensor.shape) if min(shape[side] for shape in shapes) < size), None)
    if cut is None:
        return [tensor] * len(held)
    sizes = [shape[cut] for shape in shapes]
    copies = sum(sizes) // tensor.shape[cut]
    if copies == 0 or len(held) % copies or sum(sizes[::copies]) != tensor.shape[cut]:
        return None
    return [part for part in tensor.split(sizes[::copies], cut) for _ in range(copies)]


def _same(held: Tensor | None, tensor: Tensor) -> bool:
    """Whether one rank's tensor is the policy's; what is left over in it, of a larger slot, must be zero.

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
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": config.r, "lora_alpha": config.r, "bias": "none"}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {**settings, "target_modules": adapted_names(policy)}
    (folder / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")


def write_base(policy: Policy, folder: Path, bucket: int) -> None:
    """The files of the model without an adapter, of so many bytes each, as transformers has them; no tokenizer, which
    an engine needs not."""
    folder.mkdir()
    settings: Mapping[str, Any] = policy.network.config.to_dict()
    told = {**settings, "architectures": [type(policy.network).__name__], "torch_dtype": _name(policy.dtype)}
    (folder / "config.json").write_text(json.dumps({**told, "dtype": _name(policy.dtype)}), encoding="utf-8")
    places = dict[str, str]()
    for number, tensors in enumerate(buckets(base_tensors(policy), bucket)):
        places |= dict.fromkeys(tensors, file := f"model-{number:05}.safetensors")
        whole = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(base_sizes(policy))}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
