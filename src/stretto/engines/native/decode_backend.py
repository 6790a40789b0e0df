"""What a decode step computes: tokens drawn from hidden states, and one forward over the newest tokens.

The seam between the engine, which decides who decodes what, and how that is computed. Here every step is computed as it
comes, with the sizes of the batch; on a GPU `kernels/cuda/decode_graphs.py` stands in its place.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn.functional import linear

from stretto.engines.native.batch import DecodeBatch
from stretto.engines.native.cache import KeyValueCache, SharedPrefixes
from stretto.engines.native.layout import DecodeLayout
from stretto.engines.native.sampling import draw_from
from stretto.engines.native.truncation import Truncation
from stretto.kernels.cpu.decode_kernels import decode_kernels
from stretto.models.latent_attention import latent_of
from stretto.models.load import Policy
from stretto.models.logprob_head import finished_logits
from stretto.weights.tensors import checksums


class Steps:
    """Computes every step as it comes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        latent = latent_of(policy.network)
        self.cache, self.prefixes = KeyValueCache(latent), KeyValueCache(latent)
        self.kernels = decode_kernels(policy.dtype) if policy.device.type == "cpu" else None

    def product(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """States times a weight."""
        return linear(states, weight, bias)

    def draw(self, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """(n, w) tokens that the keys draw from `batch.hidden`, and their log-probabilities."""
        n, width = batch.hidden.shape[:2]
        tokens, logprobs = draw_from(
            batch.hidden.flatten(0, 1),
            self.policy.head(),
            keys=batch.keys.repeat_interleave(width),
            positions=places(batch.positions, width),
            temperatures=batch.temperatures.repeat_interleave(width),
            product=self.product,
            some_greedy=bool((batch.temperatures == 0).any()),
            weigh=self.kernels.weigh if self.kernels is not None else None,
        )
        return tokens.view(n, width), logprobs.view(n, width)

    def draw_kept(self, batch: DecodeBatch, truncation: Truncation) -> tuple[Tensor, Tensor, Tensor]:
        """As `draw` from a part of the distribution; also the (n, w, K) ids of that part."""
        n, width = batch.hidden.shape[:2]
        head = self.policy.head()
        tokens, logprobs, ids = truncation.draw(
            self.product(batch.hidden.flatten(0, 1), head.weight, head.bias),
            keys=batch.keys.repeat_interleave(width),
            positions=places(batch.positions, width),
            temperatures=batch.temperatures.repeat_interleave(width),
            finish=lambda raw: finished_logits(raw, head, 1.0),
        )
        return tokens.view(n, width), logprobs.view(n, width), ids.view(n, width, -1)

    def forward(self, batch: DecodeBatch, shared: SharedPrefixes | None, own: int) -> Tensor:
        """(n, w, W) states after the newest tokens and their drafts; `own` is the most tokens in a slot before them."""
        n, width = len(batch.newest), batch.drafts.shape[1] + 1
        layout = DecodeLayout(
            lengths=batch.lengths,
            bases=batch.bases,
            width=width,
            longest=own + width,
            cache=self.cache,
            prefixes=shared,
            kernels=self.kernels,
        )
        return self.hidden(newest(batch).flatten(), places(batch.lengths, width), layout).view(n, width, -1)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: DecodeLayout) -> Tensor:
        """(T) token ids -> (T, W) states before the head."""
        return self.policy.hidden(tokens, positions, layout)

    def over(self, late: bool) -> bool:
        """Whether a round ends, whose seconds this process takes for over or not."""
        return late

    def weights_changed(self) -> None:
        """Told after every publish; nothing is kept here that follows from weights."""

    def checksums(self, names: Collection[str]) -> dict[str, str]:
        """Of what is read of these parameters, and of any that are read as copies which are not the same any more."""
        network, spoiled = self.policy.network, self.spoiled()
        tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        read = {name: spoiled.get(id(tensor), tensor) for name, tensor in tensors.items()}
        return checksums((name, held) for name, held in read.items() if name in names or held is not tensors[name])

    def spoiled(self) -> dict[int, Tensor]:
        """Id of a weight -> what is read instead of it and is not the same; nothing where weights are read in place."""
        return {}

    def rest(self) -> None:
        """Told when nothing is left to decode: gives back what the next update makes worthless."""

    def release(self) -> None:
        """Gives all memory back."""
        self.cache.clear()
        self.prefixes.clear()


def newest(batch: DecodeBatch) -> Tensor:
    """(n, w) the token sampled last and the drafts that go on from it."""
    return torch.cat([batch.newest[:, None], batch.drafts.clamp(min=0)], dim=1)


def places(first: Tensor, width: int) -> Tensor:
    """(n) first places -> (n*w) these and the ones after, sequence after sequence."""
    return (first[:, None] + torch.arange(width, device=first.device)).flatten()
