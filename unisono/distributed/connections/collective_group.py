"""The back ends `tcp` and `tls` of torch: collectives over connections of our own, plain or with TLS.

    torch.distributed.all_reduce -> CollectiveGroup.allreduce -> thread "collectives": pairwise.py
    torch.distributed.isend ------> MessageGroup.send -----------------------> thread "messages": message_loop.py

Collectives run one after the other in a thread of the group, so they overlap with computation. Messages are started at
once. torch calls the methods by their names, from Python and from C++ (torch/csrc/distributed/c10d/PyProcessGroup.hpp).

If a peer is lost, its connection ends, and all operations that need it fail. A failed collective ends all connections
of the group, so no process waits for one that has given up.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.distributed.connections import pairwise
from unisono.distributed.connections.message_group import MessageGroup, MessageWork, flat_of, rows_of, split_rows
from unisono.distributed.connections.peer_connections import Identity
from unisono.handshake.certificates import Credentials

TCP, TLS = "tcp", "tls"
"""The names of the back ends."""


class CollectiveGroup(MessageGroup):
    """The group with its collectives."""

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MessageWork:  # type: ignore[override]
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        flats = [flat_of(tensor) for tensor in tensors]
        return self._run(tensors, *(partial(pairwise.all_reduce, self, flat, op) for flat in flats))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> MessageWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> MessageWork:  # type: ignore[override]
        root = 0 if opts is None else opts.rootRank
        flats = [flat_of(tensor) for tensor in tensors]
        return self._run(tensors, *(partial(pairwise.broadcast, self, flat, root) for flat in flats))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> MessageWork:  # type: ignore[override]
        flats, op, root = [flat_of(tensor) for tensor in tensors], opts.reduceOp, opts.rootRank
        return self._run(tensors, *(partial(pairwise.reduce, self, flat, op, root) for flat in flats))

    def barrier(self, opts: Any = None) -> MessageWork:
        word = torch.zeros(1, dtype=torch.uint8)
        return self._run([word], lambda: pairwise.all_reduce(self, word, dist.ReduceOp.MAX))

    def allgather(  # type: ignore[override]
        self, out: list[list[torch.Tensor]], mine: list[torch.Tensor], opts: Any = None
    ) -> MessageWork:
        rows, sent = out[0], mine[0].contiguous()
        return self._run(rows, lambda: self._fill(rows, lambda into: pairwise.all_gather(self, into, sent)))

    def all_gather_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> MessageWork:
        rows, sent = rows_of(out, self.count), flat_of(mine.contiguous())
        return self._run([out], lambda: pairwise.all_gather(self, rows, sent))

    def all_gather_single_coalesced(
        self, out: list[torch.Tensor], mine: list[torch.Tensor], opts: Any = None
    ) -> MessageWork:
        pairs = [(rows_of(o, self.count), flat_of(m.contiguous())) for o, m in zip(out, mine, strict=True)]
        return self._run(out, *(partial(pairwise.all_gather, self, rows, sent) for rows, sent in pairs))

    def gather(  # type: ignore[override]
        self, out: list[list[torch.Tensor]], mine: list[torch.Tensor], opts: Any = None
    ) -> MessageWork:
        rows, sent, root = out[0] if out else [], mine[0].contiguous(), opts.rootRank
        return self._run(rows, lambda: self._fill(rows, lambda into: pairwise.gather(self, into, sent, root)))

    def scatter(  # type: ignore[override]
        self, out: list[torch.Tensor], parts: list[list[torch.Tensor]], opts: Any = None
    ) -> MessageWork:
        sent, root = [part.contiguous() for part in parts[0]] if parts else [], opts.rootRank
        return self._run(out, lambda: self._fill(out, lambda into: pairwise.scatter(self, into[0], sent, root)))

    def reduce_scatter_single(self, out: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> MessageWork:
        return self.reduce_scatter_single_coalesced([out], [mine], opts)

    def reduce_scatter_single_coalesced(
        self, out: list[torch.Tensor], mine: list[torch.Tensor], opts: Any = None
    ) -> MessageWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        pairs = [(flat_of(o), rows_of(m.contiguous(), self.count)) for o, m in zip(out, mine, strict=True)]
        return self._run(out, *(partial(pairwise.reduce_scatter, self, o, parts, op) for o, parts in pairs))

    def reduce_scatter(  # type: ignore[override]
        self, out: list[torch.Tensor], parts: list[list[torch.Tensor]], opts: Any = None
    ) -> MessageWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        sent = [part.contiguous() for part in parts[0]]
        return self._run(out, lambda: self._fill(out, lambda into: pairwise.reduce_scatter(self, into[0], sent, op)))

    def all_to_all_single(
        self, out: torch.Tensor, mine: torch.Tensor, theirs: list[int], sizes: list[int], opts: Any = None
    ) -> MessageWork:
        into, sent = split_rows(out, theirs, self.count), split_rows(mine.contiguous(), sizes, self.count)
        return self._run([out], lambda: pairwise.all_to_all(self, into, sent))

    def alltoall(self, out: list[torch.Tensor], mine: list[torch.Tensor], opts: Any = None) -> MessageWork:
        sent = [tensor.contiguous() for tensor in mine]
        return self._run(out, lambda: self._fill(out, lambda into: pairwise.all_to_all(self, into, sent)))

    # the names that torch calls before 2.13, and from C++
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


# -- registration


class GroupMaking(NamedTuple):
    """What torch cannot pass to the function that makes groups.

    Attributes:
        credentials: returns the certificate of this process. Each group has a new one, or the file as it is then.
        host: the name of this host.
    """

    credentials: Callable[[], Credentials] | None
    host: str


_current: dict[str, GroupMaking] = {}


def register(host: str, credentials: Callable[[], Credentials] | None = None) -> None:
    """Let torch make groups of this kind: with the back end `tls`, or with `tcp` if there are no certificates.

    Args:
        host: the name of this host.
        credentials: returns the certificate of this process, for each group again.
    """
    name = TCP if credentials is None else TLS
    if name not in _current:
        dist.Backend.register_backend(name, partial(_make, name), devices=["cpu"])
    _current[name] = GroupMaking(credentials, host)


def own_credentials() -> Credentials:
    """Return a certificate of this process, which is in a group with TLS."""
    credentials = _current[TLS].credentials
    assert credentials is not None
    return credentials()


def _make(name: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> CollectiveGroup:
    making = _current[name]
    identity = Identity(making.host, None if making.credentials is None else making.credentials())
    return CollectiveGroup(name, store, rank, size, timeout, identity)
