"""Step an optimizer on the local shards of its parameters, with the bits that it has on whole parameters.

Under `parallel.shard` an optimizer holds DTensors. Its step is computed here on their local tensors instead. torch then
chooses the same implementation as on one process (foreach, fused or a loop over parameters), and no operation goes
through the dispatch of DTensor.

ATen's kernels for CPUs round the last elements of a tensor otherwise than the others. A vectorized loop takes whole
blocks, in float32 registers; a scalar loop takes the rest, and rounds float16 and bfloat16 after every operation. The
scalar loops of fused optimizers compute without fused multiply-add. Which elements these are depends on where the
tensor ends, and where the intra-op threads divide it. So a shard is stepped in pieces that begin and end where blocks
of the whole tensor do. A block that two shards share is stepped by both, in a buffer in which the other's elements are
zeros:

    whole parameter     |  block 0  |  block 1  |  block 2  |  block 3  | rest |
    shard 1 of 2                         [ b b b|b b b b b b|b b b b b b| r r r]
    pieces                          |0 0 0 b b b|  a view of the shard         |

A parameter whose elements round alike everywhere (float32 and float64 without `fused=True`) is one piece: its shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from unisono.distributed.process_group import from_local_like, is_dtensor, to_local
from unisono.train.guarantees.user_errors import is_elementwise
from unisono.train.optimization.step_kernels import compiled_step_of

if TYPE_CHECKING:
    from unisono.parallel.fsdp.fsdp import ShardedLayer

BLOCK_BYTES = 128
"""Two registers of 64 bytes: what the widest vectorized loop of ATen takes at once. Narrower loops divide it."""

GRAIN = 2**15
"""at::internal::GRAIN_SIZE: elementwise kernels divide larger tensors among intra-op threads, evenly by elements."""

Slot = tuple[slice, slice]
"""Elements of a piece, and where they are in the shard."""


class ShardPiece(NamedTuple):
    """A piece that is stepped as one tensor: a view of the shard, or a buffer, of which `slots` are copied."""

    tensor: torch.Tensor
    slots: Slot | None
    within: slice


def steps_locally(optimizer: Any) -> bool:
    """Return whether the optimizer is stepped on local shards: one of torch's that goes element by element, where every
    DTensor that it holds is divided by rows along the axis `shard` and nowhere else."""
    if (
        not isinstance(optimizer, torch.optim.Optimizer)
        or not is_elementwise(optimizer)
        or hasattr(optimizer, "by_element")
    ):
        return False
    apart = [p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)]
    return bool(apart) and all(
        p.device_mesh.mesh_dim_names == ("shard",) and p.placements[0].is_shard(0) for p in apart
    )


def depends_on_position(p: torch.Tensor, group: dict[str, Any]) -> bool:
    """Return whether the optimizer's kernels round an element of this parameter by where it is in its tensor."""
    return to_local(p.detach()).device.type == "cpu" and (p.dtype.itemsize < 4 or bool(group.get("fused")))


def differs_in_shards(optimizer: Any, layers: Sequence[ShardedLayer]) -> bool:
    """Return whether the optimizer computes other bits on shards than on whole parameters."""
    reordered = {id(p) for layer in layers for p in layer.reordered}
    locally = steps_locally(optimizer)
    return any(
        is_dtensor(p) and depends_on_position(p, group) and (not locally or id(p) in reordered)
        for group in getattr(optimizer, "param_groups", ())
        for p in group["params"]
    )


def prepare(optimizer: Any) -> None:
    """Decide how the optimizer is stepped, whenever parameters are added to it.

    torch takes no list of DTensors of several meshes. Where a group has those, and is not stepped on local shards, its
    foreach and fused kernels are off while it steps.
    """
    groups = optimizer.param_groups
    if steps_locally(optimizer):
        _known[optimizer] = _Shards()
    elif isinstance(optimizer, torch.optim.Optimizer) and any(map(_of_several_meshes, groups)):
        _known[optimizer] = _OneByOne()


def _of_several_meshes(group: dict[str, Any]) -> bool:
    return len({getattr(p, "device_mesh", None) for p in group["params"]}) > 1


def on_local_shards(optimizer: Any) -> AbstractContextManager[None]:
    """Return a block in which `optimizer.step()` computes on local shards, if `prepare` has found that it can; or one
    parameter after the other, if it has found that it must.

    The optimizer's own hooks, and what comes after the block, see its parameters and its state as DTensors.
    """
    way = _known.get(optimizer) if _known and isinstance(optimizer, torch.optim.Optimizer) else None
    return nullcontext() if way is None else _stepping(optimizer, way)


