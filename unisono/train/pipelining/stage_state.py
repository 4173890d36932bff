"""The state of a model whose stages are on several processes: which process has what, and how to gather it.

A checkpoint, a fingerprint and a gradient's norm are of the whole model, in the order and with the names that it has in
one process. An optimizer's state_dict has numbers of parameters only, so it is assembled by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from unisono.distributed.mesh import Mesh
from unisono.distributed.process_group import Message, ProcessGroup, from_local_like, to_local, wait_for
from unisono.distributed.value_transfer import gather_values
from unisono.errors import CheckpointError
from unisono.tensors.codec import TensorTable, decode, encode, remote_tensors
from unisono.tensors.digest import fingerprint_of
from unisono.train.optimization.grad_norm import is_sharded, norm_of, rows_of


class LocalPart(NamedTuple):
    """The place for a process's tensors of a divided object, which it saves itself instead of sending them.

    tensors  all tensors that the process saves
    name     of the object
    speaks   whether it is the first of the processes that have the same tensors
    """

    tensors: TensorTable
    name: str
    speaks: bool


class StageParameters:
    """The parameters of the whole model, by number in its order, and the processes that hold them.

    stages   of each parameter, the stages that use it: several, if it is tied
    holders  of each parameter, the ranks in the pipeline that hold it, each once; the first one sends its state
    """

    def __init__(self, model: nn.Module, mesh: Mesh, users: Mapping[int, Sequence[int]], owners: Sequence[int]) -> None:
        self.line, self.mesh = mesh.pipeline, mesh
        self.names: list[str] = []
        self.rows: list[int] = []
        self.stages: list[Sequence[int]] = []
        self.holders: list[list[int]] = []
        self.numbers: dict[int, int] = {}  # of the parameters that this process holds, by id
        self.params: dict[int, nn.Parameter] = {}
        for number, (name, p) in enumerate(model.named_parameters()):
            self.names.append(name)
            self.rows.append(p.numel() if p.dim() < 2 else len(p))
            self.stages.append(users[id(p)])
            self.holders.append(list(dict.fromkeys(owners[stage] for stage in users[id(p)])))
            if self.line.rank in self.holders[-1]:
                self.numbers[id(p)], self.params[number] = number, p

    def of(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters of one of this process's stages."""
        return [p for number, p in self.params.items() if stage in self.stages[number]]

    @property
    def speaks(self) -> bool:
        """Whether this pipeline is the first of those that have the same stages, or parts of them."""
        return all(getattr(self.mesh, axis).rank == 0 for axis in self.mesh.axes._fields if axis != "pipeline")

    @property
    def tied(self) -> list[str]:
        """Parameters that several stages use."""
        return [name for name, stages in zip(self.names, self.stages, strict=True) if len(stages) > 1]

    def _mine(self, number: int) -> bool:
        """Return whether this process sends the state of a parameter."""
        return self.holders[number][0] == self.line.rank

    # -- gradients

    def add_ties(self, params: Sequence[nn.Parameter]) -> bool:
        """Add the gradients of tied parameters over the stages that use them, in their order, on all that hold them.

        Returns:
            Whether the sums are finite.
        """
        tied = [number for number, holders in enumerate(self.holders) if len(holders) > 1]
        if not tied:
            return True
        ours = set(map(id, params))
        has = {n: p.grad is not None for n, p in self.params.items() if n in tied and id(p) in ours}
        by_rank = self.line.all_gather_object(sorted(n for n, yes in has.items() if yes))
        whole = True
        for number in tied:
            senders = [rank for rank in self.holders[number] if number in by_rank[rank]]
            if number not in has or not senders:
                continue
            p = self.params[number]
            others = [rank for rank in self.holders[number] if rank != self.line.rank]
            mine = None if p.grad is None else to_local(p.grad).contiguous()
            parts = {rank: torch.empty_like(to_local(p.detach())) for rank in senders}
            sends = [] if mine is None else [Message(mine.view(-1), rank) for rank in others]
            receives = [Message(parts[rank].view(-1), rank) for rank in senders if rank != self.line.rank]
            wait_for(self.line.send_and_receive(sends, receives))
            if mine is not None:
                parts[self.line.rank] = mine
            total = parts[senders[0]].clone()
            for rank in senders[1:]:
                total.add_(parts[rank])
            if p.grad is None:
                p.grad = from_local_like(total, p)
            else:
                to_local(p.grad).copy_(total)
            whole &= bool(torch.isfinite(total).all())
        return whole

    def total_norm(self, params: Sequence[nn.Parameter]) -> float:
        """Return the 2-norm of the gradient of these parameters and of those of other stages.

        It has the bits of one process (grad_norm.py): the norms of rows are gathered, each from one process, squared,
        and added in order.
        """
        starts = [len(self.rows)]
        for rows in self.rows:
            starts.append(starts[-1] + rows)
        table = torch.zeros(starts[-1], dtype=torch.float64, device=self.line.device)
        for p in params:
            number = self.numbers[id(p)]
            if p.grad is not None and self._mine(number):
                table[number] = 1.0 + is_sharded(p.grad)
                mine = rows_of(to_local(p.grad))
                table[starts[number] : starts[number] + len(mine)] = mine
        table = self.line.sum_(table)
        kinds = table[: len(self.rows)].tolist()

        def squares(kind: float) -> float:
            found = [table[starts[n] : starts[n + 1]] for n, each in enumerate(kinds) if each == kind]
            return float(torch.cat(found).square().sum()) if found else 0.0

        return norm_of(squares(1.0), squares(2.0), self.mesh.tensor)

    # -- states

    def whole(self, thing: Any, state: Any, shelf: LocalPart | None = None) -> Any:
        """Return the state of a tracked object as one process would have it, on the main process.

        All processes of the pipeline call this. With a shelf, tensors stay where they are.
        """
        if isinstance(thing, nn.Module):
            return self._whole_module(state, shelf)
        if isinstance(thing, torch.optim.Optimizer):
            return self._whole_optimizer(thing, state, shelf)
        prints = self.line.all_gather_object(fingerprint_of({"": state}))
        if len(set(prints)) > 1:
            raise CheckpointError(
                f"Cannot save the state of a {type(thing).__name__}.",
                "It differs between the processes of a pipeline, and does not show what belongs to which parameter.",
                "keep what belongs to a parameter in the model's buffers, or in a torch.optim.Optimizer's state.",
            )
        return state

    def _whole_module(self, state: Mapping[str, Any], shelf: LocalPart | None) -> dict[str, Any]:
        by_rank = self.line.all_gather_object(list(state))
        first = {key: rank for rank, keys in reversed(list(enumerate(by_rank))) for key in keys}
        mine = {key: value for key, value in state.items() if first[key] == self.line.rank}
        return {key: value for part in gather_states(self.line, mine, shelf) for key, value in part.items()}

    def _whole_optimizer(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], shelf: LocalPart | None
    ) -> dict[str, Any]:
        groups = self._groups(optimizer)
        here = [number for group in optimizer.param_groups for number in self._numbers(optimizer, group["params"])]
        mine = {
            str(number): state["state"][i]
            for i, number in enumerate(here)
            if i in state["state"] and self._mine(number)
        }
        found = {int(number): of for part in gather_states(self.line, mine, shelf) for number, of in part.items()}
        order = [number for group in groups for number in group]
        ends = iter(range(len(order)))
        whole_groups = []
        for group, numbers in zip(state["param_groups"], groups, strict=True):
            named = {"param_names": [self.names[n] for n in numbers]} if "param_names" in group else {}
            whole_groups.append({**group, **named, "params": [next(ends) for _ in numbers]})
        states = {i: found[number] for i, number in enumerate(order) if number in found}
        return {**state, "state": states, "param_groups": whole_groups}

    def part(self, thing: Any, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a whole state that belongs to this process. All processes of the pipeline call this."""
        if isinstance(thing, nn.Module):
            ours = thing.state_dict()
            return {key: value for key, value in state.items() if key in ours}
        if not isinstance(thing, torch.optim.Optimizer):
            return state
        order = [number for group in self._groups(thing) for number in group]
        saved = sum(len(group["params"]) for group in state["param_groups"])
        if saved != len(order):
            raise ValueError(f"it holds the states of {saved} parameters, and all stages together hold {len(order)}")
        place = {number: i for i, number in enumerate(order)}
        states, groups, here = {}, [], 0
        for group, old in zip(thing.param_groups, state["param_groups"], strict=True):
            numbers = self._numbers(thing, group["params"])
            for i, number in enumerate(numbers):
                if place[number] in state["state"]:
                    states[here + i] = state["state"][place[number]]
            named = {"param_names": group["param_names"]} if "param_names" in group else {}
            groups.append({**old, **named, "params": list(range(here, here + len(numbers)))})
            here += len(numbers)
        return {**state, "state": states, "param_groups": groups}

    def _numbers(self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[int]:
        strange = [p for p in params if id(p) not in self.numbers]
        if strange:
            raise CheckpointError(
                f"Cannot save or load the state of {type(optimizer).__name__}: it has foreign parameters.",
                f"{len(strange)} of its parameters do not belong to this stage of the placed model.",
                "make the optimizer from the model that run.place returns.",
            )
        return [self.numbers[id(p)] for p in params]

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[list[int]]:
        """Return the numbers of all stages' parameters in each group of an optimizer.

        They have the order that they would have in one process: that of the model, or its reverse.
        """
        by_rank = self.line.all_gather_object(
            [self._numbers(optimizer, group["params"]) for group in optimizer.param_groups]
        )
        if len({len(groups) for groups in by_rank}) > 1:
            raise CheckpointError(
                f"Cannot save or load the state of {type(optimizer).__name__}: its numbers of groups differ.",
                f"On the processes of the pipeline it has {' and '.join(str(len(g)) for g in by_rank)} groups.",
                "give every process the same groups, empty ones too.",
            )
        found = []
        for parts in zip(*by_rank, strict=True):
            forth = all(part == sorted(part) for part in parts)
            if not forth and any(part != sorted(part, reverse=True) for part in parts):
                raise CheckpointError(
                    f"Cannot save or load the state of {type(optimizer).__name__}: its parameters are not in order.",
                    "They are neither in the model's order nor in its reverse, and the state has their numbers only: "
                    "the states of stages cannot be combined.",
                    "give it parameters in the order of model.parameters().",
                )
            found.append(sorted({number for part in parts for number in part}, reverse=not forth))
        return found


def gather_states(group: ProcessGroup, mine: dict[str, Any], shelf: LocalPart | None = None) -> list[dict[str, Any]]:
    """Return the dicts of all ranks on rank 0, and elsewhere only the own one.

    With a shelf, tensors stay where they are, and a RemoteTensor replaces each.
    """
    if shelf is None:
        return gather_values(group, mine)
    tensors = TensorTable()
    encoded = group.all_gather_object(encode(mine, f"{shelf.name}@{group.rank}", tensors))
    if group.rank:
        shelf.tensors.update(tensors if shelf.speaks else {})
        return [mine]
    return [mine, *(decode(plain, remote_tensors(plain)) for plain in encoded[1:])]
