"""What can be proved of an engine whose tensors nobody can read: it says of a few tokens what the trainer says.

Two things are asked of its log-probabilities. They are the trainer's, but for rounding. And they are not to the bit
those that it has said under another name, where the trainer's own have moved: the smallest update there is changes how
nearly every token is rounded, here and there, so an adapter that was kept says the very same numbers again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.models.attention import TreeLayout
from stretto.models.load import Policy
from stretto.models.segments import Segment

TEXT = (
    "In 1815 the town had 3 mills, 40 farms and one long road, which ran north along the river until it met the sea. "
    "Whoever came by boat paid 12 pence; whoever walked paid nothing, but had to answer a question at the gate. "
    "def area(width, height): return width * height"
)
"""What the probe is made of."""

MOST = 64
"""Tokens of it."""

ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Mean difference from the trainer in nats: several times what rounding makes (1e-5 and 0.05 were measured)."""

MOVED = 0.5
"""Share of the tokens whose log-probability must have changed at the trainer for those of an engine to have, too."""

KEPT = 64
"""Earlier names whose answers are remembered."""

HEAT, ANSWER = 2.0, 16
"""Temperature (2 is the highest that servers take), and tokens sampled at it, that show what is told at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What was said of the probe under one name."""

    name: str
    """Of the weights."""
    engine: NDArray[np.float64]
    """By the engine."""
    trainer: NDArray[np.float64]
    """By the modules that are trained."""

    @property
    def apart(self) -> float:
        """Mean difference, in nats."""
        return float(np.abs(self.engine - self.trainer).mean())

    @property
    def sentence(self) -> str:
        """Where the two differ most."""
        place = int(np.abs(self.engine - self.trainer).argmax())
        mine, theirs = self.trainer[place], self.engine[place]
        return f"{self.apart:.2g} nats apart on average, at token {place + 1} {theirs:.4f} where {mine:.4f} is right"


class ProbeHistory:
    """What an engine has said of the probe."""

    def __init__(self) -> None:
        self.answers: deque[ProbeAnswer] = deque(maxlen=KEPT)

    def repeats(self, answer: ProbeAnswer) -> ProbeAnswer | None:
        """An earlier answer of other weights that an engine has given again, to the bit."""
        for before in reversed(self.answers):
            moved = float((before.trainer != answer.trainer).mean())
            if before.name != answer.name and moved > MOVED and np.array_equal(before.engine, answer.engine):
                return before
        return None

    def keep(self, answer: ProbeAnswer) -> None:
        """Remembers it, once."""
        if not any(before.name == answer.name for before in self.answers):
            self.answers.append(answer)


def probe_tokens(policy: Policy) -> list[int]:
    """Tokens of a text of which every model knows something."""
    return [int(token) for token in policy.tokenizer.encode(TEXT)][:MOST]


@torch.no_grad()
def own_logprobs(policy: Policy, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float64]:
    """What the modules that are trained say of tokens from the second on."""
    row, count = torch.tensor(tokens, device=policy.device), len(tokens)
    layout = TreeLayout.of((Segment(start=0, length=count, ancestors=()),), policy.device)
    states = policy.hidden(row, torch.arange(count, device=policy.device), layout)
    said, _ = policy.read(states[:-1], row[1:], temperature=temperature)
    return said.double().cpu().numpy()


def told_at_one(said: Sequence[float], policy: Policy, context: Sequence[int], answer: Sequence[int]) -> bool:
    """Whether log-probabilities of an answer that was sampled at another temperature are those of temperature 1."""
    tokens, theirs = [*context, *answer], np.array(said)
    at = {heat: own_logprobs(policy, tokens, temperature=heat)[-len(answer) :] for heat in (1.0, HEAT)}
    off = {heat: float(np.abs(theirs - mine).mean()) for heat, mine in at.items()}
    return off[1.0] < off[HEAT]
