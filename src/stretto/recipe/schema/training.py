"""Sections `batch` and `optimizer`: batch size, updates per step, optimizer and learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.recipe.schema.base import Count, Natural, NotNegative, Positive, Section, Share


class Response(Section):
    """Lognormal distribution of completion lengths, truncated at `cap`."""

    mean: Positive = 28.0
    """Mean length in tokens."""
    sigma: NotNegative = 0.6
    """Standard deviation of the logarithm of the length."""
    cap: Count = 64
    """Max length in tokens."""


class LengthsSection(Section):
    """Sequence lengths assumed by plans and forecasts."""

    prompt: Count = 43
    """Prompt length in tokens."""
    response: Response = Response()
    """Distribution of completion lengths."""
    from_run: str | None = None
    """Run folder whose samples give both distributions."""


class BatchSection(Section):
    """One step: prompts x samples trajectories, epochs x updates optimizer updates."""

    prompts: Count = 8
    """Prompts per step."""
    samples: Count = 8
    """Trajectories per prompt (group size)."""
    updates: Count = 1
    """Optimizer updates per step and epoch, each on an equal part of the trajectories. Above 1, later updates are
    off-policy and clipping acts."""
    epochs: Count = 1
    """Passes over the trajectories of a step. Above 1, later updates are off-policy and clipping acts."""
    oversample: Annotated[float, Field(ge=1.0)] = 1.0
    """Factor of prompts launched per step. Training uses the first accepted groups, in launch order."""
    max_rounds: Count = 10
    """Max rounds of resampling before training on an incomplete batch."""
    token_budget: Literal["auto"] | Count = "auto"
    """Max tokens per microbatch. `auto` picks the largest size that fits."""
    lengths: LengthsSection | None = None
    """Sequence lengths for `stretto plan`, `placement.strategy: auto` and forecasts."""

    @property
    def updates_a_step(self) -> int:
        """Optimizer updates per step over all epochs."""
        return self.epochs * self.updates


class UpdateSection(Section):
    """Optimizer settings of one trained model."""

    name: Literal["adamw", "adamw16bit", "adamw8bit"] = "adamw"
    """AdamW variant. State next to a bf16 weight and its gradient: adamw 12 bytes per parameter, adamw16bit 6,
    adamw8bit 4 (moments rounded stochastically)."""
    lr: Literal["auto"] | NotNegative = "auto"
    """Peak learning rate. `auto`: 5e-4 / sqrt(hidden size) for LoRA, 0.004 / hidden size for full fine-tuning. In SFT,
    reward models and critics: 4e-3 / sqrt(hidden size) for LoRA, 0.008 / hidden size for full fine-tuning."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay."""
    clip: Positive | None = 1.0
    """Max gradient norm, after normalization over the whole step. `null` disables clipping."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate schedule after the warm-up."""
    warmup: Natural = 0
    """Updates of linear warm-up. Unset: 5 if `lr` is `auto`, else 0."""

    @property
    def peak(self) -> float:
        """Learning rate after the warm-up, of a resolved recipe."""
        if self.lr == "auto":
            raise ValueError("optimizer.lr is auto, and the recipe was not resolved for its model")
        return self.lr


class Optimizer(UpdateSection):
    """Optimizer of the policy, and memory and communication of its gradients."""

    checkpointing: Literal["auto"] | bool = "auto"
    """Activation checkpointing. `auto` turns it on when a device runs out of memory."""
    reduce: Literal["exact", "bfloat16"] = "exact"
    """Gradient all-reduce between devices: exact, or bfloat16 with error feedback and half the traffic."""
