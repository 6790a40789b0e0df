"""Whether packed rows give what a model's own forward gives, asked once when it is loaded.

Some families hide an attention of their own, lose the layout on the way down, or scale their logits after the head.
Nothing would crash: training would go on with wrong log-probabilities. So two short conversations are computed both
ways, and it is counted which layers asked the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.errors import RecipeError
from stretto.models.attention import WRONG, AttentionLayout, TreeLayout
from stretto.models.logprob_head import accum_dtype, chunk_logits
from stretto.models.segments import Segment

if TYPE_CHECKING:
    from stretto.models.load import Policy

STEM, TAIL = 5, 4
"""Tokens that the two conversations share, and tokens of their own."""

ALLOWED = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest relative difference of the logits: well above what each type rounds, well below what wrong rows are off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingLayout:
    """A layout that remembers which layers asked it."""

    layout: AttentionLayout
    """What answers."""
    layers: set[int] = field(default_factory=set)
    """Layers that asked the layout."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention, as the layout computes it."""
        self.layers.add(layer)
        return self.layout.attend(layer, query, key, value, scale=scale, window=window)


def conversations(vocabulary: int, device: torch.device) -> Tensor:
    """(2, STEM + TAIL) ids of two conversations that begin alike."""
    ids = (torch.arange(STEM + 2 * TAIL, device=device) * 97 + 11) % vocabulary
    return torch.stack([ids[: STEM + TAIL], torch.cat([ids[:STEM], ids[STEM + TAIL :]])])


@torch.no_grad()
def own_logits(network: Any) -> Tensor:
    """(2, STEM + TAIL, V) what the model computes by itself, with the attention it was loaded with."""
    ids = conversations(network.config.get_text_config().vocab_size, network.device)
    logits: Tensor = network(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return logits


@torch.no_grad()
def own_states(network: Any) -> Tensor:
    """(2, STEM + TAIL, W) the same before any head."""
    ids = conversations(network.config.get_text_config().vocab_size, network.device)
    output = network.get_decoder()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    states: Tensor = output.last_hidden_state
    return states


@torch.no_grad()
def packed_states(
    network: Any, hidden: Callable[[Tensor, Tensor, AttentionLayout], Tensor], witness: RecordingLayout
) -> Tensor:
    """What `hidden` makes of both conversations in one packed row, which begins with what they share."""
    ids = conversations(network.config.get_text_config().vocab_size, network.device)
    places = torch.arange(STEM + TAIL, device=network.device)
    states = hidden(torch.cat([ids[0], ids[1, STEM:]]), torch.cat([places, places[STEM:]]), witness)
    other = torch.cat([places[:STEM], places[STEM:] + TAIL])
    return torch.stack([states[places], states[other]])


@torch.no_grad()
def packed_logits(policy: Policy, witness: RecordingLayout) -> Tensor:
    """The logits of such a row."""
    states = packed_states(policy.network, policy.hidden, witness)
    return torch.stack([chunk_logits(row, policy.head(), 1.0) for row in states])


def refuse_wrong_rows(policy: Policy, own: Tensor) -> None:
    """Raises a RecipeError unless a packed row gives `own`, the model's own logits."""
    refuse_others(policy.network, own, lambda witness: packed_logits(policy, witness))


def refuse_others(network: Any, own: Tensor, packed_by: Callable[[RecordingLayout], Tensor]) -> None:
    """Raises a RecipeError unless `packed_by` gives what the model itself gives, and every layer is asked for it."""
    segments = (
        Segment(start=0, length=STEM, ancestors=()),
        Segment(start=STEM, length=TAIL, ancestors=(0,)),
        Segment(start=STEM + TAIL, length=TAIL, ancestors=(0,)),
    )
    witness = RecordingLayout(layout=TreeLayout.of(segments, network.device))
    try:
        packed = packed_by(witness)
    except (AttributeError, TypeError, ValueError) as error:
        raise refusal(f"its layers cannot be given packed rows ({error})") from error
    silent = set(range(network.config.get_text_config().num_hidden_layers)) - witness.layers
    if silent:
        raise refusal(f"{len(silent)} of its layers do not use transformers' attention interface")
    refuse_difference(own, packed, dtype=network.dtype, what="packed rows give")


def refuse_difference(own: Tensor, others: Tensor, *, dtype: torch.dtype, what: str) -> None:
    """Raises a RecipeError unless numbers (..., V) are those that the model itself gives, but for a constant."""
    own, others = (numbers.to(accum_dtype(dtype)) for numbers in (own, others))
    own, others = (numbers - numbers.mean(-1, keepdim=True) for numbers in (own, others))
    size = float(own.norm())
    if not 0 < size < float("inf"):
        told = "the same number for every token" if size == 0 else "numbers that are not finite"
        reason = (
            f"its weights give {told}; they are zero, damaged, or too large for {str(dtype).removeprefix('torch.')}"
        )
        raise RecipeError.of("model.name", reason, "get its files again, or set model.dtype: float32")
    difference = float((others - own).norm()) / size
    if not difference <= ALLOWED[dtype]:
        raise refusal(f"{what} other numbers than its own forward (relative difference {difference:.2g})")


def refusal(reason: str) -> RecipeError:
    """What to tell the user."""
    return RecipeError.of("model.name", f"{reason}{WRONG}", "use a decoder such as Llama, Qwen, Mistral or Gemma 3")
