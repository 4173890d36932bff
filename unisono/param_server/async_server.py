"""The servers of an asynchronous run: the first one, and its followers (async_run.py).

With several servers each holds some of the parameters (distributed/roles.py), and the first one decides for all. A
worker sends each server its part of the gradient. The first server receives its part last:

    worker 3  --part of q----------------->  server 1  --"I have 3's step 7"-->  server 0
              --part of p, loss, buffers-------------------------------------->  all servers have the gradient
    server 0  --"use 3's step 7", "give 3 your parameters"-->  server 1         it steps p, server 1 steps q
              --p, "yours is step 9"-->  worker 3  <--q--  server 1

Messages of the first server to a follower arrive in order. So all servers run the same updates in the same order, and a
worker gets the same version of each part. The norm for clipping comes from the worker, which has the whole gradient.
Before the first server evaluates or saves, it gets the parameters of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

import torch

from unisono.config import plural
from unisono.data.rng import seed_everything
from unisono.distributed.process_group import ProcessGroup, wrap_peer_errors
from unisono.distributed.roles import RoleGroup
from unisono.errors import PeerLostError, RunStopped, WorldError
from unisono.param_server.async_worker import refuse_passes
from unisono.param_server.connections import Message, WorkerConnections
from unisono.param_server.ledger import Ledger
from unisono.param_server.messages import ParameterMessages
from unisono.param_server.tcp_link import TcpLink
from unisono.plan.rng_keys import UPDATE, mix
from unisono.tensors.codec import TensorTable, decode, encode, specs_of
from unisono.train.batches.batch_source import Assignment, BatchSource
from unisono.train.collective import Rounds
from unisono.train.context import LoopParts, RunContext
from unisono.train.gradient_pass import GradientPass
from unisono.train.optimization.grad_norm import clip_
from unisono.train.step_state import StepState
from unisono.train.step_sync import Totals

LOOK_SECONDS = 0.1
"""Interval at which the first server checks whether a worker holds up others for too long."""


class ServerRole(Protocol):
    """The work of a server between two updates. `is_first`: whether it decides for all servers."""

    is_first: bool
    messages: ParameterMessages

    def next(self, step: StepState) -> Message:
        """Return the next gradient to use."""
        ...

    def updated(self, step: StepState) -> None:
        """Send the results of an update that is complete."""
        ...

    def register(self) -> None:
        """Register state after exchanges were closed or built."""
        ...

    def end(self) -> None:
        """End after the last update."""
        ...

    def close(self) -> None:
        """Close the links."""
        ...


class ServerBatches:
    """A server computes no micro-batches."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def seed_step(self, step: int) -> None:
        """See BatchSource."""
        self.source.seed_step(step)

    def begin(self, step: StepState) -> Assignment:
        """Return an empty assignment."""
        return Assignment((), (0, 0), {})

    def rounds(self, step: StepState, assignment: Assignment) -> Rounds:
        """Return no micro-batches, because the workers have them."""
        return iter(())

    def close(self) -> None:
        """See BatchSource."""
        self.source.close()


class ServerSync:
    """Wait for gradients of workers instead of completing gradients."""

    steps_optimizers = True

    def __init__(self, context: RunContext, parts: LoopParts, role: ServerRole) -> None:
        self.progress, self.scale, self.inner, self.role = context.progress, context.scale, parts.sync, role
        device = context.device
        self._accelerator = device if device.type != "cpu" else None
        self._key = mix(parts.source.order.seed, UPDATE)
        self._norm: float | None = None  # of the current gradient, if only its worker can compute it

    @property
    def group(self) -> ProcessGroup:
        """This process alone."""
        return self.inner.group

    def gradient_of(self, optimizers: Sequence[Any] | None, *, waiting: bool = False) -> GradientPass:
        """See GradientSync."""
        refuse_passes(optimizers)
        gradient = self.inner.gradient_of(None, waiting=waiting)
        self.role.register()
        return gradient

    def begin(self, step: StepState, gradient: GradientPass, assignment: Assignment) -> None:
        """Do nothing: a server computes no micro-batches."""

    def synchronize(self, step: StepState, gradient: GradientPass) -> None:
        """Wait for the next gradient."""
        role, requests = self.role, self.progress.requests
        message = role.next(step)
        about = message.about
        role.messages.take(gradient, about, message.tensors)
        gradient.may_skip, self._norm = self.scale.may_skip, about["norm"]
        requests["stop"] |= bool(about["stop"])
        self.progress.agreed = dict(requests) if role.is_first else {"stop": False, "leave": False}
        step.samples = self.inner.order.batch_size(about["push"])
        step.totals = Totals({name: (total, weight) for name, (total, weight) in about["sums"].items()}, {}, [], [])

    def commit(self, step: StepState, gradient: GradientPass) -> None:
        """Seed the generators for the code after the rounds."""
        seed_everything(mix(self._key, step.number), self._accelerator)
        step.sums = step.totals.sums

    def clip(self, params: Sequence[torch.nn.Parameter], limit: float | None) -> float:
        """Clip by the norm that the worker has computed, if there is one."""
        if self._norm is None:
            return self.inner.clip(params, limit)
        if limit is not None:
            clip_([p.grad for p in params if p.grad is not None], limit, self._norm)
        return self._norm

    def close(self) -> None:
        """Release the parameters, and close the links."""
        self.inner.close()
        self.role.close()


