"""The proof that an exported model answers as the run does, before anybody is told that it is one.

The run's model says its greedy answers to held-out prompts, through the engine and the template of the run. The export
is then read by transformers alone, as whoever gets it would, and is given prompt and answer in one forward. If the
likeliest token is the run's at every place, its greedy answer is the run's, and the same forward gives its
log-probabilities. Both compute in float32, so that what differs is the weights. One model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stretto.engines.base import Completion, Request
from stretto.environments.render import Renderer
from stretto.errors import ExportError
from stretto.export.saved_model import SavedModel
from stretto.export.weights import TrainedWeights
from stretto.models.gguf_header import read_ends
from stretto.models.load import Policy, quietly_once
from stretto.models.merged import adapted_layers
from stretto.recipe.schema import NativeEngineSection
from stretto.types import Prompt
from stretto.workers.models import native_engine

MOST_PROMPTS = 100
EXACT = 2e-3
"""Largest difference of a log-probability, in nats, of an export that lost nothing. What two ways of computing the same
in float32 differ by on SmolLM2 is a tenth of it or less."""
LOSSY = 0.5
"""Largest mean difference of an export that rounds, in nats: above what 4 bits cost a small model, and far below what a
layer in a wrong place does."""
UNEXPLAINED = 0.05
"""Largest part of the adapter's update, by norm, that may be in the export or missing there besides rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAnswers:
    """What the run's model says to some prompts, and how it is asked."""

    prompts: tuple[Prompt, ...]
    """What was asked."""
    contexts: tuple[NDArray[np.int64], ...]
    """The tokens of each prompt, as the run renders it."""
    answers: tuple[Completion, ...]
    """The greedy answers, with the log-probability of each token."""
    texts: tuple[str, ...]
    """The same as text."""
    stop: frozenset[int]
    """Tokens that end an answer."""
    arguments: Mapping[str, Any]
    """What the recipe tells the chat template besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportProof:
    """How an export compares with its run."""

    prompts: int
    """Prompts that were asked."""
    tokens: int
    """Tokens of the run's greedy answers."""
    equal: int
    """Greedy answers that are the run's to the last token, the end of the turn included."""
    logprob_mean: float
    """Mean difference of the log-probabilities of these tokens, without sign, in nats."""
    logprob_max: float
    """The largest."""
    tie: float
    """How much likelier, at the most, another token is than the run's; 0 where all answers are equal."""
    unexplained: float | None = None
    """Part of the adapter's update, by norm, that is not in the export although its type could hold it, or is there and
    is not the adapter's; none where nothing was merged."""

    def document(self) -> dict[str, Any]:
        """As a file or a program reads it."""
        return asdict(self)

    @property
    def sentence(self) -> str:
        """What it comes to, in words."""
        return (
            f"{self.equal} of {self.prompts} greedy answers equal the run's; log-probabilities of {self.tokens} tokens "
            f"differ by {self.logprob_mean:.2g} on average and by {self.logprob_max:.2g} at most"
        )


@torch.no_grad()
def ask_run(model: SavedModel, policy: Policy, *, most: int = MOST_PROMPTS) -> RunAnswers:
    """What the run's model answers to its held-out prompts."""
    prompts = model.prompts(most)
    renderer = Renderer(policy.tokenizer, stop=policy.stop_tokens, arguments=model.recipe.task.template)
    contexts = [renderer.open(prompt.messages) for prompt in prompts]
    limit = model.recipe.engine.max_new_tokens
    kept = [index for index, context in enumerate(contexts) if len(context) + limit <= policy.context]
    if not kept:
        told = f"an answer of {limit} tokens (engine.max_new_tokens) in the context of {policy.context}"
        raise ExportError(f"none of {len(prompts)} prompts leaves room for {told}, so nothing can be compared")
    requests = [
        Request(
            key=index, tokens=contexts[index], max_new_tokens=limit, stop=policy.stop_tokens, temperature=0.0,
            stop_texts=tuple(getattr(model.recipe.engine, "stop", ())),
        )
        for index in kept
    ]  # fmt: skip
    engine, found = native_engine(policy, NativeEngineSection()), dict[int, Completion]()
    engine.submit(requests)
    while len(found) < len(requests):
        found |= {completion.key: completion for completion in engine.step(1.0)}
    engine.close()
    return RunAnswers(
        prompts=tuple(prompts[index] for index in kept),
        contexts=tuple(contexts[index] for index in kept),
        answers=tuple(found[index] for index in kept),
        texts=tuple(renderer.text(found[index].tokens.tolist()) for index in kept),
        stop=policy.stop_tokens,
        arguments=model.recipe.task.template,
    )


def prove(run: RunAnswers, export: Path, *, exact: bool, unexplained: float | None = None) -> ExportProof:
    """Reads an export as others will and compares it; ExportError if it is not the run's model.

    `export` is a folder or a GGUF file. With `exact` its weights are stored without loss.
    """
    with quietly_once():
        _same_prompts(run, export)
        proof = _compared(run, export, unexplained)
    off = f"{proof.sentence}: {export.name} is not the model of this run, and was not kept"
    if unexplained is not None and not unexplained <= UNEXPLAINED:
        told = f"{unexplained:.2g} of the adapter's update is missing or too much, besides rounding"
        raise ExportError(f"{told}; {off}")
    if exact and not (proof.logprob_max <= EXACT and proof.tie <= 2 * EXACT):
        raise ExportError(f"nothing should be lost, and {off}")
    if not proof.logprob_mean <= LOSSY:
        raise ExportError(f"rounding cannot cost that much: {off}")
    return proof


