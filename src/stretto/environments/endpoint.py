"""A model over HTTP, for programs that know OpenAI's API or vLLM's: what it samples there is trained.

    POST /v1/chat/completions      messages in, a message out, with tools; `return_token_ids` adds the ids
    POST /inference/v1/generate    token ids in, token ids and log-probabilities out, with the weights that sampled them
    GET  /v1/models[/policy]       the one model, and how long a conversation may be

It listens on the loopback address alone. A key says which trajectory asks, as a bearer token or, before that, in the
header X-API-Key, which proxies leave alone; without a valid one nothing is answered. How
tokens are sampled is the run's to say, and never the caller's: training needs the log-probabilities of exactly that
distribution. So temperature and seed are accepted there and have no effect, as many programs send them; in `stretto
serve` they have one. Where an answer ends (`max_tokens`, `stop`) is the caller's. Other settings are refused
(`wire.NEUTRAL`). What was sampled for a client that has hung up before its answer was there is dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import secrets
import socket
import string
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from aiohttp import web

from stretto.engines.base import Completion
from stretto.environments.addresses import Caller, ServedModel
from stretto.environments.base import Reply
from stretto.environments.chat import COLDEST
from stretto.environments.wire import BadRequest, ChatCall, Given, SentReply, TokenCall, chat_call, token_call, wish_of
from stretto.errors import MODEL_FAILURES, RolloutError, StrettoError

LARGEST = 8 << 20
"""Bytes of a request."""
READING = 30.0
"""Seconds in which its headers have to come, and then its body. A connection without a request has as long."""
MOST_UNPROVED = 512
"""Max number of open connections that have shown no valid key. At most half of the process's descriptors."""
WAITING = 1024
"""Connections that may wait to be accepted."""
MOST = 64
"""Requests of one key that may wait at the same time."""
LETTERS = string.ascii_letters + string.digits
NAME = "policy"
"""What the model is called. `stretto serve` refuses other names; a trajectory has one model, whatever it is called."""
SERVED = ("POST /v1/chat/completions", "POST /inference/v1/generate", "GET /v1/models", f"GET /v1/models/{NAME}")
"""What is answered."""

