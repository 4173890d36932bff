"""A buddy's copy: what a process lost comes back from the next one, to the bit, and training goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from tests.pairs import every_pair
from tests.ranks import loops
from tests.ranks.training import Points, Sentences, TinyGPT, padded, settings
from unisono.checkpoint.sharded_state import gather_state
from unisono.config import ParallelSettings
from unisono.config.mesh_shape import MeshShape
from unisono.distributed.process_group import to_local
from unisono.testing import extension_of, finish_run, run_ranks
from unisono.train.recovery.replication import Replication
from unisono.train.recovery.shard_replica import ShardReplica, step_of
from unisono.train.recovery.survival import survival_of
from unisono.train.run import Run

attempt = partial(loops.attempt, verified=True)

CONFIG = settings(steps=6, batch=16, virtual_ranks=4)
LOST_AT = 3

Made = tuple[nn.Module, list[Any], Any, Any]


def gpt(run: Run[Any]) -> Made:
    """Tied, frozen and unused parameters; AdamW, and a schedule."""
    model = run.place(TinyGPT)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, [optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)], Sentences(53), padded


class Normed(nn.Sequential):
    """Running statistics, and a layer that does not train."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.GELU(), nn.Linear(10, 9), nn.Linear(9, 5))
        self[3].requires_grad_(False)


def normed(run: Run[Any]) -> Made:
    """Several optimizers, with other states each. Rows that three processes share unevenly, of one there is none."""
    model = run.place(Normed)
    first = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    second = torch.optim.NAdam([*model[1].parameters(), *model[4].parameters()], lr=0.01)
    return model, [first, second, torch.optim.lr_scheduler.StepLR(first, 2)], Points(60), None


class Pair(nn.Module):
    """Two matrices that a plan for the axis tensor is found for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def pairs(run: Run[Any]) -> Made:
    """Each parameter lies over two axes, or over one."""
    model = run.place(lambda: nn.Sequential(Pair(), Pair(), nn.Linear(12, 6)))
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01)], Points(60), None


def spoil(model: nn.Module, steppers: list[Any], *, new: bool) -> None:
    """What a process that is lost has. `new`: as another one has that takes its place, without any state."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            to_local(tensor).fill_(torch.nan if tensor.is_floating_point() else 99)
        for stepper in steppers:
            for state in getattr(stepper, "state", {}).values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        to_local(value).fill_(torch.nan)
            if new and hasattr(stepper, "state"):
                stepper.state.clear()
            for group in getattr(stepper, "param_groups", ()):
                group["lr"] = 1e9
            if hasattr(stepper, "last_epoch"):
                stepper.last_epoch = 77


def state_of(run: Run[Any]) -> list[Any]:
    """The bits of all weights, and of whatever is tracked beside them, thing by thing."""
    others = {
        name: thing.state_dict() for name, thing in run.context.state.tracked.items() if name.startswith("stepper")
    }
    leaves = tree_leaves(gather_state(others, keep=True))
    bits = [sha256(leaf.numpy().tobytes()).hexdigest() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return [run.context.state.fingerprint(), *bits]


def buddy_of(run: Run[Any]) -> ShardReplica:
    replication = extension_of(run, Replication)
    assert replication is not None
    return replication.replica


def loop(
    run: Run[Any],
    make: Callable[[Run[Any]], Made],
    meddle: Callable[[Run[Any], nn.Module, list[Any], list[Any]], Any] | None = None,
) -> Any:
    """The state after every step. `meddle` is called before step LOST_AT; what it returns ends the loop."""
    model, steppers, data, collate = make(run)
    run.track(model=model, **{f"stepper {i}": stepper for i, stepper in enumerate(steppers)})
    states: list[Any] = []
    for step in run.steps(data, collate_fn=collate):
        if step.number == LOST_AT and meddle is not None:
            told = meddle(run, model, steppers, states)
            if told is not None:
                return told
        for x, y in step:
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100)
            step.backward(loss, weight=(y != -100).sum())
        step.update(*steppers)
        states.append(state_of(run))
    return states


