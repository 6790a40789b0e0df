"""The model that is trained: loading it, and the two things anyone asks of it, hidden states and the head.

Engine and trainer use the same modules through this class, so publishing weights on one device is free. Everything else
(packing, losses, sampling) works on what `Policy.hidden` returns and never calls the network itself.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from stretto.errors import RecipeError
from stretto.kernels.cpu.backward import take_over
from stretto.kernels.cuda.fused_layers import fuse_layers
from stretto.models import attention, gguf_reading
from stretto.models import packing_selfcheck as probe
from stretto.models.converted import settle
from stretto.models.expert_choices import ExpertChoices
from stretto.models.files import weights_fault
from stretto.models.latent_attention import keep_latents
from stretto.models.load_errors import reading_model
from stretto.models.logprob_head import Head, logprobs_of
from stretto.models.lora import add_adapter, fill_adapter
from stretto.models.quantised import quantise
from stretto.models.reading import before_trained
from stretto.models.scratch import character_tokenizer, fresh_network, keep_norms_exact
from stretto.models.source import ModelFiles, ask_hub, refuse_packed
from stretto.models.stop_tokens import stop_tokens
from stretto.models.unpacked import is_apart, set_apart, states_apart
from stretto.recipe.schema import ModelSection, Scratch
from stretto.types import Conversation

DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}


@dataclass(slots=True, kw_only=True)
class Policy:
    """A causal language model with its tokenizer, ready for packed rows."""

    network: PreTrainedModel
    """The causal model; adapters, where there are any, sit inside its layers."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer, with a chat template."""
    adapted: Any = None
    """PEFT's wrapper around `network`, or none for full fine-tuning."""
    routing: ExpertChoices | None = None
    """What its routers choose, where that is noted and followed."""
    portable: bool = True
    """False if the base is nothing that transformers could load by name, so that a run must keep a copy."""

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.network.dtype

    @property
    def context(self) -> int:
        """Longest sequence it was made for."""
        return int(getattr(self.network.config.get_text_config(), "max_position_embeddings", None) or 1 << 30)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a turn: the tokenizer's, the configuration's and the generation settings'."""
        return stop_tokens(self.network, self.tokenizer)

    def stop_at(self, tokens: frozenset[int]) -> None:
        """Lets its turns end with these token ids, as its chat template writes them."""
        self.network.generation_config.eos_token_id = sorted(tokens)

    @property
    def apart(self) -> bool:
        """True if it cannot be given packed rows, so that its conversations are computed one by one."""
        return is_apart(self.network)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: attention.AttentionLayout,
        *,
        experts: Tensor | None = None,
    ) -> Tensor:
        """(T) token ids of one row -> (T, W) states before the head; `experts` are those that its routers choose, if
        they are told."""
        if self.routing is not None:
            self.routing.followed = experts
        return hidden_states(self.network, tokens, positions, layout)

    def head(self) -> Head:
        """What turns hidden states into logits."""
        module = self.network.get_output_embeddings()
        softcap = getattr(self.network.config.get_text_config(), "final_logit_softcapping", None)
        return Head(weight=module.weight, bias=getattr(module, "bias", None), softcap=softcap)

    def reads(self, conversation: Conversation) -> NDArray[np.int64]:
        """The places at which it is read for the trained tokens: before each of them."""
        return before_trained(conversation)

    def read(
        self, states: Tensor, targets: Tensor, *, temperature: float, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(N, W) states there -> (N) log-probabilities of the trained tokens, (N) entropies."""
        return logprobs_of(states, self.head(), targets, temperature=temperature, kept=kept)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: weight for name, weight in self.network.named_parameters() if weight.requires_grad}

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The model as it was before training, where an adapter is what is trained."""
        if self.adapted is None:
            raise ValueError("full fine-tuning has no adapter to switch off; keep a frozen copy")
        with self.adapted.disable_adapter():
            yield

    def save(self, folder: Path, *, base: Path | None = None) -> None:
        """Writes a Hugging Face folder, or a PEFT adapter that names `base` as what it adapts."""
        self.tokenizer.save_pretrained(folder)
        if self.adapted is None:
            self.network.save_pretrained(folder)
            return
        if base is not None:
            self.adapted.peft_config["default"].base_model_name_or_path = str(base.resolve())
        self.adapted.save_pretrained(folder)


def hidden_states(
    network: PreTrainedModel, tokens: Tensor, positions: Tensor, layout: attention.AttentionLayout
) -> Tensor:
    """(T) token ids of one row -> (T, W) what a network's decoder makes of them."""
    if is_apart(network):
        return states_apart(network, tokens, cast(attention.TreeLayout, layout).segments)
    decoder = network.get_decoder()
    output = decoder(
        input_ids=tokens[None], position_ids=positions[None], use_cache=False, **{attention.KEYWORD: layout}
    )
    states: Tensor = output.last_hidden_state[0]
    return states


def choose_device(cluster: str) -> torch.device:
    """The first GPU if there is one, unless the recipe asks for the CPU."""
    return torch.device("cuda" if cluster != "1xcpu" and torch.cuda.is_available() else "cpu")


def load(
    section: ModelSection, files: ModelFiles, *, seed: int, device: torch.device, base: Path | None = None
) -> Policy:
    """Loads the model a recipe names, and the adapter if it names one. `base` is a run's own copy of the model, which
    is then read instead.

    A scratch model comes out random; warming it up is the run's business, because it needs a task.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if files.scratch and base is None:
        scratch = section.scratch or Scratch()
        network: PreTrainedModel = fresh_network(scratch, seed=seed)
        tokenizer: PreTrainedTokenizerBase = character_tokenizer(scratch.characters)
    else:
        own = ModelFiles(kind="folder", name=section.name, folder=base, file=None)
        network, tokenizer = load_files(files if base is None else own)
    refuse_moving_positions(network.config)
    settle(network, DTYPES[section.dtype])
    if section.quantize == "none":
        network.to(device)
    network.config.use_cache = False
    if files.scratch:
        keep_norms_exact(network)
    network.train()  # without dropout the modes are equal
    switch_dropout_off(network)
    if device.type == "cpu":
        take_over(network)
    if section.quantize != "none":
        quantise(network, section.quantize, device)
        network.to(device)
    fuse_layers(network)
    policy = Policy(network=network, tokenizer=tokenizer, portable=files.portable)
    with reading_model(files.name, failing="cannot be run"):
        take_over_attention(policy)
    if files.adapter is not None and (problem := files.adapter.refused(section.adapter)) is not None:
        raise RecipeError(problem)
    if section.adapter is None:
        return policy
    if files.adapter is not None and (told := files.adapter.other_base(section.quantize)) is not None:
        warnings.warn(told, stacklevel=2)
    adapted = add_adapter(network, section.adapter, seed=seed)
    if files.adapter is not None:
        fill_adapter(adapted, files.adapter)
    return replace(policy, adapted=adapted)


def take_over_attention(policy: Policy) -> None:
    """Makes every attention layer ask the layout, and proves on two short conversations that this changed nothing.

    A family with which that does not work keeps its own attention, if it comes out right one conversation at a time.
    """
    own = probe.own_logits(policy.network)
    try:
        refuse_other_layers(policy.network.config)
        policy.network.set_attn_implementation(attention.NAME)
        probe.refuse_wrong_rows(policy, own)
        keep_latents(policy.network)
    except RecipeError as error:
        set_apart(policy.network, policy.head())
        why = error.problems[0].reason.removesuffix(attention.WRONG)
        warnings.warn(
            f"{policy.network.config.model_type}: {why}; its conversations are computed one by one, so that no prompt "
            "is shared and decoding is slower",
            stacklevel=2,
        )


def switch_dropout_off(network: nn.Module) -> None:
    """Engine and trainer must agree; what modules took from the configuration is theirs, so it is changed in them."""
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, int | float):
                setattr(module, name, 0.0)


def load_files(files: ModelFiles) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Reads weights and tokenizer from a hub id, a folder or a GGUF file."""
    keywords: dict[str, Any] = {} if files.gguf is None else {"gguf_file": files.file}
    with reading_model(files.name):
        config, tokenizer = describe(files)
        # transformers shows a bar of its own for GGUF files that no setting switches off; failures are raised anyway.
        with quietly_once() if keywords else nullcontext():
            network, found = AutoModelForCausalLM.from_pretrained(
                files.pretrained,
                config=config,
                dtype="auto" if not keywords else torch.float32,
                output_loading_info=True,
                trust_remote_code=False,
                **keywords,
            )
    if missing := sorted(found["missing_keys"]):  # they would be filled with noise
        raise RecipeError.of(
            "model.name",
            f"{files.name} lacks {len(missing)} of its weights ({', '.join(missing[:3])})",
            "download or save it again, or name a causal language model",
        )
    if keywords:
        network = plain_copy(network)
    return network, tokenizer


@contextmanager
def quietly_once() -> Iterator[None]:
    """Loading from a GGUF file, of which nothing is kept afterwards."""
    try:
        with redirect_stderr(io.StringIO()), gguf_reading.read_once():
            yield
    finally:
        gguf_reading.forget()


def plain_copy(network: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model without the mark of the GGUF file, which would refuse to be saved."""
    settings = network.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(network.config).from_dict(settings)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    plain.load_state_dict(network.state_dict(), assign=True)
    plain.tie_weights()
    # Buffers that no state dict holds (rotary frequencies) still are on "meta"; the loaded model has them.
    for name, buffer in network.named_buffers():
        parent, _, leaf = name.rpartition(".")
        plain.get_submodule(parent).register_buffer(leaf, buffer, persistent=False)
    return plain


def refuse_unknown_attention(config: Any) -> None:
    """Refuses what packed rows would compute wrongly without a sound."""
    refuse_moving_positions(config)
    refuse_other_layers(config)


def refuse_moving_positions(config: Any) -> None:
    """Refuses positions that the sampler and the trainer of one conversation would not agree on."""
    settings = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(settings, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    if moving := kinds & {"dynamic", "longrope"}:
        raise RecipeError.of(
            "model.name",
            f"its positions ({', '.join(sorted(moving))} RoPE) depend on the longest sequence of the row, so packing "
            "would change results",
            "use a model with another RoPE type",
        )


def refuse_other_layers(config: Any) -> None:
    """Refuses layers whose attention looks right in a short conversation and is not in a long one."""
    settings = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers = set(getattr(settings, "layer_types", None) or [])
    unknown = layers - {"full_attention", "sliding_attention"}
    if unknown:
        raise RecipeError.of(
            "model.name",
            f"layers of type {', '.join(sorted(unknown))} are not available yet",
            "use an attention-only decoder",
        )


def describe(files: ModelFiles) -> tuple[Any, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of a hub id, a folder or a GGUF file, without its weights; the caller's own."""
    ask_hub(files)
    if files.kind == "folder" and files.folder is not None and (fault := weights_fault(files.folder)) is not None:
        raise RecipeError.of("model.name", f"{files.name}: {fault}", "restore or download the model's files again")
    if files.gguf is None:
        config = AutoConfig.from_pretrained(files.pretrained, trust_remote_code=False)
        if isinstance(packed := getattr(config, "quantization_config", None), dict):
            refuse_packed(files.name, packed)
            packed["dequantize"] = True  # as on CPUs: on GPUs transformers would bring layers of its own
        return config, AutoTokenizer.from_pretrained(files.pretrained, trust_remote_code=False)
    stamp = files.gguf.stat()
    return copy.deepcopy(_describe_gguf(str(files.folder), files.gguf.name, (stamp.st_mtime_ns, stamp.st_size)))


@lru_cache(maxsize=1)
def _describe_gguf(folder: str, file: str, stamp: tuple[int, int]) -> tuple[Any, PreTrainedTokenizerBase]:
    """Kept between the checks before a run and its loading: each reading of the vocabulary takes some three seconds."""
    with gguf_reading.read_once():
        return (
            AutoConfig.from_pretrained(folder, gguf_file=file, trust_remote_code=False),
            AutoTokenizer.from_pretrained(folder, gguf_file=file, trust_remote_code=False),
        )
