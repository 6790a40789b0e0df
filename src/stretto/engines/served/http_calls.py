"""Questions over HTTP to a server that somebody else has started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from stretto.errors import RecipeError

LOOK = 10.0
"""Seconds for what a server answers at once."""

SHOWN = 300
"""Characters of a server's own words that are shown."""


class HttpReply(NamedTuple):
    """An answer of HTTP."""

    status: int
    """Its number."""
    told: Any
    """What JSON said, or its text."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """What JSON said, if that has fields."""
        return self.told if isinstance(self.told, Mapping) else {}

    @property
    def cards(self) -> Sequence[Mapping[str, Any]]:
        """The models that a server lists."""
        listed = self.fields.get("data")
        return [card for card in listed if isinstance(card, Mapping) and "id" in card] if listed else []

    @property
    def words(self) -> str:
        """What a server says of why it did not do something."""
        told = self.told
        if isinstance(told, Mapping):
            told = told.get("error", told)
            told = told.get("message") or told.get("error_message", told) if isinstance(told, Mapping) else told
        return " ".join(str(told).split())[:SHOWN] or f"status {self.status}"


class HttpCalls:
    """Questions to one server."""

    def __init__(self, url: str, *, key: str) -> None:
        """`key` is the variable that has the server's key, if it asks for one."""
        self.url = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        self.kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self.place, self.prefix = parts.netloc, parts.path
        self.headers = {"Connection": "close", "Content-Type": "application/json"}
        if secret := _secret(key):
            self.headers["Authorization"] = f"Bearer {secret}"

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float) -> HttpReply:
        """What the server says; an OSError or HTTPException if it is not reached."""
        with closing(self.opened(seconds)) as connection, self.sent(connection, path, body) as response:
            return read_reply(response.status, response.read().decode(errors="replace"))

    def opened(self, seconds: float | None) -> HTTPConnection:
        """A connection, over which each wait may take so long. A server that takes none is one that is not there."""
        wait = LOOK if seconds is None else seconds
        if self.kind is HTTPConnection:  # over TLS hands are shaken besides, which a busy server does late
            wait = min(LOOK, wait)
        connection: HTTPConnection = self.kind(self.place, timeout=wait)
        try:
            connection.connect()
        except TimeoutError as late:
            raise ConnectionError("it takes no connection") from late
        connection.sock.settimeout(seconds)
        return connection

    def sent(self, connection: HTTPConnection, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        """The beginning of an answer, which keeps the line open until it is closed, too."""
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", self.prefix + path, data, self.headers)
        return connection.getresponse()


def _secret(variable: str) -> str:
    """The key that a variable has, without the end of line that files of secrets end with. It is never shown."""
    secret = os.environ.get(variable, "").strip()
    if not (secret.isascii() and secret.isprintable()):
        reason = f"the key in {variable} has characters that HTTP does not send"
        raise RecipeError.of("engine.url", reason, f"set {variable} to the key alone")
    return secret


def read_reply(status: int, text: str) -> HttpReply:
    """An answer that has come in full."""
    with suppress(ValueError):
        return HttpReply(status, json.loads(text))
    return HttpReply(status, text)


def reason_of(error: Exception) -> str:
    """Why a server was not reached."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
