"""Pipelines: a model in stages has the bits of one process, under every schedule."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pairs import every_pair
from tests.ranks.loops import Numbers, attempt
from tests.ranks.training import Sentences, TinyGPT, padded, settings
from unisono.config import ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import to_local
from unisono.environment import World
from unisono.recipes.text import GPT, Model
from unisono.testing import build_run, close_run, run_promise, run_ranks
from unisono.train.run import Run

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

UNEVEN = settings(batch=16, virtual_ranks=8, steps=4, micro_batch=1, clip=0.5)
"""Over 53 numbers: the fourth step has five of them, so three virtual ranks are empty."""


class Deep(nn.Sequential):
    """Dropout in every layer, and a last layer that returns a view."""

    def __init__(self) -> None:
        layers = (nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.3)) for _ in range(8))
        super().__init__(nn.Linear(3, 12), *layers, nn.Unflatten(1, (2, 6)), nn.Flatten(), nn.Linear(12, 2))


def squares(output: Tensor, x: Tensor, i: Tensor) -> tuple[Tensor, int]:
    return (output - x.sum(1, keepdim=True)).pow(2).sum(), len(i)


def train_deep(run: Run[Any], build: Callable[[], nn.Module] = Deep, length: int = 53) -> Any:
    """Return losses, norms, an evaluation, a prediction, a forward pass in the loop, and the fingerprint."""
    model = run.place(build)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    found: list[Any] = []
    for step in run.steps(Numbers(length)):
        step.run(model, squares)
        norm = step.grad_norm
        step.update(optimizer)
        found.append((step.loss, step.weight, str(norm)))  # a step that fp16 skips has none
    found.append(run.evaluate(model, Numbers(20), squares))
    found.append(run.evaluate(model, (Numbers()[i] for i in range(11)), squares))
    found.append(run.predict(model, Numbers(5)).tolist())
    with torch.no_grad():
        found.append(model(torch.ones(2, 3)).tolist())
    return [*found, run_promise(run)[0], run.context.state.fingerprint()]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (found,) = run_ranks(attempt, 1, tmp_path_factory.mktemp("alone"), train_deep, UNEVEN)
    assert isinstance(found, list), found
    return found


@pytest.mark.ci
@pytest.mark.parametrize(("schedule", "size"), every_pair(SCHEDULES, [4, 2]))
def test_every_schedule_gives_the_bits_of_one_process(tmp_path: Path, single: Any, schedule: Any, size: int) -> None:
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=size, schedule=schedule))
    assert run_ranks(attempt, size, tmp_path, train_deep, config) == [single] * size


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "DualPipeV"])
def test_several_replicas_of_a_pipeline(tmp_path: Path, single: Any, schedule: Any) -> None:
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, schedule=schedule))
    assert run_ranks(attempt, 4, tmp_path, train_deep, config) == [single] * 4


def test_three_stages_for_each_process(tmp_path: Path, single: Any) -> None:
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, schedule="LoopedBFS", stages_per_rank=3))
    assert run_ranks(attempt, 2, tmp_path, train_deep, config) == [single] * 2


def deep_in_16_bits(run: Run[Any]) -> Any:
    return train_deep(run, length=48)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_mixed_precision(tmp_path: Path, precision: Any) -> None:
    config = replace(UNEVEN, precision=precision, steps=12 if precision == "fp16" else 3)
    (found,) = run_ranks(attempt, 1, tmp_path / "1", deep_in_16_bits, config)
    assert isinstance(found, list), found
    config = replace(config, parallel=ParallelSettings(pipeline=2, schedule="ZBVZeroBubble"))
    assert run_ranks(attempt, 2, tmp_path / "2", deep_in_16_bits, config) == [found] * 2


# -- models that are not a plain row


class Windows(torch.utils.data.Dataset):
    """53 rows of 17 bytes."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, 256, (53, 17), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.rows[i, :-1], self.rows[i, 1:]


