"""What several exchanges are alike in: those that are around another one, and those that gather in buckets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unisono.exchange import Exchange, Spans, Weights
from unisono.exchange.buckets import BucketReadiness


class ExchangeWrapper(Exchange):
    """An exchange around another one, `inner`, which does whatever is not written anew."""

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


class BucketedExchange(Exchange):
    """An exchange whose gradients are gathered where `ready` says (buckets.py)."""

    ready: BucketReadiness

    @property
    def used(self) -> Sequence[bool]:
        return self.ready.used

    @property
    def touched(self) -> bool:
        return self.ready.touched

    def close(self) -> None:
        self.ready.close()
        self.zero()
