"""A frozen model that says one number at a token: a reward model's score, a critic's value.

It is a decoder with a linear head. A reward model is read where the conversation ends, as transformers reads its
sequence classifiers; a critic, before every sampled token. Both are asked over the packed rows that are trained on.
Weights come from a folder or the hub, or for `scratch` from the model that is trained, with a head of noise on top:
that says nothing about an answer, and shows what the stage costs. Nothing is trained here; a critic that learns is a
`ValueModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from stretto.errors import RecipeError, TrainingError
from stretto.models import attention
from stretto.models import packing_selfcheck as probe
from stretto.models.attention import TreeLayout
from stretto.models.load import hidden_states, load, refuse_unknown_attention, switch_dropout_off
from stretto.models.load_errors import reading_model
from stretto.models.memory import memory_errors
from stretto.models.reading import Reads, at_the_end, before_trained
from stretto.models.source import ModelFiles, facts
from stretto.recipe.schema import ModelSection
from stretto.training.packing import merge
from stretto.training.rows import halved, map_microbatches
from stretto.types import Conversation, Sample

CLASSIFIER = "name a decoder with one label, such as a Llama or a Qwen, or scratch"
"""What to do about a model that cannot serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarRole:
    """What a role asks of a model."""

    field: str
    """The model's section in a recipe."""
    classes: tuple[str, ...]
    """How the names of transformers' classes for such models end, the usual one first."""
    reads: Callable[[PreTrainedModel], Reads]
    """Where such a model is read."""


class FrozenScorer:
    """One such model."""

    def __init__(self, network: PreTrainedModel, head: nn.Linear, reads: Reads, *, token_budget: int) -> None:
        self.network, self.head, self.reads = network.requires_grad_(False), head.requires_grad_(False), reads
        self.token_budget = token_budget

    def parameters(self) -> Iterator[nn.Parameter]:
        """Its weights; those of the head are the network's own, or beside it."""
        return nn.ModuleList([self.network, self.head]).parameters()

    @property
    def decoder(self) -> PreTrainedModel:
        """What has its layers."""
        return self.network

    def modules(self) -> list[nn.Module]:
        """What it computes with; of a language model not the head."""
        return [self.network.get_decoder(), self.head]

    @torch.no_grad()
    def score(self, conversations: Sequence[Conversation]) -> list[NDArray[np.float64]]:
        """Its numbers for each conversation; none for one in which nothing was sampled."""
        return map_microbatches(conversations, budget=self.token_budget, numbers=self.numbers, smaller=self._halves)

    def numbers(self, row: Sequence[Sample]) -> list[NDArray[np.float64]]:
        """Those of a row's conversations."""
        tree, device = merge([sample.conversation.tokens for sample in row]), self.network.device
        places = [place[self.reads(sample.conversation)] for sample, place in zip(row, tree.places, strict=True)]
        with memory_errors():
            states = hidden_states(
                self.network,
                torch.as_tensor(tree.tokens, device=device),
                torch.as_tensor(tree.positions, device=device),
                TreeLayout.of(tree.segments, device),
            )
            sources = torch.as_tensor(np.concatenate(places), device=device)
            numbers = self.head(states[sources]).flatten().double().cpu().numpy()
        return np.split(numbers, np.cumsum([len(place) for place in places])[:-1])

    def _halves(self, row: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        if (cut := halved(row)) is None:
            raise TrainingError("the device has too little memory to score a single conversation; use smaller models")
        parts, tokens = cut
        self.token_budget = max(1, min(self.token_budget, tokens))
        return parts


CLASSES: dict[str, Any] = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForCausalLM": AutoModelForCausalLM,
}
"""How a class's name ends -> transformers' loader. The last has no head of one number, and gets one."""

KINDS = {
    "reward": ScalarRole(field="roles.reward_model", classes=("ForSequenceClassification",), reads=at_the_end),
    "value": ScalarRole(
        field="roles.critic",
        classes=("ForTokenClassification", "ForSequenceClassification", "ForCausalLM"),
        reads=lambda network: before_trained,
    ),
}
"""Role -> what it asks."""

