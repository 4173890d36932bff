"""What exchanges carry from step to step, as one thing in a checkpoint: residuals, outer momentum, servers' copies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.exchange.base import Exchange


class ExchangeStates:
    """The exchanges of a run, each under a key that says whose gradient it makes whole.

    kind  which exchange it is, in words: what another one has carried means nothing to it, and is dropped
    own   the name of a script's own, which is known when its loop begins
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.own = self._saved_own = "none"
        self.exchanges: dict[str, Exchange] = {}
        self.kept: dict[str, Any] = {}  # what belongs to none of them alone, and stays when they are closed
        self._waiting: dict[str, Any] = {}  # was saved, and its exchange is not built yet
        self._trained = self._saved_trained = ""  # which parameters trained, when an exchange was built last

    def keep(self, key: str, thing: Any) -> None:
        """Something with a state that belongs to all of them, known before anything is loaded."""
        self.kept[key] = thing

    def register(self, key: str, exchange: Exchange, trained: Sequence[str] | None = None) -> None:
        """An exchange was built: if something was saved for it, it continues from there.

        trained  the names of all parameters that train now. If others did when it was saved, nothing that was saved
                 counts: the exchanges of a run that was not interrupted would have been closed in between. None: it
                 does not depend on them.
        """
        if trained is not None:
            self._trained = hashlib.sha256("\n".join(trained).encode()).hexdigest()[:16]
            if self._trained != self._saved_trained:
                self._waiting.clear()
        self.exchanges[key] = exchange
        saved = self._ours().pop(key, None)
        if saved is not None:
            exchange.load_state_dict(saved)

    def forget(self) -> None:
        """The exchanges are closed: other parameters train from now on."""
        if self.exchanges:
            self._waiting.clear()
        self.exchanges.clear()

    def state_dict(self) -> dict[str, Any]:
        """All processes must call this together; the main process's is the one that is saved."""
        states = {key: exchange.state_dict() for key, exchange in (self.exchanges | self.kept).items()}
        of = {**self._ours(), **{key: state for key, state in states.items() if state}}
        trained = (self._trained or self._saved_trained) if of else ""  # stages of a pipeline train unlike parameters
        return {"kind": self.kind, "own": self.own, "trained": trained, "of": of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = dict(state["of"]) if state["kind"] == self.kind else {}
        self._saved_own, self._saved_trained = state["own"], state["trained"]
        for key in self.kept.keys() & self._waiting.keys():
            self.kept[key].load_state_dict(self._waiting.pop(key))

    def _ours(self) -> dict[str, Any]:
        """What waits, if it is of this very exchange."""
        return self._waiting if self._saved_own == self.own else {}
