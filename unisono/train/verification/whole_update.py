"""The update of whole parameters, computed in addition to the update of their parts.

Under `parallel.shard` every process steps its rows of a parameter. In a verified step the processes gather a few
parameters with their gradients and optimizer state, step them whole with a twin of the optimizer, and compare: the rows
of this process must have the bits that the whole parameter has there.

A kernel may round the last elements of its input in another way. Such a difference shows in only one of several
updates. Therefore twins also step random parameters of the same shapes, whole and by rows (`differing_by_rows`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from unisono.distributed.process_group import ProcessGroup, from_local_like, is_dtensor, to_local
from unisono.train.optimization.sharded_step import on_local_shards, prepare

MOST_PARAMETERS = 8
MOST_ELEMENTS = 2**17
"""Elements that are gathered in one verified step, unless a single parameter has more."""


@dataclass
class WholeParameter:
    """A parameter that is stepped as a whole, in addition to its part."""

    part: torch.nn.Parameter
    twin: torch.nn.Parameter
    rows: tuple[int, int]
    """First and last row, exclusive, of this process's part."""


class WholeUpdate:
    """One optimizer's step over whole parameters.

    Create it before `optimizer.step()`; all processes of `group`, which share the parameters, do so together. Call
    `differing` afterward.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: ProcessGroup, turn: int) -> None:
        self.optimizer, self.group = optimizer, group
        self.wholes: list[WholeParameter] = []
        self._twins: torch.optim.Optimizer | None = None
        group.attempt(lambda: self._prepare(turn))  # if a process dies in it, no update is compared

    def _prepare(self, turn: int) -> None:
        optimizer = self.optimizer
        chosen = {id(p) for p in choose([p for g in optimizer.param_groups for p in g["params"]], turn)}
        params = [p for g in optimizer.param_groups for p in g["params"] if id(p) in chosen]
        parts = [(part, p) for p in params for part in self._parts(p)]
        wholes = iter(gathered(parts, self.group))
        groups, state = [], defaultdict[Any, Any](dict)
        for options in optimizer.param_groups:
            twins = [self._twin(p, wholes, state) for p in options["params"] if id(p) in chosen]
            if twins:
                groups.append({**options, "params": twins})
        self._twins = twin_of(optimizer, groups, state) if groups else None

    def differing(self) -> list[torch.nn.Parameter]:
        """Step the twin, and return the parameters whose part on this process has other bits."""
        if self._twins is None:
            return []
        self._twins.step()
        return [whole.part for whole in self.wholes if not self._agrees(whole)]

    def _parts(self, p: torch.nn.Parameter) -> list[torch.Tensor]:
        """Return the sharded tensors of a parameter: itself, its gradient, and its state."""
        state = self.optimizer.state.get(p, {}).values()
        return [p, *([] if p.grad is None else [p.grad]), *(value for value in state if is_dtensor(value))]

    def _twin(self, p: torch.nn.Parameter, wholes: Iterator[torch.Tensor], state: dict[Any, Any]) -> torch.nn.Parameter:
        twin = torch.nn.Parameter(next(wholes))
        twin.grad = None if p.grad is None else next(wholes)
        for name, value in self.optimizer.state.get(p, {}).items():
            state[twin][name] = (
                next(wholes) if is_dtensor(value) else value.clone() if isinstance(value, torch.Tensor) else value
            )
        self.wholes.append(WholeParameter(p, twin, rows_of(p, self.group)))
        return twin

    def _agrees(self, whole: WholeParameter) -> bool:
        return equal(to_local(whole.part.detach()), whole.twin.detach()[slice(*whole.rows)])


def gathered(parts: Sequence[tuple[Any, Any]], group: ProcessGroup) -> list[torch.Tensor]:
    """Return the whole of every tensor that is sharded as a parameter is, with one exchange of bytes.

    parts  (tensor, parameter); all processes of `group` pass the same ones
    """
    flats = []
    for part, p in parts:
        mine = to_local(part.detach())
        flat = mine.new_zeros(-(-len(p) // group.size) * p.shape[1:].numel())
        flat[: mine.numel()] = mine.reshape(-1)
        flats.append(flat)
    if not flats:
        return []
    sent = torch.cat([flat.view(torch.uint8).to(group.device) for flat in flats])
    out = sent.new_empty(group.size * len(sent))
    group.all_gather(out, sent).wait()
    found, first = [], 0
    for flat, (_, p) in zip(flats, parts, strict=True):
        last = first + flat.nbytes
        whole = out.view(group.size, -1)[:, first:last].reshape(-1).clone().view(flat.dtype)
        found.append(whole[: p.numel()].view(p.shape).to(flat.device))
        first = last
    return found


STEPS = 4
"""Number of random updates. The first ones begin from an empty state, with less rounding."""


def differing_by_rows(optimizer: torch.optim.Optimizer, group: ProcessGroup, turn: int) -> list[torch.nn.Parameter]:
    """Return the parameters whose rows on some process get other bits than the whole, in random updates."""
    random = torch.Generator().manual_seed(turn)
    wanted = {id(p) for p in choose([p for g in optimizer.param_groups for p in g["params"]], turn)}
    trials = {
        id(p): RandomUpdates(p, group, random) for g in optimizer.param_groups for p in g["params"] if id(p) in wanted
    }
    twins = []
    for take in (attrgetter("whole"), attrgetter("part")):
        chosen = [(g, [take(trials[id(p)]) for p in g["params"] if id(p) in trials]) for g in optimizer.param_groups]
        groups = [{**options, "params": params} for options, params in chosen if params]
        twins.append(twin_of(optimizer, groups, defaultdict(dict)))
    prepare(twins[1])
    for _ in range(STEPS if trials else 0):
        for trial in trials.values():
            trial.draw(random)
        twins[0].step()
        with on_local_shards(twins[1]):
            twins[1].step()
    return [trial.p for trial in trials.values() if not trial.same_rows(*twins)]


class RandomUpdates:
    """A random parameter of the shape of `p`: whole, and as the rows of this process."""

    def __init__(self, p: torch.nn.Parameter, group: ProcessGroup, random: torch.Generator) -> None:
        self.p, self.rows = p, slice(*rows_of(p, group))
        whole = self._random(random)
        self.whole = torch.nn.Parameter(whole)
        self.part = torch.nn.Parameter(from_local_like(whole[self.rows].clone(), p))

    def draw(self, random: torch.Generator) -> None:
        """Give both the same random gradient."""
        self.whole.grad = self._random(random)
        self.part.grad = from_local_like(self.whole.grad[self.rows].clone(), self.p)

    def _random(self, random: torch.Generator) -> torch.Tensor:
        return torch.randn(self.p.shape, generator=random).to(to_local(self.p).device, self.p.dtype)

    def same_rows(self, wholes: torch.optim.Optimizer, parts: torch.optim.Optimizer) -> bool:
        """Compare the parameter, and its state in the two optimizers."""
        pairs = [(self.whole.detach(), self.part.detach())]
        for name, value in wholes.state[self.whole].items():
            if isinstance(value, torch.Tensor) and value.shape == self.whole.shape:
                pairs.append((value, parts.state[self.part][name]))
        return all(equal(to_local(mine), theirs[self.rows]) for theirs, mine in pairs)


def equal(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare values. A tensor with numbers that are not finite counts as equal."""
    return torch.equal(mine, theirs) or not bool(torch.isfinite(mine).all())


