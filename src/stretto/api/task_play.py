"""One episode of a recipe's environment, for `stretto task play`: a person, a file or the model writes the replies.

The episode takes the path of training: `run_trajectory`, then the scorers. Replies by hand load no weights. Nothing is
trained or saved.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stretto import threads
from stretto.algorithms.catalog import learns_from_rows
from stretto.checks.deep import UNLIMITED, describe_model, without_weights
from stretto.checks.own_code import import_plugins
from stretto.engines.base import Completion, Request
from stretto.environments.addresses import Addresses
from stretto.environments.base import Tool, ToolCall
from stretto.environments.chat import Sampling
from stretto.environments.render import Renderer
from stretto.environments.trajectory import EnvironmentBudget, RolloutStart, Whereabouts, run_trajectory
from stretto.errors import RecipeError, StrettoError
from stretto.models.source import locate
from stretto.models.stop_tokens import generation_stop_tokens, stop_tokens
from stretto.models.template_file import use_template
from stretto.plugins import folders_of
from stretto.recipe.schema import ModelReward, Recipe
from stretto.rewards.combine import Rewards
from stretto.rewards.rehearsal import rehearse
from stretto.rewards.score import Scored, score
from stretto.runtime.build import environment_of
from stretto.runtime.questions import ask_recipe
from stretto.runtime.runtime import Runtime
from stretto.runtime.schedule import sample
from stretto.sandbox.pool import Pool
from stretto.tasks.source import load_prompts, split_task
from stretto.types import Conversation, Prompt, StopReason

VISIT = -4
"""Visit number of played episodes. Training and evaluation use other ones, so sampling noise is never shared."""
GRACE = 5.0
"""Seconds that an environment gets to clean up after the episode was ended from outside."""
PARAGRAPHS = re.compile(r"\n[ \t]*\n\s*")
"""Separator of the replies in a text file: at least one empty line."""

Show = Callable[[Literal["context", "reply", "call", "note"], str], None]
"""Prints one event of the episode: its kind and its text."""
Replies = Callable[[], Awaitable[str | None]]
"""Returns the text of the next reply; `None` at the end of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """One call of the model."""

    context: str
    """New context before the reply, special tokens included."""
    reply: str
    """Text of the reply, special tokens included."""
    tool_calls: tuple[ToolCall, ...]
    """Tool calls in the reply, including calls that cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedEpisode:
    """Result of one played episode."""

    turns: tuple[PlayedTurn, ...]
    """Calls of the model, in order."""
    scored: Scored
    """The trajectory, with its score or the reason of its failure."""
    prompt: Prompt
    """Prompt of the episode."""

    @property
    def failure(self) -> str | None:
        """Message of the environment or reward that failed, with lines of the user's files."""
        return self.scored.failed[0].failure if self.scored.failed else None

    def document(self) -> dict[str, Any]:
        """Return the document that `--json` prints."""
        trajectories = (*(each for group in self.scored.groups for each in group.trajectories), *self.scored.failed)
        outcome = trajectories[0].outcome
        rewards = [reward for group in self.scored.groups for reward in group.rewards if reward.judged]
        return {
            "ok": self.failure is None,
            "problems": [],
            "prompt": {"id": self.prompt.id, "reference": self.prompt.reference},
            "turns": [asdict(turn) for turn in self.turns],
            "answer": None if outcome is None else outcome.answer,
            "signals": None if outcome is None else dict(outcome.signals),
            "turn_rewards": None if outcome is None or outcome.turn_rewards is None else list(outcome.turn_rewards),
            "reward": {"value": rewards[0].value, "parts": dict(rewards[0].parts)} if rewards else None,
            "failure": self.failure,
        }


def choose_prompt(recipe: Recipe, root: Path, *, prompt: str | None, index: int | None) -> Prompt:
    """Return the prompt of an id, or the training prompt at an index; by default the first training prompt.

    Raises:
        RecipeError: There is no such prompt, or the recipe samples no episodes.
    """
    if learns_from_rows(name := recipe.algorithm.name):
        reason = f"{name} learns from dataset rows and samples no episodes"
        raise RecipeError.of(
            "algorithm.name", reason, "play a recipe whose algorithm samples completions, such as grpo"
        )
    training, heldout = split_task(recipe, load_prompts(recipe.task, root))
    if prompt is not None:
        for each in (*training, *heldout):
            if each.id == prompt:
                return each
        raise RecipeError.of("--prompt", f"no prompt has the id {prompt!r}", f"use an id such as {training[0].id!r}")
    if (place := index or 0) >= len(training):
        reason = f"{place} is too large for {len(training)} training prompts"
        raise RecipeError.of("--index", reason, f"use an index from 0 to {len(training) - 1}")
    return training[place]


