"""Tables of V* of tiny recipes."""

from running import Quiet, lines, recipe_in
from stretto.runtime.value import value

ASTAR = {
    "algorithm__name": "astar_po",
    "algorithm__vstar__samples": 3,
    "algorithm__vstar__beta2": 0.1,
    "batch__prompts": 6,
    "batch__samples": 1,
}


def made(folder, *, at=None, **changes):
    """The table of a recipe, made now: (what the command tells, its answers)."""
    recipe = recipe_in(folder, **(ASTAR | changes))
    told = value(recipe, root=folder, progress=Quiet(at))
    return told, {(row["prompt"], row["attempt"]): row for row in lines(told.table)[1:]}
