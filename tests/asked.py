"""What an engine answers to some requests."""

import numpy as np

from stretto.engines.base import Request
from stretto.engines.native.engine import NativeEngine


def requests(count):
    """Some prompts, each asked several times."""
    noise = np.random.default_rng(3)
    prompts = [noise.integers(5, 15, 6) for _ in range(3)]
    return [
        Request(key=key, tokens=prompts[key % 3], max_new_tokens=3 + key % 9, stop=frozenset(), temperature=1.0)
        for key in range(1, count + 1)
    ]


def sampled(policy, steps, count=11):
    """Answers by key."""
    engine = NativeEngine(policy, steps=steps)
    engine.submit(requests(count))
    found = {}
    while len(found) < count:
        found |= {each.key: each for each in engine.step(10.0)}
    return found