class FileReplies:
    """Replies from a file: a JSON list of texts (`.json`), or paragraphs that empty lines separate."""

    def __init__(self, path: Path) -> None:
        """Read the file. RecipeError if there is no reply in it."""
        self.path, self.used = path, 0
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
            raise RecipeError.of("--from", reason, "name a file with the replies as UTF-8 text") from None
        self.replies = _listed(path, text) if path.suffix == ".json" else PARAGRAPHS.split(text.strip())
        if not any(self.replies) and path.suffix != ".json":
            raise RecipeError.of("--from", f"{path} is empty", "write one paragraph for each reply of the model")

    async def __call__(self) -> str:
        """Return the next reply. StrettoError if there is none."""
        if self.used == len(self.replies):
            reason = f"{self.path} has {len(self.replies)} replies, and the environment called the model once more"
            raise StrettoError(f"--from: {reason}\n    fix: add a reply to the file")
        self.used += 1
        return self.replies[self.used - 1]


def _listed(path: Path, text: str) -> list[str]:
    found: Any = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise RecipeError.of(
            "--from", f"{path} is not a JSON list of texts", 'write a list such as ["first", "second"]'
        )
    return found


async def typed_reply() -> str | None:
    """Read one reply from standard input: a line. A backslash at the end of a line continues it on the next line.

    The line is read in a thread, because requests of programs are served meanwhile.
    """
    lines: list[str] = []
    while True:
        line = await threads.beside(sys.stdin.readline)
        if not line:
            return None
        text = line.rstrip("\r\n")
        if not text.endswith("\\"):
            return "\n".join([*lines, text])
        lines.append(text[:-1])


class _CallRecorder(Renderer):
    """A renderer that keeps the tool calls which it read in replies."""

    def __init__(self, *given: Any, show: Show | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.show = show
        self.calls: dict[tuple[int, ...], tuple[ToolCall, ...]] = {}

    def tool_calls(self, tokens: Sequence[int], tools: Sequence[Tool]) -> tuple[ToolCall, ...]:
        """Read the calls, keep them under the tokens of the reply, and show them."""
        found = self.calls[tuple(tokens)] = super().tool_calls(tokens, tools)
        if self.show is not None:
            for call in found:
                self.show("call", call_text(call))
        return found


def call_text(call: ToolCall) -> str:
    """Return a tool call on one line, with its error if it cannot be made."""
    given = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name or 'unknown'}({given})" + (f": {call.error}" if call.error else "")