def rows_of(p: Any, group: ProcessGroup) -> tuple[int, int]:
    """Return the first row of this process's part and the row after its last one."""
    each = -(-len(p) // group.size)
    first = min(group.rank * each, len(p))
    return first, min(first + each, len(p))


def choose(params: Sequence[torch.nn.Parameter], turn: int) -> list[torch.nn.Parameter]:
    """Return the parameters to step as a whole. Each verified step begins at another parameter."""
    able = [p for p in params if is_dtensor(p) and p.device_mesh.mesh_dim_names == ("shard",) and p.numel()]  # type: ignore[attr-defined]
    first = turn * MOST_PARAMETERS % max(len(able), 1)
    found, elements = [], 0
    for p in (able[first:] + able[:first])[:MOST_PARAMETERS]:
        if elements + p.numel() <= MOST_ELEMENTS:
            found.append(p)
            elements += p.numel()
    return found or sorted(able, key=lambda p: p.numel())[:1]


def twin_of(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], state: defaultdict[Any, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer that is like this one, over other parameters and without its hooks."""
    twin = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a schedule has wrapped it
    twin.__dict__.update({name: copy(v) if isinstance(v, (list, dict, set)) else v for name, v in own.items()})
    twin.param_groups, twin.state = list(groups), state
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin
