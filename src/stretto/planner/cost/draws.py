"""Normal numbers from a seed: those that `numpy.random.default_rng(seed).standard_normal` draws, up to rounding.

A plan draws some hundred lengths and has no other use for arrays, and loading NumPy takes half as long as the search
for a small cluster. That the numbers are NumPy's keeps every plan what it was, and gives a test something to compare.

The seed is spread with SeedSequence (O'Neill 2015), the generator is PCG64 (O'Neill 2014), and its bits become normal
numbers by the ziggurat (Marsaglia and Tsang 2000) with 256 layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

WORD, HALF, WHOLE = (1 << 32) - 1, (1 << 64) - 1, (1 << 128) - 1
"""Masks of 32, 64 and 128 bits."""
MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
"""Of PCG64's linear congruence."""
POOL = 4
"""Words of entropy that a seed is mixed into."""
EDGE, AREA = 3.6541528853610087963519472518, 0.0049286732339746519
"""Where the tail of the ziggurat begins, and the area of each of its layers."""
STEPS = 1 << 52
"""Numbers that a layer's width is divided into."""


def normals(seed: int) -> Iterator[float]:
    """Normal numbers without end."""
    bits = _bits(seed)
    widths, within, heights = _layers()
    while True:
        word = next(bits)
        layer, sign, steps = word & 255, 8, word >> 9 & (STEPS - 1)
        x = steps * widths[layer]
        if steps >= within[layer]:
            if layer == 0:
                x, sign = _tail(bits), 17
            elif (heights[layer - 1] - heights[layer]) * _uniform(bits) + heights[layer] >= math.exp(-0.5 * x * x):
                continue
        yield -x if word >> sign & 1 else x


def _tail(bits: Iterator[int]) -> float:
    """Beyond the edge."""
    while True:
        beyond = -math.log1p(-_uniform(bits)) / EDGE
        if -2 * math.log1p(-_uniform(bits)) > beyond * beyond:
            return EDGE + beyond


def _uniform(bits: Iterator[int]) -> float:
    return (next(bits) >> 11) * 2.0**-53


@cache
def _layers() -> tuple[list[float], list[int], list[float]]:
    """Of each layer: a step of its width, how many steps lie under the curve for certain, and the curve at its edge."""
    edges, heights = [EDGE], [math.exp(-0.5 * EDGE * EDGE)]
    for _ in range(254):
        heights.append(heights[-1] + AREA / edges[-1])
        edges.append(math.sqrt(-2 * math.log(heights[-1])))
    edges = [AREA / heights[0], *edges, 0.0]
    within = [int(inner / outer * STEPS) for outer, inner in pairwise(edges)]
    # The layer at the bottom has the tail beside it; the others are counted from the top.
    return (
        [edges[0] / STEPS, *(edge / STEPS for edge in reversed(edges[1:256]))],
        [within[0], *reversed(within[1:256])],
        [1.0, *reversed(heights)],
    )


def _bits(seed: int) -> Iterator[int]:
    """64 bits at a time."""
    words = _spread(seed)
    start, stream = ((words[i + 1] << 32 | words[i]) << 64 | words[i + 3] << 32 | words[i + 2] for i in (0, 4))
    increment = (stream << 1 | 1) & WHOLE
    state = ((increment + start) * MULTIPLIER + increment) & WHOLE
    while True:
        state = (state * MULTIPLIER + increment) & WHOLE
        mixed, turn = (state >> 64 ^ state) & HALF, state >> 122
        yield (mixed >> turn | mixed << (64 - turn)) & HALF


def _spread(seed: int) -> list[int]:
    """Eight words that look nothing like the seed, which may be any number that is not below zero."""
    entropy = [seed >> 32 * i & WORD for i in range(max(POOL, -(-seed.bit_length() // 32)))]
    constant = 0x43B0D7E5

    def hashed(value: int, factor: int = 0x931E8875) -> int:
        nonlocal constant
        before, constant = constant, constant * factor & WORD
        value = (value ^ before) * constant & WORD
        return value ^ value >> 16

    def mixed(into: int, value: int) -> int:
        into = (0xCA01F9DD * into - 0x4973F715 * hashed(value)) & WORD
        return into ^ into >> 16

    pool = [hashed(word) for word in entropy[:POOL]]
    for source in range(POOL):
        for target in range(POOL):
            if source != target:
                pool[target] = mixed(pool[target], pool[source])
    for word in entropy[POOL:]:
        pool = [mixed(into, word) for into in pool]
    constant = 0x8B51F9DD
    return [hashed(word, 0x58F38DED) for word in (*pool, *pool)]