def lose(
    run: Run[Any], model: nn.Module, steppers: list[Any], _: list[Any], lost: Collection[int], *, new: bool = False
) -> None:
    if run.rank in lost:
        spoil(model, steppers, new=new)
    assert buddy_of(run).restore(lost) == LOST_AT


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Both trainings, undisturbed on one process."""
    folder = tmp_path_factory.mktemp("alone")
    found = {make: run_ranks(attempt, 1, folder / make.__name__, partial(loop, make=make), CONFIG)[0] for make in MAKES}
    assert all(isinstance(states, list) for states in found.values()), found
    return found


MAKES = (gpt, normed)
PLACEMENTS: dict[str, tuple[int, ParallelSettings, tuple[int, ...]]] = {
    "the first of two": (2, ParallelSettings(shard=2), (0,)),
    "the last of three": (3, ParallelSettings(shard=3), (2,)),
    "two of four that are not neighbours": (4, ParallelSettings(shard=4), (0, 2)),
    "one of two models of two shards": (4, ParallelSettings(shard=2), (3,)),
    "one of each of two models": (4, ParallelSettings(shard=2, reshard="step"), (0, 3)),
    "one of three, gathered once a step": (3, ParallelSettings(shard=3, reshard="step"), (1,)),
}


@pytest.mark.parametrize(("what", "make"), every_pair(PLACEMENTS, MAKES))
def test_what_is_lost_comes_back(tmp_path: Path, alone: dict[Any, list[Any]], what: str, make: Any) -> None:
    size, parallel, lost = PLACEMENTS[what]
    config = replace(CONFIG, parallel=replace(parallel, replicate_shards=True))
    meddle = partial(lose, lost=lost, new=make is normed)
    for states in run_ranks(attempt, size, tmp_path, partial(loop, make=make, meddle=meddle), config):
        assert states == alone[make]


@pytest.mark.slow
def test_what_is_divided_by_matrices_as_well(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=2, tensor=2))
    told = run_ranks(attempt, 4, tmp_path / "undisturbed", partial(loop, make=pairs), config)
    assert isinstance(told[0], list), told[0]
    config = replace(config, parallel=replace(config.parallel, replicate_shards=True))
    meddle = partial(lose, lost=(1,), new=True)
    assert run_ranks(attempt, 4, tmp_path / "restored", partial(loop, make=pairs, meddle=meddle), config) == told


def half_way(run: Run[Any], model: nn.Module, steppers: list[Any], states: list[Any]) -> Any:
    """Process 1 dies before all of its newest copy has left: its buddy has half of it."""
    buddy = buddy_of(run)
    buddy.settle()
    if run.rank == 1:
        spoil(model, steppers, new=False)
    if run.rank == 2:
        half, buddy.theirs[buddy._turn] = buddy.theirs[buddy._turn], None
        assert half is not None
        half.moving.data[::2] = 0
    return [buddy.restore([1]), state_of(run) == states[LOST_AT - 2], state_of(run) == states[LOST_AT - 1]]


def test_all_go_back_to_a_step_that_is_whole_everywhere(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    told = run_ranks(attempt, 3, tmp_path, partial(loop, make=gpt, meddle=half_way), config)
    assert told == [[LOST_AT - 1, True, False]] * 3


def late(run: Run[Any]) -> Any:
    """A layer that does not train is written to, then a process is lost; it begins to train, and one is lost again.
    Returns the state, and how often processes agreed anew on what there is."""
    model, steppers, data, _ = normed(run)
    run.track(model=model, **{f"stepper {i}": stepper for i, stepper in enumerate(steppers)})
    layer: Any = model.get_submodule("3")
    agreed: list[int] = []
    for step in run.steps(data):
        if step.number == 1 and run.size > 1:
            buddy_of(run)._agree = partial(count, buddy_of(run)._agree, agreed)  # type: ignore[method-assign]
        if step.number == 3:
            with torch.no_grad():
                layer.weight.mul_(2)
        if step.number in (4, 5) and run.size > 1:
            if run.rank == 1:
                spoil(model, steppers, new=False)
            assert buddy_of(run).restore([1]) == step.number
        if step.number == 4:
            layer.requires_grad_(True)
            steppers[0].add_param_group({"params": [*layer.parameters()], "lr": 0.1})
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(*steppers)
    return [state_of(run), len(agreed)]


def count(agree: Callable[[Any], None], agreed: list[int], content: Any) -> None:
    agreed.append(1)
    agree(content)


def test_what_stood_still_and_moves_later(tmp_path: Path) -> None:
    ((state, _),) = run_ranks(attempt, 1, tmp_path / "1", late, CONFIG)
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    # written to, lost, training, lost again; and not in the step between
    assert run_ranks(attempt, 3, tmp_path / "3", late, config) == [[state, 4]] * 3


def test_two_neighbours_are_too_many(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    meddle = partial(lose, lost=(0, 2))
    for words in run_ranks(attempt, 3, tmp_path, partial(loop, make=gpt, meddle=meddle), config):
        assert isinstance(words, str)
        assert re.search(
            "CheckpointError: Processes 0, 2.*process 2's was on process 0.*checkpoint.*--resume", words, re.DOTALL
        )


def room(run: Run[Any], model: nn.Module, steppers: list[Any], _: list[Any]) -> list[int]:
    """Bytes of what a process has, and of all parcels."""
    buddy = buddy_of(run)
    buddy.settle()
    states = [value for state in steppers[0].state.values() for value in state.values()]
    has = sum(to_local(t).nbytes for t in (*model.parameters(), *states))
    bags = [bag for parcel in (*buddy.mine, *buddy.theirs) if parcel for bag in (parcel.still, parcel.moving)]
    return [has, sum({bag.data.data_ptr(): bag.data.nbytes for bag in bags}.values())]


def wide(run: Run[Any]) -> Made:
    model = run.place(lambda: nn.Sequential(nn.Linear(12, 120), *(nn.Linear(120, 120) for _ in range(3))))
    return model, [torch.optim.AdamW(model.parameters())], Points(60), None


def test_four_times_a_shard_is_all_the_room_it_takes(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    for has, kept in run_ranks(attempt, 3, tmp_path, partial(loop, make=wide, meddle=room), config):
        assert 4 * has <= kept <= 4.05 * has


def test_the_step_to_go_back_to() -> None:
    ring = [0, 1, 2]
    assert step_of([(ring, [4, 5], [5, 4]), (ring, [], []), (ring, [5, 4], [4])], [1]) == 4
    assert step_of([(ring, [4, 5], [5, 4]), (ring, [4, 5], [5, 4]), (ring, [], [])], [2]) == 5
    pairs = [([0, 1], [2], [2]), ([0, 1], [2], [2]), ([2, 3], [2, 1], [1, 2]), ([2, 3], [], [])]
    assert step_of(pairs, [3]) == 2


def test_survival_is_told() -> None:
    assert survival_of(ParallelSettings(), MeshShape()) == "checkpoint"
    assert survival_of(ParallelSettings(), MeshShape(replicate=2)) == "replicas"
    assert survival_of(ParallelSettings(), MeshShape(replicate=2), survivors=True) == "survivors"
    assert survival_of(ParallelSettings(), MeshShape(), survivors=True) == "checkpoint"
    assert survival_of(ParallelSettings(), MeshShape(context=2)) == "replicas"
    assert survival_of(ParallelSettings(shard=2), MeshShape(shard=2)) == "checkpoint"
    assert survival_of(ParallelSettings(), MeshShape(tensor=2, pipeline=2)) == "checkpoint"
    assert survival_of(ParallelSettings(shard=2), MeshShape(shard=2, replicate=2)) == "replicas"
    assert survival_of(ParallelSettings(shard=2, replicate_shards=True), MeshShape(shard=2)) == "buddy"
    assert (
        survival_of(ParallelSettings(shard=2, replicate_shards=True), MeshShape(shard=2, replicate=2))
        == "replicas and buddy"
    )


def leaves_early(run: Run[Any]) -> Any:
    """A loop that is left while a copy is under way."""
    model, steppers, data, _ = normed(run)
    run.track(model=model, **{f"stepper {i}": stepper for i, stepper in enumerate(steppers)})
    for step in run.steps(data):
        if step.number == 2:
            break
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(*steppers)
    under_way = buddy_of(run)._travel is not None
    finish_run(run)
    return [under_way, buddy_of(run)._travel is None, run.context.progress.steps_done]


def test_a_loop_that_is_left_early_waits_for_its_copies(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=2, replicate_shards=True))
    assert run_ranks(attempt, 2, tmp_path, leaves_early, config) == [[True, True, 2]] * 2
