"""The sections `batch` and `optimizer`: how much is learned from at once, and how a gradient becomes an update."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.recipe.schema.base import Count, Natural, NotNegative, Positive, Section, Share


class Response(Section):
    """Distribution of answer lengths in tokens: lognormal, cut at `cap`."""

    mean: Positive = 28.0
    """Mean."""
    sigma: NotNegative = 0.6
    """Standard deviation of the logarithm."""
    cap: Count = 64
    """Longest."""


class LengthsSection(Section):
    """Lengths that plans are made for; what is generated is as long as it comes out."""

    prompt: Count = 43
    """Prompt tokens."""
    response: Response = Response()
    """Answer tokens."""
    from_run: str | None = None
    """Take both from a run's samples instead."""


class BatchSection(Section):
    """One step: prompts x samples trajectories, epochs x updates optimizer updates."""

    prompts: Count = 8
    """Prompts a step."""
    samples: Count = 8
    """Samples per prompt."""
    updates: Count = 1
    """Optimizer updates that the answers of a step are divided into; above 1 the later ones are off-policy and clipping
    acts."""
    epochs: Count = 1
    """How often each answer is trained on, in other updates each time; above 1 as above."""
    oversample: Annotated[float, Field(ge=1.0)] = 1.0
    """Launch this many times the prompts and train on the first that are worth it, in launch order."""
    max_rounds: Count = 10
    """Rounds of resampling before training on what is there."""
    token_budget: Literal["auto"] | Count = "auto"
    """Most tokens in a micro-batch; the only thing that decides its size."""
    lengths: LengthsSection | None = None
    """Lengths that `plan`, `placement.strategy: auto` and forecasts count with."""

    @property
    def updates_a_step(self) -> int:
        """Optimizer updates of all epochs."""
        return self.epochs * self.updates


class UpdateSection(Section):
    """How a gradient becomes an update, whichever model it is of."""

    name: Literal["adamw", "adamw16bit", "adamw8bit"] = "adamw"
    """AdamW. Beside a bf16 weight and its gradient it keeps 12 bytes; adamw16bit keeps 6 and adamw8bit 4, with moments
    that are rounded at random."""
    lr: Literal["auto"] | NotNegative = "auto"
    """Peak learning rate. `auto` divides a constant by the model's hidden size: 0.012 for LoRA, 0.008 for all
    weights, 0.1 for LoRA that learns from rows or is a critic's."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay of the two moments."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    clip: Positive | None = 1.0
    """Largest gradient norm, after the global denominator; null for none."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup: Natural = 0
    """Updates of linear warm-up. Unset, 5 where `lr` is `auto`."""

    @property
    def peak(self) -> float:
        """Learning rate after the warm-up, of a resolved recipe."""
        if self.lr == "auto":
            raise ValueError("optimizer.lr is auto, and the recipe was not resolved for its model")
        return self.lr


class Optimizer(UpdateSection):
    """How the gradient of the model that is trained becomes an update, and how gradients are made and added up."""

    checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward; auto switches it on when memory runs out."""
    reduce: Literal["exact", "bfloat16"] = "exact"
    """Several devices: add gradients up as they are, or rounded, with half the bytes and error feedback."""
