"""Turn counters that only grow into rates: the growth since the last sample, per second."""

from __future__ import annotations

from collections.abc import Hashable


class CounterRates:
    """The rates of one sample after the other. `seconds`: the time since the last sample."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._at: float | None = None
        self._before: dict[Hashable, float] = {}
        self._now: dict[Hashable, float] = {}

    def begin(self, now: float) -> None:
        """Begin a sample at this time of a monotonic clock. Forget counters that the last sample did not have."""
        self.seconds = 0.0 if self._at is None else now - self._at
        self._at = now
        self._before, self._now = self._now, {}

    def age(self, now: float) -> float:
        """Return the seconds since the last sample began."""
        return 0.0 if self._at is None else now - self._at

    def growth(self, counter: Hashable, value: float) -> float | None:
        """Return how much a counter has grown since the last sample; None for a new one, or one that has restarted."""
        self._now[counter] = value
        before = self._before.get(counter)
        return None if before is None or value < before else value - before

    def rate(self, counter: Hashable, value: float) -> float | None:
        """Return the growth of a counter per second, or None."""
        growth = self.growth(counter, value)
        return None if growth is None or self.seconds <= 0 else growth / self.seconds


def without_none(values: dict[str, float | None], digits: int | None = None) -> dict[str, float]:
    """Return the known values, rounded: to integers, or to this number of digits."""
    return {name: round(value, digits) for name, value in values.items() if value is not None}
