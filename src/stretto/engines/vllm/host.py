"""The engine's own process: the one file that imports vLLM, run by the Python that has it (`process` starts it).

It answers one question after the other, and knows of the project only the tensor files beside it. A matrix that a
layer multiplies with is read back as the product with the identity, and so in whatever order the layer keeps it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tensor_file  # type: ignore[import-not-found]  # beside this file
import torch
from engine_args import (  # type: ignore[import-not-found]  # beside this file
    NATIVE,
    Refused,
    engine_args,
    refusal,
    words_of,
)

QUESTIONS = (
    "start", "submit", "step", "abort", "version", "adapter", "begin", "load", "finish", "read", "sleep", "wake",
)  # fmt: skip
"""What may be asked."""

NOTICES = 2.0
"""Seconds after a failure until which the death of a rank is known: others say at once that they miss it."""


@dataclass(kw_only=True)
class RunningRequest:
    """A request that is being decoded."""

    key: int
    """What the asker calls it."""
    version: str
    """The weights that it is sampled with."""
    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each."""
    stop: str = "abort"
    """Why it ended."""
    watched: bool = False
    """Whether its tokens are told as they come, because a text may end it."""


class EngineHost:
    """Answers questions: each method is one."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.lora: Any = None
        self.name, self.count, self.several = "", 0, False
        self.answers: dict[str, RunningRequest] = {}

    def start(self, *, model: str, versions: Sequence[str], **settings: Any) -> dict[str, Any]:
        """Loads vLLM and the model."""
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if not vllm.__version__.startswith(tuple(f"{version}." for version in versions)):
            reason = f"{sys.executable} has vLLM {vllm.__version__}, and {' or '.join(versions)} is supported"
            raise Refused("engine.python", reason, "name a Python that has it; make engine builds one")
        try:
            arguments = EngineArgs(model=model, **engine_args(**settings))
            self.engine = LLMEngine.from_engine_args(arguments)
        except (ValueError, TypeError, NotImplementedError, torch.OutOfMemoryError) as error:
            traceback.print_exc()
            raise refusal(error, settings["arguments"], short=isinstance(error, torch.OutOfMemoryError)) from error
        self.several = settings["devices"] > 1
        cache = self.engine.vllm_config.cache_config
        return {"cache_tokens": cache.num_gpu_blocks * cache.block_size, "vllm": vllm.__version__}

    def submit(self, *, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Takes requests in."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        for asked in requests:
            self.count += 1
            name = f"{self.name}/{self.count}"
            params = SamplingParams(
                temperature=asked["temperature"],
                max_tokens=asked["max_new_tokens"],
                seed=asked["seed"],
                stop_token_ids=asked["stop"],
                ignore_eos=True,  # those that end an answer are told
                logprobs=0,  # of the sampled token alone
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = TokensPrompt(prompt_token_ids=asked["tokens"], cache_salt=self.name)
            self.engine.add_request(name, prompt, params, lora_request=self.lora)
            self.answers[name] = RunningRequest(key=asked["key"], version=self.name, watched=asked["watched"])
        return {}

    def step(self, *, seconds: float) -> dict[str, Any]:
        """Decodes until something ends, an answer that is watched grows, or the time is over."""
        end = time.monotonic() + seconds
        done, grown = list[dict[str, Any]](), list[dict[str, Any]]()
        while self.answers and not done and not grown:
            for output in self.engine.step():
                answer = self.answers.get(output.request_id)
                if answer is None:
                    continue
                (said,) = output.outputs
                more = list(said.token_ids)
                logprobs = [chances[token].logprob for token, chances in zip(more, said.logprobs or (), strict=True)]
                answer.tokens += more
                answer.logprobs += logprobs
                if output.finished:
                    answer.stop = "stop" if said.finish_reason == "stop" else "length"
                    done.append(vars(self.answers.pop(output.request_id)))
                elif answer.watched and more:
                    told = {"key": answer.key, "version": answer.version}
                    grown.append({**told, "tokens": more, "logprobs": logprobs})
            if time.monotonic() >= end:
                break
        return {"done": done, "grown": grown}

    def abort(self, *, keys: Sequence[int]) -> dict[str, Any]:
        """Takes requests out, with what they have so far."""
        gone = [name for name, answer in self.answers.items() if answer.key in keys]
        self.engine.abort_request(gone)
        return {"done": [vars(self.answers.pop(name)) for name in gone]}

    def version(self) -> dict[str, Any]:
        """What the weights are called that the next request is sampled with."""
        return {"version": self.name}

    def adapter(self, *, name: str, number: int, folder: str) -> dict[str, Any]:
        """Loads an adapter under a name and a number that no other had; the one before is forgotten."""
        from vllm.lora.request import LoRARequest

        before, self.lora = self.lora, None
        if before is not None:
            self.engine.remove_lora(before.lora_int_id)
        found = LoRARequest(lora_name=name, lora_int_id=number, lora_path=folder)
        try:
            loaded = self.engine.add_lora(found)
        except ValueError as error:  # such as a layer for which vLLM has no adapter
            reason = f"vLLM cannot load this adapter: {words_of(error)}"
            raise Refused("model.adapter.targets", reason, NATIVE) from error
        if not loaded:
            raise RuntimeError(f"vLLM did not load the adapter {name}")
        self.lora, self.name = found, name
        self._told("pin_adapter", number)
        self.engine.reset_prefix_cache()  # names see to it too; this frees the memory
        return {}

    def begin(self, *, name: str) -> dict[str, Any]:
        """New weights come; until they have, there are none."""
        self.name = ""
        self._told("begin_weights")
        self.coming = name
        return {}

    def load(self, *, path: str, table: Sequence[Any]) -> dict[str, Any]:
        """A bucket of them."""
        self._told("load_bucket", path, table)
        return {}

    def finish(self) -> dict[str, Any]:
        """All have come."""
        self._told("finish_weights")
        self.engine.reset_prefix_cache()  # names see to it too; this frees the memory
        self.name = self.coming
        return {}

    def read(self, *, path: str, names: Sequence[str]) -> dict[str, Any]:
        """Writes into files, one for each rank, what is multiplied with under these names."""
        return {"tables": self._told("write_tensors", path, names)}

    def sleep(self) -> dict[str, Any]:
        """Gives memory back; the weights go to the host, because LoRA does not survive their loss."""
        if self.engine.vllm_config.model_config.enable_sleep_mode:
            self.engine.sleep(level=1)
        return {}

    def wake(self) -> dict[str, Any]:
        """Takes it again."""
        if self.engine.vllm_config.model_config.enable_sleep_mode:
            self.engine.wake_up()
        return {}

    def has_lost_a_rank(self) -> bool:
        """Whether a failure is that of a process of one of several ranks, which has died."""
        end = time.monotonic() + NOTICES
        while self.several and not self.engine.model_executor.is_failed and time.monotonic() < end:
            time.sleep(0.05)
        return self.several and bool(self.engine.model_executor.is_failed)

    def _told(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank says."""
        told: list[Any] = self.engine.collective_rpc(f"stretto_{method}", args=arguments)
        return told


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
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with self._loading():
            initialize_layerwise_reload(self.model_runner.model)

    def stretto_load_bucket(self, path: str, table: Sequence[Any]) -> None:
        """Layers whose weights are complete take them over, as they did when the model was loaded."""
        weights = ((name, tensor.clone()) for name, tensor in tensor_file.read_bucket(Path(path), table))
        with self._loading():
            self.model_runner.model.load_weights(weights)

    def stretto_finish_weights(self) -> None:
        """All of them have."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

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
        from vllm.config import set_current_vllm_config

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
        for path, module in modules.items():
            if path.endswith(".base_layer"):
                continue
            parent, _, last = path.rpartition(".")
            parts = [f"{parent}.{part}" if parent else part for part in packed.get(last, [last])]
            if any(name.startswith(f"{part}.") for part in parts for name in wanted):
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
        elif hasattr(layer, "input_size_per_partition"):
            whole["weight"] = product(layer, layer.input_size_per_partition)
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
    like = next(layer.parameters())
    one = torch.eye(inputs, dtype=layer.params_dtype if hasattr(layer, "params_dtype") else like.dtype)
    made: torch.Tensor = layer.quant_method.apply(layer, one.to(like.device), None)
    return made.t().contiguous()


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answers until nobody asks any more."""
    connection, parent, host = Connection(int(sys.argv[1])), int(sys.argv[2]), EngineHost()
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    while True:
        try:
            asked = json.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = getattr(host, QUESTIONS[QUESTIONS.index(asked.pop("call"))])(**asked)
        except Refused as refused:
            answer = {"refused": list(refused.args)}
        except Exception as error:
            traceback.print_exc()
            if host.has_lost_a_rank():  # whoever asks starts another process with all of them
                os._exit(1)
            answer = {"failed": f"{type(error).__name__}: {error}"}
        connection.send_bytes(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
