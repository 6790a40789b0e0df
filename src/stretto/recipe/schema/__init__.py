"""The recipe as types: every key, its default and a sentence on what it does. No behavior, no torch.

A key that only another section gives meaning to (`roles.critic` without an algorithm that reads it) is legal here;
`checks.recipe` refuses what has no effect and what contradicts. `docs/reference/recipe.md` is generated from these
sentences. A section a file; `base` has what they are made of, and how a section has several kinds.
"""

# ruff: noqa: F403  (every record of every section has its place here)

from stretto.recipe.schema.algorithm import *
from stretto.recipe.schema.base import *
from stretto.recipe.schema.engine import *
from stretto.recipe.schema.model import *
from stretto.recipe.schema.recipe import *
from stretto.recipe.schema.rewards import *
from stretto.recipe.schema.running import *
from stretto.recipe.schema.sources import *
from stretto.recipe.schema.task import *
from stretto.recipe.schema.training import *
