"""What a placement by hand is expected to take: a plan's cells as a choice of the planner, priced like all others.

The planner knows roles by the devices that they lie on, side by side and in cells that are alike. A plan in which they
do not is refused with the cell that is different. What a plan leaves open (micro-batches, recomputing) is chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from stretto.errors import RecipeError
from stretto.placement.partitions import RolePlace
from stretto.placement.plan import Cell, Plan
from stretto.planner.candidate import Candidate
from stretto.planner.cost.memory_fit import MemoryFit, MemoryFits
from stretto.planner.cost.stage_times import StageTimes
from stretto.planner.enumerate import Candidates, Variant
from stretto.planner.problem import ModelSplit, PlanningProblem
from stretto.planner.simulate import Forecast, simulate
from stretto.scheduler.records import UPDATE

BLOCKS = 7
"""Sets of roles that share devices, up to which every order of them is tried."""


def forecast_given(plan: Plan, setting: PlanningProblem, *, field: str) -> Forecast:
    """The forecast of a plan by hand; a RecipeError where it has no room, or cannot be priced."""
    own = replace(setting.with_caches_of(plan), order=_order(plan, setting, field))
    prices, rooms = StageTimes(own), MemoryFits(own)
    grid = Candidates(own, prices, rooms)
    choice = _choice(plan, own, field)
    variant = Variant(strategy=choice.strategy)
    found = [simulate(prices, mine, room) for mine, room in _fitting(choice, plan, grid, variant)]
    if not found:
        miss = next(iter(grid.misses.values()))
        fix = "divide models over more devices, let cells sleep, or use other devices"
        raise RecipeError.of(field, f"it does not fit. {miss.room.why_not(own.workload.longest)}", fix)
    return min(found, key=lambda forecast: forecast.step)


def _fitting(
    choice: Candidate, plan: Plan, grid: Candidates, variant: Variant
) -> Iterator[tuple[Candidate, MemoryFit]]:
    """The choice with micro-batches that fit, or with those that the plan asks for."""
    budgets = [cell.token_budget for cell in plan.cells if cell.token_budget]
    if not budgets:
        yield from grid.budgeted(choice, variant, sleeps=choice.sleeps, sharded=choice.sharded)
        return
    for recompute in (False, True) if grid.setting.workload.recompute is None else (grid.setting.workload.recompute,):
        asked = replace(choice, recompute=recompute, budget=max(min(budgets), grid.setting.workload.longest))
        if (found := grid.exactly(asked, variant)) is not None:
            yield found
            return


def _choice(plan: Plan, setting: PlanningProblem, field: str) -> Candidate:
    """The plan as a choice."""
    cells: dict[str, list[Cell]] = {}
    for cell in plan.cells:
        cells.setdefault(cell.role, []).append(cell)
    splits = {role: _split(role, alike, setting, field) for role, alike in cells.items()}
    indices = {role: sorted(setting.index[d] for cell in alike for d in cell.devices) for role, alike in cells.items()}
    places = tuple(RolePlace(role, there[0], len(there)) for role, there in sorted(indices.items()))
    others = {role: split for role, split in splits.items() if role not in ("generate", "train")}
    moves = bool(plan.tail.get("move"))
    name = "yours" if plan.flow == "phased" else "yours, with moving tails" if moves else "yours, streamed"
    return Candidate(
        strategy=name,
        devices=len(plan.devices),
        fractions=places,
        lane=splits["generate"],
        train=splits["train"],
        others=tuple(others.items()),
        budget=max(setting.workload.longest, setting.ordered[0][1].kind.micro_batch),
        sharded=plan.optimizer == "sharded",
        sleeps=any(cell.sleeps for cell in plan.cells if cell.role in UPDATE),
    )


def _split(role: str, cells: Sequence[Cell], setting: PlanningProblem, field: str) -> ModelSplit:
    """How the cells of a role divide their model: all in one way, each on devices that lie side by side."""
    meshes = {tuple(sorted((key, degree) for key, degree in cell.mesh.items() if degree > 1)) for cell in cells}
    if len(meshes) > 1:
        reason = f"cells of the role {role} are divided in {len(meshes)} ways, and no price of that is known"
        raise RecipeError.of(f"{field}: {role}", reason, "give all cells of a role the same mesh")
    width = len(cells[0].devices)
    for cell in cells:
        there = sorted(setting.index[device] for device in cell.devices)
        if there != list(range(there[0], there[0] + width)):
            reason = f"the devices of {cell.name} do not lie side by side among those of the roles that it shares with"
            raise RecipeError.of(f"{field}: {role}", reason, "give a cell devices that follow each other")
    mesh: Mapping[str, int] = cells[0].mesh
    return ModelSplit(*(mesh.get(key, 1) for key in ("dp_shard", "tp", "pp", "ep")))


def _order(plan: Plan, setting: PlanningProblem, field: str) -> tuple[str, ...]:
    """The devices in an order in which those of every role lie side by side; those without a role come last."""
    on, names = plan.roles_on, list(setting.cluster.devices)
    blocks: dict[frozenset[str], list[str]] = {}
    for name in names:
        blocks.setdefault(on.get(name, frozenset()), []).append(name)
    idle = blocks.pop(frozenset(), [])
    tries = permutations(blocks) if math.factorial(len(blocks)) <= math.factorial(BLOCKS) else iter([tuple(blocks)])
    for order in tries:
        if all(_together(role, order) for role in {role for roles in order for role in roles}):
            return (*(name for roles in order for name in blocks[roles]), *idle)
    reason = "no order of the devices has those of every role side by side, and no price of that is known"
    raise RecipeError.of(field, reason, "let roles share all of their devices, or a part that follows")


def _together(role: str, order: Sequence[frozenset[str]]) -> bool:
    """True if the blocks with a role follow each other."""
    there = [index for index, roles in enumerate(order) if role in roles]
    return there[-1] - there[0] == len(there) - 1
