"""The sizes of a model, and what follows from them: parameters, products per token, bytes of KV cache.

No weights and no torch: a shape comes from the table of well-known families (`families`), from numbers in a recipe, or
from a config.json. The counts leave out norms and biases, which never matter to a plan.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stretto.errors import RecipeError
from stretto.models.plausible import implausible
from stretto.planner.cost.windows import windows_of
from stretto.recipe.schema import Shape

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Linear layers of a feed-forward layer; one without a gate lacks the first."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder. What follows from them is worked out once: a search asks for it again and again."""

    name: str
    """The model's name, as people call it."""
    layers: int
    """Decoder layers."""
    hidden: int
    """Hidden size."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Size of a head."""
    ffn: int
    """Size of the feed-forward layer of a dense layer."""
    vocab: int
    """Vocabulary."""
    tied: bool = False
    """Embedding and head are one matrix."""
    gated: bool = True
    """The feed-forward layer has a gate: three matrices instead of two."""
    experts: int = 0
    """Routed experts per layer; 0 for a dense model."""
    top_k: int = 0
    """Experts that a token visits."""
    expert_ffn: int = 0
    """Size of one expert."""
    shared_experts: int = 0
    """Experts of the same size that every token visits."""
    dense_layers: int = 0
    """Layers of a mixture that are dense."""
    kv_rank: int = 0
    """Latent size of keys and values (multi-head latent attention); 0 for ordinary attention."""
    q_rank: int = 0
    """Latent size of queries; 0 if they are projected directly."""
    rope_dim: int = 0
    """Part of a latent head that carries positions, shared by all heads."""
    value_dim: int = 0
    """Size of a value head where it differs; 0 if it is `head_dim`."""
    windowed_layers: int = 0
    """Layers whose attention sees only `window` tokens."""
    window: int = 0
    """How many those see."""
    adapted: tuple[str, ...] | None = None
    """Names of the linear layers that an adapter sits on; `attention` for all of attention, none for all."""
    one_qkv: str = ""
    """Name of the linear layer that is queries, keys and values in one; empty where they are three."""
    one_gate_up: bool = False
    """Gate and up of a feed-forward layer are one linear layer, `gate_up_proj`."""
    adapts_experts: bool = True
    """Adapters sit on routed experts, too, where they sit on all linear layers; not if these are in few bits."""
    speaks: bool = True
    """It has a head with a number for each word; a critic or a reward model says one number."""
    uncut: bool = False
    """True if devices may not be able to share its matrices or spread its experts (`models.tensor_parallel`)."""
    narrows: bool = True
    """Most of it can be stored in few bits (`models.quantised`)."""

    @cached_property
    def values(self) -> int:
        """Size of a value head."""
        return self.value_dim or self.head_dim

    @cached_property
    def queries(self) -> int:
        """Size of a query head, positions included."""
        return self.head_dim + self.rope_dim

    @cached_property
    def attention_params(self) -> int:
        """Of one layer. Latent attention as in DeepSeek-V2: projections down to the ranks and up to the heads."""
        out = self.heads * self.values * self.hidden
        if not self.kv_rank:
            return (
                self.hidden * (self.heads + self.kv_heads) * self.head_dim
                + self.hidden * self.kv_heads * (self.values)
                + out
            )
        width = self.heads * self.queries
        query = self.q_rank * (self.hidden + width) if self.q_rank else self.hidden * width
        down = self.hidden * (self.kv_rank + self.rope_dim)
        return query + down + self.kv_rank * self.heads * (self.head_dim + self.values) + out

    @cached_property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def matrices(self) -> int:
        """Weight matrices of a feed-forward layer."""
        return 3 if self.gated else 2

    @cached_property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return self.matrices * self.hidden * self.expert_ffn

    @cached_property
    def embedding_params(self) -> int:
        """Of the embedding, which is the head as well where they are tied."""
        return self.vocab * self.hidden

    @cached_property
    def logits(self) -> int:
        """Numbers of the head for one token, as far as they count."""
        return self.vocab if self.speaks else 0

    @cached_property
    def plain_params(self) -> int:
        """Of embedding and head."""
        return self.embedding_params + (0 if self.tied else self.logits * self.hidden)

    @cached_property
    def common_params(self) -> int:
        """What every token passes through in the layers: attention, dense feed-forward, shared experts, router."""
        dense = (self.layers - self.moe_layers) * self.matrices * self.hidden * self.ffn
        shared = self.moe_layers * (self.shared_experts * self.expert_params + self.hidden * self.experts)
        return self.layers * self.attention_params + dense + shared

    @cached_property
    def uncut_params(self) -> int:
        """Of the layers what is read before heads and experts are told apart: latents, routers."""
        latents = self.hidden * (self.q_rank + self.kv_rank + self.rope_dim) if self.kv_rank else 0
        return self.layers * latents + self.moe_layers * self.hidden * self.experts

    @cached_property
    def routed_params(self) -> int:
        """All routed experts of all layers."""
        return self.moe_layers * self.experts * self.expert_params

    @cached_property
    def params(self) -> int:
        """All of them."""
        return self.common_params + self.routed_params + self.plain_params

    def trained(self, adapter: int) -> tuple[float, float]:
        """Parameters that are trained, without and of routed experts; with a rank, those of an adapter."""
        if adapter:
            return float(adapter * self.linear_inputs), 0.0
        return float(self.params - self.routed_params), float(self.routed_params)

    @cached_property
    def active_params(self) -> int:
        """What takes part in the products of one token: common parts, its experts, the head."""
        return self.common_params + self.moe_layers * self.top_k * self.expert_params + self.logits * self.hidden

    @cached_property
    def tensors(self) -> int:
        """Tensors of a checkpoint, each expert's matrices by themselves."""
        per_layer = 2 + (4 if not self.kv_rank else 7 if self.q_rank else 5)
        dense = (self.layers - self.moe_layers) * self.matrices
        routers = self.moe_layers * (1 + self.matrices * bool(self.shared_experts))
        ends = 2 if self.tied or not self.speaks else 3
        return self.layers * per_layer + dense + routers + ends + self.expert_tensors

    @cached_property
    def expert_tensors(self) -> int:
        """Those of them that are a routed expert's."""
        return self.moe_layers * self.experts * self.matrices

    @cached_property
    def attention_inputs(self) -> dict[str, int]:
        """Name of a linear layer of attention -> its in + out size."""
        queries, keys, out = self.heads * self.queries, self.kv_heads * self.head_dim, self.heads * self.values
        ends = {"q_proj": self.hidden + queries, "o_proj": out + self.hidden}
        if self.one_qkv:
            return {self.one_qkv: self.hidden + queries + keys + self.kv_heads * self.values, "o_proj": ends["o_proj"]}
        if not self.kv_rank:
            return ends | {"k_proj": self.hidden + keys, "v_proj": self.hidden + self.kv_heads * self.values}
        if self.q_rank:
            del ends["q_proj"]
            ends |= {"q_a_proj": self.hidden + self.q_rank, "q_b_proj": self.q_rank + queries}
        up = self.kv_rank + self.heads * (self.head_dim + self.values)
        return ends | {"kv_a_proj_with_mqa": self.hidden + self.kv_rank + self.rope_dim, "kv_b_proj": up}

    @cached_property
    def linear_inputs(self) -> int:
        """Sum of in + out sizes over the linear layers that adapters sit on; times the rank, an adapter's size."""
        chosen = self.adapted
        if chosen == ("attention",):
            chosen = tuple(self.attention_inputs)
        attention = sum(size for name, size in self.attention_inputs.items() if chosen is None or name in chosen)
        names = PROJECTIONS[-self.matrices :]
        matrices = sum(chosen is None or name in chosen for name in names)
        dense = matrices * (self.hidden + self.ffn)
        if self.one_gate_up:
            sizes = {"gate_up_proj": self.hidden + 2 * self.ffn, "down_proj": self.hidden + self.ffn}
            dense = sum(size for name, size in sizes.items() if chosen is None or name in chosen)
        expert = matrices * (self.hidden + self.expert_ffn) * self.shared_experts + self.experts * self._expert_inputs
        return self.layers * attention + (self.layers - self.moe_layers) * dense + self.moe_layers * expert

    @cached_property
    def _expert_inputs(self) -> int:
        """The same of one routed expert."""
        adapts = self.adapted is None and self.adapts_experts
        return self.matrices * (self.hidden + self.expert_ffn) if adapts else 0

    @cached_property
    def active_inputs(self) -> int:
        """The same, of the matrices that one token passes through."""
        idle = self.experts - self.top_k if self.experts else 0
        return self.linear_inputs - self.moe_layers * idle * self._expert_inputs

    @cached_property
    def largest_matrix(self) -> int:
        """Parameters of the largest linear layer but embedding and head."""
        attention = self.hidden * self.heads * max(self.queries, self.values)
        dense = self.hidden * self.ffn if self.layers > self.moe_layers else 0
        shared = self.hidden * self.expert_ffn * max(1, self.shared_experts) if self.experts else 0
        return max(attention, dense, shared)

    def kv_bytes(self, context: float, *, width: float = 2.0) -> float:
        """Cache of one sequence of this many tokens: 2 * layers * kv heads * head size, or the latent and its key."""
        if self.kv_rank:
            per_layer: float = self.kv_rank + self.rope_dim
        else:
            per_layer = self.kv_heads * (self.head_dim + self.values)
        seen = min(context, self.window) if self.windowed_layers else 0.0
        return width * per_layer * ((self.layers - self.windowed_layers) * context + self.windowed_layers * seen)


