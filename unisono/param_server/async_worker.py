"""A worker of an asynchronous run: it gets steps from the server, and sends gradients there (async_run.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.errors import LoopError, RunStopped
from unisono.param_server.messages import ParameterMessages
from unisono.param_server.tcp_link import TcpLink
from unisono.train.batches.batch_source import Assignment, BatchSource
from unisono.train.collective import Rounds
from unisono.train.context import LoopParts, RunContext
from unisono.train.gradient_pass import GradientPass
from unisono.train.step_state import StepState


def refuse_passes(optimizers: Sequence[Any] | None) -> None:
    """Raise LoopError for a pass over some parameters. A step has only one gradient here."""
    if optimizers is not None:
        raise LoopError(
            "step.over is not possible with asynchronous servers.",
            "With exchange=server and server.staleness above 0 a step is one gradient and one update.",
            "add the losses up in one pass, or --set server.staleness=0.",
        )


class Worker:
    """The links of a worker to its servers, and its current step.

    number   the number of that step
    version  the number of updates in its parameters
    """

    def __init__(
        self, context: RunContext, parts: LoopParts, links: Mapping[int, TcpLink], messages: ParameterMessages
    ) -> None:
        """`links`: to all servers, the first one first."""
        self.scale, self.links, self.messages = context.scale, links, messages
        self.number, self.version = -1, 0
        parts.source.follow(self._numbers())

    def begin(self) -> None:
        """Request the first step. The trained parameters are known already."""
        with wrap_peer_errors("The first step"):
            for link in self.links.values():
                link.send({"hello": True})
        self.pull()

    def _numbers(self) -> Iterator[int]:
        while True:
            yield self.number

    def pull(self, step: StepState | None = None) -> None:
        """Receive new parameters, and the next step. Raise RunStopped when the run is over."""
        with wrap_peer_errors("A pull of new parameters"):
            for server, link in self.links.items():
                about, tensors = link.receive()
                if "over" in about:
                    raise RunStopped
                self.messages.unpack(about, tensors)
                if server == 0:
                    self.scale.load_state_dict(about["scale"])
                    self.number, self.version = about["step"], about["version"]
        self.messages.mark()

    def push(self, gradient: GradientPass, about: Mapping[str, Any]) -> None:
        """Send a gradient to the servers, to the first one last: then all servers have it."""
        with wrap_peer_errors(f"Step {about['push']}'s push"):
            for server in reversed(list(self.links)):
                described, tensors = self.messages.pushed(gradient, server)
                self.links[server].send({**described, **about, "version": self.version}, tensors)

    @property
    def has_message(self) -> bool:
        """Whether the first server has sent a message without a request: the run is over, or the server is gone."""
        return self.links[0].has_word()

    def close(self) -> None:
        """Send the servers the message that this worker leaves, and close its links."""
        for link in self.links.values():
            link.tell({"bye": True})
            link.close()


class WorkerBatches:
    """The micro-batches of the step that the server assigned to a worker."""

    def __init__(self, source: BatchSource, worker: Worker) -> None:
        self.source, self.worker = source, worker

    def seed_step(self, step: int) -> None:
        """See BatchSource."""
        self.source.seed_step(step)

    def begin(self, step: StepState) -> Assignment:
        """See BatchSource."""
        return self.source.begin(step)

    def rounds(self, step: StepState, assignment: Assignment) -> Rounds:
        """Yield the micro-batches, and end early if the run is over."""
        for micro_batch in self.source.rounds(step, assignment):
            if self.worker.has_message:
                self.worker.pull()
            yield micro_batch

    def close(self) -> None:
        """See BatchSource."""
        self.source.close()


class WorkerSync:
    """Complete a worker's gradient, which it computes by itself, and send it to the servers."""

    steps_optimizers = False

    def __init__(self, context: RunContext, parts: LoopParts, worker: Worker) -> None:
        self.progress, self.inner, self.worker = context.progress, parts.sync, worker

    @property
    def group(self) -> ProcessGroup:
        """This process alone."""
        return self.inner.group

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> GradientPass:
        """See GradientSync."""
        refuse_passes(optimizers)
        return self.inner.gradient_of(None, waiting=waiting)

    def begin(self, step: StepState, gradient: GradientPass, assignment: Assignment) -> None:
        """See GradientSync."""
        self.inner.begin(step, gradient, assignment)

    def synchronize(self, step: StepState, gradient: GradientPass) -> None:
        """See GradientSync."""
        self.inner.synchronize(step, gradient)

    def commit(self, step: StepState, gradient: GradientPass) -> None:
        """Send the gradient to the servers. With several, each clips by the norm that this process computes."""
        self.inner.commit(step, gradient)
        norm = self.clip(gradient.params, None) if len(self.worker.links) > 1 else None
        stop = bool(self.progress.requests["stop"])
        sums = step.totals.sums
        self.worker.push(
            gradient, {"push": step.number, "sums": sums, "norm": norm, "stop": stop, "finite": gradient.finite}
        )

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        """See GradientSync."""
        return self.inner.clip(params, limit)

    def close(self) -> None:
        """Release the parameters, and leave."""
        self.inner.close()
        self.worker.close()
