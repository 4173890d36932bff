"""A back end of torch's that does what NCCL does when somebody dies: it tells nobody.

    gloo    wait returns when the result is there, and raises when a peer is gone
    NCCL    wait returns at once, and what comes next on the device waits; for a peer that is gone, for ever. Who aborts
            the group finds all that was under way completed, with whatever lies in the results

This one is NCCL so far, over gloo, for tensors of the processor. A thread is the stream: it makes one collective after
the other, and stands still when a peer is gone. The messages of a batch are sent when their receivers are there. Who
looks at a number (`item`, `tolist`, ...) waits for all that was told to `wait`, as for a device. And what an abort
leaves behind is garbage, which says that it is completed.
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
"""Every byte of what an abort leaves; of every kind of number it is one, and large."""

LONG = timedelta(minutes=10)

_left: list[Any] = []  # gloo's groups of which we know no end: a thread may wait in one
_waited: set[Queued] = set()  # what the device is to wait for


class Queued:
    """A collective under way, and the tensors that it writes to."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        self.results = results
        self.over = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        _waited.add(self)
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class Late(dist.ProcessGroup):
    """Collectives are made with copies of tensors: what comes too late is to reach nobody's memory."""

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
        return "late"

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
                return  # nobody is told

    def _queue(
        self, results: Sequence[torch.Tensor], given: Sequence[torch.Tensor], begin: Callable[..., Sequence[Any]]
    ) -> Queued:
        """`begin` gloo's works, with copies of what is written to and of what is given, when their turn has come."""
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

    # -- what the loop calls

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

    def messages(self, ops: Sequence[dist.P2POp]) -> list[Queued]:
        """A batch of messages, one work of all. Who sends waits for a word of the receiver's."""
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
    """From now on this process's groups are late ones; and none of their memory is shared, as with accelerators."""
    dist.Backend.register_backend("late", Late, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "late"
    dist.batch_isend_irecv = _batch  # type: ignore[assignment]
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        setattr(torch.Tensor, name, _after_the_device(getattr(torch.Tensor, name)))
    if hasattr(os, "memfd_create"):
        del os.memfd_create


def _batch(ops: Sequence[dist.P2POp]) -> Any:
    groups: list[Any] = [ops[0].group, dist.group.WORLD]
    return next(group for group in groups if group is not None).messages(ops)


def _after_the_device(look: Callable[..., Any]) -> Callable[..., Any]:
    """Look at a tensor once all is there that the device was to wait for."""

    def looks(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        while _waited and threading.current_thread() is threading.main_thread():
            _waited.pop().over.wait()
        return look(tensor, *args, **kwargs)

    return looks
