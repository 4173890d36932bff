"""Simulated streams, and a detector of races between them, for machines without a GPU.

Operations run at once, on the CPU. Each counts as given to the current simulated stream, and every stream has a vector
clock (Fidge 1988; Mattern 1989): `a.wait_stream(b)` lets a know all that b has been given before. An operation must
know the last write to each storage that it reads or writes, and all reads of one that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SimulatedStream:
    """A stream. `clock` counts, for each stream, the operations that this one knows to be over before its next."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.clock: dict[SimulatedStream, int] = {self: 0}

    def wait_stream(self, other: SimulatedStream) -> None:
        for stream, count in other.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)


class SimulatedStreams:
    """The functions of torch.cuda for streams."""

    Stream = SimulatedStream

    def __init__(self) -> None:
        self.stack = [SimulatedStream()]

    def current_stream(self, device: torch.device | None = None) -> SimulatedStream:
        return self.stack[-1]

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        self.stack.append(stream)
        try:
            yield
        finally:
            self.stack.pop()


Stamp = tuple[SimulatedStream, int]


class RaceDetector(TorchDispatchMode):
    """Note every operation in `races` that uses memory which another stream may still use."""

    def __init__(self, streams: SimulatedStreams) -> None:
        super().__init__()
        self.streams, self.races, self.operations = streams, list[str](), 0
        self._written: dict[int, Stamp] = {}
        self._read: dict[int, list[Stamp]] = {}
        self._kept: list[Any] = []  # storages stay alive, so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self.streams.current_stream()
        stream.clock[stream] += 1
        self.operations += 1
        stamp, known = (stream, stream.clock[stream]), set()
        schema, named = func._schema, kwargs or {}
        values = [*zip(schema.arguments, args, strict=False)]
        values += [(argument, named[argument.name]) for argument in schema.arguments if argument.name in named]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for argument, value in values:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    known.add(self._key(tensor))
                    if not is_view:
                        self._use(str(func), tensor, stamp, writes=writes or "recv" in str(func))
        result = func(*args, **named)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in known:
                self._written[self._key(tensor)] = stamp
        return result

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        return storage.data_ptr() or id(storage)

    def _use(self, name: str, tensor: torch.Tensor, stamp: Stamp, *, writes: bool) -> None:
        key, (stream, _) = self._key(tensor), stamp
        before = [self._written[key]] if key in self._written else []
        if writes:
            before += self._read.pop(key, [])
        for other, count in before:
            if stream.clock.get(other, 0) < count:
                self.races.append(f"{name} of {tuple(tensor.shape)}")
        if writes:
            self._written[key] = stamp
        else:
            self._read.setdefault(key, []).append(stamp)
