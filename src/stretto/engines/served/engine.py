"""A server of the user's own behind the seam of an engine: only an adapter travels, by way of a folder.

Nobody can read a server's tensors, so what is proved is less than of an engine that the run has started
(`vllm.engine`): the files that the server was told to load are those of the policy, it lists them under a name that it
never had before, and what it says of a probe is what the trainer says (`probe`).
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file

from stretto.engines.apart import ApartEngine, EngineDeadlines
from stretto.engines.base import Request
from stretto.engines.request_rows import WatchedAnswers
from stretto.engines.served.probe import (
    ALLOWED,
    ANSWER,
    HEAT,
    ProbeAnswer,
    ProbeHistory,
    own_logprobs,
    probe_tokens,
    told_at_one,
)
from stretto.engines.served.server_api import FIELD, ServerApi
from stretto.engines.served.transport import ServerTransport
from stretto.engines.vllm.published import adapter_tensors, equal, write_adapter
from stretto.errors import EngineError, RecipeError, WeightsError
from stretto.models.load import Policy
from stretto.weights.publish import refusal
from stretto.weights.tensors import checksum


class ServedEngine(ApartEngine):
    """Generates with an adapter on a server that was there before, and is there after."""

    def __init__(
        self,
        policy: Policy,
        api: ServerApi,
        *,
        room: Path,
        context: int,
        deadlines: EngineDeadlines,
        processed: bool,
        transport: Callable[[ServerApi], ServerTransport] = ServerTransport,
    ) -> None:
        """`api` is how the server is asked, `room` a folder that it sees, too, `context` the longest sequence. With
        `processed`, what it says of a token must be at the temperature at which the token was sampled."""
        watched = WatchedAnswers(policy.tokenizer, context, no_room=self._no_room)
        name = f"{api.kind} at {api.http.url}"
        super().__init__(
            policy, partial(transport, api), name=name, context=context, deadlines=deadlines, watched=watched
        )
        self.api, self.room = api, room
        # Others may have used names of versions on this server, whose cached prefixes go by them.
        self.mark, self.processed = secrets.token_hex(4), processed
        # Whether the server's model, without an adapter, is still to be compared.
        self.strange = True
        self.probe, self.history = probe_tokens(policy), ProbeHistory()
        self.kv_tokens = 1 << 30  # who waits for its cache waits there
        try:
            self._begin(deadlines.first)
            self._compare(whole=True)
        except BaseException:
            self.close()
            raise

    def sleep(self, keep: bool) -> None:
        """Its memory is elsewhere."""

    def wake(self) -> None:
        """Nothing to undo."""

    def close(self) -> None:
        """Leaves the server without an adapter of ours, and no file behind."""
        if self.process is not None:
            self.process.close()
        shutil.rmtree(self.room, ignore_errors=True)

    def _begin(self, seconds: float) -> None:
        """Asks for the server, which may take so long to come back, and sends it the adapter."""
        if self.process is not None:
            self.process.close()
        self.known.clear()
        self.watched.forget()
        self.process, self.strange = self.start(), True
        self._call("start", seconds)
        self._publish()

    def _publish(self) -> None:
        """The adapter, as files of their own under a name of its own; those before are not needed any more."""
        self.publishes, self.unproved = self.publishes + 1, True
        self.called = f"policy-v{self.version}-{self.mark}"
        self.called += f".{self.publishes}" if self.called in self.names else ""
        self.names.add(self.called)
        before, folder = list(self.room.iterdir()), self.room / self.called
        try:
            write_adapter(self.policy, folder)
        except (OSError, SafetensorError) as error:
            why = f"{self.name}: the adapter cannot be written to {folder}: {error}"
            raise EngineError(f"{why}\n    fix: make room there") from error
        self._call("adapter", self.patience.publish, name=self.called, folder=str(folder))
        for each in before:
            shutil.rmtree(each, ignore_errors=True)

    def _compare(self, *, whole: bool) -> None:
        """Raises unless the files are the policy's, and the server says what it says: of its model without the adapter,
        whatever is asked, once."""
        self._compare_files()
        if self.strange:
            self._compare_model()
        answer = self._asked(adapted=True)
        if not answer.apart <= ALLOWED[self.policy.dtype]:
            raise self._refusal(f"{self.name} does not compute with {self.called}: {answer.sentence}")
        if (same := self.history.repeats(answer)) is not None:
            mine = f"{same.trainer[-1]:.7g} to {answer.trainer[-1]:.7g}"
            told = f"says {answer.engine[-1]:.7g} of the last token of the probe, and of all others what it said"
            why = f"{self.name} {told} under {same.name}, to the bit, while the trainer went from {mine}"
            raise self._refusal(f"{why}: it still computes with the adapter of then")
        self.history.keep(answer)
        self.unproved = False

    def _compare_files(self) -> None:
        """Raises unless what the server was told to load is the adapter."""
        folder = self.room / self.called
        try:
            held = load_file(folder / "adapter_model.safetensors")
        except (OSError, SafetensorError) as error:
            raise self._refusal(f"the adapter in {folder} cannot be read any more: {error}") from error
        for name, tensor in adapter_tensors(self.policy).items():
            mine = held.get(f"base_model.model.{name}")
            if not equal([mine], tensor.cpu()):
                read = "nothing" if mine is None else checksum(mine)
                told = f"{name} in {folder} is {read} where {checksum(tensor)} was published"
                raise self._refusal(told)

    def _compare_model(self) -> None:
        """Raises unless the server's model is the policy's without its adapter, told as the recipe samples."""
        with self.policy.without_adapter():
            answer = self._asked(adapted=False)
        if not answer.apart <= ALLOWED[self.policy.dtype]:
            dtype = str(self.policy.dtype).removeprefix("torch.")
            reason = f"{self.name} serves another model than model.name, or in another type than {dtype}"
            fix = f"start it with the files of model.name and --dtype {dtype}, {self.api.otherwise}"
            raise RecipeError.of(FIELD, f"{reason}: they are {answer.sentence}", fix)
        if self.processed:
            asked = {"tokens": self.probe, "adapted": True, "more": ANSWER, "temperature": HEAT}
            told = self._call("score", self.patience.publish, **asked)
            if told_at_one(told["said"], self.policy, self.probe, told["tokens"]):
                reason = f"{self.name} tells log-probabilities of temperature 1, and engine.temperature is another"
                raise RecipeError.of(FIELD, reason, self.api.at_temperature)
        self.strange = False

    def _refusal(self, told: str) -> WeightsError:
        return refusal(self.version, told, "look at the server's log, and whether others load adapters there")

    def _asked(self, *, adapted: bool) -> ProbeAnswer:
        """What both say of the probe, with the adapter or without."""
        ask = partial(self._call, "score", self.patience.publish, tokens=self.probe, more=1, temperature=1.0)
        return ProbeAnswer(
            name=self.called,
            engine=np.array(ask(adapted=adapted)["logprobs"], dtype=np.float64),
            trainer=own_logprobs(self.policy, self.probe),
        )

    def _no_room(self, request: Request, context: int) -> EngineError:
        """What to say of a conversation that is longer than the server's context."""
        told = f"a conversation of {len(request.tokens)} tokens and an answer of up to {request.max_new_tokens}"
        return EngineError(
            f"{FIELD}: {told} have no room on {self.name}, whose context is {context}\n"
            f"    fix: start it with a larger {self.api.context_option}, or lower engine.max_new_tokens"
        )
