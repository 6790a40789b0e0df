"""What a recipe may be planned with and not be run with, wherever its models lie, and what a plan does not count.

What depends on a layout is for `Candidate.waits_for` to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from stretto.errors import Problem
from stretto.planner.cost.shapes import PROJECTIONS, ModelShape
from stretto.recipe.schema import Recipe, RoleModel
from stretto.training.narrow_blocks import cut_block


def unmade(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> Iterator[str]:
    """What nothing can execute yet; `shapes` has the model of each role."""
    policy, vllm, few_bits = shapes["train"], recipe.engine.kind == "vllm", recipe.model.in_few_bits
    if recipe.model.dtype == "float16":
        yield "float16"
    if "reference" in shapes and isinstance(recipe.roles.reference, RoleModel) and recipe.roles.teacher is None:
        yield "a reference of its own"
    if vllm and recipe.model.adapter is not None and policy.experts and policy.adapted is None and not few_bits:
        yield "vLLM with adapters on experts"
    if few_bits and not policy.narrows:
        yield "a base in few bits of this family"


def uncounted(recipe: Recipe, policy: ModelShape) -> Iterator[str]:
    """A server that nobody here knows, and adapters of which only the model's files say how large they are."""
    if (url := getattr(recipe.engine, "url", None)) is not None:
        yield f"how fast {url} generates cannot be known here: it is priced as if the plan's own devices did it"
    chosen = recipe.model.adapter.targets if recipe.model.adapter else ()
    known = {*policy.attention_inputs, *PROJECTIONS}
    if not isinstance(chosen, str) and (names := [name for name in chosen if name not in known]):
        yield f"adapters on {', '.join(names)} are not counted, because the size of such a layer is not known here"


def cut_moments(shape: ModelShape, mesh: Mapping[str, int], *, optimizer: str, rank: int, field: str) -> Problem | None:
    """The problem of devices that share matrices (`tp`) and would share a block of an optimizer's moments of 8 bits.

    Layers that are cut by their inputs have it. `rank` is that of an adapter, 0 without one.
    """
    tensor = mesh["tp"]
    if optimizer != "adamw8bit" or tensor == 1:
        return None
    rows = {"o_proj": shape.heads * shape.values}
    if shape.layers > shape.moe_layers:
        rows["down_proj"] = shape.ffn
    if shape.experts and mesh["ep"] == 1:
        rows["experts.down_proj"] = shape.expert_ffn
    chosen = shape.adapted if rank else None
    for name, width in rows.items():
        named = chosen is None or name in chosen or ("attention" in chosen and name == "o_proj")
        if named and (
            found := cut_block(
                name, numbers=(rank or shape.hidden) * width, width=width, run=width // tensor, field=field
            )
        ):
            return found
    return None
