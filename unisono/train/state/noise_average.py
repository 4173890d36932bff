"""The averages from which the gradient noise scale follows, as a part of the state of a run."""

from __future__ import annotations

from typing import Any

DECAY = 0.95
"""The weight of earlier measurements in the averages, for each measurement."""


class NoiseScale:
    """The averages, which are saved with the run.

    noise     S, in samples
    signal    |G|²
    count     number of measurements
    """

    def __init__(self) -> None:
        self.noise = self.signal = 0.0
        self.count = 0

    @property
    def value(self) -> float | None:
        """The noise scale in samples; None before the first measurement, or if noise hides the gradient."""
        return self.noise / self.signal if self.count and self.signal > 0 else None

    def add(self, noise: float, signal: float) -> None:
        """Add a measurement."""
        self.count += 1
        share = (1 - DECAY) / (1 - DECAY**self.count)  # the weights of all measurements add up to 1
        self.noise += share * (noise - self.noise)
        self.signal += share * (signal - self.signal)

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise, "signal": self.signal, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise, self.signal, self.count = float(state["noise"]), float(state["signal"]), int(state["count"])
