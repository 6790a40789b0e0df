"""A vLLM server that somebody else has started, over HTTP: how it is asked, and whether it can be used.

What it must have been started with is found out before a run begins, where it says so; nothing is changed by asking.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from stretto.errors import RecipeError

FIELD = "engine.url"
OTHERWISE = "or leave engine.url out, and the run starts vLLM itself"
START = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --enable-scale-out"
"""How a server is started that can be used."""

KEY = "VLLM_API_KEY"
"""The variable that has the key of a server which asks for one, here as there."""

LOOK = 10.0
"""Seconds for what a server answers at once."""

SHOWN = 300
"""Characters of a server's own words that are shown."""

GENERATE, LOAD, UNLOAD = "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class ServerFacts(NamedTuple):
    """What a server says of itself."""

    version: str
    """Version of vLLM."""
    name: str
    """What requests call the model without an adapter."""
    root: str
    """Where the server has read it."""
    context: int
    """Longest sequence."""


class HttpReply(NamedTuple):
    """An answer of HTTP."""

    status: int
    """Its number."""
    told: Any
    """What JSON said, or its text."""

    @property
    def words(self) -> str:
        """What a server says of why it did not do something."""
        told = self.told
        if isinstance(told, Mapping):
            told = told.get("error", told)
            told = told.get("message", told) if isinstance(told, Mapping) else told
        return " ".join(str(told).split())[:SHOWN] or f"status {self.status}"


class HttpCalls:
    """Questions to one server."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        self.kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.place, self.prefix = parts.netloc, parts.path
        key = os.environ.get(KEY)
        self.headers = {"Connection": "close", "Content-Type": "application/json"}
        self.headers |= {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> HttpReply:
        """What the server says; an OSError or HTTPException if it is not reached."""
        connection = self.opened(seconds)
        try:
            response = self.sent(connection, path, body)
            text = response.read().decode(errors="replace")
        finally:
            connection.close()
        with suppress(ValueError):
            return HttpReply(response.status, json.loads(text))
        return HttpReply(response.status, text)

    def opened(self, seconds: float | None) -> HTTPConnection:
        """A connection, over which each wait may take so long."""
        connection: HTTPConnection = self.kind(self.place, timeout=LOOK if seconds is None else seconds)
        connection.connect()
        connection.sock.settimeout(seconds)
        return connection

    def sent(self, connection: HTTPConnection, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        """The beginning of an answer."""
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", self.prefix + path, data, self.headers)
        return connection.getresponse()


def served_model(url: str, versions: Sequence[str]) -> ServerFacts:
    """What a server serves; a RecipeError if it cannot be reached or used. It is asked for nothing that changes it."""
    http = HttpCalls(url)
    try:
        version, models = http.ask("/version", seconds=LOOK), http.ask("/v1/models", seconds=LOOK)
        loads, generates = http.ask(LOAD, {}, seconds=LOOK), http.ask(GENERATE, {}, seconds=LOOK)
    except (OSError, HTTPException) as error:
        reason = f"no server answers at {http.url}: {reason_of(error)}"
        raise RecipeError.of(FIELD, reason, f"start one ({START}), {OTHERWISE}") from None
    if version.status != 200 or not isinstance(version.told, Mapping) or "version" not in version.told:
        reason = f"{http.url} is no server of vLLM: it does not say which version it is"
        raise RecipeError.of(FIELD, reason, f"name a vLLM server; SGLang and others cannot be used; {OTHERWISE}")
    number = str(version.told["version"])
    if not number.startswith(tuple(f"{known}." for known in versions)):
        reason = f"{http.url} is vLLM {number}, and {' or '.join(versions)} is supported"
        raise RecipeError.of(FIELD, reason, f"start one of that version, {OTHERWISE}")
    if models.status in (401, 403):
        reason = f"{http.url} asks for a key ({models.words})"
        raise RecipeError.of(FIELD, reason, f"set {KEY} to it, in the environment of this program")
    if loads.status in (404, 405):
        reason = f"{http.url} loads no adapters while it runs"
        raise RecipeError.of(
            FIELD, reason, f"start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora: {START}"
        )
    if generates.status in (403, 404, 405):
        reason = f"{http.url} takes no token ids ({generates.words})"
        raise RecipeError.of(FIELD, reason, f"start it with --enable-scale-out: {START}")
    base = _base(models)
    if base is None:
        raise RecipeError.of(FIELD, f"{http.url} serves no model ({models.words})", f"start it with one: {START}")
    return ServerFacts(number, str(base["id"]), str(base.get("root")), int(base.get("max_model_len") or 1 << 30))


def reason_of(error: Exception) -> str:
    """Why a server was not reached."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def _base(models: HttpReply) -> Mapping[str, Any] | None:
    """The model that adapters are for."""
    cards = models.told.get("data", []) if isinstance(models.told, Mapping) else []
    return next((card for card in cards if not card.get("parent")), None)


def not_loaded(url: str, told: HttpReply, folder: str) -> RecipeError:
    """Why a server does not load an adapter, at the key that can be changed."""
    words = told.words
    if "No adapter found" in words:
        reason = f"{url} does not see {folder}, where this host has written the adapter"
        return RecipeError.of(FIELD, reason, "put run.folder on a disk that both hosts have under the same path")
    if (limit := re.search(r"max_lora_rank (\d+)", words)) is not None:
        reason = f"{url} has room for adapters of rank {limit[1]} at most"
        return RecipeError.of(
            "model.adapter.rank", reason, "lower it, or start the server with a higher --max-lora-rank"
        )
    if "not enabled" in words:
        return RecipeError.of(
            FIELD, f"{url} was started without adapters: {words}", f"start it with --enable-lora: {START}"
        )
    return RecipeError.of(FIELD, f"{url} does not load the adapter: {words}", f"see the server's log, {OTHERWISE}")
