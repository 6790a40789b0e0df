"""Random conversations under shared stems, for the tests of attention over a packed row."""

import numpy as np
from hypothesis import strategies as st


@st.composite
def trees(draw):
    """Sequences under shared stems."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    stem = rng.integers(0, 9, draw(st.integers(1, 20))).tolist()
    branches = [[*stem, *rng.integers(0, 9, rng.integers(0, 8)).tolist()] for _ in range(draw(st.integers(1, 3)))]
    return [
        np.array([*draw(st.sampled_from(branches)), *rng.integers(0, 9, rng.integers(1, 12)).tolist()])
        for _ in range(draw(st.integers(1, 6)))
    ]