def step_optimizer(optimizer: Any) -> None:
    """Call `optimizer.step()`: compiled, or on local shards, or parameter by parameter, as it was decided for it."""
    compiled = compiled_step_of(optimizer)
    if compiled is not None:
        compiled.step(optimizer)
        return
    way = _known.get(optimizer) if _known and isinstance(optimizer, torch.optim.Optimizer) else None
    if way is None:
        optimizer.step()
    else:
        with _stepping(optimizer, way):
            optimizer.step()


@contextmanager
def _stepping(optimizer: Any, way: _Shards | _OneByOne) -> Iterator[None]:
    before = optimizer.register_step_pre_hook(lambda *_: way.enter(optimizer))
    after = optimizer.register_step_post_hook(lambda *_: way.leave(optimizer))
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
    try:
        yield
    finally:
        way.leave(optimizer)
        before.remove()
        after.remove()


class _OneByOne:
    """The options of an optimizer that steps one parameter after the other, for the time of the step."""

    def __init__(self) -> None:
        self.held: list[dict[str, Any]] | None = None

    def enter(self, optimizer: Any) -> None:
        groups = optimizer.param_groups
        self.held = [{way: group[way] for way in ("foreach", "fused") if way in group} for group in groups]
        for group, held in zip(groups, self.held, strict=True):
            if _of_several_meshes(group):
                group |= dict.fromkeys(held, False)

    def leave(self, optimizer: Any) -> None:
        if self.held is not None:
            for group, held in zip(optimizer.param_groups, self.held, strict=True):
                group |= held
            self.held = None


class _Shards:
    """The local shards of an optimizer's parameters, and between `enter` and `leave` what it held before.

    Without gradients `to_local` is the local tensor itself: a `detach` of a DTensor would cost most of the time.
    """

    def __init__(self) -> None:
        self.shards: dict[int, _Shard] = {}
        self.held: tuple[list[list[Any]], Any] | None = None

    @torch.no_grad()
    def enter(self, optimizer: Any) -> None:
        self.held = [group["params"] for group in optimizer.param_groups], optimizer.state
        state: dict[Any, Any] = defaultdict(dict)
        stepped = {}
        for group in optimizer.param_groups:
            pieces: list[torch.Tensor] = []
            for p in group["params"]:
                if not is_dtensor(p):
                    pieces.append(p)
                    if p in optimizer.state:
                        state[p] = optimizer.state[p]
                elif p.grad is not None:
                    stepped[id(p)] = shard = self._shard_of(p, group)
                    pieces += shard.take(optimizer.state.get(p, {}), state)
            group["params"] = pieces
        self.shards = stepped  # those without a gradient keep no buffers
        optimizer.state = state

    @torch.no_grad()
    def leave(self, optimizer: Any) -> None:
        if self.held is None:
            return
        (params, state), self.held = self.held, None
        for group, held in zip(optimizer.param_groups, params, strict=True):
            group["params"] = held
            for p in held:
                if not is_dtensor(p) and p in optimizer.state:
                    state[p] = optimizer.state[p]
                elif id(p) in self.shards:
                    self.shards[id(p)].give(state[p], optimizer.state)
        optimizer.state = state

    def _shard_of(self, p: torch.Tensor, group: dict[str, Any]) -> _Shard:
        fused, threads = bool(group.get("fused")), torch.get_num_threads()
        how = to_local(p).data_ptr(), fused, threads
        known = self.shards.get(id(p))
        if known is None or known.how != how:
            # the kernels of fused optimizers divide a tensor among threads at whole blocks
            known = _Shard(p, how, cut=depends_on_position(p, group), threads=1 if fused else threads)
        return known


_known: WeakKeyDictionary[Any, _Shards | _OneByOne] = WeakKeyDictionary()


