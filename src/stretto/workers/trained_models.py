"""Where each model that is trained lives: the cells that train it, who holds its optimizer, and who only reads it."""

from __future__ import annotations

from dataclasses import dataclass

from stretto.placement.plan import Plan
from stretto.workers.api import MODELS, POLICY, TRAINS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """One of a plan's models that are trained."""

    name: str
    """The model: the policy or the critic."""
    training: tuple[tuple[str, ...], ...]
    """The devices of each cell that trains it."""
    copies: tuple[tuple[str, ...], ...]
    """Devices that hold one whole optimizer together, copy by copy."""
    holders: tuple[str, ...]
    """Devices that hold it: those that train it, then those that only read it."""

    @property
    def trainers(self) -> list[str]:
        """Devices that train it, in the plan's order."""
        return [device for devices in self.training for device in devices]


def trained_models(plan: Plan) -> dict[str, TrainedModel]:
    """Those of a plan by name, the policy first."""
    found: dict[str, TrainedModel] = {}
    for name, role in TRAINS.items():
        training = tuple(cell.devices for cell in plan.cells if cell.role == role)
        if training:
            sharers = plan.sharers(role)
            copies = (sharers,) if sharers else training
            found[name] = TrainedModel(name=name, training=training, copies=copies, holders=_holders(plan, name))
    return found


def _holders(plan: Plan, name: str) -> tuple[str, ...]:
    """Those that only generate read the policy; of the others each role has its own model."""
    if name == POLICY:
        return plan.holders
    cells = sorted((cell for cell in plan.cells if MODELS.get(cell.role) == name), key=lambda c: c.role != TRAINS[name])
    return tuple(dict.fromkeys(device for cell in cells for device in cell.devices))
