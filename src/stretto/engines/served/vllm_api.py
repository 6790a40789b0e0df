"""How a vLLM server is asked."""

from __future__ import annotations

import re
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
from stretto.errors import RecipeError

KEY = "VLLM_API_KEY"
"""The variable that has the key of a server which asks for one, here as there."""


class VllmApi:
    """A vLLM server; as `ServerApi`."""

    kind = "vLLM"
    start = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --enable-scale-out"
    otherwise = "or leave engine.url out, and the run starts vLLM itself"
    context_option = "--max-model-len"
    at_temperature = "start it with --logprobs-mode processed_logprobs"
    generate, load, unload = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

    def __init__(self, url: str, *, versions: Sequence[str]) -> None:
        self.http, self.versions = HttpCalls(url, key=KEY), versions

    def facts(self) -> ServerFacts:
        """What it serves."""
        url = self.http.url
        asked: dict[str, Mapping[str, Any] | None] = {"/version": None, MODELS: None, self.load: {}, self.generate: {}}
        version, models, loads, generates = asked_at_start(self, asked)
        if version.status != 200 or "version" not in version.fields:
            reason = f"{url} is no server of vLLM: it does not say which version it is"
            raise RecipeError.of(FIELD, reason, f"name a vLLM server, or say engine.kind: sglang; {self.otherwise}")
        refuse_version(self, number := str(version.told["version"]), self.versions)
        refuse_without_key(self, models, KEY)
        if loads.status in (404, 405):
            fix = f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora: {self.start}"
            raise RecipeError.of(FIELD, f"{url} loads no adapters while it runs", fix)
        if generates.status in (403, 404, 405):
            reason = f"{url} takes no token ids ({generates.words})"
            raise RecipeError.of(FIELD, reason, f"start it with --enable-scale-out: {self.start}")
        return base_model(self, models, number)

    def question(self, asked: Mapping[str, Any], *, adapter: str) -> dict[str, Any]:
        """Token ids in and out. No prefix that others have left is found, nor one of ours by others."""
        params = {
            "temperature": asked["temperature"],
            "max_tokens": asked["max_new_tokens"],
            "seed": asked["seed"],
            "stop_token_ids": asked["stop"],
            "ignore_eos": True,  # those that end an answer are told
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "stream_interval": EVERY_WATCHED if asked["watched"] else EVERY,
        }
        return {**_of(asked["tokens"], adapter, adapter), "sampling_params": params, "stream": True}

    def pieces(self, told: Mapping[str, Any], question: Mapping[str, Any], have: int) -> Iterator[Piece]:
        """What has come since the last."""
        for choice in told["choices"]:
            content = (choice.get("logprobs") or {}).get("content") or []
            logprobs = [each["logprob"] for each in content]
            yield Piece(choice.get("token_ids") or [], logprobs, choice.get("finish_reason"))

    def probe(
        self, tokens: Sequence[int], *, model: str, adapter: str, more: int, temperature: float
    ) -> dict[str, Any]:
        """Log-probabilities of the prompt, too."""
        params = {"temperature": temperature, "max_tokens": more, "seed": 0, "ignore_eos": True, "detokenize": False}
        asked = {**params, "prompt_logprobs": 0, "logprobs": 0}
        return {**_of(tokens, adapter or model, adapter or "base"), "sampling_params": asked}

    def scored(self, told: Mapping[str, Any], tokens: Sequence[int]) -> ProbeReply:
        """Each token's own."""
        rows, (choice,) = told["prompt_logprobs"][1:], told["choices"]
        said = [each["logprob"] for each in choice["logprobs"]["content"]]
        own = [row[str(token)]["logprob"] for row, token in zip(rows, tokens[1:], strict=True)]
        return ProbeReply(own, choice["token_ids"], said)

    def lacks_adapter(self, reply: HttpReply) -> bool:
        """It knows no model of that name."""
        return reply.status == 404

    def not_loaded(self, reply: HttpReply, folder: str) -> RecipeError:
        """By its words."""
        words, url = reply.words, self.http.url
        if "No adapter found" in words:
            return not_seen(url, folder)
        if (limit := re.search(r"max_lora_rank (\d+)", words)) is not None:
            reason, fix = f"{url} has room for adapters of rank {limit[1]} at most", "with a higher --max-lora-rank"
            return RecipeError.of("model.adapter.rank", reason, f"lower it, or start the server {fix}")
        if "not enabled" in words:
            reason = f"{url} was started without adapters: {words}"
            return RecipeError.of(FIELD, reason, f"start it with --enable-lora: {self.start}")
        return RecipeError.of(
            FIELD, f"{url} does not load the adapter: {words}", f"see the server's log, {self.otherwise}"
        )


def _of(tokens: Sequence[int], model: str, salt: str) -> dict[str, Any]:
    return {"model": model, "token_ids": list(tokens), "cache_salt": salt}
