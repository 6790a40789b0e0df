"""The engine's own process, run by the Python that has vLLM (`process` starts it). It and `host_tensors`, which is in
each rank, are the files that import vLLM.

It answers one question after the other, and knows of the project only the files beside it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from engine_args import (  # type: ignore[import-not-found]  # beside this file
    NATIVE,
    Refused,
    engine_args,
    refusal,
    words_of,
)
from rank_failures import FOLDER, REFUSALS, read_failure  # type: ignore[import-not-found]

QUESTIONS = (
    "start", "submit", "step", "abort", "version", "adapter", "begin", "load", "finish", "read", "sleep", "wake",
)  # fmt: skip
"""What may be asked."""

NOTICES = 2.0
"""Seconds after a failure until which the death of a rank is known: others say at once that they miss it."""


ROOM = (103 if sys.platform == "darwin" else 107) - len(f"/{uuid.uuid4()}")
"""Characters of a folder for sockets: the system's longest name of one, without what vLLM calls it."""


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
        self.name, self.count, self.several, self.folder = "", 0, False, Path()
        self.answers: dict[str, RunningRequest] = {}

    def start(self, *, model: str, versions: Sequence[str], folder: str, **settings: Any) -> dict[str, Any]:
        """Loads vLLM and the model. What passes between ranks is in `folder`, such as sockets, which vLLM leaves
        behind."""
        self.folder, self.several = Path(folder), settings["devices"] > 1
        os.environ[FOLDER] = folder
        read_failure(self.folder)  # of a process that was here before
        if len(os.fsencode(folder)) <= ROOM:
            os.environ["VLLM_RPC_BASE_PATH"] = folder
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if not vllm.__version__.startswith(tuple(f"{version}." for version in versions)):
            reason = f"{sys.executable} has vLLM {vllm.__version__}, and {' or '.join(versions)} is supported"
            raise Refused("engine.python", reason, "name a Python that has it; make engine builds one")
        try:
            arguments = EngineArgs(model=model, **engine_args(**settings))
            self.engine = LLMEngine.from_engine_args(arguments)
        except Exception as error:
            why = self._cause(error)
            if not isinstance(why, REFUSALS):
                raise
            traceback.print_exc()
            raise refusal(why, settings["arguments"], short=isinstance(why, torch.OutOfMemoryError)) from error
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
                    if said.finish_reason not in ("stop", "length"):  # such as an error of a part of vLLM
                        raise RuntimeError(f"vLLM has ended an answer ({said.finish_reason})")
                    answer.stop = said.finish_reason
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
        except Exception as error:
            why = self._cause(error)
            if not isinstance(why, ValueError):  # such as a layer for which vLLM has no adapter
                raise
            reason = f"vLLM cannot load this adapter: {words_of(why)}"
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
        """Whether a failure is that of a process of one of several ranks, which has died since all were there."""
        if not self.several or self.engine is None:
            return False
        end = time.monotonic() + NOTICES
        while not self.engine.model_executor.is_failed and time.monotonic() < end:
            time.sleep(0.05)
        return bool(self.engine.model_executor.is_failed)

    def _cause(self, error: Exception) -> Exception:
        """What a failure comes from: what a rank has refused, if there are several."""
        return (read_failure(self.folder) if self.several else None) or error

    def _told(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank says."""
        told: list[Any] = self.engine.collective_rpc(f"stretto_{method}", args=arguments)
        return told


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answers until nobody asks any more."""
    handle, parent, host = int(sys.argv[1]), int(sys.argv[2]), EngineHost()
    connection = Connection(handle)
    os.set_inheritable(handle, False)  # a rank that had it too would hide this process's death
    os.register_at_fork(after_in_child=connection.close)
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
