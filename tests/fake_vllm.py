"""vLLM's process, without vLLM: it keeps what it is sent, and says it back. A test may spoil any question on its way.

It stands where `EngineProcess` does, so the engine around it is the real one.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from stretto.engines.vllm.tensor_file import rank_file, read_bucket, write_bucket

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class FakeHost:
    """Answers as the host does: each request with one more token 9 a step, until it has as many as it may."""

    def __init__(self, spoil=None):
        """`spoil(what, arguments, host)` may change the arguments or the host, answer instead, or raise."""
        self.spoil = spoil or (lambda what, arguments, host: None)
        self.tensors, self.numbers, self.name = {}, set(), ""
        self.asked, self.called, self.closed = {}, [], False

    def call(self, what, seconds, /, **arguments):
        assert seconds > 0 and not self.closed
        self.called.append(what)
        told = self.spoil(what, arguments, self)
        return getattr(self, what)(**arguments) if told is None else told

    def close(self):
        self.closed = True

    def start(self, *, model, **settings):
        self.settings = settings
        self.tensors = {
            name: each for file in Path(model).glob("*.safetensors") for name, each in load_file(file).items()
        }
        return {"cache_tokens": 512}

    def adapter(self, *, name, number, folder):
        self.name = name
        if number not in self.numbers:  # vLLM keeps what it has under a number
            self.numbers.add(number)
            loaded = load_file(Path(folder) / "adapter_model.safetensors")
            self.tensors |= {key.removeprefix("base_model.model."): tensor for key, tensor in loaded.items()}
        return {}

    def begin(self, *, name):
        self.name, self.coming = "", name
        return {}

    def load(self, *, path, table):
        self.tensors |= {name: tensor.clone() for name, tensor in read_bucket(Path(path), table)}
        return {}

    def finish(self):
        self.name = self.coming
        return {}

    def read(self, *, path, names):
        held = {HEAD: self.tensors[EMBEDDING], **self.tensors}
        found = {name: held[name] for name in names if name in held}
        return {"tables": [write_bucket(rank_file(Path(path), 0), found) if found else []]}

    def version(self):
        return {"version": self.name}

    def submit(self, *, requests):
        self.asked |= {row["key"]: {**row, "said": [], "version": self.name} for row in requests}
        return {}

    def step(self, *, seconds):
        for row in self.asked.values():
            row["said"].append(9)
        ended = [key for key, row in self.asked.items() if len(row["said"]) == row["max_new_tokens"]]
        more = {"tokens": [9], "logprobs": [-1.0]}
        watched = [row for key, row in self.asked.items() if row["watched"] and key not in ended]
        return {
            "done": [self._answer(key, "length") for key in ended],
            "grown": [{"key": row["key"], "version": row["version"], **more} for row in watched],
        }

    def abort(self, *, keys):
        return {"done": [self._answer(key, "abort") for key in keys if key in self.asked]}

    def sleep(self):
        return {}

    def wake(self):
        return {}

    def _answer(self, key, stop):
        row = self.asked.pop(key)
        said = row["said"]
        told = {"key": key, "tokens": said, "logprobs": [-1.0] * len(said)}
        return {**told, "stop": stop, "version": row["version"]}