class _HandClient:
    """Answers the requests of one trajectory with replies by hand, one at a time."""

    def __init__(self, replies: Replies, renderer: Renderer, show: Show, *, echo: bool) -> None:
        """`echo` shows the replies, too."""
        self.replies, self.renderer, self.show, self.echo = replies, renderer, show, echo
        self.turn = asyncio.Lock()
        self.seen: list[list[int]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ask(self, request: Request) -> Completion:
        """Show the new context and return the next reply as a completion."""
        async with self.turn:
            context = request.tokens.tolist()
            known = max((len(each) for each in self.seen if context[: len(each)] == each), default=0)
            self.show("context", self.renderer.all_text(context[known:]))
            try:
                text = await self.replies()
                if text is None:
                    raise StrettoError("the input ended before the episode; nothing was scored")
            except StrettoError as error:
                # An environment could catch an exception of this call, so the episode is ended from outside.
                if not self.ended.done():
                    self.ended.set_exception(error)
                await asyncio.Event().wait()
                raise
            tokens, stop = self._tokens(text, request)
            self.seen.append([*context, *tokens])
            if self.echo:
                self.show("reply", self.renderer.all_text(tokens))
        return Completion(
            key=request.key,
            tokens=np.array(tokens, dtype=np.int64),
            logprobs=np.zeros(len(tokens)),
            stop=stop,
            version=0,
        )

    def give_up(self, keys: Iterable[int]) -> None:
        """Do nothing: no engine works on the requests."""

    def _tokens(self, text: str, request: Request) -> tuple[list[int], StopReason]:
        """Return the tokens of a reply, cut as an engine cuts them."""
        if lacking := self.renderer.lacking(text):
            self.show("note", f"the tokenizer lacks {lacking!r}; the reply is read without these characters")
        ends = [(place, place + len(end)) for end in request.stop_texts if (place := text.find(end)) >= 0]
        tokens = self.renderer.spoken(text[: min(ends)[1]] if ends else text, ended=not ends)
        stops = [place for place, token in enumerate(tokens) if token in request.stop]
        tokens = tokens[: stops[0] + 1] if stops else tokens
        if len(tokens) > request.max_new_tokens:
            self.show("note", f"the reply is cut off after {request.max_new_tokens} tokens")
            return tokens[: request.max_new_tokens], "length"
        return tokens, "stop"


def play_by_hand(
    recipe: Recipe, root: Path, prompt: Prompt, replies: Replies, *, show: Show, echo: bool
) -> PlayedEpisode:
    """Play one episode with replies by hand; `echo` shows them. No weights and no reward model are loaded.

    Raises:
        StrettoError: The replies ended before the episode.
    """
    import_plugins(recipe, root, training=False)
    files = locate(recipe.model.name, root)
    config, tokenizer = describe_model(recipe, files)
    use_template(tokenizer, recipe.task, root)
    named = stop_tokens(without_weights(files, config, tokenizer), tokenizer) | generation_stop_tokens(files)
    renderer = _CallRecorder(tokenizer, stop=named, arguments=recipe.task.template, show=show)
    renderer.stop_at_turns(lambda text: show("note", text))
    sampling = Sampling(
        seed=recipe.seed,
        temperature=recipe.engine.temperature,
        max_new_tokens=recipe.engine.max_new_tokens,
        context=int(getattr(config.get_text_config(), "max_position_embeddings", None) or UNLIMITED),
        stop_texts=getattr(recipe.engine, "stop", None),
    )
    return threads.run(_played(recipe, root, prompt, replies, renderer, sampling, show=show, echo=echo))


async def _played(
    recipe: Recipe,
    root: Path,
    prompt: Prompt,
    replies: Replies,
    renderer: _CallRecorder,
    sampling: Sampling,
    *,
    show: Show,
    echo: bool,
) -> PlayedEpisode:
    """Play and score one episode by hand."""
    parts = tuple(part for part in recipe.rewards if not isinstance(part, ModelReward))
    if len(parts) < len(recipe.rewards):
        show("note", "the reward model is not loaded; --model scores with it, too")
    parts = parts if any(part.judges for part in parts) else ()
    client = _HandClient(replies, renderer, show, echo=echo)
    addresses = Addresses(vocabulary=len(renderer.tokenizer))
    async with Pool(paths=folders_of(root), start_deadline=recipe.deadlines.start) as pool:
        rewards = Rewards(parts, pool)
        await rehearse(rewards, ())
        playing = asyncio.ensure_future(
            run_trajectory(
                RolloutStart(prompt=prompt, visit=VISIT, attempt=0),
                model=client,
                environment=environment_of(recipe, root),
                renderer=renderer,
                sampling=sampling,
                outside=EnvironmentBudget(recipe.environment.deadline, Whereabouts()),
                addresses=addresses,
            )
        )
        waiting: list[asyncio.Future[Any]] = [playing, client.ended]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if client.ended.done():
                client.ended.result()
            trajectory = await playing
        finally:
            if not playing.done():
                playing.cancel()
                await asyncio.wait({playing}, timeout=GRACE)
            await addresses.close()
        scored = await score([trajectory], rewards, min_samples=1, deadline=recipe.deadlines.reward)
    if text := renderer.unknown_warning():
        show("note", text)
    return PlayedEpisode(prompt=prompt, scored=scored, turns=_turns(trajectory.conversations, renderer))


def play_by_model(recipe: Recipe, root: Path, prompt: Prompt, *, note: Callable[[str], None]) -> PlayedEpisode:
    """Play one episode with the recipe's model before training; the recipe's rewards score it."""

    async def question(parts: Runtime) -> PlayedEpisode:
        before = parts.renderer
        renderer = _CallRecorder(before.tokenizer, stop=before.stop, arguments=before.arguments)
        launch = RolloutStart(prompt=prompt, visit=VISIT, attempt=0)
        scored = await sample(replace(parts, renderer=renderer), [launch], temperature=recipe.engine.temperature)
        if text := renderer.unknown_warning():
            note(text)
        trajectories = (*(each for group in scored.groups for each in group.trajectories), *scored.failed)
        return PlayedEpisode(prompt=prompt, scored=scored, turns=_turns(trajectories[0].conversations, renderer))

    return ask_recipe(recipe, root, question, note=note)


def _turns(conversations: Sequence[Conversation], renderer: _CallRecorder) -> tuple[PlayedTurn, ...]:
    """Return every call of the model, in the order of the calls."""
    found: dict[int, PlayedTurn] = {}
    for talk in conversations:
        tokens, place = talk.tokens.tolist(), talk.parent[1] if talk.parent else 0
        for call, length in talk.turns:
            sampled = np.flatnonzero(talk.trained[place:])
            begin = place + int(sampled[0]) if len(sampled) else len(tokens)
            reply = tokens[begin : begin + length]
            found[call] = PlayedTurn(
                context=renderer.all_text(tokens[place:begin]),
                reply=renderer.all_text(reply),
                tool_calls=renderer.calls.get(tuple(reply), ()),
            )
            place = begin + length
    return tuple(found[call] for call in sorted(found))


def events(turns: Sequence[PlayedTurn]) -> Iterator[tuple[Literal["context", "reply", "call"], str]]:
    """Yield what is shown of finished turns: kind and text."""
    for turn in turns:
        yield "context", turn.context
        yield "reply", turn.reply
        yield from (("call", call_text(call)) for call in turn.tool_calls)
