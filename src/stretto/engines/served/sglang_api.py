"""How an SGLang server is asked.

Three things are otherwise than with vLLM. What has come of an answer is told again with each piece, unless the server
was started to tell only what is new. With `ignore_eos` it also ignores the tokens that are told to end an answer. And a
request's seed counts only where it was started with --enable-deterministic-inference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stretto.engines.served.http_calls import HttpCalls, HttpReply
from stretto.engines.served.server_api import (
    EVERY,
    EVERY_WATCHED,
    FIELD,
    MODELS,
    Piece,
    ProbeReply,
    ServerFacts,
    asked_at_start,
    base_model,
    not_seen,
    refuse_version,
    refuse_without_key,
)
from stretto.errors import EngineError, RecipeError

KEY = "SGLANG_API_KEY"
"""The variable that has the key of a server which asks for one."""

VERSIONS = ("0.5",)
"""Of SGLang; 0.5.23 is what was tried."""

INFO = "/server_info"
"""Where it says how it was started."""

PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
PLAIN |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
"""The model's own distribution, whatever a server was told to prefer (--preferred-sampling-params)."""


class SglangApi:
    """An SGLang server; as `ServerApi`."""

    kind = "SGLang"
    start = (
        "python -m sglang.launch_server --model-path MODEL --enable-lora --max-lora-rank 16 --lora-target-modules all"
    )
    otherwise = "or use engine.kind: native"
    context_option = "--context-length"
    at_temperature = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
    generate, load, unload = "/generate", "/load_lora_adapter", "/unload_lora_adapter"

    def __init__(self, url: str) -> None:
        self.http, self.context = HttpCalls(url, key=KEY), 0

    def facts(self) -> ServerFacts:
        """What it serves, and whether it takes adapters while it runs."""
        info, models = asked_at_start(self, {INFO: None, MODELS: None})
        refuse_without_key(self, info, KEY)
        refuse_without_key(self, models, KEY)
        url, told = self.http.url, info.fields
        if info.status != 200 or "version" not in told:
            reason = f"{url} is no server of SGLang: it does not say which version it is"
            raise RecipeError.of(
                FIELD, reason, f"name one, or say engine.kind: vllm for a server of vLLM; {self.otherwise}"
            )
        refuse_version(self, number := str(told["version"]), VERSIONS)
        if not told.get("enable_lora"):
            raise RecipeError.of(
                FIELD, f"{url} was started without adapters", f"start it with --enable-lora: {self.start}"
            )
        if (copies := told.get("dp_size") or 1) > 1:
            reason = f"{url} has {copies} copies of the model (--dp-size), and loads no adapters then"
            raise RecipeError.of(FIELD, reason, "start it with one, and with --tp-size if it is to use several devices")
        found = base_model(self, models, number)
        self.context = found.context
        return found

    def question(self, asked: Mapping[str, Any], *, adapter: str) -> dict[str, Any]:
        """Token ids in and out."""
        params = {
            **PLAIN,
            "temperature": asked["temperature"],
            # It refuses a request that might not fit; one that does not is told as with vLLM, when it has ended early.
            "max_new_tokens": min(asked["max_new_tokens"], self.context - len(asked["tokens"])),
            "sampling_seed": asked["seed"],
            "stop_token_ids": asked["stop"],
            "ignore_eos": not asked["stop"],
            "stream_interval": EVERY_WATCHED if asked["watched"] else EVERY,
        }
        return {**_of(asked["tokens"], adapter), "sampling_params": params, "stream": True}

    def pieces(self, told: Mapping[str, Any], question: Mapping[str, Any], have: int) -> Iterator[Piece]:
        """The end of what has come, whether all of it is told or only what is new."""
        meta = told["meta_info"]
        new = meta["completion_tokens"] - have
        ended = (meta["finish_reason"] or {}).get("type")
        matched = (meta["finish_reason"] or {}).get("matched")
        if ended == "stop" and matched not in question["sampling_params"]["stop_token_ids"]:
            why = f"{self.http.url} has ended an answer at token {matched}, which ends none for the trainer's model"
            raise EngineError(f"{why}\n    fix: start it with the files of model.name as they are")
        if new:
            yield Piece(told["output_ids"][-new:], [said[0] for said in meta["output_token_logprobs"][-new:]], ended)
        else:
            yield Piece((), (), ended)

    def probe(
        self, tokens: Sequence[int], *, model: str, adapter: str, more: int, temperature: float
    ) -> dict[str, Any]:
        """Log-probabilities of the prompt, too."""
        params = {**PLAIN, "temperature": temperature, "max_new_tokens": more, "ignore_eos": True}
        return {**_of(tokens, adapter), "sampling_params": params, "logprob_start_len": 0}

    def scored(self, told: Mapping[str, Any], tokens: Sequence[int]) -> ProbeReply:
        """Each token's own."""
        meta = told["meta_info"]
        own = [said[0] for said in meta["input_token_logprobs"][1:]]
        return ProbeReply(own, told["output_ids"], [said[0] for said in meta["output_token_logprobs"]])

    def lacks_adapter(self, reply: HttpReply) -> bool:
        """By its words: it was never loaded, or is not any more."""
        return "LoRA adapter" in reply.words and "loaded" in reply.words

    def not_loaded(self, reply: HttpReply, folder: str) -> RecipeError:
        """By its words."""
        words, url = reply.words, self.http.url
        if folder in words and ("Repo id" in words or "No such file" in words):
            return not_seen(url, folder)
        if "is incompatible" in words:
            reason = f"{url} has no room for the adapter: it takes a lower rank only, or none on these layers"
            fix = "lower it, or start the server with a higher --max-lora-rank and --lora-target-modules all"
            return RecipeError.of("model.adapter.rank", reason, fix)
        return RecipeError.of(
            FIELD, f"{url} does not load the adapter: {words}", f"see the server's log, {self.otherwise}"
        )


def _of(tokens: Sequence[int], adapter: str) -> dict[str, Any]:
    body = {"input_ids": list(tokens), "return_logprob": True}
    return {**body, "lora_path": adapter, "extra_key": adapter} if adapter else body
