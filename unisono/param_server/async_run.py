"""A run in which each worker goes at its own pace (exchange=server, server.staleness above 0, or none).

One process serves (or several: async_server.py), the others work, and no two ever wait for a step in common:

    worker 1                      server                                        worker 2
    hello ----------------------> ledger: step 0 <-------------------------------- hello
      <------- parameters, step 0 |      step 1 |  parameters, step 1 ------------->
    all virtual ranks of step 0                                      all of step 1
    gradient of 0 --------------> for batch in step: nothing to walk, it waits
                                  p.grad is here
                                  step.update: the optimizer steps
      <------- parameters, step 2 | evaluation, log, checkpoint    <----------- gradient of 1

A worker computes the whole batch of a step by itself, folded by the tree, and the same numbers as in any other run with
these parameters. The server uses gradients as they come, one update each: so `steps` counts updates, every step of the
data is used once, and with one worker it is the loop of one process, to the bit. With several a gradient was computed
with parameters from some updates ago (param_server/ledger.py), and who comes first is decided by the machines: two runs
of one command differ.

Everybody runs the script, and its loop looks the same; roles differ inside.

    server   a step's number is that of the update. `for batch in step` walks over nothing and waits for a gradient;
             step.loss is that gradient's; step.update steps; run.evaluate, run.log, checkpoints: as on one process
    worker   a step's number is the one it was given. step.update steps nothing: it waits for new parameters.
             step.every(n) is never true, nothing is saved, and with the last step the script is over: what it does
             behind its loop, the server does

Processes meet once, when the loop begins; then they part (torch's groups do not survive a death) and talk over links.
A worker that dies closes its link: its step is handed out again, and nobody waits. When the server dies, its workers
hear of it the same way and end; what it has saved is where a resume goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unisono.config import Settings, plural
from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.roles import RoleGroup, build_crew
from unisono.errors import LoopError, RunStopped
from unisono.launcher import failure_record
from unisono.monitor.step_monitor import StepMonitor
from unisono.param_server.async_server import FollowerLoop, ServerLoop
from unisono.param_server.async_worker import WorkerLoop
from unisono.param_server.sync_servers import RoleRun, ServerParts
from unisono.param_server.tcp_link import TcpLink, build_links
from unisono.train.loop import StepLoop
from unisono.train.pipelining.stage_state import LocalPart
from unisono.train.run import Run
from unisono.train.step import Step

T = TypeVar("T")


class AsyncServerRun(RoleRun):
    """A run whose processes meet before the loop only. In it each is by itself, as far as torch is concerned."""

    def __init__(
        self, settings: Settings, *, group: ProcessGroup, engine: type[StepLoop] = StepLoop, **more: Any
    ) -> None:
        self.crew = build_crew(group, settings.server.count)
        pace: type[StepLoop] = ServerLoop if group.rank == 0 else FollowerLoop if self.crew.serves else WorkerLoop
        kind = pace if engine is StepLoop else type("Engine", (engine, pace), {})
        super().__init__(settings, group=ProcessGroup(device=group.device), engine=kind, **more)
        self._everybody, self._group, self._alone = group, group, self._group
        self._table.group = group  # until the loop begins
        self._state.stages = self._parts = AsyncParts(self.crew, self._state.tracked)
        world, output, color = more["world"], more["output"], more.get("color", False)
        self._watcher = StepMonitor(
            self.dir, self.rank, output, live=world.terminal, columns=world.columns, color=color
        )

    def _steps(self, engine: StepLoop) -> Iterator[Step]:
        self._refuse_averages()
        links = build_links(self._group, self.crew.servers)
        self._group.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._table.group = self._group = self._alone
        if isinstance(engine, ServerLoop):
            engine.open(links, self.crew, self.steps_done, self.print, self._stop_now)
        elif isinstance(engine, FollowerLoop):
            engine.open(links, self.crew, self._parts.mine)
        else:
            assert isinstance(engine, WorkerLoop)
            failure_record.mark_spare()
            return self._work(engine, links)
        return super()._steps(engine)

    def _ask_for_collective(self) -> None:
        if self._group is self._alone:
            raise LoopError(
                "A verb of run.collectives was called.",
                "With exchange=server and server.staleness above 0 no two processes meet once the loop has begun.",
                "call it before the loop, or --set server.staleness=0.",
            )
        super()._ask_for_collective()

    def _refuse_averages(self) -> None:
        """With several servers the first one sees the others' parameters now and then."""
        placed = {id(p) for model in self._models.modules for p in model.parameters()}
        strange = [m for m in self._state.models.values() if any(id(p) not in placed for p in m.parameters())]
        if strange and self.crew.servers > 1:
            raise LoopError(
                f"run.track was given a {type(strange[0]).__name__} that was not placed.",
                f"With server.count={self.crew.servers} and server.staleness above 0 no process has all parameters "
                "after every update, so an average of them would be one of old ones.",
                "--set server.count=1, or --set server.staleness=0.",
            )

    def _work(self, engine: WorkerLoop, links: Mapping[int, TcpLink]) -> Iterator[Step]:
        """The steps that the server gives this process, until it is over."""
        self._state.begin()
        self._watcher.begin(engine.last, self.steps_done, 0, resumed=self._state.resumed is not None)
        self._began = time.perf_counter()
        engine.begin(links, self.crew)
        while True:
            step = self._last_step = engine.new_step(engine.number)
            engine.before_step(engine.number)
            try:
                yield step
            except GeneratorExit:  # the loop was left with break
                self._state.seal(half_done=step.is_half_done)
                raise
            step.finish()
            self._state.check_whole(self._models.modules, engine.steppers)
            self._samples_here += step.samples
            self._done = step
            self._watcher.step(step)
            if self._leave:
                raise RunStopped

    def _save(self, more_changes: Sequence[dict[str, Any]] = (), *, beside: bool = False) -> None:
        if isinstance(self._engine, ServerLoop):
            self._parts.shown = self._engine.refresh(states=True)
            super()._save(more_changes, beside=beside)

    def together(self, what: str, body: Callable[[], T], *, again: bool = True) -> T:
        if isinstance(self._engine, ServerLoop) and what in ("run.evaluate", "run.predict"):
            self._engine.refresh()
        return super().together(what, body, again=again)

    def _stop_now(self) -> None:
        """Between two updates: save what is there."""
        if self._state.saved_after != self.steps_done:
            self._save()

    def leave(self) -> None:
        super().leave()
        if isinstance(self._engine, ServerLoop):
            self._engine.wake()

    def promise(self) -> tuple[str, str]:
        if self.changes:
            return super().promise()
        bound = self.settings.server.staleness
        late = "by any number of updates" if bound is None else f"by up to {plural(bound, 'update')}"
        return (
            "sites are part of the mathematics",
            f"exchange=server with server.staleness={'none' if bound is None else bound} uses gradients as they come, "
            f"late {late}: two runs of one command differ; server.staleness=0 does not",
        )

    def result(self) -> dict[str, Any]:
        told = super().result()
        told["promise"], told["reason"] = self.promise()
        told["servers"] = self.settings.server.count
        told.pop("bytes_per_step", None)  # nobody counts what links carry
        if isinstance(self._engine, ServerLoop):
            told |= self._engine.told()
        return told


class AsyncParts(ServerParts):
    """Optimizers of which other servers have told what they hold.

    shown  by them: {name of the optimizer: {number of the parameter: its state}}
    """

    def __init__(self, crew: RoleGroup, tracked: Mapping[str, Any]) -> None:
        super().__init__(crew)
        self.tracked = tracked
        self.shown: list[dict[str, dict[str, Any]]] = []

    def mine(self) -> dict[str, dict[str, Any]]:
        """What this process holds of all that is tracked."""
        optimizers = {name: o for name, o in self.tracked.items() if isinstance(o, torch.optim.Optimizer)}
        return {name: self.held(o, o.state_dict()) for name, o in optimizers.items()}

    def whole(self, thing: Any, state: Any, shelf: LocalPart | None = None) -> Any:
        if not isinstance(thing, torch.optim.Optimizer) or self.crew.servers == 1:
            return state
        name = next(name for name, tracked in self.tracked.items() if tracked is thing)
        return self.together(state, [self.held(thing, state), *(shown[name] for shown in self.shown)])


def kind_of_pace(settings: Settings) -> type[Run[Any]]:
    """The class of such a run."""
    return AsyncServerRun
