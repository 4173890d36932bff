"""Buffers that a forward pass changes: batch norm's running statistics, a spectral norm's vectors, a counter.

With several virtual ranks, each one begins with the buffers as they were when the pass began, and not with the buffers
that the previous virtual rank of its process has left. Their changes are combined when the pass ends:

    batch norm     running <- a * running + c is affine, with a = (1 - momentum)^forwards. The (a, c) of every virtual
                   rank is one row of a table, and each process folds the rows in the order of virtual ranks, in
                   float64. The result is that of one process that computes all micro-batches one after the other.
    anything else  takes the value that it has in the first virtual rank with work. A spectral norm's vectors depend
                   on the weights alone, so they are equal in every virtual rank; a counter counts that rank's rounds.

With one virtual rank buffers change as in plain torch. Python attributes of modules are handled in the same way
(train/modules/module_attributes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.value_transfer import broadcast_tensors
from unisono.errors import LoopError
from unisono.tensors.codec import TensorTable, decode, encode
from unisono.train.modules import module_attributes
from unisono.train.modules.module_attributes import ModuleAttributes

QUICK = 2**20
"""Largest number of elements of a buffer that is compared whenever it may have changed: 0.2 ms."""

Mark = tuple[int, int]
"""The id of a tensor, and its version."""


@dataclass
class BufferSlot:
    """A buffer: its name, the dict that holds it and its key there, and its value when the pass began."""

    name: str
    holder: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor | None = None  # the buffer itself, as it was
    value: torch.Tensor | None = None  # a copy of its content
    mark: Mark = (0, -1)
    secretly: bool = False  # whether it is written to without a new version (native batch norm does that)
    absent: bool = False  # whether there was no such buffer

    def look(self) -> Mark:
        now = self.holder.get(self.key)
        return id(now), -1 if now is None else version(now)

    def remember(self) -> None:
        self.tensor, self.mark, self.absent = self.holder.get(self.key), self.look(), self.key not in self.holder
        self.value = None if self.tensor is None else self.tensor.detach().clone()

    @property
    def changed(self) -> bool:
        if self.absent:
            return self.key in self.holder
        return self.secretly or self.look() != self.mark or self.differs()

    def differs(self, *, at_any_cost: bool = False) -> bool:
        """Return whether the content has changed, whatever the version is.

        torch's batch_norm and writes through `.data` do not raise the version. Large buffers, and buffers on an
        accelerator, whose comparison causes a synchronization, are compared only `at_any_cost`.
        """
        now, value = self.holder.get(self.key), self.value
        if now is None or value is None or now is value:
            return now is not value
        quick = now.is_cpu and now.numel() <= QUICK
        return (quick or at_any_cost) and not (now.shape == value.shape and torch.equal(now, value))

    def put_back(self) -> None:
        if self.absent:
            self.holder.pop(self.key, None)
            return
        self.holder[self.key] = self.tensor
        if self.differs(at_any_cost=True):
            assert self.tensor is not None
            assert self.value is not None
            with torch.no_grad():
                self.tensor.copy_(self.value)
        self.mark = self.look()


def slots_of(model: torch.nn.Module, before: str = "") -> list[BufferSlot]:
    """Return all buffers of a model. Their names begin with `before`."""
    return [
        BufferSlot(f"{before}{prefix}.{key}", part._buffers, key)
        for prefix, part in model.named_modules()
        for key in part._buffers
    ]


@dataclass
class BatchNormStats:
    """A batch norm with running statistics, and the slots of its counter, mean and variance."""

    module: _BatchNorm
    count: BufferSlot
    mean: BufferSlot
    var: BufferSlot

    def remember(self) -> None:
        for slot in (self.count, self.mean, self.var):
            slot.remember()

    def kept(self, forwards: float) -> float:
        """Return the factor of the running statistics after this number of further forwards: `a` in the module."""
        if self.module.momentum is None:  # a plain average over all forwards so far
            assert self.count.value is not None
            before = float(self.count.value)
            return before / (before + forwards) if forwards else 1.0
        kept = 1.0
        for _ in range(int(forwards)):
            kept *= 1.0 - self.module.momentum
        return kept


Row = torch.Tensor
"""The changes of all batch norms by a virtual rank, float64: the forwards of each, then c of all means and variances,
flat."""

Gathered = tuple[list[Row] | None, dict[str, torch.Tensor | None] | None, module_attributes.Gathered | None]
"""The rows of all virtual ranks; the other buffers of the first one, by name; its attributes. None: there is no change
of that kind."""

NOTHING: Gathered = (None, None, None)


@dataclass
class BufferSync:
    """Combine the changes of the buffers of all placed models after each pass."""

    group: ProcessGroup
    virtual_ranks: int
    slots: list[BufferSlot] = field(default_factory=list)
    norms: list[BatchNormStats] = field(default_factory=list)
    _holders: dict[str, dict[str, torch.Tensor | None]] = field(default_factory=dict)  # by name of the module
    _now: int = -1  # the virtual rank whose micro-batches are computed; -1: none
    _spare: bool = False  # whether the results of this computation are discarded
    _first: int = 0  # the first virtual rank with work, on any process
    _first_look: bool = True
    _rows: dict[int, Row] = field(default_factory=dict)
    _made: dict[str, torch.Tensor | None] = field(default_factory=dict)  # buffers of the first virtual rank, by name
    _others_changed: bool = False

    def __post_init__(self) -> None:
        self.attributes = ModuleAttributes(self.group.device, self.virtual_ranks)

    def look_at(self, modules: Iterable[torch.nn.Module]) -> None:
        """Set the current models. With one virtual rank, nothing is done about their buffers."""
        modules = list(modules)
        self.attributes.look_at(modules)
        if self.virtual_ranks == 1:
            return
        found = [(model, slots_of(model, f"{i}/")) for i, model in enumerate(modules)]
        if self._holders and {_key(s) for _, slots in found for s in slots} == set(map(_key, self.slots)):
            return
        known = {_key(slot): slot for _, slots in found for slot in slots}
        self.slots, self.norms = list(known.values()), []
        batch_norms = {id(p): p for model, _ in found for p in model.modules() if isinstance(p, _BatchNorm)}
        for part in batch_norms.values():
            mine = [
                known.get((id(part._buffers), key)) for key in ("num_batches_tracked", "running_mean", "running_var")
            ]
            count, mean, var = mine
            if count and mean and var and all(slot.holder[slot.key] is not None for slot in (count, mean, var)):
                self.norms.append(BatchNormStats(part, count, mean, var))
        self._holders = {
            f"{i}/{name}": part._buffers for i, (model, _) in enumerate(found) for name, part in model.named_modules()
        }
        self._first_look = True

    def begin(self, first: int) -> None:
        """Begin a pass; `first` is the first virtual rank that has work in it, on any process."""
        self._first, self._now = first, -1
        self._rows, self._made, self._others_changed = {}, {}, False
        self.attributes.begin()
        for norm in self.norms:
            if norm.count.changed:  # it ran between two steps; statistics on an accelerator do not show it
                norm.remember()
        for slot in self.slots:
            if slot.changed:
                slot.remember()

    def enter(self, virtual_rank: int, *, spare: bool = False) -> None:
        """Begin a micro-batch of this virtual rank; `spare`: its changes are discarded."""
        if virtual_rank != self._now or spare:
            self.leave()
            self._now, self._spare = virtual_rank, spare
            self.attributes.enter()

    def leave(self) -> None:
        """End the current virtual rank: record its changes of buffers, and restore the buffers."""
        if self._now < 0 or not self._holders:
            return
        self.attributes.leave(first=self._now == self._first and not self._spare)
        if self._first_look:
            self._find_secrets()
        self._find_new()
        norms = [slot for norm in self.norms if norm.count.changed for slot in (norm.count, norm.mean, norm.var)]
        if norms and not self._spare:
            self._rows[self._now] = self._row()
        counted = set(map(id, norms))
        changed = [slot for slot in self.slots if id(slot) not in counted and slot.changed]
        self._others_changed |= bool(changed)
        if self._now == self._first and not self._spare:
            self._made = {slot.name: _copy(slot.holder.get(slot.key)) for slot in changed}
        for slot in changed + norms:
            slot.put_back()
        self._now = -1

    def _find_new(self) -> None:
        """Add the buffers that a forward pass has registered, as changed ones."""
        if sum(map(len, self._holders.values())) <= len(self.slots):
            return
        known = set(map(_key, self.slots))
        for name, holder in self._holders.items():
            for key in holder:
                slot = BufferSlot(f"{name}.{key}", holder, key, absent=True)
                if _key(slot) not in known:
                    known.add(_key(slot))
                    self.slots.append(slot)

    def note_changes(self) -> None:
        """Record whether forward passes of a pipeline changed buffers. Its micro-batches run concurrently."""
        self._others_changed |= any(slot.changed for slot in self.slots)

    @property
    def flags(self) -> dict[str, bool]:
        """The kinds of changes that processes have to exchange, by name."""
        if self.virtual_ranks == 1:
            return {}
        return {"norms": bool(self._rows), "buffers": self._others_changed, **self.attributes.flags}

    def keep(self, virtual_ranks: Collection[int]) -> None:
        """Keep the changes of these virtual ranks only. The others are computed again, after the death of a process."""
        self._rows = {v: row for v, row in self._rows.items() if v in virtual_ranks}
        if self._first not in virtual_ranks:
            self._made = {}
        self.attributes.keep(self._first in virtual_ranks)

    def gather(self, flags: Mapping[str, int]) -> Gathered:
        """Return the changes of all virtual ranks. Every process calls this with the same flags. No buffer changes."""
        rows = self._gather_rows() if flags["norms"] else None
        values = self._take_from_first() if flags["buffers"] else None
        return rows, values, self.attributes.gather(self.group) if flags["attributes"] else None

    def settle(self, gathered: Gathered) -> None:
        """Write the gathered values into the buffers. Every process calls this."""
        rows, values, others = gathered
        if rows is not None:
            self._fold(rows)
        for name, value in (values or {}).items():
            self._put(name, value)
        if others is not None:
            self.attributes.settle(others)

    # -- batch norm

    def _row(self) -> Row:
        flat = self._flat([s.holder[s.key] for s in self._running()])
        # the counter's version is the number of forwards; a batch norm without counter is not in `norms`
        forwards = [float(n.count.look()[1] - n.count.mark[1]) for n in self.norms]
        flat = flat - self._spread([n.kept(k) for n, k in zip(self.norms, forwards, strict=True)]) * self._before()
        flat = flat * self._spread([float(k > 0) for k in forwards])
        return torch.cat([torch.tensor(forwards, dtype=torch.float64, device=flat.device), flat])

    def _fold(self, rows: Sequence[Row]) -> None:
        """Fold the rows in the order of virtual ranks."""
        total, running = [0.0] * len(self.norms), self._before()
        for row in rows:
            forwards = row[: len(self.norms)].tolist()
            if not any(forwards):
                continue
            keep, add = [], []
            for norm, done, more in zip(self.norms, total, forwards, strict=True):
                if norm.module.momentum is None:
                    assert norm.count.value is not None
                    start = float(norm.count.value)
                    keep.append((start + done) / (start + done + more) if more else 1.0)
                    add.append((start + more) / (start + done + more) if more else 0.0)
                else:
                    keep.append(norm.kept(more))
                    add.append(1.0)
            running = self._spread(keep) * running + self._spread(add) * row[len(self.norms) :]
            total = [a + b for a, b in zip(total, forwards, strict=True)]
        values = iter(running.split(self._sizes()))
        for norm, count in zip(self.norms, total, strict=True):
            mean, var = next(values), next(values)
            if count:
                _write(norm.mean, mean)
                _write(norm.var, var)
                assert norm.count.tensor is not None
                norm.count.tensor += int(count)
                norm.remember()

    def _gather_rows(self) -> list[Row]:
        """Return the rows of all virtual ranks. One process has each row, and the others add zeros."""
        width = len(self.norms) + sum(self._sizes())
        rows = torch.zeros(self.virtual_ranks, width, dtype=torch.float64, device=self.group.device)
        for virtual_rank, row in self._rows.items():
            rows[virtual_rank] += row  # turns -0 into +0, as an addition of another process's zero does
        return list(self.group.sum_(rows))

    def _running(self) -> list[BufferSlot]:
        return [slot for norm in self.norms for slot in (norm.mean, norm.var)]

    def _sizes(self) -> list[int]:
        return [0 if slot.value is None else slot.value.numel() for slot in self._running()]

    def _before(self) -> torch.Tensor:
        return self._flat([slot.value for slot in self._running()])

    def _flat(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return torch.cat([t.detach().flatten().to(self.group.device) for t in tensors if t is not None]).double()

    def _spread(self, values: Sequence[float]) -> torch.Tensor:
        """Repeat the number of each norm for all its elements in the flat row."""
        if len(set(values)) == 1:
            return torch.tensor(values[0], dtype=torch.float64, device=self.group.device)
        sizes = self._sizes()
        each = torch.tensor([a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)], device=self.group.device)
        return torch.tensor(values, dtype=torch.float64, device=self.group.device).repeat_interleave(each)

    # -- anything else

    def _take_from_first(self) -> dict[str, torch.Tensor | None]:
        """Return the other buffers as the first virtual rank has changed them, on every process."""
        tensors = TensorTable()
        plain = encode(self._made, "buffers", tensors)
        by_rank = self.group.all_gather_object(plain if self._made else None)
        owner = next((rank for rank, other in enumerate(by_rank) if other is not None), None)
        if owner is None:  # only other virtual ranks changed buffers
            return {}
        made: dict[str, torch.Tensor | None] = decode(
            by_rank[owner], broadcast_tensors(self.group, by_rank[owner], tensors, owner)
        )
        return made

    def _put(self, name: str, value: torch.Tensor | None) -> None:
        holder, _, key = name.rpartition(".")
        slot = next((slot for slot in self.slots if slot.name == name), None)
        if slot is None:
            slot = BufferSlot(name, self._holders[holder], key, absent=True)
            self.slots.append(slot)
        was = slot.tensor
        if was is not None and value is not None and was.shape == value.shape and was.dtype == value.dtype:
            slot.holder[key] = was
            with torch.no_grad():
                was.copy_(value)
        else:
            slot.holder[key] = value
        slot.remember()

    def _find_secrets(self) -> None:
        """Find the buffers that the first round has changed without a new version.

        torch's batch_norm does that to running statistics.
        """
        self._first_look = False
        counted = {id(slot) for norm in self.norms for slot in (norm.mean, norm.var) if norm.count.changed}
        for slot in self.slots:
            if id(slot) not in counted and slot.look() == slot.mark:
                slot.secretly = slot.differs(at_any_cost=True)


def _key(slot: BufferSlot) -> tuple[int, str]:
    """Return a key of the buffer that does not depend on its name: a module may have several names."""
    return id(slot.holder), slot.key


def _write(slot: BufferSlot, value: torch.Tensor) -> None:
    assert slot.tensor is not None
    with torch.no_grad():
        slot.tensor.copy_(value.view_as(slot.tensor))


def version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor: how often torch has counted a write."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[torch.Tensor | None]) -> list[int]:
    """Return the version counters of tensors."""
    return [0 if tensor is None else version(tensor) for tensor in tensors]


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


# -- limits of batch norm


def refuse_sync(model: torch.nn.Module) -> None:
    """Raise LoopError for a SyncBatchNorm: it needs all processes in every forward pass."""
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm):
            raise LoopError(
                f"Cannot place a {type(model).__name__} with SyncBatchNorm.",
                f"Its {name or 'self'} is a SyncBatchNorm, which waits for all processes in every forward pass; they "
                "compute different numbers of micro-batches.",
                "use nn.BatchNorm: each micro-batch is normalized by itself, on any number of processes.",
            )


def watch_samples(
    norms: Iterable[tuple[str, _BatchNorm]], samples: int, error: Callable[[str], LoopError]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Register hooks that raise `error(name)` if a batch norm in training gets a batch of `samples` elements.

    A batch norm may get more elements than samples, tokens for example.
    """

    def hook(name: str) -> Callable[..., None]:
        def look(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if module.training and len(inputs[0]) == samples:
                raise error(name)

        return look

    return [norm.register_forward_pre_hook(hook(name)) for name, norm in norms]
