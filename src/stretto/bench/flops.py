"""How much arithmetic a step needs, from numbers of weights and positions of tokens; no torch.

A multiplication and an addition are two. Per token, a forward costs
    2 * linear  +  2 * adapter  +  4 * layers * attention * (position + 1)      and  2 * head  where logits are wanted:
each weight is used once, and scores and their sum over values each take one product of every head with every key in
sight. A backward costs twice that with full fine-tuning: one product for what comes in, one for the weight. With LoRA
the frozen weights have no gradient, so `linear` and `head` cost once, the adapter and attention twice.
Embeddings, norms, activations, sampling and the optimizer are not counted, nor what a side computes again.

An *unshared* step computes every conversation on its own: the prompt of an answer in the prefill and in the training
pass of each answer. A *shared* one computes tokens with the same past once. The last token of an answer is never fed
back while generating.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What of a model its arithmetic follows from."""

    layers: int
    """Decoder layers."""
    linear: int
    """Weights of all linear layers but the head."""
    head: int
    """Weights of the head."""
    attention: int
    """Query heads times the size of a head."""
    adapter: int = 0
    """Weights of the adapter, if one is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The tokens of a forward."""

    tokens: int
    """How many."""
    keys: int
    """How many keys they look at, their own included: the sum of position + 1."""
    logits: int
    """For how many of them logits are wanted."""

    @classmethod
    def over(cls, positions: Sequence[NDArray[np.int64]], *, logits: int) -> Pass:
        """Tokens at these positions."""
        tokens = sum(len(part) for part in positions)
        return cls(tokens=tokens, keys=int(sum(part.sum() for part in positions)) + tokens, logits=logits)


def forward(sizes: ModelSizes, work: Pass) -> int:
    """Operations of a forward."""
    weights = 2 * (sizes.linear + sizes.adapter) * work.tokens
    return weights + 4 * sizes.layers * sizes.attention * work.keys + 2 * sizes.head * work.logits


def backward(sizes: ModelSizes, work: Pass) -> int:
    """Operations of the backward of that forward."""
    if not sizes.adapter:
        return 2 * forward(sizes, work)
    frozen = 2 * sizes.linear * work.tokens + 2 * sizes.head * work.logits
    return frozen + 2 * (forward(sizes, work) - frozen)


def step(sizes: ModelSizes, generate: Pass, train: Pass) -> int:
    """Of generating, and of training on what was generated."""
    return forward(sizes, generate) + forward(sizes, train) + backward(sizes, train)


def unshared(prompts: Sequence[int], answers: Sequence[int]) -> tuple[Pass, Pass]:
    """What is generated and what is trained, a conversation at a time; prompt and answer tokens of each."""
    both = list(zip(prompts, answers, strict=True))
    logits = sum(answers)
    return (
        Pass.over([np.arange(prompt + answer - 1) for prompt, answer in both], logits=logits),
        Pass.over([np.arange(prompt + answer) for prompt, answer in both], logits=logits),
    )


def shared(
    prompts: Sequence[int], answers: Sequence[int], *, prefill: NDArray[np.int64], row: NDArray[np.int64]
) -> tuple[Pass, Pass]:
    """The same where equal beginnings count once: `prefill` and `row` are the positions of the distinct tokens of all
    prompts and of all conversations."""
    logits = sum(answers)
    fed = [np.arange(prompt, prompt + answer - 1) for prompt, answer in zip(prompts, answers, strict=True)]
    return Pass.over([prefill, *fed], logits=logits), Pass.over([row], logits=logits)


def answers_to(prompts: Sequence[int], answers: int, length: int) -> dict[str, Pass]:
    """Generating so many answers of this length to each prompt, unshared and shared; no two prompts begin alike."""
    each, lengths = [prompt for prompt in prompts for _ in range(answers)], [length] * answers * len(prompts)
    prefill = np.concatenate([np.arange(prompt) for prompt in prompts])
    together, _ = shared(each, lengths, prefill=prefill, row=prefill)
    return {"unshared": unshared(each, lengths)[0], "shared": together}