def _same_prompts(run: RunAnswers, export: Path) -> None:
    """Tokenizer, chat template and what ends a turn are the run's."""
    tokenizer = AutoTokenizer.from_pretrained(**_source(export), trust_remote_code=False)
    renderer = Renderer(tokenizer, stop=run.stop, arguments=run.arguments)
    for prompt, context, answer, text in zip(run.prompts, run.contexts, run.answers, run.texts, strict=True):
        if renderer.open(prompt.messages).tolist() != context.tolist():
            raise ExportError(f"{export.name} makes other tokens of prompt {prompt.id} than the run")
        if renderer.text(answer.tokens.tolist()) != text:
            raise ExportError(f"{export.name} reads the tokens of the answer to prompt {prompt.id} otherwise")
    _refuse_other_ends(run, export, tokenizer)


def _refuse_other_ends(run: RunAnswers, export: Path, tokenizer: Any) -> None:
    """A folder says all tokens at which `generate` stops. A GGUF file has room for two, at which llama.cpp stops: with
    one of them each of the answers must have ended."""
    if export.is_file():
        ends = frozenset([tokenizer.eos_token_id]) | read_ends(export)
        ended = {int(answer.tokens[-1]) for answer in run.answers if answer.stop == "stop"} & run.stop
        same = ends <= run.stop and ended <= ends
    else:
        found = GenerationConfig.from_pretrained(export, trust_remote_code=False).eos_token_id
        ends = frozenset([found] if isinstance(found, int) else found or [])
        same = ends == run.stop
    if not same:
        raise ExportError(f"answers end at the tokens {sorted(run.stop)}, and those of {export.name} at {sorted(ends)}")


@torch.no_grad()
def _compared(run: RunAnswers, export: Path, unexplained: float | None) -> ExportProof:
    network = AutoModelForCausalLM.from_pretrained(**_source(export), dtype=torch.float32, trust_remote_code=False)
    network.eval()
    gaps, ties, equal = list[Tensor](), list[float](), 0
    for context, answer in zip(run.contexts, run.answers, strict=True):
        logprobs = _logprobs(network, context, answer.tokens)
        said = torch.as_tensor(answer.tokens)[:, None]
        own = logprobs.gather(-1, said)[:, 0]
        behind = logprobs.max(-1).values - own
        equal += bool((behind == 0).all())
        ties.append(float(behind.max()))
        gaps.append((own.double() - torch.as_tensor(answer.logprobs)).abs())
    differences = torch.cat(gaps)
    return ExportProof(
        prompts=len(run.answers),
        tokens=len(differences),
        equal=equal,
        logprob_mean=float(differences.mean()),
        logprob_max=float(differences.max()),
        tie=max(ties),
        unexplained=unexplained,
    )


def _logprobs(network: Any, context: NDArray[np.int64], answer: NDArray[np.int64]) -> Tensor:
    """(tokens of the answer, vocabulary) log-probabilities, from one forward over prompt and answer."""
    tokens = torch.as_tensor(np.concatenate([context, answer]))[None]
    logits: Tensor = network(input_ids=tokens, use_cache=False, logits_to_keep=len(answer) + 1).logits
    return logits[0, -len(answer) - 1 : -1].float().log_softmax(-1)


def _source(export: Path) -> dict[str, Any]:
    """How transformers is told what to read."""
    if export.is_file():
        return {"pretrained_model_name_or_path": str(export.parent), "gguf_file": export.name}
    return {"pretrained_model_name_or_path": str(export)}


@torch.no_grad()
def unexplained_share(
    policy: Policy, weights: TrainedWeights, read: Callable[[str], Tensor], stored: Callable[[str, Tensor], Tensor]
) -> float | None:
    """How much of an export differs from what PEFT itself makes of base and adapter, relative to the update's norm;
    none without an adapter. A second arithmetic, so that a mistake in the first is found whatever rounding hides.

    `read` gives a weight as the export holds it, `stored` what it should hold of one.
    """
    off = update = 0.0
    layers = adapted_layers(policy.network)
    for name, layer in layers.items():
        for part, delta in weights.parts(name, layer.get_delta_weight("default").float()).items():
            expected = stored(part, weights.base(part).float() + delta)
            off += float((read(part).double() - expected.double()).square().sum())
            update += float(delta.double().square().sum())
    if not layers:
        return None
    return (off / update) ** 0.5 if update else float(off > 0)


@torch.no_grad()
def refuse_other_base(
    weights: TrainedWeights,
    names: Iterable[str],
    read: Callable[[str], Tensor],
    stored: Callable[[str, Tensor], Tensor],
) -> None:
    """ExportError if a weight that no adapter changes is not the base's, as the export's type holds it; `names` are all
    that are written. Where rounding is to be expected, answers would not tell.

    `read` and `stored` are as above.
    """
    for name in names:
        if name not in weights.updates and not torch.equal(read(name), stored(name, weights.base(name))):
            folder = weights.stored.folder
            raise ExportError(f"{name}, which no adapter changes, is not that of {folder}; nothing was kept")
