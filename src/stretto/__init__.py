"""stretto: strictly on-policy reinforcement learning for language models, from a laptop to a cluster.

The public surface is small: the records of `stretto.types`, the errors of `stretto.errors`, and the protocols of the
rooms (`stretto.environments.base`, `stretto.engines.base`, `stretto.algorithms.base`). Importing this package loads
neither torch nor any other heavy library.
"""

from stretto.errors import StrettoError
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Sample, Trajectory

__version__ = "0.1.0"

__all__ = [
    "Conversation",
    "Group",
    "Outcome",
    "Prompt",
    "Reward",
    "Sample",
    "StrettoError",
    "Trajectory",
    "__version__",
]