LOG = logging.getLogger("stretto.endpoint")
"""Where aiohttp tells of requests that are none, with tracebacks; nobody reads them in a terminal."""
LOG.addHandler(logging.NullHandler())
LOG.propagate = False

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """The server of a process."""

    def __init__(self, callers: Mapping[str, Caller], *, vocabulary: int) -> None:
        """`callers` are the keys that are valid, which may change at any time."""
        self.callers, self.vocabulary = callers, vocabulary
        app = web.Application(client_max_size=LARGEST, middlewares=[self._answer])
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/inference/v1/generate", self._generate)
        self.runner = web.AppRunner(
            app,
            access_log=None,
            logger=LOG,
            handle_signals=False,
            shutdown_timeout=1.0,
            handler_cancellation=True,
            keepalive_timeout=READING,
        )
        self.url = ""
        self.listening: asyncio.Server | None = None
        self.unproved: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have shown no valid key, oldest first, each with the timer that closes the connection."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_unproved = max(4, min(MOST_UNPROVED, descriptors // 2 if descriptors > 0 else MOST_UNPROVED))

    async def start(self, port: int = 0) -> None:
        """Listens; 0 is whichever port is free."""
        await self.runner.setup()
        listener = socket.create_server(("127.0.0.1", port))
        # asyncio accepts `backlog` connections in each round of its loop and reads a key some rounds later. A small
        # number leaves a client time to show a key in a flood of connections. Others wait in the system's queue.
        backlog = max(1, self.most_unproved // 32)
        self.listening = await asyncio.get_running_loop().create_server(self._connected, sock=listener, backlog=backlog)
        listener.listen(WAITING)
        host, number = listener.getsockname()
        self.url = f"http://{host}:{number}"

    async def close(self) -> None:
        """Ends every connection."""
        if self.listening is not None:
            self.listening.close()
        for timer in self.unproved.values():
            timer.cancel()
        await self.runner.cleanup()

    def _connected(self) -> web.RequestHandler:
        """Accept a connection; close it unless a valid key comes in time, and close the oldest of too many."""
        server = self.runner.server
        assert server is not None
        connection = server()
        if len(self.unproved) >= self.most_unproved:
            self._close_unproved(next(iter(self.unproved)))
        timer = asyncio.get_running_loop().call_later(READING, self._close_unproved, connection)
        self.unproved[connection] = timer
        return connection

    def _close_unproved(self, connection: web.RequestHandler) -> None:
        self.unproved.pop(connection).cancel()
        connection.force_close()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Lets nobody in without a key, and turns what is wrong into a status and a sentence."""
        if (caller := self._caller(request)) is None:
            refusal = _error(401, "the API key is wrong, or its trajectory has ended", "invalid_api_key")
            refusal.force_close()
            return refusal
        if (timer := self.unproved.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            with _counted(caller):
                return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            reason = f"there is no {request.method} {request.path[:100]} here; there are: {', '.join(SERVED)}"
            return _error(error.status, reason, "not_found")
        except web.HTTPException as error:
            return _error(error.status, error.reason or "refused", "invalid_request_error")
        except BadRequest as error:
            return _error(error.status, str(error), error.code)
        except MODEL_FAILURES as error:
            caller.fail(error)
            return _error(503, f"the run cannot answer any more: {type(error).__name__}", "unavailable")
        except (RolloutError, ValueError) as error:
            code = "context_length_exceeded" if "context" in str(error) else "invalid_request_error"
            return _error(400, str(error), code)
        except StrettoError as error:
            return _error(500, str(error), "internal_error")
        except Exception as error:  # aiohttp would print where it happened, and answer in plain text
            return _error(500, f"{type(error).__name__}: {error}", "internal_error")

    def _caller(self, request: web.Request) -> Caller | None:
        """Whose key the request has."""
        if (key := request.headers.get("X-API-Key")) is not None:
            return self.callers.get(key)
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self.callers.get(key.strip()) if scheme.lower() == "bearer" else None

    def _known(self, request: web.Request) -> Caller:
        """The same for a request that was let in."""
        caller = self._caller(request)
        assert caller is not None
        return caller

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card(request)]})

    async def _model(self, request: web.Request) -> web.Response:
        _refuse_other(request.match_info["name"])
        return web.json_response(self._card(request))

    def _card(self, request: web.Request) -> dict[str, Any]:
        context = self._known(request).model.context
        return {"id": NAME, "object": "model", "owned_by": "stretto", "max_model_len": context}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        caller, body = self._known(request), await _body(request)
        _named(caller.model, body)
        model = caller.model.at(wish_of(body))
        call = chat_call(body, caller.replies, given=_given(caller.model, model))
        asked = partial(model.chat, max_new_tokens=call.max_new_tokens, tools=call.tools, stop=call.stop)
        replies = await _together([asked(call.messages) for _ in range(call.choices)])
        answer = _chat_answer(call, [(reply, *model.sampled(reply)) for reply in replies], caller)
        return await _streamed(request, answer) if call.stream else web.json_response(answer)

    async def _generate(self, request: web.Request) -> web.Response:
        caller, body = self._known(request), await _body(request)
        _named(caller.model, body)
        settings = body.get("sampling_params") if isinstance(body, dict) else None
        model = caller.model.at(wish_of(settings if isinstance(settings, dict) else {}))
        call = token_call(body, vocabulary=self.vocabulary, given=_given(caller.model, model))
        completion = await model.complete(call.tokens, max_new_tokens=call.max_new_tokens, stop=call.stop)
        return web.json_response(_token_answer(call, completion))


def _named(model: ServedModel, body: Any) -> None:
    """Refuses the name of another model, where programs choose among servers by it."""
    wanted = body.get("model") if isinstance(body, dict) else None
    if model.named and wanted is not None:
        _refuse_other(wanted)


def _refuse_other(name: object) -> None:
    if name != NAME:
        reason = f"The model `{str(name)[:100]}` does not exist; this server has `{NAME}`"
        raise BadRequest(reason, status=404, code="model_not_found")


def _given(model: ServedModel, asked: ServedModel) -> Given:
    """What a request cannot change of the model; `asked` is what answers it, another one where its wishes count."""
    return Given(
        ends=model.renderer.stop,
        top_p=model.sampling.top_p,
        top_k=model.sampling.top_k,
        greedy=asked is not model and asked.sampling.temperature < COLDEST,
        template=model.renderer.arguments,
    )


async def _together(calls: Sequence[Coroutine[Any, Any, Reply]]) -> list[Reply]:
    """The replies of calls at the same time; if one fails, the others are given up."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def _counted(caller: Caller) -> Iterator[None]:
    """A request under way, which ends with its trajectory."""
    if len(caller.requests) >= MOST:
        raise BadRequest(f"{MOST} requests of this key wait already", status=429, code="rate_limit_exceeded")
    task = asyncio.current_task()
    assert task is not None
    caller.requests.add(task)
    try:
        yield
    finally:
        caller.requests.discard(task)


async def _body(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(READING):
            read = await request.read()
        return json.loads(read)
    except TimeoutError as error:
        raise BadRequest(f"the body has not come within {READING:g} s", status=408, code="timeout") from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body is not encoded as its headers say: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error


def _error(status: int, message: str, code: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "code": code}}, status=status)


