"""Which share of decoding does not grow with the number of answers, as engines measure their decode steps."""

from __future__ import annotations

from stretto.engines.native.decode_times import NOTHING
from stretto.training.loss_counters import fixed_share


class DecodeOverhead:
    """Sums over decode steps of each device."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, ...]] = {}

    def add(self, device: str, sums: tuple[float, ...]) -> None:
        """What an engine has measured since it told before, if it measures."""
        if sums:
            self.sums[device] = tuple(map(sum, zip(self.sums.get(device, NOTHING), sums, strict=True)))

    def by_device(self) -> dict[str, float]:
        """Of each whose engine can tell, by itself: of a slow and a fast one together, the few answers of the slow one
        would seem to take as long as the many of the other."""
        shares = {device: fixed_share(*sums) for device, sums in self.sums.items()}
        return {device: share for device, share in shares.items() if share is not None}

    def share(self) -> float | None:
        """Of all that they took together; none where no engine can tell."""
        shares = self.by_device()
        seconds = sum(self.sums[device][3] for device in shares)
        return sum(share * self.sums[device][3] for device, share in shares.items()) / seconds if seconds else None

    def forget(self) -> None:
        """A step is over."""
        self.sums.clear()
