"""The base class of exchanges that wrap another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.exchange.base import Exchange, Spans, Weights


class ExchangeWrapper(Exchange):
    """Wrap another exchange, `inner`, and pass every call on to it. Subclasses override what they change."""

    inner: Exchange

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        self.inner.begin(spans, pieces, weights)

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        self.inner.enter(virtual_rank, last=last)

    def leave(self) -> None:
        self.inner.leave()

    def launch(self) -> None:
        self.inner.launch()

    def finish(self, weight: float) -> bool:
        return self.inner.finish(weight)

    def commit(self) -> None:
        self.inner.commit()

    def zero(self) -> None:
        self.inner.zero()

    @property
    def used(self) -> Sequence[bool]:
        return self.inner.used

    @property
    def touched(self) -> bool:
        return self.inner.touched

    @property
    def sent(self) -> float:
        return self.inner.sent

    @property
    def plain(self) -> float:
        return self.inner.plain

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state)

    def close(self) -> None:
        self.inner.close()