Sampled = tuple[Reply, list[int], list[float]]
"""A reply, the tokens before it, and the log-probabilities of its own."""


def _chat_answer(call: ChatCall, replies: Sequence[Sampled], caller: Caller) -> dict[str, Any]:
    """Replies as OpenAI's API has them."""
    context = replies[0][1]
    answer: dict[str, Any] = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": NAME,
        "choices": [
            _choice(call, index, reply, logprobs, caller) for index, (reply, _, logprobs) in enumerate(replies)
        ],
        "usage": _usage(len(context), sum(len(reply.tokens) for reply, _, _ in replies)),
    }
    if call.token_ids:
        answer["prompt_token_ids"] = context
    return answer


def _choice(call: ChatCall, index: int, reply: Reply, logprobs: Sequence[float], caller: Caller) -> dict[str, Any]:
    message = _sent(reply, caller)
    finish = "tool_calls" if "tool_calls" in message else "length" if reply.stop == "length" else "stop"
    choice: dict[str, Any] = {"index": index, "message": message, "finish_reason": finish, "logprobs": None}
    if call.logprobs:
        told = token_id if call.tokens_by_id else lambda token: caller.model.renderer.all_text([token])
        choice["logprobs"] = {"content": _logprobs(reply.tokens, logprobs, told)}
    if call.token_ids:
        choice["token_ids"] = list(reply.tokens)
    return choice


def _sent(reply: Reply, caller: Caller) -> dict[str, Any]:
    """A reply as a message. A call that nobody could make stands in the text, and then all of them do."""
    made = [wanted for wanted in reply.tool_calls if wanted.name and not wanted.error]
    if not made:
        return {"role": "assistant", "content": reply.text}
    words = reply.words if len(made) == len(reply.tool_calls) else reply.text
    calls: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": "assistant", "content": words or None, "tool_calls": calls}
    for wanted in made:
        # As Mistral's models and templates want them.
        name = wanted.id if wanted.id not in caller.replies else "".join(secrets.choice(LETTERS) for _ in range(9))
        caller.remember(name, SentReply(reply=reply, message=message))
        function = {"name": wanted.name, "arguments": json.dumps(dict(wanted.arguments))}
        calls.append({"id": name, "type": "function", "function": function})
    return message


def token_id(token: int) -> str:
    """A token as vLLM names it by its id."""
    return f"token_id:{token}"


def _token_answer(call: TokenCall, completion: Completion) -> dict[str, Any]:
    """A completion as vLLM has it."""
    tokens = completion.tokens.tolist()
    choice = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": "length" if completion.stop == "length" else "stop",
        "logprobs": {"content": _logprobs(tokens, completion.logprobs.tolist(), token_id)} if call.logprobs else None,
        "weight_versions": [{"version": str(completion.version), "start": 0, "end": len(tokens)}],
    }
    return {
        "request_id": call.request_id or uuid.uuid4().hex,
        "choices": [choice],
        "usage": _usage(len(call.tokens), len(tokens)),
    }


def _logprobs(tokens: Sequence[int], values: Sequence[float], told: Callable[[int], str]) -> list[dict[str, Any]]:
    texts = [told(token) for token in tokens]
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
        for text, value in zip(texts, values, strict=True)
    ]


def _usage(prompt: int, sampled: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def _streamed(request: web.Request, answer: dict[str, Any]) -> web.StreamResponse:
    """The answer as a stream of one piece, for clients that know no other way."""
    choices = []
    for choice in answer["choices"]:
        delta = {**choice["message"]}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **each} for place, each in enumerate(delta["tool_calls"])]
        choices.append({**{key: value for key, value in choice.items() if key != "message"}, "delta": delta})
    piece = {**answer, "object": "chat.completion.chunk", "choices": choices}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n".encode())
    await response.write_eof()
    return response
