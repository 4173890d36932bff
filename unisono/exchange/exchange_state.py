"""Save what exchanges carry from step to step: residuals, outer momentum, copies of servers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.errors import CheckpointError, UnisonoError
from unisono.exchange.base import Exchange


class ExchangeStates:
    """The states of a run's exchanges, each under a key that identifies the gradient that it averages.

    Args:
        kind: The exchange of the run. The state of another kind is dropped when it is loaded.

    Attributes:
        own: The name of a script's own exchange, which is known when its loop begins.
        exchanges: The exchanges, by key.
        kept: Other parts with a state, which belong to no exchange alone and stay when these are closed.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.own = self._saved_own = "none"
        self.exchanges: dict[str, Exchange] = {}
        self.kept: dict[str, Any] = {}
        self._waiting: dict[str, Any] = {}  # loaded states whose exchanges are not built yet
        self._trained = self._saved_trained = ""  # identifies the parameters that train

    def keep(self, key: str, part: Any) -> None:
        """Register a part with a state that belongs to no exchange alone, before anything is loaded."""
        self.kept[key] = part

    def register(self, key: str, exchange: Exchange, trained: Sequence[str] | None = None) -> None:
        """Register an exchange that was built, and load the state that was saved for it.

        Args:
            key: Identifies the gradient.
            exchange: The exchange.
            trained: The names of all parameters that train now. If others trained when the state was saved, it is
                dropped: in a run without an interruption the exchanges would have been closed in between. None: the
                exchange does not depend on them.
        """
        if trained is not None:
            self._trained = hashlib.sha256("\n".join(trained).encode()).hexdigest()[:16]
            if self._trained != self._saved_trained:
                self._waiting.clear()
        self.exchanges[key] = exchange
        saved = self._usable().pop(key, None)
        if saved is None:
            return
        try:
            exchange.load_state_dict(saved)
        except UnisonoError:
            raise
        except Exception as error:  # the state is data of a checkpoint, and may be anything
            raise CheckpointError(
                f"Cannot load the state of the exchange {type(exchange).__name__}.",
                f"Its state does not fit: {str(error) or type(error).__name__}",
                "resume with the script that began the run, or start a new run in another --run-dir.",
            ) from error

    def forget(self) -> None:
        """Drop the exchanges, which are closed because other parameters train from now on."""
        if self.exchanges:
            self._waiting.clear()
        self.exchanges.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return all states. All processes call this together, and the main process's is saved."""
        states = {key: exchange.state_dict() for key, exchange in (self.exchanges | self.kept).items()}
        of = {**self._usable(), **{key: state for key, state in states.items() if state}}
        trained = (self._trained or self._saved_trained) if of else ""  # pipeline stages train different parameters
        return {"kind": self.kind, "own": self.own, "trained": trained, "of": of}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = dict(state["of"]) if state["kind"] == self.kind else {}
        self._saved_own, self._saved_trained = state["own"], state["trained"]
        for key in self.kept.keys() & self._waiting.keys():
            self.kept[key].load_state_dict(self._waiting.pop(key))

    def _usable(self) -> dict[str, Any]:
        """Return the waiting states if they belong to this exchange."""
        return self._waiting if self._saved_own == self.own else {}