def shape_of(told: str | Shape, *, field: str = "model.shape") -> ModelShape:
    """The shape that a recipe names or gives in numbers."""
    if isinstance(told, str):
        return named_shape(told, field=field)
    values = {key: value for key, value in told.model_dump().items() if value is not None}
    return _checked({"name": "given", **values}, field)


def named_shape(name: str, *, field: str = "model.shape") -> ModelShape:
    """A well-known model by name, or the one in a folder with a config.json (or in that file)."""
    from stretto.planner.cost.families import FAMILIES  # the table is made of shapes, so it imports this module

    path = Path(name)
    if path.name == "config.json" or (path / "config.json").is_file():
        return read_config(path if path.name == "config.json" else path / "config.json", field=field)
    key = name.rsplit("/", 1)[-1].lower().replace("_", "-")
    for ending in ("", "-instruct", "-base", "-chat", "-it", "-hf", "-instruct-2507", "-thinking-2507"):
        if (found := FAMILIES.get(key.removesuffix(ending))) is not None:
            return found
    near = difflib.get_close_matches(key, FAMILIES, n=4, cutoff=0.4)
    told = f"the nearest are {', '.join(near)}" if near else f"some that are: {', '.join(list(FAMILIES)[::8])}"
    numbers = "{layers: 32, hidden: 4096, heads: 32, kv_heads: 8, ffn: 14336, vocab: 128256}"
    raise RecipeError.of(
        field,
        f"no model is known as {name!r}, and no folder here has its config.json; {told}",
        "name one of them, a folder with its config.json, or give numbers"
        + (f" as {field.removesuffix('.name')}.shape={numbers}" if field.endswith(".name") else f": {numbers}"),
    )


