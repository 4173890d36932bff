"""Exchanges: how the processes of a run come to hold the same gradient. A variant is a file, not a branch.

An exchange lives through a step like this (train/step.py is the caller):

    begin(spans, pieces, weights)
                                 a step begins; pieces[v] micro-batches will come for virtual rank v of our span;
                                 weights() is what each of these weighs, as soon as the last backward has begun
    enter(v, last)  leave()      around every micro-batch: in between, backward fills p.grad
    launch()                     the last micro-batch is done: everything still here goes out
    finish(weight)               p.grad becomes the sum divided by `weight` (all weights together), the same on every
                                 process; says whether what this process made of it is finite (together they made all)
    commit()                     everybody holds the whole gradient
    zero()                       the optimizer has stepped: p.grad is given back

Partial sums stay as they are until somebody adds up the first bucket, late in the last backward. What fails before can
be exchanged anew; what fails after is computed anew, from the step's first micro-batch, to the same bits.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from unisono.distributed.process_group import ProcessGroup, is_dtensor
from unisono.errors import LoopError
from unisono.plan.reduction_tree import Node

if TYPE_CHECKING:
    from unisono.config import CompressSettings, Settings

Spans = Sequence[tuple[int, int]]
Weights = Callable[[], torch.Tensor]
"""float64 [virtual ranks of the process's span], on the group's device."""


PROMISES = ("exact", "exact in practice", "tolerance", "sites are part of the mathematics")
"""What an exchange may promise of the result, from what binds most to what binds least."""


class Exchange(Protocol):
    """What the step asks of an exchange. `promise` and `reason` go into result.json. Whoever inherits from it writes
    what it does, and leaves out where it does nothing: then autograd adds up micro-batches in p.grad, and the rest is
    `finish`. (docs/exchanges.md has one of a script's own.)"""

    promise: str
    reason: str
    params: Sequence[torch.nn.Parameter]

    def begin(self, spans: Spans, pieces: Mapping[int, int], weights: Weights) -> None:
        return

    def enter(self, virtual_rank: int, *, last: bool) -> None:
        return

    def leave(self) -> None:
        return

    def launch(self) -> None:
        return

    def finish(self, weight: float) -> bool: ...

    def commit(self) -> None:
        return

    def zero(self) -> None:
        for p in self.params:
            p.grad = None

    @property
    def used(self) -> Sequence[bool]:
        """Which parameters took part in a backward of this step, on this process."""
        return [p.grad is not None for p in self.params]

    @property
    def touched(self) -> bool:
        """Has the loop changed p.grad in this process's last micro-batch? (Earlier, `leave` raises LoopError.) Messages
        are under way then: who ends now shows the others a peer that is gone, instead of the reason."""
        return False

    @property
    def sent(self) -> float:
        """Bytes of this step's gradient that have left this process for others: as they would if each process were on
        a host of its own, since what neighbours read in shared memory is what they would be sent. Of a library's
        all-reduce it is what the best one sends, 2 (W - 1) / W of the gradient. Not a number: nobody counts them."""
        return math.nan

    @property
    def plain(self) -> float:
        """The same, if gradients were not compressed."""
        return self.sent

    def held(self) -> Mapping[Node, Any]:
        """Return the partial sums that are whole on this process after a failure, by nodes of the tree.

        `continue_after_death` of another exchange over the same parameters takes them. {}: all is computed again.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What it carries from one step to the next, whole, with numbers that no placement changes where its promise
        is exact. All processes call this together, between two steps; the main process's is saved. {}: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Called on every process, with tensors in the CPU's memory, before the first step."""
        return

    def close(self) -> None:
        return


def all_reduce_bytes(size: int, group: ProcessGroup) -> float:
    """Bytes that a process sends when `size` bytes are added up over a group, by an all-reduce that sends as few as can
    be: each process adds up one chunk, and hands it to the others."""
    return 2 * (group.size - 1) / group.size * size


_files = {
    "tree": "unisono.exchange.tree.tree_fold:TreeExchange",
    "claimed": "unisono.exchange.tree.dynamic_tree:DynamicTree",
    "allreduce": "unisono.exchange.allreduce:AllReduce",
    "ring": "unisono.exchange.ring:RingAllReduce",
    "server": "unisono.param_server.push_pull:ParameterServerExchange",
    "wide": "unisono.exchange.reproducible_sum:ReproducibleSum",
    "solo": "unisono.exchange.single:SingleProcess",
    "ddp": "unisono.exchange.ddp:DdpExchange",
    "compressed tree": "unisono.exchange.compression.compressed:CompressedTree",
    "compressed allreduce": "unisono.exchange.compression.compressed:CompressedAllReduce",
    "later": "unisono.exchange.warmup:WarmupExchange",
    "scatter": "unisono.exchange.tree.reduce_scatter:ReduceScatterTree",
    "local_sgd": "unisono.local_sgd.inner:InnerExchange",
}

_needs: dict[str, Callable[[Settings, ProcessGroup], dict[str, Any]]] = {
    "wide": lambda settings, world: {"world": world},
    "ddp": lambda settings, world: {"settings": settings.ddp},
    "compressed tree": lambda settings, world: {"settings": settings.compress},
    "compressed allreduce": lambda settings, world: {"settings": settings.compress},
}
"""What some exchanges are given beside that: of the run's settings, and all its processes."""


def _kind(name: str) -> Any:
    module, cls = _files[name].split(":")
    return getattr(importlib.import_module(module), cls)


def _name(settings: Settings) -> str:
    """What the settings choose, as the tables above call it."""
    if settings.balance.work_stealing:
        return "claimed"
    return settings.exchange if settings.compress.kind == "none" else f"compressed {settings.exchange}"


def choose_exchange(
    settings: Settings, params: Sequence[torch.nn.Parameter], group: ProcessGroup, world: ProcessGroup | None = None
) -> Exchange:
    """The exchange that the settings choose, over these parameters; `world`: all processes of the run."""
    name, ranks = _name(settings), settings.virtual_ranks

    def build(name: str) -> Exchange:
        more = _needs[name](settings, world or group) if name in _needs else {}
        return build_exchange(name, params, ranks, group, **more)

    if name == settings.exchange or not settings.compress.start_step:
        return build(name)
    later: Exchange = _kind("later")(
        params, build(settings.exchange), _kind(name), lambda: build(name), settings.compress.start_step
    )
    return later


def exchange_after_death(
    settings: Settings, params: Sequence[torch.nn.Parameter], group: ProcessGroup, world: ProcessGroup | None = None
) -> Exchange:
    """The exchange that goes on where the one that the settings choose was left, among those who are left."""
    if settings.exchange == "tree":
        return build_exchange("claimed", params, settings.virtual_ranks, group)
    return choose_exchange(settings, params, group, world)


SURVIVE = ("tree",)
"""Exchanges whose step can be made again: nothing of theirs is elsewhere, or under way between two steps."""


def survives(settings: Settings) -> bool:
    """Can a step be made again by those who are left, under the exchange that the settings choose?"""
    return settings.exchange in SURVIVE and settings.compress.kind == "none"


def build_exchange(
    name: str, params: Sequence[torch.nn.Parameter], virtual_ranks: int, group: ProcessGroup, **more: Any
) -> Exchange:
    """The exchange called `name` over these parameters. One virtual rank on one process needs none: single.py."""
    if virtual_ranks == group.size == 1 and not any(map(is_dtensor, params)):
        name, more = "solo", {}
    exchange: Exchange = _kind(name)(params, virtual_ranks, group, **more)
    return exchange


def refuse_hook(name: str) -> None:
    """Raise LoopError if the exchange called `name` takes no communication hook of the user's."""
    if not hasattr(_kind(name), "register_comm_hook"):
        takes = [other for other in _files if other != "solo" and hasattr(_kind(other), "register_comm_hook")]
        raise LoopError(
            "run.register_comm_hook was called.",
            f"With exchange={name} no bucket goes through a hook of torch's.",
            " or ".join(f"--set exchange={other}" for other in takes) + ", or leave the line out.",
        )


def refuse_numbers(params: Sequence[torch.nn.Parameter], compress: CompressSettings) -> None:
    """Raise LoopError if the gradients of these parameters cannot travel in the form that is asked for.

    Whole numbers count even when they are frozen, as torch has them: who passes them on to be trained expects that they
    are. Quantised weights beside a trained adapter are not passed on where a pass names its optimizers.
    """
    whole = [p for p in params if not (p.is_floating_point() or p.is_complex())]
    odd = whole or [p for p in params if p.requires_grad and p.dtype != torch.float32]
    if compress.kind == "none" or not odd:
        return
    if whole:
        more = "whole numbers have no gradient"
        do = "keep them in buffers (register_buffer), or name what trains: step.run(..., over=[optimizer])"
    else:
        more = "too much of wider numbers would be lost"
        do = "keep parameters in float32 (--set precision=bf16 computes in fewer bits)"
    dtype = str(odd[0].dtype).removeprefix("torch.")
    raise LoopError(
        f"compress.kind={compress.kind} was given {len(odd)} of {len(params)} parameters in {dtype}.",
        f"Forms are made of float32: {more}.",
        f"--set compress.kind=none, or {do}.",
    )


def promise_of(settings: Settings, size: int) -> tuple[str, str]:
    """What the exchange that the settings choose promises of the result on `size` processes, and why."""
    kind = _kind("solo" if settings.virtual_ranks == size == 1 else _name(settings))
    return kind.promise, kind.reason
