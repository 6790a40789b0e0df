"""Which cells are free: a device works for one cell at a time, and a cell needs all of its devices.

A device serves its cells in the plan's order: a cell waits while a cell before it, on any of its devices, has work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stretto.placement.plan import Plan


class CellLocks:
    """Which cells are busy, and which hold a device."""

    def __init__(self, plan: Plan) -> None:
        self.devices = {cell.name: cell.devices for cell in plan.cells}
        self.role = {cell.name: cell.role for cell in plan.cells}
        self.at: dict[str, list[str]] = {}
        for cell in plan.cells:
            for device in cell.devices:
                self.at.setdefault(device, []).append(cell.name)
        self.before = {cell.name: self._before(plan, cell.name) for cell in plan.cells}
        self.beside = {cell.name: self._beside(cell.name) for cell in plan.cells}
        self.blocked = dict.fromkeys(self.devices, 0)
        self.idle: dict[str, dict[str, None]] = {}
        for cell in plan.cells:
            self.idle.setdefault(cell.role, {})[cell.name] = None
        self.lanes: set[str] = set()
        self.taken: set[str] = set()
        self.dead: set[str] = set()
        self.in_lanes = dict.fromkeys(self.devices, 0)
        self.serving = {role: len(cells) for role, cells in self.idle.items()}
        self.count = dict(self.serving)

    def _before(self, plan: Plan, name: str) -> tuple[str, ...]:
        """Roles that some device of a cell serves before it."""
        found: dict[str, None] = {}
        for device in self.devices[name]:
            order = plan.priority[device]
            found.update(dict.fromkeys(self.role[cell] for cell in order[: order.index(name)]))
        return tuple(found)

    def _beside(self, name: str) -> tuple[tuple[str, int], ...]:
        """Every cell that shares devices with one, itself included, and how many; in the order of the last of them."""
        found: dict[str, int] = {}
        for device in self.devices[name]:
            for other in self.at[device]:
                found[other] = found.pop(other, 0) + 1
        return tuple(found.items())

    def free_for(self, role: str, has_work: Callable[[str], bool]) -> Iterator[str]:
        """Free cells of a role whose turn it is; take one before asking for the next."""
        for cell in list(self.idle.get(role, ())):
            if not self.blocked[cell] and self.turn(cell, has_work):
                yield cell

    def turn(self, cell: str, has_work: Callable[[str], bool]) -> bool:
        """True if no cell before it has work."""
        return not any(has_work(role) for role in self.before[cell])

    def take(self, cell: str, *, lane: bool = False) -> None:
        """A cell starts a piece, or opens its lane if it is not open yet."""
        if cell in self.taken:
            return
        self.taken.add(cell)
        if lane:
            self.lanes.add(cell)
        self._shift(cell, +1)

    def release(self, cell: str) -> list[str]:
        """A cell has nothing to do; returns the cells that its devices are free for now."""
        if cell not in self.taken:
            return []
        self.taken.remove(cell)
        freed = self._shift(cell, -1)
        self.lanes.discard(cell)
        return freed

    def kill(self, cell: str) -> None:
        """A cell has died. Its devices are free for others, if they still are there."""
        self.release(cell)
        self.dead.add(cell)
        self.blocked[cell] += 1
        self.idle[self.role[cell]].pop(cell, None)
        self.count[self.role[cell]] -= 1
        self.serving[self.role[cell]] -= not self.in_lanes[cell]

    def revive(self, cell: str) -> None:
        """The cell serves again."""
        self.dead.remove(cell)
        self.blocked[cell] -= 1
        if not self.blocked[cell]:
            self.idle[self.role[cell]][cell] = None
        self.count[self.role[cell]] += 1
        self.serving[self.role[cell]] += not self.in_lanes[cell]

    def _shift(self, cell: str, by: int) -> list[str]:
        """Blocks or unblocks every cell on the devices of one."""
        lane, freed = cell in self.lanes, []
        for other, shared in self.beside[cell]:
            was, role = self.blocked[other], self.role[other]
            self.blocked[other] = now = was + by * shared
            if not now:
                self.idle[role][other] = None
                freed.append(other)
            elif not was:
                self.idle[role].pop(other, None)
            if lane:
                was = self.in_lanes[other]
                self.in_lanes[other] = now = was + by * shared
                if other not in self.dead:
                    self.serving[role] += bool(was) - bool(now)
        return freed