CUT_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
"""Types of models that were tried cut."""

ONE_QKV = {
    "phi3": "qkv_proj",
    "codegen": "qkv_proj",
    "gpt_neox": "query_key_value",
    "falcon": "query_key_value",
    "bloom": "query_key_value",
    "gpt2": "c_attn",
    "gpt_bigcode": "c_attn",
}
"""Types of models whose queries, keys and values are one linear layer -> its name."""

ONE_GATE_UP = ("phi3", "glm", "glm4")
"""Types of models whose gate and up are one linear layer."""

UNGATED = ("codegen", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "starcoder2")
"""Types of models whose feed-forward layers are two matrices."""

WIDE_TYPES = ("gpt_oss", "gpt2")
"""Types of models most of whose weights are in layers that cannot be stored in few bits."""

UNBIASED = ("mistral", "mixtral", "qwen2")
"""Those whose `attention_bias` gives the last layer of attention none."""

CONFIG_KEYS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
    "ffn": ("intermediate_size", "ffn_dim", "n_inner"),
    "vocab": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
}
"""Our names -> what config.json files call them; the first that is there counts."""


def read_config(path: Path, *, field: str = "model.shape") -> ModelShape:
    """The shape that a Hugging Face config.json describes."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as wrong:
        raise RecipeError.of(field, f"{path} cannot be read: {wrong}", "name a folder with a config.json") from None
    if isinstance(told, dict) and (why := implausible(told)):
        raise RecipeError.of(
            field, f"{path} cannot be right: {why}", "correct it there, or give model.shape in numbers"
        )
    if isinstance(told, dict) and isinstance(told.get("text_config"), dict):
        told = told["text_config"]
    if not isinstance(told, dict):
        raise RecipeError.of(field, f"{path} is no object", "name the config.json of a model")
    found = {ours: told[key] for ours, keys in CONFIG_KEYS.items() for key in reversed(keys) if told.get(key)}
    if "tie_word_embeddings" not in told and str(told.get("model_type")).startswith("gemma"):
        found["tied"] = True  # their files leave out what is the default of the family
    shape = _checked({"name": path.parent.name or "config.json", **found}, field)
    kind = told.get("model_type")
    windowed, window = windows_of(str(kind), shape.layers, told)
    biased = told.get("mlp_bias") or (told.get("attention_bias") and kind not in UNBIASED)
    uncut = kind not in CUT_TYPES or bool(biased)
    return replace(
        shape,
        windowed_layers=windowed,
        window=window,
        uncut=uncut,
        narrows=kind not in WIDE_TYPES,
        gated=kind not in UNGATED,
        one_qkv=ONE_QKV.get(str(kind), ""),
        one_gate_up=kind in ONE_GATE_UP,
    )


def _checked(values: Mapping[str, Any], field: str) -> ModelShape:
    """A shape from partial numbers, with what is left out derived and what cannot be refused."""
    told = dict(values)
    if told.get("expert_ffn"):
        told.setdefault("ffn", told["expert_ffn"])
    missing = [key for key in ("layers", "hidden", "heads", "ffn", "vocab") if key not in told]
    numbers = {key: value for key, value in told.items() if key not in ("name", "tied", "gated")}
    wrong = [key for key, value in numbers.items() if not isinstance(value, int) or value < 0]
    wrong += [key for key in ("layers", "hidden", "heads", "ffn", "vocab") if told.get(key) == 0]
    if missing or wrong:
        reason = f"it lacks {', '.join(missing)}" if missing else f"{', '.join(wrong)} must be whole and above zero"
        raise RecipeError.of(field, reason, "give layers, hidden, heads, kv_heads, head_dim, ffn and vocab")
    told.setdefault("kv_heads", told["heads"])
    told.setdefault("head_dim", max(1, told["hidden"] // told["heads"]))
    told["tied"] = bool(told.get("tied", False))
    if told.get("experts"):
        told.setdefault("top_k", min(2, told["experts"]))
        told.setdefault("expert_ffn", told["ffn"])
    if not told.get("kv_rank"):
        told = {key: value for key, value in told.items() if key not in ("q_rank", "rope_dim")}
    return ModelShape(**told)
