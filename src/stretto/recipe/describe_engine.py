"""What a recipe's engine samples from, in words, where that is not what is trained."""

from __future__ import annotations

from stretto.recipe.schema import ApartEngineSection, SglangEngineSection
from stretto.recipe.schema.engine import EngineSection

APART = (
    "; vLLM samples from a copy of the weights, which is read back and compared after each publish; its noise is a "
    "seed per request, so an answer is promised to be the same again only where its request does not move"
)
"""What is said of an engine with weights of its own."""

SERVED = (
    "; {url} samples: its tensors cannot be read, so what it says of a few tokens is compared with the trainer after "
    "each publish; its noise is a seed per request"
)
"""What is said of a server of the user's."""

SEEDED = ", which SGLang heeds if it was started with --enable-deterministic-inference"
"""What is said of one that may draw as it likes."""


def copy_sentence(engine: EngineSection) -> str:
    """What is said of an engine that does not sample from what is trained; nothing of others."""
    if not isinstance(engine, ApartEngineSection):
        return ""
    seeded = SEEDED if isinstance(engine, SglangEngineSection) else ""
    return APART if engine.url is None else SERVED.format(url=engine.url) + seeded
