"""A back end of torch's that does what NCCL does when somebody dies: it tells nobody.

    gloo    wait returns when the result is there, and raises when a peer is gone
    NCCL    wait returns at once, and what comes next on the device waits; for a peer that is gone, for ever. Who aborts
            the group finds all that was under way completed, with whatever lies in the results

This one is NCCL so far, for tensors of the processor: a thread for each collective waits for gloo's, and brings the
result. What a death leaves behind is garbage, and says that it is completed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

GARBAGE = 0x5A
"""Every byte of what an abort leaves; of every kind of number it is one, and large."""

_left: list[Any] = []  # gloo's groups of which we know no end: a thread may wait in one


class Queued:
    """A collective under way."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        self.results = results
        self.over = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()


class Late(dist.ProcessGroup):
    """`begin` a collective of gloo's with copies of the tensors: what comes too late is to reach nobody's memory."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        _left.append(self.gloo)
        self.mutex = threading.Lock()
        self.aborted = False
        self.under_way: list[Queued] = []

    def getBackendName(self) -> str:
        return "late"

    def _set_group_name(self, name: Any) -> None:
        self._called = name

    @property
    def group_name(self) -> Any:
        return self._called

    def _begin(
        self, results: Sequence[torch.Tensor], begin: Callable[..., Any], *, given: Sequence[torch.Tensor] = ()
    ) -> Queued:
        if self.aborted:
            raise RuntimeError("communicator was aborted")
        copies = [tensor.detach().clone() for tensor in results]
        work, queued = begin(copies, [tensor.detach().clone() for tensor in given]), Queued(results)
        with self.mutex:
            self.under_way.append(queued)
        threading.Thread(target=self._bring, args=(work, queued, copies), daemon=True).start()
        return queued

    def _bring(self, work: Any, queued: Queued, copies: Sequence[torch.Tensor]) -> None:
        try:
            work.wait(timedelta(minutes=10))
        except RuntimeError:
            return  # nobody is told
        with self.mutex:
            if self.aborted:
                return
            for to, copy in zip(queued.results, copies, strict=True):
                to.detach().copy_(copy)
            queued.over.set()
            self.under_way.remove(queued)

    def abort(self) -> None:
        with self.mutex:
            self.aborted = True
            for queued in self.under_way:
                for to in queued.results:
                    to.detach().view(torch.uint8).fill_(GARBAGE)
                queued.over.set()

    def shutdown(self) -> None:
        assert not self.under_way, "a group is only left in peace when nothing is under way"

    # -- what the loop calls

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._begin(tensors, lambda copies, _: self.gloo.allreduce(copies, opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        return self._begin(tensors, lambda copies, _: self.gloo.broadcast(copies, opts))

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> Any:
        begin = lambda copies, given: self.gloo._allgather_base(copies[0], given[0], opts)  # noqa: E731
        return self._begin([out], begin, given=[mine])

    def all_to_all_single(
        self, out: torch.Tensor, mine: torch.Tensor, theirs: list[int], sizes: list[int], opts: Any = None
    ) -> Any:
        begin = lambda copies, given: self.gloo.alltoall_base(copies[0], given[0], theirs, sizes, opts)  # noqa: E731
        return self._begin([out], begin, given=[mine])

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        return self._begin([], lambda _, given: self.gloo.send(given, to, tag), given=tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        return self._begin(tensors, lambda copies, _: self.gloo.recv(copies, source, tag))


def use() -> None:
    """From now on this process's groups are late ones; and none of their memory is shared, as with accelerators."""
    dist.Backend.register_backend("late", Late, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "late"
    if hasattr(os, "memfd_create"):
        del os.memfd_create