def likelihood(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    nats = F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return nats, (targets != -100).sum()


def train_language_model(run: Run[Any], *, text: bool, tied: bool, stop_after: int | None = None) -> Any:
    """Train the text recipe's model, or one with lines of varied length, a frozen parameter and an unused one.

    The results have every gradient of the first step, by name.
    """

    def build() -> nn.Module:
        model = GPT(Model(width=16, depth=4, heads=2, context=16, dropout=0.1)) if text else TinyGPT()
        if not tied:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    model, data, collate = run.place(build), Windows() if text else Sentences(53), None if text else padded
    ours = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [p for p in ours if p.dim() > 1], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW([*groups, {"params": [p for p in ours if p.dim() < 2]}], lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
    run.track(model=model, optimizer=optimizer, schedule=schedule)
    found: list[Any] = []
    gradients: dict[str, Any] = {}
    for step in run.steps(data, collate_fn=collate):
        step.run(model, likelihood)
        if not gradients:
            trained = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
            gradients = {name: to_local(grad).numpy().copy() for name, grad in trained}
        norm = step.grad_norm
        step.update(optimizer, schedule)
        found.append((step.loss, norm))
        if step.number + 1 == stop_after:
            run.stop()
    found.append(run.evaluate(model, data, likelihood, collate_fn=collate))
    assert run.context.state.fingerprint() == run.context.state.fingerprint()
    return found, gradients, run_promise(run), run.context.state.fingerprint()


def untied_text(run: Run[Any]) -> Any:
    return train_language_model(run, text=True, tied=False)


def untied_lines(run: Run[Any]) -> Any:
    return train_language_model(run, text=False, tied=False)


def tied_text(run: Run[Any]) -> Any:
    return train_language_model(run, text=True, tied=True)


def tied_lines(run: Run[Any]) -> Any:
    return train_language_model(run, text=False, tied=True)


@pytest.mark.ci
@pytest.mark.parametrize("loop", [untied_text, untied_lines])
def test_masks_positions_and_lines_of_varying_length(tmp_path: Path, loop: Any) -> None:
    (single,) = run_ranks(attempt, 1, tmp_path / "1", loop, UNEVEN)
    assert isinstance(single, tuple), single
    losses, gradients, promise, fingerprint = single
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2))
    for size in (2, 4):
        found: dict[str, Any] = {}
        for there, parts, promised, print_ in run_ranks(attempt, size, tmp_path / str(size), loop, config):
            assert (there, promised[0], print_) == (losses, "exact", fingerprint)
            assert promise[0] == promised[0]
            found |= parts
        assert found.keys() == gradients.keys()
        assert all(np.array_equal(found[name], gradients[name]) for name in found)


@pytest.mark.parametrize(
    ("loop", "schedule"),
    [
        *(pytest.param(tied_text, schedule, marks=pytest.mark.slow) for schedule in ("1F1B", "DualPipeV")),
        (tied_lines, "GPipe"),
    ],
)
def test_weights_that_two_stages_share(tmp_path: Path, loop: Any, schedule: Any) -> None:
    """They agree with one process to rounding; every process and any number of replicas has the same bits."""
    (single,) = run_ranks(attempt, 1, tmp_path / "1", loop, UNEVEN)
    assert isinstance(single, tuple), single
    found, gradients, _, _ = single
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, schedule=schedule))
    prints = set()
    for size in (2, 4):
        runs = run_ranks(attempt, size, tmp_path / str(size), loop, config)
        for there, parts, promised, print_ in runs:
            prints.add(print_)
            assert promised[0] == "exact"
            assert re.search("weight belongs to several stages.* a whole model agrees to rounding", promised[1])
            for (loss, norm), (expected, expected_norm) in zip(there[:-1], found[:-1], strict=True):
                assert loss == pytest.approx(expected, rel=1e-6)
                assert norm == pytest.approx(expected_norm, rel=1e-6)
            for name, mine in parts.items():
                same = gradients.get(name, gradients[next(iter(gradients))])  # the head is called after the embedding
                assert np.linalg.norm(mine - same) < 1e-5 * np.linalg.norm(same)
    assert len(prints) == 1


def train_tied(run: Run[Any]) -> Any:
    found, _, _, fingerprint = train_language_model(run, text=False, tied=True)
    return found, fingerprint


@pytest.mark.slow
def test_the_number_of_replicas_changes_no_bit(tmp_path: Path) -> None:
    """1 to 4 replicas of two stages, with tied weights, lines of varying length and short steps."""
    config = settings(batch=24, virtual_ranks=12, steps=5, clip=0.5, parallel=ParallelSettings(pipeline=2))
    (first, *others) = [run_ranks(attempt, 2 * n, tmp_path / str(n), train_tied, config) for n in (1, 2, 3, 4)]
    assert isinstance(first[0], tuple), first
    for found in (first, *others):
        assert found == first[:1] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [2, 4])
