"""Our own spans in a profile: steps, phases, virtual ranks, and waits for messages."""

from __future__ import annotations

import threading
import time

from unisono import phases
from unisono.profiles.rank_trace import PHASES, STEPS, VIRTUAL_RANKS, WAITING, OwnSpan


class SpanLog:
    """Records spans between `start` and `stop`, by the clock that counts nanoseconds since 1970.

    Attributes:
        spans: The spans so far, in the order of their ends.
    """

    def __init__(self) -> None:
        self.spans: list[OwnSpan] = []
        self._phase = self._step = self._round = 0  # the beginnings of what is in progress
        self._observers = self._phase_changed, self._waited  # each read of a method is another object

    def start(self) -> None:
        """Start. The training thread calls this."""
        self._phase = time.time_ns()
        on_phase, on_wait = self._observers
        phases.observe(on_phase)
        phases.observe_waits(on_wait)

    def stop(self) -> None:
        """Stop. The phase in progress ends here. A second call has no effect."""
        on_phase, on_wait = self._observers
        phases.unobserve(on_phase)
        phases.unobserve_waits(on_wait)
        if self._phase:
            on_phase(phases.now(), "")
            self._phase = 0

    def begin_step(self) -> None:
        """Begin a step."""
        self._step = time.time_ns()

    def end_step(self, step: int) -> None:
        """End the step with this number."""
        self.spans.append(OwnSpan(STEPS, f"step {step}", self._step, time.time_ns(), {"step": step}))

    def begin_round(self) -> None:
        """Begin a micro-batch."""
        self._round = time.time_ns()

    def end_round(self, virtual_rank: int, number: int) -> None:
        """End a micro-batch, the one with this number of a virtual rank."""
        args = {"virtual_rank": virtual_rank, "micro_batch": number}
        self.spans.append(OwnSpan(VIRTUAL_RANKS, f"virtual rank {virtual_rank}", self._round, time.time_ns(), args))

    def _phase_changed(self, left: str, _entered: str) -> None:
        now = time.time_ns()
        self.spans.append(OwnSpan(PHASES, left, self._phase, now))
        self._phase = now

    def _waited(self, seconds: float) -> None:
        now = time.time_ns()
        thread = threading.current_thread()
        track = WAITING if thread is threading.main_thread() else f"{WAITING} in {thread.name}"
        self.spans.append(OwnSpan(track, "wait for messages", now - round(seconds * 1e9), now))
