"""The server of an asynchronous run, and others that follow it (async_run.py).

With several servers each holds some of the parameters (distributed/roles.py), and the first one decides for all. A
worker sends each what it holds, and the first one its part last:

    worker 3  --part of q----------------->  server 1  --"I have 3's step 7"-->  server 0
              --part of p, loss, buffers-------------------------------------->  all have it: its turn comes
    server 0  --"use 3's step 7", "give 3 what you have"-->  server 1            it steps p, server 1 steps q
              --p, "yours is step 9"-->  worker 3  <--q--  server 1

What it says to a follower arrives in order, so all make the same updates in the same order, and what a worker gets of
each is the same version. The norm to clip by comes from the worker, which has the whole gradient. Before the first one
evaluates or saves, it asks the others for what they hold.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from unisono.config import plural
from unisono.data.rng import seed_everything
from unisono.distributed.process_group import wrap_peer_errors
from unisono.distributed.roles import RoleGroup
from unisono.errors import PeerLostError, RunStopped, WorldError
from unisono.param_server.async_worker import AsyncLoop
from unisono.param_server.connections import Message, WorkerConnections
from unisono.param_server.ledger import Ledger
from unisono.param_server.messages import ParameterMessages
from unisono.param_server.tcp_link import TcpLink
from unisono.plan.batch_order import MicroBatchId
from unisono.plan.rng_keys import mix
from unisono.tensors.codec import TensorTable, decode, encode, specs_of
from unisono.train.gradient_pass import GradientPass
from unisono.train.optimization.grad_norm import clip_
from unisono.train.step import FROM_SETTINGS, Step

LOOK_SECONDS = 0.1
"""Where a worker may hold up others, it is looked so often whether it does so for too long."""


class ServerStep(Step):
    """A step is an update; when it is made, who sent the gradient gets what came of it."""

    _engine: ServingLoop

    def update(self, *steppers: Any, clip: float | None = FROM_SETTINGS) -> None:
        super().update(*steppers, clip=clip)
        self._engine.updated()


class ServingLoop(AsyncLoop, ABC):
    """What all servers have in common: gradients come from workers."""

    hub: WorkerConnections | None = None
    crew: RoleGroup
    wares: ParameterMessages
    _norm: float | None = None  # of the gradient that is being used, if only its worker knows

    def new_step(self, number: int) -> Step:
        return ServerStep(self, number)

    def micro_batches(
        self, step: int, number: int, gradient: GradientPass, kept: list[tuple[MicroBatchId, Any]] | None
    ) -> Iterator[tuple[MicroBatchId, Any, bool]]:
        """None: workers have them."""
        return iter(())

    def synchronize(self, step: Step, number: int, gradient: GradientPass) -> dict[str, tuple[float, float]]:
        """Wait for the next gradient."""
        letter = self.next(step)
        self.wares.take(gradient, letter.about, letter.tensors)
        gradient.may_skip, self._norm = self.scale.may_skip, letter.about["norm"]
        self.asked["stop"] |= bool(letter.about["stop"])
        self.agreed = dict(self.asked) if self.crew.rank == 0 else {"stop": False, "leave": False}
        step.samples = self.order.batch_size(letter.about["push"])
        seed_everything(mix(self._update_key, step.number), self._accelerator)
        return {name: (total, weight) for name, (total, weight) in letter.about["sums"].items()}

    @abstractmethod
    def next(self, step: Step) -> Message:
        """The gradient whose turn it is."""

    def updated(self) -> None:
        """The update is made."""

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        if self._norm is None:
            return super().clip(params, limit)
        if limit is not None:
            clip_([p.grad for p in params if p.grad is not None], limit, self._norm)
        return self._norm

    def close(self) -> None:
        super().close()
        if self.hub is not None:
            self.hub.close()


class ServerLoop(ServingLoop):
    """The first server: it knows who has which step, and whose gradient is used next."""

    def open(
        self,
        links: Mapping[int, TcpLink],
        crew: RoleGroup,
        first: int,
        tell: Callable[[str], None],
        save: Callable[[], None],
    ) -> None:
        """From now on there are workers, and `first` updates were made. `tell` says something on the screen; `save` is
        called before an end."""
        self.crew, self._tell, self._save_now = crew, tell, save
        self.followers = {rank: links[rank] for rank in range(1, crew.servers)}
        self.hub = WorkerConnections({rank: links[rank] for rank in crew.workers}, self.followers)
        self.ledger = Ledger(first, self.last, self.settings.server.staleness)
        self.carried.register("ledger", self.ledger)  # type: ignore[arg-type]  # it has a state as exchanges have
        self.wares = ParameterMessages(self.models, crew)
        self.workers = set(crew.workers)  # that are there
        self.lost: list[int] = []
        self._idle: list[int] = []  # workers for whom there was no step
        self._new = set(crew.workers)  # workers that have nothing yet
        self._parts: dict[int, Message] = {}  # gradients of which followers may not have their part yet
        self._have: dict[tuple[int, int], int] = {}  # of a worker's step, how many of them have
        self._here: dict[int, Message] = {}  # gradients that wait for their turn
        self._now: int | None = None  # the worker whose gradient is being used
        self._copies: tuple[int, tuple[dict[str, Any], list[torch.Tensor]]] | None = None
        self._shown: dict[int, Message] = {}

    def updated(self) -> None:
        """The update is made: its worker goes on with what came of it, whatever the loop does now."""
        assert self._now is not None
        worker, self._now = self._now, None
        self.ledger.use(worker)
        self._give(worker)

    def refresh(self, *, states: bool = False) -> list[dict[str, Any]]:
        """Get what followers hold: parameters, and, if they are asked for, the states of their optimizers."""
        if self.hub is None or self.hub.is_over or not self.followers:
            return []
        self._shown = {}
        self._order({"show": states})
        while len(self._shown) < len(self.followers):
            letter = self.hub.receive(None)
            if letter is not None:
                self._read(letter)
        found = []
        for _, (_, about, tensors) in sorted(self._shown.items()):
            count = len(about["params"])
            self.wares.unpack(about, tensors[:count])
            found.append(decode(about["states"], dict(zip(specs_of(about["states"]), tensors[count:], strict=True))))
        return found

    def _order(self, about: Mapping[str, Any]) -> None:
        for link in self.followers.values():
            link.send(about)

    def wake(self) -> None:
        """Somebody wants to leave. A signal's handler may call it."""
        if self.hub is not None:
            self.hub.notify()

    def end(self) -> None:
        if self.hub is not None and not self.hub.is_over:
            with suppress(OSError):
                self._order({"over": True})
            self.hub.finish()
        super().end()

    def told(self) -> dict[str, Any]:
        """What the result says of it."""
        if self.hub is None:
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
        if self.hub is not None:  # which is no gradient's
            self.carried.register("ledger", self.ledger)  # type: ignore[arg-type]

    def next(self, step: Step) -> Message:
        """The gradient whose turn it is; meanwhile whoever asks for work gets some."""
        hub, ledger = self.hub, self.ledger
        assert hub is not None
        while (turn := ledger.turn()) is None:
            if self.asked["leave"]:
                self._save_now()
                self.end()
                raise RunStopped
            if not self.workers:
                self._deserted(step)
            letter = hub.receive(LOOK_SECONDS if self._idle or ledger.bound is not None else None)
            if letter is not None:
                self._read(letter)
            for worker in ledger.overtake(time.monotonic(), idle=bool(self._idle)):
                self._tell(f"Worker {worker} holds up the others: its step is handed out again.")
                self._give_idle()
        self._now = turn
        self._order({"use": turn})
        return self._here.pop(turn)

    def _read(self, letter: Message) -> None:
        worker, about = letter.worker, letter.about
        if worker in self.followers:
            self._hear(letter)
        elif not about or "bye" in about:
            self._part_with(worker, died=not about)
        elif "push" in about:
            self._parts[worker] = letter
            self._arrive(worker, about["push"])
        else:
            self._give(worker)

    def _hear(self, letter: Message) -> None:
        """What a follower says."""
        if "have" in letter.about:
            worker, number = letter.about["have"]
            self._have[worker, number] = self._have.get((worker, number), 0) + 1
            self._arrive(worker, number)
        elif "params" in letter.about:
            self._shown[letter.worker] = letter
        else:
            raise lost(letter.worker)

    def _arrive(self, worker: int, number: int) -> None:
        """Once every server has its part, a gradient is there."""
        letter = self._parts.get(worker)
        if letter is None or self._have.get((worker, number), 0) < len(self.followers):
            return
        del self._parts[worker]
        self._have.pop((worker, number), None)
        if self.ledger.arrive(worker, number, time.monotonic()):
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
        assert self.hub is not None
        if worker not in self.workers:
            return
        number = self.ledger.hand(worker, time.monotonic())
        if number is None:
            self._idle.append(worker)
            return
        everything = worker in self._new
        about, tensors = self._copy(everything=everything)
        self._new.discard(worker)
        more = {"step": number, "version": self.ledger.version, "scale": self.scale.state_dict()}
        self._order({"give": worker, "everything": everything})
        self.hub.answer(Message(worker, {**about, **more}, tensors))

    def _copy(self, *, everything: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """What a worker gets: one copy for all who ask between the same two updates."""
        if everything:
            return self.wares.packed(everything=True)
        if self._copies is None or self._copies[0] != self.ledger.version:
            self._copies = self.ledger.version, self.wares.packed(everything=False)
        return self._copies[1]

    def _deserted(self, step: Step) -> NoReturn:
        self._save_now()
        died = " and ".join(map(str, sorted(self.lost))) or "none"
        raise WorldError(
            f"Step {step.number} waited for a gradient.",
            f"No worker is left (died: rank {died}; the others have left). What was learned is saved.",
            "look at their logs; then start the same command with --resume.",
        )


class FollowerStep(ServerStep):
    """What is done now and then, the first server does."""

    def every(self, n: int) -> bool:
        return False

    @property
    def ends_epoch(self) -> bool:
        return False


class FollowerLoop(ServingLoop):
    """Another server: it does what the first one says, with what it holds."""

    _is_open = False

    def open(self, links: Mapping[int, TcpLink], crew: RoleGroup, states: Callable[[], dict[str, Any]]) -> None:
        """`states`: of optimizers, of what this process holds."""
        self.crew, self._first, self._states, self._is_open = crew, links[0], states, True
        self.hub = WorkerConnections({rank: links[rank] for rank in crew.workers}, {0: links[0]})
        self.wares = ParameterMessages(self.models, crew)
        self._here: dict[int, Message] = {}

    def new_step(self, number: int) -> Step:
        return FollowerStep(self, number)

    def next(self, step: Step) -> Message:
        while (letter := self._obey()) is None:
            pass
        return letter

    def end(self) -> None:
        """All updates are made: what was made of them is still asked for."""
        while self._is_open:
            self._obey()
        super().end()

    def close(self) -> None:
        self._is_open = False
        super().close()

    def _obey(self) -> Message | None:
        """Wait for the next word, and do what it says; returns the gradient to use, if that is it."""
        assert self.hub is not None
        with wrap_peer_errors("The next update"):
            letter = self.hub.receive(None)
            if letter is None:
                return None
            worker, about = letter.worker, letter.about
            if worker in self.crew.workers:
                if "push" in about:
                    self._here[worker] = letter
                    self._first.send({"have": [worker, about["push"]]})
                return None
            if "use" in about:
                return self._here.pop(about["use"])
            if "give" in about:
                self._here.pop(about["give"], None)  # it came too late
                self.hub.answer(Message(about["give"], *self.wares.packed(everything=about["everything"])))
            elif "show" in about:
                packed, tensors = self.wares.packed(everything=False)
                found = TensorTable()
                states = encode(self._states() if about["show"] else {}, "", found)
                self._first.send({**packed, "states": states}, [*tensors, *found.values()])
            elif "over" in about:
                self._is_open = False
                self.hub.finish()
                raise RunStopped
            else:
                raise lost(0)
        return None


def lost(server: int) -> PeerLostError:
    return PeerLostError(
        f"The server on rank {server} was asked for what it holds.",
        "It is gone, and nobody else has the state of its optimizer.",
        "look at its log; then start the same command with --resume.",
    )
