"""Models that cannot be given packed rows: each conversation by itself, through the model's own attention and cache.

Some families do not ask for an attention that could be told who sees whom: linear attention, ALiBi, capped scores,
attention sinks. They are right where a conversation is computed alone, which is slower: what conversations share is
computed for each of them again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from stretto.models.attention import NAME
from stretto.models.logprob_head import Head, chunk_logits
from stretto.models.packing_selfcheck import STEM, TAIL, conversations, own_logits, refusal, refuse_difference
from stretto.models.segments import Segment

OWN = "eager"
"""The attention that every family writes out itself; others leave caps and sinks out without a word."""


def is_apart(network: Any) -> bool:
    """True if a network computes with an attention of its own."""
    return bool(network.config._attn_implementation != NAME)


def states_apart(network: Any, tokens: Tensor, segments: Sequence[Segment]) -> Tensor:
    """(T) token ids of one row -> (T, W) what the decoder makes of each conversation in it, computed alone.

    What several have in common is taken from the first of them, whose states are those of the others too.
    """
    decoder = network.get_decoder()
    parents = {ancestor for segment in segments for ancestor in segment.ancestors}
    found: dict[int, Tensor] = {}
    for last, segment in enumerate(segments):
        if last in parents:
            continue
        path = (*segment.ancestors, last)
        parts = [tokens[segments[place].start :][: segments[place].length] for place in path]
        states = decoder(input_ids=torch.cat(parts)[None], use_cache=False).last_hidden_state[0]
        for place, part in zip(path, states.split([len(part) for part in parts]), strict=True):
            found.setdefault(place, part)
    return torch.cat([found[place] for place in range(len(segments))])


@contextmanager
def cached(network: nn.Module) -> Iterator[None]:
    """Layers that are recomputed in the backward keep no cache; inside here none is."""
    layers: list[Any] = [layer for layer in network.modules() if getattr(layer, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


@functools.cache
def _name_of_cache(decoder: type[nn.Module]) -> str:
    """What its forward calls the cache, which is another word since transformers 5.24."""
    return "cache" if "cache" in signature(decoder.forward).parameters else "past_key_values"


@torch.no_grad()
def continued(network: Any, tokens: Tensor, past: Any = None) -> tuple[Tensor, Any]:
    """(n, t) more tokens of n conversations -> (n, W) the states of the last of them, and the cache to go on from."""
    decoder = network.get_decoder()
    name = _name_of_cache(decoder.__class__)
    with cached(network):
        output = decoder(input_ids=tokens, use_cache=True, **{name: past})
    return output.last_hidden_state[:, -1], output[name]


@torch.no_grad()
def set_apart(network: Any, head: Head) -> None:
    """Gives a network its own attention back; raises a RecipeError unless two conversations come out right one by one.

    Both ways are tried: as training computes them, whole, and as they are sampled, token by token from a cache.
    """
    network.set_attn_implementation(OWN)
    own, ids = own_logits(network), conversations(network.config.get_text_config().vocab_size, network.device)
    segments = [Segment(start=start, length=STEM + TAIL, ancestors=()) for start in (0, STEM + TAIL)]
    try:
        whole = states_apart(network, ids.flatten(), segments).view(2, STEM + TAIL, -1)
        states, past = continued(network, ids[:, :STEM])
        steps = [states]
        for place in range(STEM, STEM + TAIL):
            states, past = continued(network, ids[:, place : place + 1], past)
            steps.append(states)
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise refusal(f"it can neither be given packed rows nor go on from a cache ({error})") from error
    for states, expected, what in (
        (whole, own, "its layers and its head give"),
        (torch.stack(steps, dim=1), own[:, STEM - 1 :], "its cache gives"),
    ):
        logits = torch.stack([chunk_logits(row, head, 1.0) for row in states])
        refuse_difference(expected, logits, dtype=network.dtype, what=what)
