"""Replicated shards: the next process restores the state of a lost one, bit for bit."""

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

Setup = tuple[nn.Module, list[Any], Any, Any]


def gpt(run: Run[Any]) -> Setup:
    """Build a GPT with tied, frozen and unused parameters, AdamW and a schedule."""
    model = run.place(TinyGPT)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, [optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)], Sentences(53), padded


class MLPWithNorm(nn.Sequential):
    """An MLP with running statistics and a frozen layer."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.GELU(), nn.Linear(10, 9), nn.Linear(9, 5))
        self[3].requires_grad_(False)


def with_norm(run: Run[Any]) -> Setup:
    """Build a model with several kinds of optimizers, whose rows are uneven over three processes."""
    model = run.place(MLPWithNorm)
    first = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    second = torch.optim.NAdam([*model[1].parameters(), *model[4].parameters()], lr=0.01)
    return model, [first, second, torch.optim.lr_scheduler.StepLR(first, 2)], Points(60), None


class TwoMatrices(nn.Module):
    """Two matrices with a tensor parallel plan."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def two_matrices(run: Run[Any]) -> Setup:
    """Build a model whose parameters are sharded over one or two axes."""
    model = run.place(lambda: nn.Sequential(TwoMatrices(), TwoMatrices(), nn.Linear(12, 6)))
    return model, [torch.optim.AdamW(model.parameters(), lr=0.01)], Points(60), None


def overwrite_state(model: nn.Module, steppers: list[Any], *, new: bool) -> None:
    """Overwrite the state, as for a lost process; with `new`, as for a replacement without any state."""
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
    """Return the bits of all weights and other tracked state."""
    others = {
        name: thing.state_dict() for name, thing in run.context.state.tracked.items() if name.startswith("stepper")
    }
    leaves = tree_leaves(gather_state(others, keep=True))
    bits = [sha256(leaf.numpy().tobytes()).hexdigest() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return [run.context.state.fingerprint(), *bits]


def replica_of(run: Run[Any]) -> ShardReplica:
    replication = extension_of(run, Replication)
    assert replication is not None
    return replication.replica


def loop(
    run: Run[Any],
    make: Callable[[Run[Any]], Setup],
    meddle: Callable[[Run[Any], nn.Module, list[Any], list[Any]], Any] | None = None,
) -> Any:
    """Return the state after each step. `meddle` is called before step LOST_AT, and ends the loop with its result."""
    model, steppers, data, collate = make(run)
    run.track(model=model, **{f"stepper {i}": stepper for i, stepper in enumerate(steppers)})
    states: list[Any] = []
    for step in run.steps(data, collate_fn=collate):
        if step.number == LOST_AT and meddle is not None:
            results = meddle(run, model, steppers, states)
            if results is not None:
                return results
        for x, y in step:
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="sum", ignore_index=-100)
            step.backward(loss, weight=(y != -100).sum())
        step.update(*steppers)
        states.append(state_of(run))
    return states


def lose_and_restore(
    run: Run[Any], model: nn.Module, steppers: list[Any], _: list[Any], lost: Collection[int], *, new: bool = False
) -> None:
    if run.rank in lost:
        overwrite_state(model, steppers, new=new)
    assert replica_of(run).restore(lost) == LOST_AT


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    """Train both models on one process without losses."""
    folder = tmp_path_factory.mktemp("alone")
    found = {make: run_ranks(attempt, 1, folder / make.__name__, partial(loop, make=make), CONFIG)[0] for make in MAKES}
    assert all(isinstance(states, list) for states in found.values()), found
    return found


MAKES = (gpt, with_norm)
PLACEMENTS: dict[str, tuple[int, ParallelSettings, tuple[int, ...]]] = {
    "the first of two": (2, ParallelSettings(shard=2), (0,)),
    "the last of three": (3, ParallelSettings(shard=3), (2,)),
    "two of four, as on one host": (4, ParallelSettings(shard=4), (0, 1)),
    "one of two models of two shards": (4, ParallelSettings(shard=2), (3,)),
    "one of each of two models": (4, ParallelSettings(shard=2, reshard="step"), (0, 3)),
    "one of three, gathered once a step": (3, ParallelSettings(shard=3, reshard="step"), (1,)),
}


@pytest.mark.ci
@pytest.mark.parametrize(("what", "make"), every_pair(PLACEMENTS, MAKES))
def test_lost_state_is_restored(tmp_path: Path, reference: dict[Any, list[Any]], what: str, make: Any) -> None:
    size, parallel, lost = PLACEMENTS[what]
    config = replace(CONFIG, parallel=replace(parallel, replicate_shards=True))
    meddle = partial(lose_and_restore, lost=lost, new=make is with_norm)
    for states in run_ranks(attempt, size, tmp_path, partial(loop, make=make, meddle=meddle), config):
        assert states == reference[make]


@pytest.mark.slow
def test_lost_state_with_tensor_parallelism_is_restored(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=2, tensor=2))
    results = run_ranks(attempt, 4, tmp_path / "undisturbed", partial(loop, make=two_matrices), config)
    assert isinstance(results[0], list), results[0]
    config = replace(config, parallel=replace(config.parallel, replicate_shards=True))
    meddle = partial(lose_and_restore, lost=(1,), new=True)
    assert (
        run_ranks(attempt, 4, tmp_path / "restored", partial(loop, make=two_matrices, meddle=meddle), config) == results
    )


