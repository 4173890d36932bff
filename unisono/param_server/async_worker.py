"""A worker of an asynchronous run: steps come from the server, gradients go there (async_run.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unisono.distributed.process_group import wrap_peer_errors
from unisono.distributed.roles import RoleGroup
from unisono.errors import LoopError, RunStopped
from unisono.param_server.messages import ParameterMessages
from unisono.param_server.tcp_link import TcpLink
from unisono.plan.batch_order import MicroBatchId
from unisono.train.gradient_pass import GradientPass
from unisono.train.loop import StepLoop
from unisono.train.step import FROM_SETTINGS, Step


class WorkerStep(Step):
    """A step that was given to this process. Nothing is stepped here: new parameters come."""

    _engine: WorkerLoop

    def every(self, n: int) -> bool:
        """What is done now and then, the server does."""
        return False

    @property
    def ends_epoch(self) -> bool:
        return False

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        super().update(*steppers, clip=clip)
        self._engine.pull()

    def _step(self, steppers: Sequence[Any], optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            self._engine.register_optimizer(optimizer)
        for schedule in steppers:
            if schedule not in optimizers:
                self._engine.register_schedule(schedule)


class AsyncLoop(StepLoop):
    """What servers and workers have in common: a step is one gradient."""

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> GradientPass:
        if optimizers is not None:
            raise LoopError(
                "step.over was asked for a pass.",
                "With exchange=server and server.staleness above 0 a step is one gradient and one update.",
                "add the losses up in one pass, or --set server.staleness=0.",
            )
        return super().gradient_of(optimizers, waiting=waiting)


class WorkerLoop(AsyncLoop):
    """Steps come from the server, gradients go there.

    number   of the step that is this process's now
    version  updates that are in its parameters
    """

    number = -1
    version = 0
    _links: Mapping[int, TcpLink] = {}

    def begin(self, links: Mapping[int, TcpLink], crew: RoleGroup) -> None:
        """`links`: to all servers, the first one first."""
        self._links, self.wares = links, ParameterMessages(self.models, crew)
        self._loader.steps = self._numbers()
        self.gradient_of(None)  # what trains is known before anything comes
        with wrap_peer_errors("The first step"):
            for link in links.values():
                link.send({"hello": True})
        self.pull()

    def _numbers(self) -> Iterator[int]:
        while True:
            yield self.number

    def new_step(self, number: int) -> Step:
        return WorkerStep(self, number)

    def micro_batches(
        self, step: int, number: int, gradient: GradientPass, kept: list[tuple[MicroBatchId, Any]] | None
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        for micro_batch in super().micro_batches(step, number, gradient, kept):
            if self._links[0].has_word():  # unasked: it is over, or the server is gone
                self.pull()
            yield micro_batch

    def synchronize(self, step: Step, number: int, gradient: GradientPass) -> dict[str, tuple[float, float]]:
        """The gradient of the step goes to the servers, to the first one last: then all have it."""
        sums = super().synchronize(step, number, gradient)
        norm = self.clip(gradient.params, None) if len(self._links) > 1 else None
        more = {"push": step.number, "version": self.version, "sums": sums, "norm": norm}
        more |= {"stop": bool(self.asked["stop"]), "finite": gradient.finite}
        with wrap_peer_errors(f"Step {step.number}'s push"):
            for server in reversed(list(self._links)):
                about, tensors = self.wares.pushed(gradient, server)
                self._links[server].send({**about, **more}, tensors)
        return sums

    def pull(self) -> None:
        """New parameters, and the next step. Raises Stopped when it is over."""
        with wrap_peer_errors("A pull of new parameters"):
            for server, link in self._links.items():
                about, tensors = link.receive()
                if "over" in about:
                    raise RunStopped
                self.wares.unpack(about, tensors)
                if server == 0:
                    self.scale.load_state_dict(about["scale"])
                    self.number, self.version = about["step"], about["version"]
        self.wares.mark()

    def close(self) -> None:
        super().close()
        for link in self._links.values():
            link.tell({"bye": True})
            link.close()