def test_eight_processes(tmp_path: Path, single: Any, pipeline: int) -> None:
    config = replace(
        UNEVEN, parallel=ParallelSettings(pipeline=pipeline, schedule="InterleavedZeroBubble", stages_per_rank=1)
    )
    assert run_ranks(attempt, 8, tmp_path, train_deep, config) == [single] * 8


# -- checkpoints of a pipeline


@pytest.mark.ci
def test_a_checkpoint_is_loaded_with_and_without_a_pipeline(tmp_path: Path) -> None:
    """Two groups of parameters, moments and a schedule; the run stops three times and resumes in other layouts."""
    config, folder = replace(UNEVEN, steps=8), tmp_path / "parts"
    never = run_ranks(attempt, 1, tmp_path / "whole", untied_text, config)[0]
    layouts = [
        (2, ParallelSettings(pipeline=2)),
        (1, ParallelSettings()),
        (4, ParallelSettings(pipeline=2, schedule="ZBVZeroBubble")),
        (2, ParallelSettings(shard=2)),
    ]
    for number, (size, parallel) in enumerate(layouts):
        ended = run_ranks(train_and_stop, size, folder, replace(config, parallel=parallel), 2 * (number + 1))
        assert len(set(ended)) == 1
    assert ended[0] == f"exact {never[-1]}"


def test_a_resume_without_the_pipeline_names_tied_weights(tmp_path: Path) -> None:
    piped = replace(UNEVEN, parallel=ParallelSettings(pipeline=2))
    (print_, _) = run_ranks(train_and_stop, 2, tmp_path, piped, 2, True)
    assert print_.startswith("exact ")
    (print_,) = run_ranks(train_and_stop, 1, tmp_path, UNEVEN, 4, True)
    assert print_.startswith("exact until step 3 ")  # where it had stopped


def train_and_stop(world: World, folder: Path, config: Settings, stop_after: int, tied: bool = False) -> str:
    with join(world) as group:
        run = build_run(config, world, group, folder, resume=True)
        *_, promise, fingerprint = train_language_model(run, text=True, tied=tied, stop_after=stop_after)
        close_run(run)
        return f"{promise[0]} {fingerprint}"


def train_with_average(run: Run[Any]) -> Any:
    """Average the weights and evaluate the average; compute a sum in the loop; change gradients in the loop."""
    model = run.place(Deep)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    run.track(model=model, average=average, optimizer=optimizer)
    found: list[Any] = []

    for step in run.steps(Numbers(53)):

        def counted(output: Tensor, x: Tensor, i: Tensor, step: Any = step) -> tuple[Tensor, int]:
            step.add("high", (output > 0).sum(), output.numel())
            return squares(output, x, i)

        step.run(model, counted, forward=lambda model, batch: model(batch[0] * 2.0) * 0.5)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        step.update(optimizer)
        average.update_parameters(model)
        found.append((step.loss, step.mean("high")))
    return [*found, run.evaluate(average, Numbers(20), squares), run.context.state.fingerprint()]


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_averages_sums_and_a_forward_in_the_loop(tmp_path: Path, schedule: Any) -> None:
    (found,) = run_ranks(attempt, 1, tmp_path / "1", train_with_average, UNEVEN)
    assert isinstance(found, list), found
    config = replace(UNEVEN, parallel=ParallelSettings(pipeline=2, schedule=schedule))
    assert run_ranks(attempt, 2, tmp_path / "2", train_with_average, config) == [found] * 2


def parameters_held(run: Run[Any]) -> Any:
    model = run.place(Deep)
    return sorted({name.split(".")[0] for name, _ in model.named_parameters()}, key=int)


def test_each_process_keeps_the_parameters_of_its_stages(tmp_path: Path) -> None:
    parallel = ParallelSettings(pipeline=2)
    assert run_ranks(attempt, 2, tmp_path / "a", parameters_held, replace(UNEVEN, parallel=parallel)) == [
        ["0", "1", "2", "3", "4"],
        ["5", "6", "7", "8", "11"],
    ]
    named = replace(parallel, split_points=["2"])
    assert run_ranks(attempt, 2, tmp_path / "b", parameters_held, replace(UNEVEN, parallel=named)) == [
        ["0", "1"],
        ["2", "3", "4", "5", "6", "7", "8", "11"],
    ]
    in_v = replace(parallel, schedule="DualPipeV", split_points=["1", "3", "6"])
    assert run_ranks(attempt, 2, tmp_path / "c", parameters_held, replace(UNEVEN, parallel=in_v)) == [
        ["0", "6", "7", "8", "11"],
        ["1", "2", "3", "4", "5"],
    ]
