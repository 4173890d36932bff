"""The loop in which each worker runs steps at its own pace (exchange=server, server.staleness above 0, or none).

One process (or several: async_server.py) is a server, the others are workers, and no process waits for another step:

    worker 1                      server                                        worker 2
    hello ----------------------> ledger: step 0 <-------------------------------- hello
      <------- parameters, step 0 |      step 1 |  parameters, step 1 ------------->
    all virtual ranks of step 0                                      all of step 1
    gradient of 0 --------------> for batch in step: no batches, it waits
                                  p.grad is set
                                  step.update: the optimizer steps
      <------- parameters, step 2 | evaluation, log, checkpoint    <----------- gradient of 1

A worker computes the whole batch of a step by itself, folded by the tree. It computes the same numbers as any other run
with these parameters. The server uses gradients in their order of arrival, with one update for each. So `steps` counts
updates, and every step of the data is used once. With one worker, the run is that of one process, to the bit. With
several workers, a gradient was computed with parameters from some updates ago (param_server/ledger.py). The order of
arrival depends on the machines, so two runs of one command differ.

Every process runs the script, with the same loop. Its calls act by the role of the process:

    server   The number of a step is that of the update. `for batch in step` yields no batches and waits for a gradient;
             step.loss is that gradient's; step.update steps. run.evaluate, run.log and checkpoints are as on one
             process.
    worker   The number of a step is the one that the server assigned. step.update steps no optimizer: it waits for new
             parameters. step.every(n) is never true, and nothing is saved. The script ends with the last step; the
             server runs the code after the loop.

Processes form one group when the loop begins. Then they leave it, because a group of torch does not survive a death,
and exchange messages over links. A worker that dies closes its link: its step is assigned again, and no process waits.
When the server dies, its workers detect it in the same way and end. A resume continues from the server's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unisono.config import Settings, plural
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.roles import RoleGroup, assign_roles
from unisono.errors import LoopError, RunStopped
from unisono.launcher import failure_record
from unisono.param_server.async_server import FirstServer, Follower, ServerBatches, ServerRole, ServerSync
from unisono.param_server.async_worker import Worker, WorkerBatches, WorkerSync
from unisono.param_server.messages import ParameterMessages
from unisono.param_server.server_parts import ServerParts, refuse_foreign
from unisono.param_server.tcp_link import TcpLink, build_links
from unisono.train.context import LoopParts, RunContext
from unisono.train.loop import SyncLoop
from unisono.train.pipelining.stage_state import LocalPart
from unisono.train.state.save_state import save_checkpoint
from unisono.train.step import Step, StepParts
from unisono.train.step_state import StepState


class AsyncServerLoop(SyncLoop):
    """The loop of asynchronous servers and workers. For torch, each process trains alone in it."""

    is_uniform = False
    parts_of_optimizers: AsyncParts

    def __init__(self, settings: Settings, group: ProcessGroup) -> None:
        super().__init__(settings, group)
        self.training = ProcessGroup(device=group.device)
        self.crew = assign_roles(group, settings.server.count)
        self.saves = group.rank == 0
        self._server: ServerRole | None = None
        self._worker: Worker | None = None
        self._has_begun = False

    # -- before the loop

    def attach(self, context: RunContext) -> None:
        context.state.stages = self.parts_of_optimizers = AsyncParts(self.crew, context.state.tracked)
        context.progress.bytes_sent = math.nan  # traffic over links is not counted

    def place(self, model: torch.nn.Module) -> None:
        self.crew.shares.assign(model.parameters())

    def track(self, things: Iterable[Any]) -> None:
        refuse_foreign(things, self.crew.servers)

    def check_collective(self) -> None:
        if self._has_begun:
            raise LoopError(
                "run.collectives cannot be used in the loop of asynchronous servers.",
                "With exchange=server and server.staleness above 0 no two processes meet once the loop has begun.",
                "call it before the loop, or --set server.staleness=0.",
            )

    def parts(self, context: RunContext, parts: LoopParts, steps: StepParts) -> StepParts:
        """Leave torch's group, and return the parts of this process's steps, by its role."""
        self._refuse_averages(context)
        links = build_links(self.group, self.crew.servers)
        self.group.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        context.step_sync.switch_group(self.training)
        self._has_begun = True
        messages = ParameterMessages(context.models, self.crew)
        if not self.crew.is_server:
            return self._as_worker(context, parts, steps, links, messages)
        server: ServerRole
        if self.group.rank == 0:
            server = FirstServer(context, self.crew, links, messages, lambda: self._save_now(context))
        else:
            server = Follower(self.crew, links, messages, self.parts_of_optimizers.mine)
        self._server = server
        hooks = steps.hooks._replace(updated=(*steps.hooks.updated, server.updated))
        return steps._replace(
            source=ServerBatches(parts.source),
            sync=ServerSync(context, parts, server),
            hooks=hooks,
            periodic=server.is_first,
        )

    def _as_worker(
        self,
        context: RunContext,
        parts: LoopParts,
        steps: StepParts,
        links: Mapping[int, TcpLink],
        messages: ParameterMessages,
    ) -> StepParts:
        worker = self._worker = Worker(context, parts, links, messages)
        hooks = steps.hooks._replace(updated=(*steps.hooks.updated, worker.pull))
        return steps._replace(
            source=WorkerBatches(parts.source, worker),
            sync=WorkerSync(context, parts, worker),
            hooks=hooks,
            periodic=False,
        )

    def _refuse_averages(self, context: RunContext) -> None:
        """Raise LoopError for averaged models. With several servers, the first one often lacks new parameters."""
        placed = {id(p) for model in context.models.modules for p in model.parameters()}
        strange = [m for m in context.state.models.values() if any(id(p) not in placed for p in m.parameters())]
        if strange and self.crew.servers > 1:
            raise LoopError(
                f"Cannot track a {type(strange[0]).__name__} that was not placed.",
                f"With server.count={self.crew.servers} and server.staleness above 0 no process has all parameters "
                "after every update, so an average of them would be one of old ones.",
                "--set server.count=1, or --set server.staleness=0.",
            )

    # -- the steps

    def steps(self, context: RunContext, parts: StepParts) -> Iterator[Step]:
        if self._worker is None:
            return super().steps(context, parts)
        failure_record.mark_spare()
        return self._given_steps(context, parts, self._worker)

    def _given_steps(self, context: RunContext, parts: StepParts, worker: Worker) -> Iterator[Step]:
        """Yield the steps that the server assigns to this worker, until the run is over."""
        self.begin(context, parts)
        parts.sync.gradient_of(None)  # the trained parameters have to be known before a message arrives
        worker.begin()
        while True:
            state = StepState(worker.number, parts.checks.order.batch_size(worker.number))
            yield from self.step(context, parts, state)
            context.state.check_whole(context.models.modules, context.progress.steppers)
            self.count(context, state)
            if context.progress.leaving:
                raise RunStopped

    def end(self, parts: StepParts) -> None:
        if self._server is not None:
            self._server.end()
        super().end(parts)

    def refresh(self, *, states: bool = False) -> None:
        if isinstance(self._server, FirstServer):
            found = self._server.refresh(states=states)
            if states:
                self.parts_of_optimizers.shown = found

    def _save_now(self, context: RunContext) -> None:
        """Save between two updates, before an early end."""
        if context.state.saved_after != context.progress.steps_done:
            save_checkpoint(context)

    def wake(self) -> None:
        if isinstance(self._server, FirstServer):
            self._server.wake()

    # -- results

    def promise(self, context: RunContext) -> tuple[str, str]:
        bound = self.settings.server.staleness
        late = "by any number of updates" if bound is None else f"by up to {plural(bound, 'update')}"
        return (
            "depends on the number of sites",
            f"exchange=server with server.staleness={'none' if bound is None else bound} uses gradients as they come, "
            f"late {late}: two runs of one command differ; server.staleness=0 does not",
        )

    def result(self) -> Mapping[str, Any]:
        more = self._server.result() if isinstance(self._server, FirstServer) else {}
        return {"servers": self.crew.servers, **more}


class AsyncParts(ServerParts):
    """The optimizers of all servers, including the states that other servers have sent.

    shown  for each of them, {name of the optimizer: {number of the parameter: its state}}
    """

    def __init__(self, crew: RoleGroup, tracked: Mapping[str, Any]) -> None:
        super().__init__(crew)
        self.tracked = tracked
        self.shown: list[dict[str, dict[str, Any]]] = []

    def mine(self) -> dict[str, dict[str, Any]]:
        """Return this process's part of all tracked objects."""
        optimizers = {name: o for name, o in self.tracked.items() if isinstance(o, torch.optim.Optimizer)}
        return {name: self.held(o, o.state_dict()) for name, o in optimizers.items()}

    def whole(self, thing: Any, state: Any, shelf: LocalPart | None = None) -> Any:
        if not isinstance(thing, torch.optim.Optimizer) or self.crew.servers == 1:
            return state
        name = next(name for name, tracked in self.tracked.items() if tracked is thing)
        return self.together(state, [self.held(thing, state), *(shown[name] for shown in self.shown)])
