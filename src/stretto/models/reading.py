"""At which tokens of a conversation a model is read: what `Policy.reads` and the frozen scorers answer.

One place for each trained token. A language model says the log-probability of a token where it was chosen, before it. A
sequence classifier is read where its own family reads it, at the last token that is no padding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from stretto.types import Conversation

Reads = Callable[[Conversation], NDArray[np.int64]]
"""Conversation -> the places of the tokens at which a model is read."""


def before_trained(conversation: Conversation) -> NDArray[np.int64]:
    """The token before each that is trained: the state in which it was chosen."""
    return np.flatnonzero(conversation.trained) - 1


def at_the_end(network: PreTrainedModel) -> Reads:
    """The last token that is no padding; what padding is, the model's configuration says, if anything is."""
    padding = network.config.get_text_config().pad_token_id

    def reads(conversation: Conversation) -> NDArray[np.int64]:
        tokens = conversation.tokens
        return (np.arange(len(tokens)) if padding is None else np.flatnonzero(tokens != padding))[-1:]

    return reads
