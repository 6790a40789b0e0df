"""stretto: strictly on-policy reinforcement learning for language models, from a laptop to a cluster.

`train`, `sft`, `reward_model`, `resume`, `evaluate`, `sample`, `plan` and `check` are the functions of the command line
in Python (docs/reference/python.md). Besides them, the public surface is the records of `stretto.types`, the errors of
`stretto.errors`, and the protocols of the rooms (`stretto.environments.base`, `stretto.engines.base`,
`stretto.algorithms.base`). Importing this package loads neither torch nor any other heavy library: what is not a record
or an error is loaded when it is first asked for. It says how long threads of a CPU may spin, which torch reads once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stretto.errors import Problem, RecipeError, StrettoError
from stretto.openmp import bound_spinning
from stretto.types import Conversation, Group, Outcome, Prompt, Reward, Sample, Trajectory

if TYPE_CHECKING:
    from stretto.api.calls import check, evaluate, plan, resume, sample, train
    from stretto.api.compare import compare
    from stretto.api.run import Run
    from stretto.api.supervised import reward_model, sft
    from stretto.api.sweep import sweep
    from stretto.recipe.schema import Recipe
    from stretto.runtime.user_functions import StepEvent

__version__ = "0.1.0"

__all__ = [
    "Conversation",
    "Group",
    "Outcome",
    "Problem",
    "Prompt",
    "Recipe",
    "RecipeError",
    "Reward",
    "Run",
    "Sample",
    "StepEvent",
    "StrettoError",
    "Trajectory",
    "__version__",
    "check",
    "compare",
    "evaluate",
    "plan",
    "resume",
    "reward_model",
    "sample",
    "sft",
    "sweep",
    "train",
]

_WHERE = {
    **dict.fromkeys(("check", "evaluate", "plan", "resume", "sample", "train"), "stretto.api.calls"),
    **dict.fromkeys(("reward_model", "sft"), "stretto.api.supervised"),
    "Recipe": "stretto.recipe.schema",
    "compare": "stretto.api.compare",
    "sweep": "stretto.api.sweep",
    "Run": "stretto.api.run",
    "StepEvent": "stretto.runtime.user_functions",
}
"""Name -> the module that it is loaded from when it is asked for."""


bound_spinning()


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