Base = Callable[[], PreTrainedModel]
"""Loads the network that is trained, as it was before training and without an adapter."""


def load_scorer(
    role: str, files: ModelFiles, *, base: Base, dtype: torch.dtype, device: torch.device, seed: int, token_budget: int
) -> FrozenScorer:
    """The model of a role; raises a RecipeError if its files hold no such model."""
    network, head = network_and_head(role, files, base=base, dtype=dtype, device=device)
    if head is None and not files.scratch:
        fix = "name a classifier of one label, or give the critic an optimizer"
        raise RecipeError.of(f"{KINDS[role].field}.name", f"{files.name} has no head of one number", fix)
    head = _fresh_head(network, seed=seed) if head is None else head
    return FrozenScorer(network, head, KINDS[role].reads(network), token_budget=token_budget)


def network_and_head(
    role: str, files: ModelFiles, *, base: Base, dtype: torch.dtype, device: torch.device
) -> tuple[PreTrainedModel, nn.Linear | None]:
    """The model of a role and its head; none if it has no head of one number yet. RecipeError if it can have none."""
    kind = KINDS[role]
    with concerning(f"{kind.field}.name"):
        if files.scratch:
            return base(), None
        ending = _class_of(files, kind)
        network = _classifier(ending, files, dtype=dtype, device=device)
        return network, None if ending == "ForCausalLM" else _own_head(network)


def _class_of(files: ModelFiles, kind: ScalarRole) -> str:
    """Which of the classes that can serve the files are of; the usual one where they do not say."""
    known = facts(files)
    named = known.architectures if known else ()
    return next((ending for ending in kind.classes if any(name.endswith(ending) for name in named)), kind.classes[0])


@contextmanager
def concerning(field: str) -> Iterator[None]:
    """Whatever is found wrong with a model is wrong with this key."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(*(replace(problem, field=field) for problem in error.problems)) from error


def base_network(
    section: ModelSection,
    files: ModelFiles,
    *,
    seed: int,
    device: torch.device,
    base: Path | None,
    as_stored: bool = False,
) -> Base:
    """How the network that is trained is loaded once more; `as_stored` in as few bits as the policy's, which stay as
    they are."""
    plain = section.model_copy(update={"adapter": None} | ({} if as_stored else {"quantize": "none"}))
    return lambda: load(plain, replace(files, adapter=None), seed=seed, device=device, base=base).network


def _classifier(ending: str, files: ModelFiles, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of a class, its attention taken over."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    network: PreTrainedModel
    with reading_model(files.name, fix=CLASSIFIER):
        network, found = CLASSES[ending].from_pretrained(
            files.pretrained, dtype=dtype, output_loading_info=True, trust_remote_code=False
        )
    if missing := sorted(found["missing_keys"]):  # they would be filled with noise
        raise _refusal(f"{files.name} lacks {len(missing)} of its weights ({', '.join(missing[:3])})")
    refuse_unknown_attention(network.config)
    network.to(device).eval()
    switch_dropout_off(network)
    own = probe.own_states(network)
    network.set_attn_implementation(attention.NAME)
    probe.refuse_others(network, own, partial(probe.packed_states, network, partial(hidden_states, network)))
    return network


def _own_head(network: PreTrainedModel) -> nn.Linear:
    heads = [module for module in network.children() if isinstance(module, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != 1:
        raise _refusal("it does not end in one linear layer of one label")
    return heads[0]


def _fresh_head(network: PreTrainedModel, *, seed: int) -> nn.Linear:
    """Noise that depends on the seed alone; numbers about as large as one entry of a state."""
    width = network.config.get_text_config().hidden_size
    head = nn.utils.skip_init(nn.Linear, width, 1, bias=False)
    nn.init.normal_(head.weight, std=1 / math.sqrt(width), generator=torch.Generator().manual_seed(seed))
    return head.to(device=network.device, dtype=network.dtype)


def _refusal(reason: str) -> RecipeError:
    """What to tell the user; the field is filled in by `concerning`."""
    return RecipeError.of("model.name", reason, CLASSIFIER)