def die_while_copying(run: Run[Any], model: nn.Module, steppers: list[Any], states: list[Any]) -> Any:
    """Lose process 1 before its newest copy is complete on the next process."""
    replica = replica_of(run)
    replica.settle()
    if run.rank == 1:
        overwrite_state(model, steppers, new=False)
    if run.rank == 2:
        half, replica.theirs[replica._turn] = replica.theirs[replica._turn], None
        assert half is not None
        half.moving.data[::2] = 0
    return [replica.restore([1]), state_of(run) == states[LOST_AT - 2], state_of(run) == states[LOST_AT - 1]]


def test_all_processes_return_to_the_last_complete_copy(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    results = run_ranks(attempt, 3, tmp_path, partial(loop, make=gpt, meddle=die_while_copying), config)
    assert results == [[LOST_AT - 1, True, False]] * 3


def unfreeze_late(run: Run[Any]) -> Any:
    """Write to a frozen layer, lose a process, unfreeze the layer, and lose a process again.

    Returns:
        The state, and the number of times that processes agreed on the list of tensors.
    """
    model, steppers, data, _ = with_norm(run)
    run.track(model=model, **{f"stepper {i}": stepper for i, stepper in enumerate(steppers)})
    layer: Any = model.get_submodule("3")
    agreements: list[int] = []
    for step in run.steps(data):
        if step.number == 1 and run.size > 1:
            replica_of(run)._agree = partial(count, replica_of(run)._agree, agreements)  # type: ignore[method-assign]
        if step.number == 3:
            with torch.no_grad():
                layer.weight.mul_(2)
        if step.number in (4, 5) and run.size > 1:
            if run.rank == 1:
                overwrite_state(model, steppers, new=False)
            assert replica_of(run).restore([1]) == step.number
        if step.number == 4:
            layer.requires_grad_(True)
            steppers[0].add_param_group({"params": [*layer.parameters()], "lr": 0.1})
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(*steppers)
    return [state_of(run), len(agreements)]


def count(agree: Callable[[Any], None], agreements: list[int], content: Any) -> None:
    agreements.append(1)
    agree(content)


def test_frozen_state_that_changes_is_restored(tmp_path: Path) -> None:
    ((state, _),) = run_ranks(attempt, 1, tmp_path / "1", unfreeze_late, CONFIG)
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    # written to, lost, unfrozen, lost again; and not in the step between
    assert run_ranks(attempt, 3, tmp_path / "3", unfreeze_late, config) == [[state, 4]] * 3


def test_two_adjacent_losses_cannot_be_restored(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    meddle = partial(lose_and_restore, lost=(0, 2))
    for words in run_ranks(attempt, 3, tmp_path, partial(loop, make=gpt, meddle=meddle), config):
        assert isinstance(words, str)
        assert re.search(
            "CheckpointError: .* lost processes 0, 2.*copy of process 2's shard was on process 0.*checkpoint.*--resume",
            words,
            re.DOTALL,
        )


def memory_of(run: Run[Any], model: nn.Module, steppers: list[Any], _: list[Any]) -> list[int]:
    """Return the bytes of a process's state, and of all copies."""
    replica = replica_of(run)
    replica.settle()
    states = [value for state in steppers[0].state.values() for value in state.values()]
    has = sum(to_local(t).nbytes for t in (*model.parameters(), *states))
    bags = [bag for parcel in (*replica.mine, *replica.theirs) if parcel for bag in (parcel.still, parcel.moving)]
    return [has, sum({bag.data.data_ptr(): bag.data.nbytes for bag in bags}.values())]


def wide(run: Run[Any]) -> Setup:
    model = run.place(lambda: nn.Sequential(nn.Linear(12, 120), *(nn.Linear(120, 120) for _ in range(3))))
    return model, [torch.optim.AdamW(model.parameters())], Points(60), None


def test_copies_take_four_times_the_memory_of_a_shard(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=3, replicate_shards=True))
    for has, kept in run_ranks(attempt, 3, tmp_path, partial(loop, make=wide, meddle=memory_of), config):
        assert 4 * has <= kept <= 4.05 * has


def test_step_to_return_to() -> None:
    ring = [0, 1, 2]
    assert step_of([(ring, [4, 5], [5, 4]), (ring, [], []), (ring, [5, 4], [4])], [1]) == 4
    assert step_of([(ring, [4, 5], [5, 4]), (ring, [4, 5], [5, 4]), (ring, [], [])], [2]) == 5
    two_matrices = [([0, 1], [2], [2]), ([0, 1], [2], [2]), ([2, 3], [2, 1], [1, 2]), ([2, 3], [], [])]
    assert step_of(two_matrices, [3]) == 2


def test_start_message_describes_survival() -> None:
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


def leave_loop_early(run: Run[Any]) -> Any:
    """Leave a loop while a copy is in progress."""
    model, steppers, data, _ = with_norm(run)
    run.track(model=model, **{f"stepper {i}": stepper for i, stepper in enumerate(steppers)})
    for step in run.steps(data):
        if step.number == 2:
            break
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(*steppers)
    under_way = replica_of(run)._travel is not None
    finish_run(run)
    return [under_way, replica_of(run)._travel is None, run.context.progress.steps_done]


def test_loop_that_is_left_early_waits_for_its_copies(tmp_path: Path) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(shard=2, replicate_shards=True))
    assert run_ranks(attempt, 2, tmp_path, leave_loop_early, config) == [[True, True, 2]] * 2
