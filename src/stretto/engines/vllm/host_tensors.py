"""What each rank of vLLM does with its own tensors: takes in what comes, and tells what it multiplies with.

A matrix is read back as the product with the identity, and so in whatever order its layer keeps it. Between the two
matrices of an expert is an activation, so their numbers are followed to where they have gone, instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rank_failures  # type: ignore[import-not-found]  # beside this file
import tensor_file  # type: ignore[import-not-found]  # beside this file
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import convert_to_unquantized_kernel_format as order
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

rank_failures.write_failures()

if current_platform.is_cpu():
    # Where there is an adapter vLLM takes a kernel for experts that has room for one, which is not for CPUs. Adapters
    # of ours are never on experts.
    FusedMoEConfig.is_lora_enabled = property(lambda config: False, lambda config, told: None)

BASE = 128
"""What digits of places are counted to: a whole number in every type that models compute in."""

DIGITS = 5
"""Enough of them for any matrix."""

ROWS = 1024
"""Rows of the identity that are multiplied with at once: all of a head's would take as much memory as the head."""


class TensorRpc:
    """What each rank does with its own tensors; mixed into vLLM's worker."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    rank: int

    def stretto_pin_adapter(self, number: int) -> None:
        """Which adapter is read back."""
        self.stretto_adapter = number

    def stretto_begin_weights(self) -> None:
        """Layers wait for their weights."""
        with self._loading():
            initialize_layerwise_reload(self.model_runner.model)
        for layer in self.model_runner.model.modules():
            if hasattr(layer, "w13_weight") and self.device.type == "cpu":
                # vLLM 0.32 orders experts for its kernel when there is none yet, and would multiply with new ones as
                # they came.
                layer.quant_method.moe_kernel = None

    def stretto_load_bucket(self, path: str, table: Sequence[Any]) -> None:
        """Layers whose weights are complete take them over, as they did when the model was loaded."""
        weights = ((name, tensor.clone()) for name, tensor in tensor_file.read_bucket(Path(path), table))
        with self._loading():
            self.model_runner.model.load_weights(weights)

    def stretto_finish_weights(self) -> None:
        """All of them have."""
        with self._loading():
            model = self.model_runner.model
            finalize_layerwise_reload(model, self.model_config)
            if getattr(self.model_config.hf_text_config, "tie_word_embeddings", False) and hasattr(model, "lm_head"):
                # vLLM reloads the embedding alone: on a CPU the head would multiply with its copy of the old one.
                (table,) = (each for path, each in model.named_modules() if path.endswith("embed_tokens"))
                model.lm_head.tie_weights(table)
                model.lm_head.quant_method.process_weights_after_loading(model.lm_head)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What vLLM has set while it loads a model."""
        with set_current_vllm_config(self.vllm_config), torch.device(self.device):
            yield

    @torch.no_grad()
    def stretto_write_tensors(self, path: str, names: Sequence[str]) -> list[Any]:
        """A file with those of these names that are here, or this rank's part of them, and its table."""
        wanted = set(names)
        found = {name: tensor.to("cpu") for name, tensor in self._held(wanted) if name in wanted}
        return list(tensor_file.write_bucket(tensor_file.rank_file(Path(path), self.rank), found)) if found else []

    def _held(self, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors under the names of the model's own files, at least those that are wanted."""
        model = self.model_runner.model
        packed = getattr(model, "packed_modules_mapping", {})
        modules = dict(model.named_modules(remove_duplicate=False))
        layers = {name[:end] for name in wanted for end, sign in enumerate(name) if sign == "."}
        for path, module in modules.items():
            if path.endswith(".base_layer"):
                continue
            parent, _, last = path.rpartition(".")
            parts = [f"{parent}.{part}" if parent else part for part in packed.get(last, [last])]
            if hasattr(module, "w13_weight") and parent in layers:
                yield from of_experts(parent.removesuffix("experts"), module, wanted)
            if hasattr(module, "W_UV") and f"{(outer := parent.rpartition('.')[0])}.kv_b_proj" in layers:
                yield f"{outer}.kv_b_proj.weight", of_latents(module)
            elif not layers.isdisjoint(parts):
                base = getattr(module, "base_layer", module)
                yield from self._of_layer(parts, base)
                if base is not module:
                    yield from self._of_adapter(parts, module)
        if "lm_head.weight" in wanted and not any(path.endswith("lm_head") for path in modules):
            table = next(each for path, each in modules.items() if path.endswith("embed_tokens"))  # multiplied with
            yield from self._of_layer(["lm_head"], getattr(table, "base_layer", table))

    def _of_layer(self, parts: Sequence[str], layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What one layer has: matrices by their product, whatever else as it lies there."""
        whole = dict(layer.named_parameters(recurse=False))
        if hasattr(layer, "embedding_dim"):  # rows are looked up; the head multiplies with them
            cut = getattr(layer, "shard_indices", None)  # positions are no vocabulary, and are whole everywhere
            rows = len(layer.weight) if cut is None else cut.num_org_elements
            whole["weight"] = (product(layer, layer.embedding_dim) if parts == ["lm_head"] else layer.weight)[:rows]
        elif inputs := getattr(layer, "input_size_per_partition", getattr(layer, "input_size", None)):
            whole["weight"] = product(layer, inputs)
        for name, tensor in whole.items():
            sizes = getattr(layer, "output_partition_sizes", None) if len(parts) > 1 else None
            for part, piece in zip(parts, tensor.split(sizes) if sizes else [tensor], strict=True):
                yield f"{part}.{name}", piece

    def _of_adapter(self, parts: Sequence[str], layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The slot of the adapter that was published last, with what is left over in it."""
        manager = self.model_runner.lora_manager._adapter_manager
        number = getattr(self, "stretto_adapter", None)
        if number not in manager.lora_index_to_id or not hasattr(layer, "lora_a_stacked"):
            return
        slot = manager.lora_index_to_id.index(number)
        for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=False):
            yield f"{part}.lora_A.weight", a[slot, 0]
            yield f"{part}.lora_B.weight", b[slot, 0]


def product(layer: Any, inputs: int) -> torch.Tensor:
    """The matrix that a layer multiplies with, by what it makes of the identity: each number times one, plus zeros."""
    like, made = next(layer.parameters()), torch.empty(0)
    dtype = layer.params_dtype if hasattr(layer, "params_dtype") else like.dtype
    for start in range(0, inputs, ROWS):
        one = torch.zeros(min(ROWS, inputs - start), inputs, dtype=dtype, device=like.device)
        one.diagonal(start).fill_(1)
        part = layer.quant_method.apply(layer, one, None)
        made = made if start else part.new_empty(part.shape[1], inputs)
        made[:, start : start + len(one)] = part.t()
    return made


def of_latents(layer: Any) -> torch.Tensor:
    """The matrix that makes keys and values of latents. Prompts are multiplied with it, and decoded tokens with a part
    for either; nothing where these are not its parts."""
    whole = layer.kv_b_proj.weight
    parts = torch.cat([layer.W_UK_T, layer.W_UV.transpose(1, 2)], dim=1).reshape(whole.shape)
    return whole if torch.equal(parts, whole) else whole.new_zeros(0)


def of_experts(parent: str, layer: Any, wanted: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Matrices of experts under the names of files; nothing of those whose numbers cannot be followed."""
    orders = orders_of(layer)
    for kind, name, expert, part in layer.get_expert_mapping():
        matrices = "w2_weight" if kind.endswith("w2_") else "w13_weight"
        if f"{parent}{name}weight" in wanted and matrices in orders:
            matrix = getattr(layer, matrices)[expert].flatten()[orders[matrices]]
            half = len(matrix) // 2
            yield f"{parent}{name}weight", matrix[{"w1": slice(half), "w3": slice(half, None), "w2": slice(None)}[part]]


def orders_of(layer: Any) -> dict[str, torch.Tensor]:
    """Where each number of an expert's matrices has gone: (outputs, inputs), by the name of the parameter.

    Kernels order them anew and fill them up with zeros. A layer whose numbers say where they are, in as many digits as
    it takes, is ordered in the same way; each of its experts stands for a digit.
    """
    shapes = {name: like.shape[1:] for name, like in get_layerwise_info(layer).restore_metadata[0].items()}
    method, told = layer.quant_method, copy.copy(layer)
    if method.moe_kernel is None:  # none of its weights came under a name that vLLM knows
        return {}
    told._parameters = {name: digits(shape, like=getattr(layer, name)) for name, shape in shapes.items()}
    ordered = order(method.unquantized_backend, layer.moe_config, told.w13_weight, told.w2_weight, layer=told)
    told._parameters = dict(zip(("w13_weight", "w2_weight"), map(parameter, ordered), strict=True))
    method.moe_kernel.fused_experts.process_weights_after_loading(told)
    found = {}
    for name, each in told._parameters.items():
        places = read_digits(each)
        back = torch.full((shapes[name].numel(),), -1, device=places.device)
        back[places[places >= 0]] = (places >= 0).nonzero().flatten()
        if back.min() >= 0 and not getattr(layer, name).flatten(1)[:, places < 0].count_nonzero():
            found[name] = back.view(shapes[name])
    return found


def digits(shape: torch.Size, *, like: torch.Tensor) -> torch.nn.Parameter:
    """(DIGITS, *shape): each number's place, counted from 1."""
    places = 1 + torch.arange(shape.numel(), device=like.device)
    told = torch.stack([places // BASE**power % BASE for power in range(DIGITS)])
    return parameter(told.unflatten(1, shape).to(like.dtype))


def read_digits(told: torch.Tensor) -> torch.Tensor:
    """The places, wherever they have gone, counted from 0; -1 for what was filled up."""
    powers = BASE ** torch.arange(DIGITS, device=told.device)
    return (told.flatten(1).long() * powers[:, None]).sum(0) - 1


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """One that is not trained."""
    return torch.nn.Parameter(tensor, requires_grad=False)