class _Shard:
    """The pieces of one parameter's local shard."""

    def __init__(self, p: torch.Tensor, how: tuple[Any, ...], *, cut: bool, threads: int) -> None:
        self.p, self.how = p, how
        mine: torch.Tensor = to_local(p)
        self.pieces = [ShardPiece(mine, None, slice(None))]
        if not cut:
            return
        self.pieces, flat = [], mine.view(-1)
        begin = _begin(p)
        for first, end in spans(begin, begin + len(flat), p.numel(), BLOCK_BYTES // p.dtype.itemsize, threads):
            lo, hi = max(first, begin), min(end, begin + len(flat))
            within = slice(lo - begin, hi - begin)
            if (lo, hi) == (first, end):
                self.pieces.append(ShardPiece(flat[within], None, within))
            else:
                slots = slice(lo - first, hi - first), within
                self.pieces.append(ShardPiece(flat.new_zeros(end - first), slots, within))
        if not self.pieces:  # a shard without elements: a dummy element creates the optimizer's state
            self.pieces = [ShardPiece(flat.new_zeros(1), (slice(0, 0), slice(0, 0)), slice(0, 0))]

    def take(self, state: dict[str, Any], into: dict[Any, Any]) -> list[torch.Tensor]:
        """Hand parameter, gradient and state over in pieces: the first of these are returned, and have `grad`."""
        parts = {name: self._cut(to_local(value)) for name, value in state.items() if is_dtensor(value)}
        grads = self._cut(to_local(self.p.grad))
        whole = self._cut(to_local(self.p))
        for number, piece in enumerate(self.pieces):
            if piece.slots is not None:
                piece.tensor.copy_(whole[number])
            piece.tensor.grad = grads[number]
            if state:
                into[piece.tensor] = {
                    name: parts[name][number]
                    if name in parts
                    else (value.clone() if number and isinstance(value, torch.Tensor) else value)
                    for name, value in state.items()
                }
        return [piece.tensor for piece in self.pieces]

    def give(self, state: dict[str, Any], found: dict[Any, Any]) -> None:
        """Take parameter and state back after the step."""
        mine = to_local(self.p)
        for piece in self.pieces:
            piece.tensor.grad = None
            self._put(piece, piece.tensor, mine)
        first = self.pieces[0]
        for name, value in found[first.tensor].items() if first.tensor in found else ():
            if not (isinstance(value, torch.Tensor) and value.shape == first.tensor.shape):
                state[name] = value
            elif first.tensor.shape == mine.shape and first.slots is None:
                held: Any = state.get(name)
                if not is_dtensor(held) or to_local(held).data_ptr() != value.data_ptr() or held.dtype != value.dtype:
                    state[name] = from_local_like(value, self.p)
            else:
                if not is_dtensor(state.get(name)):
                    state[name] = from_local_like(torch.empty_like(mine, dtype=value.dtype), self.p)
                for piece in self.pieces:
                    self._put(piece, found[piece.tensor][name], to_local(state[name]))

    def _cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of a tensor with the shape of the shard: views of it, or buffers padded with zeros."""
        if self.pieces[0].within == slice(None):
            return [tensor]
        flat, cut = tensor.reshape(-1), []
        for piece in self.pieces:
            part = flat[piece.within]
            if piece.slots is not None:
                part = torch.zeros_like(piece.tensor, dtype=tensor.dtype)
                part[piece.slots[0]] = flat[piece.within]
            cut.append(part)
        return cut

    def _put(self, piece: ShardPiece, part: torch.Tensor, into: torch.Tensor) -> None:
        """Write a piece back into a tensor that is laid out as the shard, unless it is a view of it."""
        place = into.view(-1)[piece.within]
        if piece.slots is not None:
            place.copy_(part[piece.slots[0]])
        elif part.data_ptr() != place.data_ptr():
            place.copy_(part.view(-1))


def _begin(p: Any) -> int:
    """Return where a parameter's local shard begins in the whole, in elements."""
    rank, size, rows = p.device_mesh.get_local_rank(), p.device_mesh.size(), p.shape[0]
    return int(min(rank * -(-rows // size), rows) * prod(p.shape[1:]))


def spans(begin: int, end: int, total: int, block: int, threads: int) -> Iterator[tuple[int, int]]:
    """Yield spans of a tensor of `total` elements that cover those from `begin` to `end`.

    A kernel that takes each span as a separate tensor rounds every element as in the whole tensor, which it divides
    among `threads` threads.
    """
    parts = min(threads, -(-total // GRAIN)) if total > GRAIN else 1
    chunk = max(-(-total // parts), 1)
    for first in range(0, total, chunk):
        last = min(first + chunk, total)
        lo, hi = max(begin, first), min(end, last)
        if lo >= hi:
            continue
        inner = first - (first - lo) // block * block  # the first border of blocks that is not before `lo`
        outer = hi if hi == last else first + (hi - first) // block * block
        if inner > lo:
            yield inner - block, min(inner, last)
        if inner < outer:
            yield from _even(inner, outer, block, threads)
        if inner <= outer < hi:
            yield outer, min(outer + block, last)


def _even(begin: int, end: int, block: int, threads: int) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) so that threads divide each of these spans at whole blocks."""
    length = end - begin
    parts = min(threads, -(-length // GRAIN)) if length > GRAIN else 1
    even = length // (parts * block) * parts * block
    if parts == 1 or -(-length // parts) % block == 0:
        yield begin, end
    else:
        yield from _even(begin, begin + even, block, threads)
        yield from _even(begin + even, end, block, threads)
