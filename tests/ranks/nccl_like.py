"""A torch back end that behaves like NCCL when a process dies: it reports nothing.

    gloo    `wait` returns when the result has arrived, and raises when a peer is gone
    NCCL    `wait` returns at once, and later work on the device waits; forever, if a peer is gone. When the group is
            aborted, all collectives in progress count as completed, whatever the results contain

This back end is like NCCL in these respects, over gloo, for tensors on the CPU. A thread simulates the stream: it runs
one collective after the other, and stops when a peer is gone. The messages of a batch are sent when their receivers are
ready. Reading a number (`item`, `tolist`, ...) waits for all works whose `wait` was called, as for a device. An abort
leaves garbage in the results, which count as completed.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GARBAGE = 0x5A
"""Every byte of the results after an abort; a valid and large number in every dtype."""

LONG = timedelta(minutes=10)

_left: list[Any] = []  # gloo groups that are never destroyed: a thread may wait in one
_waited: set[Queued] = set()  # works whose `wait` was called


class Queued:
    """A collective in progress, and the tensors that it writes to."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        self.results = results
        self.over = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        _waited.add(self)
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class NcclLike(dist.ProcessGroup):
    """A group that runs collectives on copies of tensors, so that a late result changes no memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.gloo._set_default_timeout(LONG)
        _left.append(self.gloo)
        self.mutex = threading.Lock()
        self.aborted = False
        self.under_way: list[Queued] = []
        self.stream: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="stream", daemon=True).start()

    def getBackendName(self) -> str:
        return "nccl_like"

    def _set_group_name(self, name: Any) -> None:
        self._called = name

    @property
    def group_name(self) -> Any:
        return self._called

    # -- the stream

    def _serve(self) -> None:
        while (make := self.stream.get()) is not None:
            try:
                make()
            except RuntimeError:
                return  # no error is reported

    def _queue(
        self, results: Sequence[torch.Tensor], given: Sequence[torch.Tensor], begin: Callable[..., Sequence[Any]]
    ) -> Queued:
        """Queue a collective: `begin` starts gloo's works on copies of the results and of the inputs."""
        if self.aborted:
            raise RuntimeError("communicator was aborted")
        copies, gifts = ([tensor.detach().clone() for tensor in each] for each in (results, given))
        queued = Queued(results)

        def make() -> None:
            for work in begin(copies, gifts):
                work.wait(LONG)
            with self.mutex:
                if not self.aborted:
                    self._bring(queued, copies)

        with self.mutex:
            self.under_way.append(queued)
        self.stream.put(make)
        return queued

    def _bring(self, queued: Queued, copies: Sequence[torch.Tensor]) -> None:
        for to, copy in zip(queued.results, copies, strict=True):
            to.detach().copy_(copy)
        self.under_way.remove(queued)
        queued.over.set()

    def abort(self) -> None:
        with self.mutex:
            self.aborted = True
            for queued in self.under_way:
                for to in queued.results:
                    to.detach().view(torch.uint8).fill_(GARBAGE)
                queued.over.set()
        self.stream.put(None)

    # -- torch's interface

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._queue(tensors, [], lambda copies, _: [self.gloo.allreduce(copies, opts)])

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._queue(tensors, [], lambda copies, _: [self.gloo.broadcast(copies, opts)])

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        return self._queue([out], [mine], lambda to, of: [self.gloo._allgather_base(to[0], of[0], opts)])

    def all_to_all_single(
        self, out: torch.Tensor, mine: torch.Tensor, theirs: list[int], sizes: list[int], opts: Any = None
    ) -> Any:
        return self._queue([out], [mine], lambda to, of: [self.gloo.alltoall_base(to[0], of[0], theirs, sizes, opts)])

    _allgather_base = all_gather_single  # type: ignore[assignment]  # the names that torch calls before 2.13
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def messages(self, ops: Sequence[dist.P2POp]) -> list[Queued]:
        """Send a batch of messages as one work. A sender waits until its receiver is ready."""
        receives = [op for op in ops if op.op is dist.irecv]
        sends = [op for op in ops if op.op is not dist.irecv]

        def begin(copies: Sequence[torch.Tensor], gifts: Sequence[torch.Tensor]) -> list[Any]:
            words = [torch.zeros(1) for _ in ops]
            works = [self.gloo.recv([to], op.group_peer, 0) for op, to in zip(receives, copies, strict=True)]
            works += [self.gloo.send([of], op.group_peer, 0) for op, of in zip(sends, gifts, strict=True)]
            works += [self.gloo.send([word], op.group_peer, 1) for op, word in zip(receives, words, strict=False)]
            words = words[len(receives) :]
            return [*works, *(self.gloo.recv([word], op.group_peer, 1) for op, word in zip(sends, words, strict=True))]

        return [self._queue([op.tensor for op in receives], [op.tensor for op in sends], begin)]


def use() -> None:
    """Use this back end for all groups of this process, without shared memory, as with accelerators."""
    dist.Backend.register_backend("nccl_like", NcclLike, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "nccl_like"
    dist.batch_isend_irecv = _batch  # type: ignore[assignment]
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        setattr(torch.Tensor, name, _after_the_device(getattr(torch.Tensor, name)))
    if hasattr(os, "memfd_create"):
        del os.memfd_create


def _batch(ops: Sequence[dist.P2POp]) -> Any:
    groups: list[Any] = [ops[0].group, dist.group.WORLD]
    return next(group for group in groups if group is not None).messages(ops)


def _after_the_device(look: Callable[..., Any]) -> Callable[..., Any]:
    """Read a tensor after all works whose `wait` was called."""

    def looks(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        while _waited and threading.current_thread() is threading.main_thread():
            _waited.pop().over.wait()
        return look(tensor, *args, **kwargs)

    return looks
