"""A run in which each worker goes at its own pace (exchange=server, server.staleness above 0, or none).

One process serves, the others work, and no two ever wait for a step in common:

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
with parameters from some updates ago (score/ledger.py), and who comes first is decided by the machines: two runs of one
command differ.

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
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from unisono.data.seeding import seed_everything
from unisono.errors import LoopError, Stopped, WorldError
from unisono.launch import record
from unisono.score.keys import mix
from unisono.score.ledger import Ledger
from unisono.score.order import Place
from unisono.settings import Settings, plural
from unisono.train.engine import Engine
from unisono.train.gradient import Gradient
from unisono.train.hub import Hub, Letter
from unisono.train.run import Run
from unisono.train.step import FROM_SETTINGS, Step
from unisono.train.wares import Wares
from unisono.watch.watcher import Watcher
from unisono.world.collectives import Group, peers
from unisono.world.links import Link, build_links

LOOK_SECONDS = 0.1
"""Where a worker may hold up others, it is looked so often whether it does so for too long."""


class PacedRun(Run[Settings]):
    """A run whose processes meet before the loop only. In it each is by itself, as far as torch is concerned."""

    def __init__(self, settings: Settings, *, group: Group, engine: type[Engine] = Engine, **more: Any) -> None:
        self.serves = group.rank < settings.server.count
        pace = ServerEngine if self.serves else WorkerEngine
        kind = pace if engine is Engine else type("Engine", (engine, pace), {})
        super().__init__(settings, group=Group(device=group.device), engine=kind, **more)
        self.rank, self.size, self._group, self._alone = group.rank, group.size, group, self._group
        self._table.group = group  # until the loop begins
        world, output, color = more["world"], more["output"], more.get("color", False)
        self._watcher = Watcher(self.dir, self.rank, output, live=world.terminal, columns=world.columns, color=color)

    def _steps(self, engine: Engine) -> Iterator[Step]:
        links = build_links(self._group, self.settings.server.count)
        self._group.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._table.group = self._group = self._alone
        if isinstance(engine, ServerEngine):
            engine.open(links, self.steps_done, self.print, self._stop_now)
            return super()._steps(engine)
        assert isinstance(engine, WorkerEngine)
        record.be_spare()
        return self._work(engine, links[0])

    def _work(self, engine: WorkerEngine, link: Link) -> Iterator[Step]:
        """The steps that the server gives this process, until it is over."""
        self._state.begin()
        self._watcher.begin(engine.last, self.steps_done, 0, resumed=self._state.resumed is not None)
        self._began = time.perf_counter()
        engine.begin(link)
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
                raise Stopped

    def _save(self, more_changes: Sequence[dict[str, Any]] = ()) -> None:
        if self.serves:
            super()._save(more_changes)

    def _stop_now(self) -> None:
        """Between two updates: save what is there."""
        if self._state.saved_after != self.steps_done:
            self._save()

    def leave(self) -> None:
        super().leave()
        if isinstance(self._engine, ServerEngine):
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
        if isinstance(self._engine, ServerEngine):
            told |= self._engine.told()
        return told


def kind_of_pace(settings: Settings) -> type[Run[Any]]:
    """The class of such a run."""
    return PacedRun


def _refuse_passes(engine: Engine, optimizers: Sequence[Any] | None) -> None:
    if optimizers is not None:
        raise LoopError(
            "step.over was asked for a pass.",
            "With exchange=server and server.staleness above 0 a step is one gradient and one update.",
            "add the losses up in one pass, or --set server.staleness=0.",
        )


# -- the server


class ServerStep(Step):
    """A step is an update; when it is made, who sent the gradient gets what came of it."""

    _engine: ServerEngine

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        super().update(*steppers, clip=clip)
        self._engine.updated()


class ServerEngine(Engine):
    """Gradients come from workers."""

    _hub: Hub | None = None

    def open(
        self, links: Mapping[int, Link], first: int, tell: Callable[[str], None], save: Callable[[], None]
    ) -> None:
        """From now on there are workers, and `first` updates were made. `tell` says something on the screen; `save` is
        called before an end."""
        self._hub, self._tell, self._save_now = Hub(links), tell, save
        self.ledger = Ledger(first, self.last, self.settings.server.staleness)
        self.carried.know("ledger", self.ledger)  # type: ignore[arg-type]  # it has a state as exchanges have
        self.wares = Wares(self.models)
        self.workers = set(links)  # that are there
        self.lost: list[int] = []
        self._idle: list[int] = []  # workers for whom there was no step
        self._new = set(links)  # workers that have nothing yet
        self._here: dict[int, Letter] = {}  # gradients that wait for their turn
        self._now: int | None = None  # the worker whose gradient is being used
        self._copies: tuple[int, tuple[dict[str, Any], list[torch.Tensor]]] | None = None

    def new_step(self, number: int) -> Step:
        return ServerStep(self, number)

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> Gradient:
        _refuse_passes(self, optimizers)
        return super().gradient_of(optimizers, waiting=waiting)

    def micro_batches(
        self, step: int, number: int, gradient: Gradient, kept: list[tuple[Place, Any]] | None
    ) -> Iterator[tuple[Place, Any, bool]]:
        """None: workers have them."""
        return iter(())

    def meet(self, step: Step, number: int, gradient: Gradient) -> dict[str, tuple[float, float]]:
        """Wait for the next gradient."""
        letter = self._next(step)
        self.wares.take(gradient, letter.about, letter.tensors)
        gradient.may_skip = self.scale.may_skip
        self.asked["stop"] |= bool(letter.about["stop"])
        self.agreed = dict(self.asked)
        step.samples = self.order.batch_size(letter.about["push"])
        seed_everything(mix(self._update_key, step.number), self._accelerator)
        return {name: (total, weight) for name, (total, weight) in letter.about["sums"].items()}

    def updated(self) -> None:
        """The update is made: its worker goes on with what came of it, whatever the loop does now."""
        assert self._now is not None
        worker, self._now = self._now, None
        self.ledger.use(worker)
        self._give(worker)

    def wake(self) -> None:
        """Somebody wants to leave. A signal's handler may call it."""
        if self._hub is not None:
            self._hub.wake()

    def end(self) -> None:
        if self._hub is not None:
            self._hub.finish()
        super().end()

    def close(self) -> None:
        super().close()
        if self._hub is not None:
            self._hub.close()

    def told(self) -> dict[str, Any]:
        """What the result says of it."""
        if self._hub is None:
            return {}
        ledger = self.ledger
        made = ledger.version - ledger.first
        return {
            "lost_workers": self.lost,
            "handed_out_again": ledger.again,
            "dropped_gradients": ledger.dropped,
            "late_mean": round(ledger.late / made, 3) if made else 0.0,
            "late_most": ledger.latest,
        }

    def _forget(self) -> None:
        super()._forget()
        if self._hub is not None:  # which is no gradient's
            self.carried.know("ledger", self.ledger)  # type: ignore[arg-type]

    def _next(self, step: Step) -> Letter:
        """The gradient whose turn it is; meanwhile whoever asks for work gets some."""
        hub, ledger = self._hub, self.ledger
        assert hub is not None
        while (turn := ledger.turn()) is None:
            if self.asked["leave"]:
                self._save_now()
                hub.finish()
                raise Stopped
            if not self.workers:
                self._deserted(step)
            letter = hub.receive(LOOK_SECONDS if self._idle or ledger.bound is not None else None)
            if letter is not None:
                self._read(letter)
            for worker in ledger.overtake(time.monotonic(), idle=bool(self._idle)):
                self._tell(f"Worker {worker} holds up the others: its step is handed out again.")
                self._give_idle()
        self._now = turn
        return self._here.pop(turn)

    def _read(self, letter: Letter) -> None:
        worker, about = letter.worker, letter.about
        if not about or "bye" in about:
            self._part_with(worker, died=not about)
        elif "push" in about and self.ledger.arrive(worker, about["push"], time.monotonic()):
            self._here[worker] = letter
        else:
            self._give(worker)

    def _part_with(self, worker: int, *, died: bool) -> None:
        if worker not in self.workers:  # it has said so itself
            return
        self.workers.remove(worker)
        again = self.ledger.lose(worker)
        self._idle = [other for other in self._idle if other != worker]
        if died:
            self.lost.append(worker)
            what = "" if again is None else f" Step {again} is handed out again;"
            self._tell(f"Worker {worker} is gone.{what} {plural(len(self.workers), 'worker')} left.")
        self._give_idle()

    def _give_idle(self) -> None:
        idle, self._idle = self._idle, []
        for worker in idle:
            self._give(worker)

    def _give(self, worker: int) -> None:
        """New parameters and the next step, if there is one; otherwise it waits for either."""
        assert self._hub is not None
        if worker not in self.workers:
            return
        number = self.ledger.hand(worker, time.monotonic())
        if number is None:
            self._idle.append(worker)
            return
        about, tensors = self._copy(everything=worker in self._new)
        self._new.discard(worker)
        more = {"step": number, "version": self.ledger.version, "scale": self.scale.state_dict()}
        self._hub.answer(Letter(worker, {**about, **more}, tensors))

    def _copy(self, *, everything: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """What a worker gets: one copy for all who ask between the same two updates."""
        if everything:
            return self.wares.packed(everything=True)
        if self._copies is None or self._copies[0] != self.ledger.version:
            self._copies = self.ledger.version, self.wares.packed(everything=False)
        return self._copies[1]

    def _deserted(self, step: Step) -> NoReturn:
        self._save_now()
        died = " and ".join(map(str, self.lost)) or "none"
        raise WorldError(
            f"Step {step.number} waited for a gradient.",
            f"No worker is left (died: rank {died}; the others have left). What was learned is saved.",
            "look at their logs; then start the same command with --resume.",
        )


# -- a worker


class WorkerStep(Step):
    """A step that was given to this process. Nothing is stepped here: new parameters come."""

    _engine: WorkerEngine

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
            self._engine.know(optimizer)
        for schedule in steppers:
            if schedule not in optimizers:
                self._engine.know_schedule(schedule)


class WorkerEngine(Engine):
    """Steps come from the server, gradients go there.

    number   of the step that is this process's now
    version  updates that are in its parameters
    """

    number = -1
    version = 0
    _link: Link | None = None

    def begin(self, link: Link) -> None:
        self._link, self.wares = link, Wares(self.models)
        self._loader.steps = self._numbers()
        self.gradient_of(None)  # what trains is known before anything comes
        with peers("The first step"):
            link.send({"hello": True})
            self._take(*link.receive())

    def _numbers(self) -> Iterator[int]:
        while True:
            yield self.number

    def new_step(self, number: int) -> Step:
        return WorkerStep(self, number)

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> Gradient:
        _refuse_passes(self, optimizers)
        return super().gradient_of(optimizers, waiting=waiting)

    def micro_batches(
        self, step: int, number: int, gradient: Gradient, kept: list[tuple[Place, Any]] | None
    ) -> Iterator[tuple[Place, Any, bool]]:
        assert self._link is not None
        for micro_batch in super().micro_batches(step, number, gradient, kept):
            if self._link.has_word():  # unasked: it is over, or the server is gone
                with peers(f"Step {step}"):
                    self._take(*self._link.receive())
            yield micro_batch

    def meet(self, step: Step, number: int, gradient: Gradient) -> dict[str, tuple[float, float]]:
        assert self._link is not None
        sums = super().meet(step, number, gradient)
        about, tensors = self.wares.pushed(gradient)
        more = {"push": step.number, "version": self.version, "sums": sums, "stop": bool(self.asked["stop"])}
        with peers(f"Step {step.number}'s push"):
            self._link.send({**about, **more}, tensors)
        return sums

    def pull(self) -> None:
        """New parameters, and the next step. Raises Stopped when it is over."""
        assert self._link is not None
        with peers("A pull of new parameters"):
            self._take(*self._link.receive())

    def _take(self, about: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        if "over" in about:
            raise Stopped
        self.wares.unpack(about, tensors)
        self.scale.load_state_dict(about["scale"])
        self.number, self.version = about["step"], about["version"]

    def close(self) -> None:
        super().close()
        if self._link is not None:
            self._link.tell({"bye": True})
            self._link.close()