class FirstServer:
    """The first server: it records the step of each worker, and chooses the gradient to use next."""

    is_first = True

    def __init__(
        self,
        context: RunContext,
        crew: RoleGroup,
        links: Mapping[int, TcpLink],
        messages: ParameterMessages,
        save: Callable[[], None],
    ) -> None:
        """`save` is called before an early end."""
        progress = context.progress
        self.progress, self.scale, self.messages = progress, context.scale, messages
        self._exchange_states, self._note, self._save = context.exchange_states, context.monitor.note, save
        self.followers = {rank: links[rank] for rank in range(1, crew.servers)}
        self.connections = WorkerConnections({rank: links[rank] for rank in crew.workers}, self.followers)
        self.ledger = Ledger(progress.steps_done, progress.last, context.settings.server.staleness)
        self.register()
        self.workers = set(crew.workers)  # workers that are still connected
        self.lost: list[int] = []
        self._idle: list[int] = []  # workers for which there was no step
        self._new = set(crew.workers)  # workers that have no parameters yet
        self._parts: dict[int, Message] = {}  # gradients of which followers may not have their part yet
        self._have: dict[tuple[int, int], int] = {}  # by worker and step, the number of followers that have their part
        self._here: dict[int, Message] = {}  # complete gradients that wait for their turn
        self._now: int | None = None  # the worker whose gradient is in use
        self._copies: tuple[int, tuple[dict[str, Any], list[torch.Tensor]]] | None = None
        self._shown: dict[int, Message] = {}

    def register(self) -> None:
        """Keep the ledger among the states of exchanges, which a checkpoint holds."""
        if "ledger" not in self._exchange_states.exchanges:
            self._exchange_states.register("ledger", self.ledger)  # type: ignore[arg-type]  # it has a state, too

    def updated(self, step: StepState) -> None:
        """Send the new parameters to the worker of this update, before the loop continues."""
        assert self._now is not None
        worker, self._now = self._now, None
        self.ledger.use(worker)
        self._give(worker)

    def refresh(self, *, states: bool = False) -> list[dict[str, Any]]:
        """Get the parameters of followers, and with `states` return the states of their optimizers."""
        if self.connections.is_over or not self.followers:
            return []
        self._shown = {}
        self._order({"show": states})
        while len(self._shown) < len(self.followers):
            message = self.connections.receive(None)
            if message is not None:
                self._read(message)
        found = []
        for _, (_, about, tensors) in sorted(self._shown.items()):
            count = len(about["params"])
            self.messages.unpack(about, tensors[:count])
            found.append(decode(about["states"], dict(zip(specs_of(about["states"]), tensors[count:], strict=True))))
        return found

    def _order(self, about: Mapping[str, Any]) -> None:
        for link in self.followers.values():
            link.send(about)

    def wake(self) -> None:
        """End a wait for messages, because a signal arrived. Its handler may call this."""
        self.connections.notify()

    def end(self) -> None:
        """Send all processes the message that the run is over."""
        if not self.connections.is_over:
            with suppress(OSError):
                self._order({"over": True})
            self.connections.finish()

    def close(self) -> None:
        """Close the links."""
        self.end()
        self.connections.close()

    def result(self) -> dict[str, Any]:
        """Return entries of result.json."""
        ledger = self.ledger
        made = ledger.version - ledger.first
        return {
            "lost_workers": self.lost,
            "handed_out_again": ledger.again,
            "dropped_gradients": ledger.dropped,
            "late_mean": round(ledger.late / made, 3) if made else 0.0,
            "late_most": ledger.latest,
        }

    def next(self, step: StepState) -> Message:
        """Return the next gradient to use. Meanwhile, assign steps to workers."""
        connections, ledger = self.connections, self.ledger
        while (turn := ledger.turn()) is None:
            if self.progress.requests["leave"]:
                self._save()
                self.end()
                raise RunStopped
            if not self.workers:
                self._deserted(step)
            message = connections.receive(LOOK_SECONDS if self._idle or ledger.bound is not None else None)
            if message is not None:
                self._read(message)
            for worker in ledger.overtake(time.monotonic(), idle=bool(self._idle)):
                self._note(f"Worker {worker} holds up the others: its step is handed out again.")
                self._give_idle()
        self._now = turn
        self._order({"use": turn})
        return self._here.pop(turn)

    def _read(self, message: Message) -> None:
        worker, about = message.worker, message.about
        if worker in self.followers:
            self._read_follower(message)
        elif not about or "bye" in about:
            self._part_with(worker, died=not about)
        elif "push" in about:
            self._parts[worker] = message
            self._arrive(worker, about["push"])
        else:
            self._give(worker)

    def _read_follower(self, message: Message) -> None:
        if "have" in message.about:
            worker, number = message.about["have"]
            self._have[worker, number] = self._have.get((worker, number), 0) + 1
            self._arrive(worker, number)
        elif "params" in message.about:
            self._shown[message.worker] = message
        else:
            raise lost(message.worker)

    def _arrive(self, worker: int, number: int) -> None:
        """Record that a server has its part of a gradient. Once all servers have their parts, it waits for its turn."""
        message = self._parts.get(worker)
        if message is None or self._have.get((worker, number), 0) < len(self.followers):
            return
        del self._parts[worker]
        self._have.pop((worker, number), None)
        if self.ledger.arrive(worker, number, time.monotonic()):
            self._here[worker] = message
        else:
            self._give(worker)

    def _part_with(self, worker: int, *, died: bool) -> None:
        if worker not in self.workers:  # it has left by itself
            return
        self.workers.remove(worker)
        again = self.ledger.lose(worker)
        self._idle = [other for other in self._idle if other != worker]
        if died:
            self.lost.append(worker)
            what = "" if again is None else f" Step {again} is handed out again;"
            self._note(f"Worker {worker} is gone.{what} {plural(len(self.workers), 'worker')} left.")
        self._give_idle()

    def _give_idle(self) -> None:
        idle, self._idle = self._idle, []
        for worker in idle:
            self._give(worker)

    def _give(self, worker: int) -> None:
        """Send a worker new parameters and the next step, if there is one. Otherwise it waits for either."""
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
        self.connections.answer(Message(worker, {**about, **more}, tensors))

    def _copy(self, *, everything: bool) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Return the message for a worker: one copy for all workers that get it between the same two updates."""
        if everything:
            return self.messages.packed(everything=True)
        if self._copies is None or self._copies[0] != self.ledger.version:
            self._copies = self.ledger.version, self.messages.packed(everything=False)
        return self._copies[1]

    def _deserted(self, step: StepState) -> NoReturn:
        self._save()
        died = " and ".join(map(str, sorted(self.lost))) or "none"
        raise WorldError(
            f"No worker is left to compute step {step.number}.",
            f"Died: rank {died}. The others have left. The state of the run is saved.",
            "read their logs; then start the same command with --resume.",
        )


class Follower:
    """Another server: it follows the orders of the first server, with its part of the parameters."""

    is_first = False

    def __init__(
        self,
        crew: RoleGroup,
        links: Mapping[int, TcpLink],
        messages: ParameterMessages,
        states: Callable[[], dict[str, Any]],
    ) -> None:
        """`states` returns the states of optimizers on this process."""
        self.crew, self.messages, self._first, self._states = crew, messages, links[0], states
        self.connections = WorkerConnections({rank: links[rank] for rank in crew.workers}, {0: links[0]})
        self._here: dict[int, Message] = {}
        self._is_open = True

    def register(self) -> None:
        """Do nothing: the first server keeps the ledger."""

    def next(self, step: StepState) -> Message:
        """Return the gradient that the first server chooses."""
        while (message := self._obey()) is None:
            pass
        return message

    def updated(self, step: StepState) -> None:
        """Do nothing: the first server gives the next order."""

    def end(self) -> None:
        """Follow orders after the last update, until the first server has the results."""
        while self._is_open:
            self._obey()

    def close(self) -> None:
        """Close the links."""
        self._is_open = False
        self.connections.close()

    def _obey(self) -> Message | None:
        """Wait for the next message, and follow its order. Return the gradient to use, if the message names one."""
        with wrap_peer_errors("The next update"):
            message = self.connections.receive(None)
            if message is None:
                return None
            worker, about = message.worker, message.about
            if worker in self.crew.workers:
                if "push" in about:
                    self._here[worker] = message
                    self._first.send({"have": [worker, about["push"]]})
                return None
            if "use" in about:
                return self._here.pop(about["use"])
            if "give" in about:
                self._here.pop(about["give"], None)  # it arrived too late
                self.connections.answer(Message(about["give"], *self.messages.packed(everything=about["everything"])))
            elif "show" in about:
                packed, tensors = self.messages.packed(everything=False)
                found = TensorTable()
                states = encode(self._states() if about["show"] else {}, "", found)
                self._first.send({**packed, "states": states}, [*tensors, *found.values()])
            elif "over" in about:
                self._is_open = False
                self.connections.finish()
                raise RunStopped
            else:
                raise lost(0)
        return None


def lost(server: int) -> PeerLostError:
    """Return the error for a server that is gone."""
    return PeerLostError(
        f"The server on rank {server} is gone.",
        "No other process has the state of its optimizer.",
        "read its log; then start the same command with --resume.",
    )
