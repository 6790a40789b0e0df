"""A reward model that is trained: a decoder with one linear layer, which says a number for a conversation.

To the trainer it is a policy like any other, read once per conversation, at its end; the numbers are scores instead of
log-probabilities. It begins as the language model of the recipe with a head of zeros, so that all scores are equal.
What it writes is a sequence classifier of transformers, with one label, which `scalar_head` and everybody else loads;
an adapter is merged into a copy for that, in fp32, because rounding would lose much of a young one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stretto.errors import RecipeError
from stretto.models.load import Policy, load
from stretto.models.load_errors import reading_model
from stretto.models.logprob_head import accum_dtype
from stretto.models.merged import merged
from stretto.models.reading import at_the_end
from stretto.models.source import ModelFiles
from stretto.recipe.schema import ModelSection
from stretto.types import Conversation

OTHERS = "use a decoder such as a Llama or a Qwen"
"""What to do about a model that cannot become a reward model."""


@dataclass(slots=True, kw_only=True)
class RewardPolicy(Policy):
    """A decoder with a scalar head, ready for packed rows."""

    scalar: nn.Linear
    """From a state to a score; one of the network's layers."""

    def reads(self, conversation: Conversation) -> NDArray[np.int64]:
        """The place at which it is read: the conversation's end, as transformers reads it."""
        return at_the_end(self.network)(conversation)

    def read(
        self, states: Tensor, targets: Tensor, *, temperature: float, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(N, W) states there -> (N) scores; there is no distribution, so entropies are 0."""
        wide = accum_dtype(states.dtype)
        scores = linear(states.to(wide), self.scalar.weight.to(wide)).flatten()
        return scores, torch.zeros_like(scores)

    def save(self, folder: Path, *, base: Path | None = None) -> None:
        """Writes a Hugging Face folder of a sequence classifier; it needs no base beside it."""
        self.tokenizer.save_pretrained(folder)
        if self.adapted is None:
            self.network.save_pretrained(folder)
            return
        with torch.device("meta"):
            plain = type(self.network)(copy.deepcopy(self.network.config))
        plain.load_state_dict(merged(self.network), assign=True)
        plain.save_pretrained(folder)


def load_reward_policy(
    section: ModelSection, files: ModelFiles, *, seed: int, device: torch.device, base: Path | None = None
) -> RewardPolicy:
    """The language model that a recipe names as a reward model that has learned nothing yet."""
    policy = load(section, files, seed=seed, device=device, base=base)
    if policy.apart:
        reason = "its layers cannot be given packed rows, and a reward model is trained on nothing else"
        raise RecipeError.of("model.name", reason, OTHERS)
    with reading_model(files.name, failing="cannot be made a reward model", fix=OTHERS):
        network, head = classifier_around(policy.network, padding=policy.tokenizer.pad_token_id)
    return RewardPolicy(
        network=network,
        tokenizer=policy.tokenizer,
        adapted=policy.adapted,
        portable=policy.portable,
        scalar=head,
    )


def classifier_around(network: PreTrainedModel, *, padding: int | None) -> tuple[PreTrainedModel, nn.Linear]:
    """The sequence classifier of one label of a language model's family, around the very decoder; and its head."""
    config = copy.deepcopy(network.config)
    config.num_labels = 1
    config.pad_token_id = config.pad_token_id if padding is None else padding
    with torch.device("meta"):
        classifier: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    prefix = classifier.base_model_prefix
    heads = [(name, child) for name, child in classifier.named_children() if isinstance(child, nn.Linear)]
    if prefix != network.base_model_prefix or len(heads) != 1 or getattr(heads[0][1], "bias", None) is not None:
        raise ValueError(f"{type(classifier).__name__} is no decoder with one linear layer")
    setattr(classifier, prefix, getattr(network, prefix))
    head = nn.Linear(heads[0][1].in_features, 1, bias=False, device=network.device, dtype=network.dtype)
    nn.init.zeros_(head.weight)
    setattr(classifier, heads[0][0], head)
    classifier.generation_config = network.generation_config  # knows which tokens end the answers that are read
    return classifier.train(), head
