"""A critic that is trained: a decoder and a linear head whose number at a token is the value of what comes after it.

It has the attributes of a `Policy` that a trainer needs, and a value where a policy has a log-probability. All weights
are trained, or an adapter and the head. An adapter on the base of a policy that has an adapter too shares that base:
the same tensors, which neither of them changes. A critic that is only read is a `FrozenScorer` (`scalar_head`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from stretto.kernels.cpu.backward import take_over
from stretto.kernels.cuda.fused_layers import fuse_layers
from stretto.models import attention
from stretto.models.load import Policy, hidden_states
from stretto.models.logprob_head import accum_dtype
from stretto.models.lora import inject_adapter
from stretto.models.reading import before_trained
from stretto.models.scalar_head import Base, network_and_head
from stretto.models.source import ModelFiles
from stretto.models.unpacked import is_apart
from stretto.recipe.schema import Adapter
from stretto.types import Conversation

BASE_LAYER = ".base_layer"
"""What the name of a weight has more where an adapter is around its layer."""


@dataclass(slots=True, kw_only=True)
class ValueModel:
    """A critic, ready for packed rows."""

    network: PreTrainedModel
    """What makes states of tokens; an adapter, if there is one, sits inside its layers."""
    scalar: nn.Linear
    """The head, in the wide type: values are small differences."""

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.network.dtype

    @property
    def apart(self) -> bool:
        """True if it cannot be given packed rows."""
        return is_apart(self.network)

    def hidden(
        self, tokens: Tensor, positions: Tensor, layout: attention.AttentionLayout, *, experts: Tensor | None = None
    ) -> Tensor:
        """(T) token ids of one row -> (T, W) states before the head."""
        return hidden_states(self.network, tokens, positions, layout)

    def reads(self, conversation: Conversation) -> NDArray[np.int64]:
        """The places at which it is read: before each trained token."""
        return before_trained(conversation)

    def read(
        self, states: Tensor, targets: Tensor, *, temperature: float, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(N, W) states there -> (N) values, in the wide type; there is no distribution, so entropies are 0."""
        values = self.scalar(states.to(self.scalar.weight.dtype)).flatten()
        return values, torch.zeros_like(values)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter that its values depend on, by name."""
        parts = nn.ModuleDict({"decoder": self.network.get_decoder(), "head": self.scalar})
        return dict(parts.named_parameters())

    def trained(self) -> dict[str, nn.Parameter]:
        """Those that are trained."""
        return {name: weight for name, weight in self.parameters().items() if weight.requires_grad}


def load_value_model(
    files: ModelFiles,
    *,
    base: Base,
    adapter: Adapter | None,
    shared: Policy | None,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> ValueModel:
    """The critic in some files, or one with a head of zeros: it says 0 of everything before its first update.

    `shared` is the policy whose base an adapter is put on, where that is the same model and stays as it is.
    """
    network, head = network_and_head("value", files, base=base, dtype=dtype, device=device)
    if head is None:
        width = network.config.get_text_config().hidden_size
        head = nn.Linear(width, 1, bias=False, device=device, dtype=accum_dtype(dtype))
        nn.init.zeros_(head.weight)
    network.train()  # which is the same without dropout, and activations can be recomputed
    network.requires_grad_(adapter is None)
    if not files.scratch:  # whose layers were taken over where it was loaded
        take_over(network)
        fuse_layers(network)
    if adapter is not None:
        if shared is not None and shared.adapted is not None and files.scratch:
            share_frozen(network.get_decoder(), shared.network.get_decoder())
        inject_adapter(network.get_decoder(), adapter, seed=seed)
    return ValueModel(network=network, scalar=head.to(accum_dtype(dtype)).requires_grad_(True))


def share_frozen(decoder: nn.Module, other: nn.Module) -> None:
    """Puts the frozen parameters of another decoder in the place of one's own, where they are the same numbers."""
    theirs = {
        name.replace(BASE_LAYER, ""): weight for name, weight in other.named_parameters() if not weight.requires_grad
    }
    for name, own in list(decoder.named_parameters()):
        weight = theirs.get(name)
        if weight is not None and weight.shape == own.shape and weight.dtype == own.dtype and torch.equal(weight, own):
            parent, _, leaf = name.rpartition(".")
            setattr(decoder.get_submodule(parent), leaf, weight)
