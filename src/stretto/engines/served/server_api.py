"""What a kind of server is asked and how it answers: vLLM's way is in `vllm_api`, SGLang's in `sglang_api`.

Both list their models in the same way, and load an adapter by its name and folder. What they must have been started
with is found out before a run begins, where they say so; nothing is changed by asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple, Protocol

from stretto.engines.served.http_calls import LOOK, HttpCalls, HttpReply, reason_of
from stretto.errors import RecipeError

FIELD = "engine.url"

MODELS = "/v1/models"
"""Where a server lists its model and the adapters that it has."""

EVERY, EVERY_WATCHED = 32, 8
"""Tokens that come together; of an answer that a text may end, fewer, because what follows the text is thrown away."""


class ServerFacts(NamedTuple):
    """What a server says of itself."""

    version: str
    """Version of vLLM or SGLang."""
    name: str
    """What requests call the model without an adapter."""
    root: str
    """Where the server has read it."""
    context: int
    """Longest sequence."""


class Piece(NamedTuple):
    """What has come of an answer."""

    tokens: Sequence[int]
    """Sampled since the last piece."""
    logprobs: Sequence[float]
    """Log-probability of each."""
    ended: str | None
    """Why it has ended, in the server's words; none while it goes on."""


class ProbeReply(NamedTuple):
    """What a server says of tokens that it is given."""

    logprobs: list[float]
    """Of the tokens from the second on."""
    tokens: list[int]
    """What it has sampled after them."""
    said: list[float]
    """The log-probability of each of these."""


class ServerApi(Protocol):
    """One kind of server."""

    kind: str
    """What it is called."""
    start: str
    """How one is started that can be used."""
    otherwise: str
    """What can be done instead of using one."""
    context_option: str
    """Its option that says the longest sequence."""
    at_temperature: str
    """How it must be started to tell log-probabilities at the temperature at which tokens were sampled."""
    generate: str
    """Where it answers."""
    load: str
    """Where it takes an adapter."""
    unload: str
    """Where it forgets one."""
    http: HttpCalls

    def facts(self) -> ServerFacts:
        """What it serves; a RecipeError if it cannot be reached or used."""
        ...

    def question(self, asked: Mapping[str, Any], *, adapter: str) -> dict[str, Any]:
        """The body for an answer to a request (`request_rows.row_of`), which comes in pieces."""
        ...

    def pieces(self, told: Mapping[str, Any], question: Mapping[str, Any], have: int) -> Iterator[Piece]:
        """What has come of the answer to a question, of which so many tokens are here already."""
        ...

    def probe(
        self, tokens: Sequence[int], *, model: str, adapter: str, more: int, temperature: float
    ) -> dict[str, Any]:
        """The body for log-probabilities of tokens, and for so many more at a temperature."""
        ...

    def scored(self, told: Mapping[str, Any], tokens: Sequence[int]) -> ProbeReply:
        """The answer to that."""
        ...

    def lacks_adapter(self, reply: HttpReply) -> bool:
        """Whether it has not the adapter that was asked for, such as one that was started again."""
        ...

    def not_loaded(self, reply: HttpReply, folder: str) -> RecipeError:
        """Why it does not load an adapter, at the key that can be changed."""
        ...


def asked_at_start(api: ServerApi, questions: Mapping[str, Mapping[str, Any] | None]) -> list[HttpReply]:
    """The answers to some questions; a RecipeError if nobody answers."""
    try:
        return [api.http.ask(path, body, seconds=LOOK) for path, body in questions.items()]
    except (OSError, HTTPException) as error:
        reason = f"no server answers at {api.http.url}: {reason_of(error)}"
        raise RecipeError.of(FIELD, reason, f"start one ({api.start}), {api.otherwise}") from None


def refuse_version(api: ServerApi, number: str, versions: Sequence[str]) -> None:
    """Raises for one that is not supported."""
    if not number.startswith(tuple(f"{known}." for known in versions)):
        reason = f"{api.http.url} is {api.kind} {number}, and {' or '.join(versions)} is supported"
        raise RecipeError.of(FIELD, reason, f"start one of that version, {api.otherwise}")


def refuse_without_key(api: ServerApi, reply: HttpReply, key: str) -> None:
    """Raises where a key was missing, or wrong."""
    if reply.status in (401, 403):
        reason = f"{api.http.url} asks for a key ({reply.words})"
        raise RecipeError.of(FIELD, reason, f"set {key} to it, in the environment of this program")


def base_model(api: ServerApi, models: HttpReply, number: str) -> ServerFacts:
    """The model that adapters are for; a RecipeError if there is none."""
    base = next((card for card in models.cards if not card.get("parent")), None)
    if base is None:
        reason = f"{api.http.url} serves no model ({models.words})"
        raise RecipeError.of(FIELD, reason, f"start it with one: {api.start}")
    return ServerFacts(number, str(base["id"]), str(base.get("root")), int(base.get("max_model_len") or 1 << 30))


def not_seen(url: str, folder: str) -> RecipeError:
    """What to say where a server does not find the files of an adapter."""
    reason = f"{url} does not see {folder}, where this host has written the adapter"
    return RecipeError.of(FIELD, reason, "put run.folder on a disk that both hosts have under the same path")
