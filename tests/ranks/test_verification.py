"""Verification: violations of the promise are named in the first steps, and correct runs pass.

The protections against some violations (alignment, optimizers on shards, attributes, compilers, sparse sums, unlike
models) are switched off here, one at a time. The verification alone must then find the violation, with its cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import rounding
from tests.ranks import loops
from tests.ranks.loops import SETTINGS, Loop, Numbers, loss_of, train, whole
from unisono.config import LoaderSettings, ParallelSettings, PromiseSettings, Settings
from unisono.data import alignment
from unisono.distributed.process_group import to_local
from unisono.environment import World
from unisono.exchange import gradient_accumulation
from unisono.testing import run_ranks, run_result
from unisono.train import build
from unisono.train import run as run_module
from unisono.train.guarantees import promise
from unisono.train.modules import models
from unisono.train.modules.module_attributes import ModuleAttributes
from unisono.train.optimization import sharded_step
from unisono.train.run import Run
from unisono.train.step import Step
from unisono.train.verification import sharded_update
from unisono.train.verification.verification import is_candidate, is_early

LONGER = replace(SETTINGS, steps=9)
attempt = partial(loops.attempt, verified=True)
SHARDS = replace(LONGER, parallel=ParallelSettings(shard=2))

Off = Callable[[pytest.MonkeyPatch], None]


# -- violations of the promise


class Bags(torch.utils.data.Dataset):
    """Slices of one array, with different memory alignment."""

    def __init__(self) -> None:
        numbers = np.random.RandomState(0)
        self.x, self.ends = numbers.randn(4000, 13).astype(np.float32), np.cumsum(numbers.randint(3, 40, 60))

    def __len__(self) -> int:
        return 53

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.x[self.ends[i] : self.ends[i + 1]]), torch.tensor([i % 3])


def bags(run: Run[Any]) -> Any:
    model = run.place(lambda: nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(Bags(), collate_fn=lambda samples: samples[0]):
        for x, y in step:
            step.backward(F.cross_entropy(model(x).mean(0, keepdim=True), y, reduction="sum"), weight=1)
        step.update(optimizer)


class Previous(nn.Module):
    """Divides by its previous input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 2), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, self.last = self.last, float(x[0, 0])
        out: torch.Tensor = self.linear(x) / (1.0 + before)
        return out


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.swish = nn.Linear(3, 37), nn.Linear(37, 2), torch.jit.script(swish)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.swish(self.up(x)))
        return out


def scripted(run: Run[Any]) -> Any:
    torch._C._jit_set_profiling_mode(True)
    return train(run, build=Scripted)


def sparse(run: Run[Any]) -> Any:
    words = torch.randint(0, 20, (160, 12), generator=torch.Generator().manual_seed(1))
    model = run.place(lambda: nn.EmbeddingBag(20, 3, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(words, words[:, 0] % 3)):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(optimizer)


def odd_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 19), nn.LayerNorm(19), nn.ReLU(), nn.Linear(19, 11))


def backward_on_half(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
    step.backward((model(x.bfloat16()).float() - x.sum(1, keepdim=True)).pow(2).sum(), weight=len(i))


fused: Loop = partial(
    train, build=odd_model, make=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
)
half: Loop = partial(
    train,
    body=backward_on_half,
    build=lambda: odd_model().bfloat16(),
    make=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
)


def change_gradients(change: Callable[[nn.Module], None]) -> Loop:
    """Return a loop that changes gradients between the micro-batches and the update."""

    def loop(run: Run[Any]) -> Any:
        model = run.place(odd_model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        for step in run.steps(Numbers()):
            for x, _ in step:
                step.backward(loss_of(model, x), weight=len(x))
            change(model)
            step.update(optimizer)

    return loop


def clip_by_own_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def norm_of_rows(model: nn.Module) -> None:
    for p in model.parameters():
        rows: Any = to_local(p.grad)
        rows.mul_(1.0 / (1.0 + rows.norm()))


def sum_of_copies(model: nn.Module) -> None:
    squares: list[Any] = [to_local(p.grad) ** 2 for p in model.parameters()]
    total = sum(float(each.sum()) for each in squares)
    for p in model.parameters():
        to_local(p.grad).mul_(1.0 / (1.0 + total))


class UnorderedHeads(nn.Module):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(3, 2) for name in order})
        for name in sorted(order):
            nn.init.zeros_(self.heads.get_parameter(f"{name}.weight"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = sum((i + 1) * self.heads[name](x) for i, name in enumerate(sorted(self.heads)))
        return out


def unordered_modules(run: Run[Any]) -> Any:
    names = ["one", "two", "three"]
    return train(run, build=lambda: UnorderedHeads(names if run.rank else names[::-1]))


def with_counter(run: Run[Any]) -> Any:
    seen = [0]

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        seen[0] += 1
        step.backward(loss_of(model, x) * (1.0 + 0.01 * seen[0]), weight=len(i))

    return train(run, body)


def with_generator(run: Run[Any]) -> Any:
    draws = torch.Generator().manual_seed(3)

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        step.backward(loss_of(model, x + 0.1 * torch.randn(x.shape, generator=draws)), weight=len(i))

    return train(run, body)


class KeepsLargest(nn.Module):
    """Divides by the largest input seen: state that the run restores. It also keeps its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.largest, self.seen = nn.Linear(3, 2), 0.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, float(x.abs().max()))
        out: torch.Tensor = self.linear(x / (1.0 + self.largest))
        self.seen = float(out.detach()[0, 0])
        return out


def with_generator_and(build: Callable[[], nn.Module], run: Run[Any]) -> Any:
    draws = torch.Generator().manual_seed(3)

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        step.backward(loss_of(model, x) * (1.0 + torch.rand((), generator=draws)), weight=len(i))

    return train(run, body, build=build)


class CountsFetches(Numbers):
    fetched = 0

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        self.fetched += 1
        x, number = super().__getitem__(i)
        return x + 0.01 * self.fetched, number


class UsesWorkerId(Numbers):
    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x, number = super().__getitem__(i)
        return x + 0.5 * (torch.utils.data.get_worker_info() is not None), number


# -- disabled protections


def no_alignment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(alignment, "align", lambda batch: batch)
    patch.setattr(alignment, "align_", lambda tensors: None)


def no_attributes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModuleAttributes, "enabled", False)


def no_compilers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_module, "fix_compilers", lambda: None)


def no_unique(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradient_accumulation, "coalesced", lambda grad: grad)


def no_local_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharded_step, "steps_locally", lambda optimizer: False)
    patch.setattr(promise, "differs_in_shards", lambda *_: False)
    patch.setattr(sharded_update, "differs_in_shards", lambda *_: False)


def no_reductions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(models, "reduce_whole", lambda shard: lambda: None)


def no_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(models, "check_same_parameters", lambda *_, **__: None)
    patch.setattr(build, "check_same_parameters", lambda *_, **__: None)


def patch_nothing(patch: pytest.MonkeyPatch) -> None:
    pass


BAGS = replace(LONGER, micro_batch=1)
BROKEN: dict[str, tuple[Loop, Off, int, Settings, str]] = {
    "alignment": (bags, no_alignment, 1, BAGS, "depends on where its data is in memory"),
    "alignment beside a worker": (
        bags,
        no_alignment,
        1,
        replace(BAGS, loader=LoaderSettings(workers=1)),
        "depends on where its data is in memory",
    ),
    "attribute on 1": (partial(train, build=Previous), no_attributes, 1, LONGER, "Python attribute.*last"),
    "attribute on 2": (partial(train, build=Previous), no_attributes, 2, LONGER, "Python attribute.*last"),
    "torchscript on 1": (scripted, no_compilers, 1, LONGER, "swish is compiled by torch.jit.script"),
    "torchscript on 2": (scripted, no_compilers, 2, LONGER, "swish is compiled by torch.jit.script"),
    "sparse on 1": (sparse, no_unique, 1, LONGER, "weight in step . is not the sum along the tree"),
    "sparse on 2": (sparse, no_unique, 2, LONGER, "weight in step . is not the sum along the tree"),
    "fused": (fused, no_local_steps, 2, SHARDS, r"update of 0\.weight by rows differs.*AdamW\(fused=True\)"),
    "half": (half, no_local_steps, 2, SHARDS, r"by rows differs.*SGD\(\)"),
    "clip by hand": (
        change_gradients(clip_by_own_norm),
        no_reductions,
        2,
        SHARDS,
        "_foreach_norm at .*test_verification.py",
    ),
    "norm of rows": (
        change_gradients(norm_of_rows),
        patch_nothing,
        2,
        SHARDS,
        "reduced rows.*norm at .*test_verification.py",
    ),
    "sum of copies": (
        change_gradients(sum_of_copies),
        patch_nothing,
        2,
        SHARDS,
        "reduced rows.*sum at .*test_verification.py",
    ),
    "order": (unordered_modules, no_comparison, 2, LONGER, "parameters in different orders"),
    "counter on 1": (with_counter, patch_nothing, 1, LONGER, "another loss"),
    "counter on 2": (with_counter, patch_nothing, 2, LONGER, "another loss"),
    "generator": (with_generator, patch_nothing, 2, LONGER, "another loss"),
    **{
        f"generator and {build.__name__} on {size}": (
            partial(with_generator_and, build),
            patch_nothing,
            size,
            LONGER,
            "another loss.*on one process, differ: randomness",
        )
        for build in (KeepsLargest, Scripted)
        for size in (1, 2)
    },
    "data": (partial(train, data=CountsFetches()), patch_nothing, 2, LONGER, "other samples.*keeps a counter"),
    "worker": (partial(train, data=UsesWorkerId()), patch_nothing, 1, LONGER, "in a loader worker"),
}


def run_violations(world: World, folder: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        loop, off, _, settings, _ = BROKEN[name]
        with pytest.MonkeyPatch.context() as patch:
            off(patch)
            found[name] = attempt(world, folder / name.replace(" ", "-"), loop, settings)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_violations_are_named_in_the_first_steps(tmp_path: Path, size: int) -> None:
    names = [name for name, case in BROKEN.items() if case[2] == size]
    if not rounding.depends_on_addresses():
        names = [name for name in names if BROKEN[name][1] is not no_alignment]
    for result in run_ranks(run_violations, size, tmp_path, names):
        for name in names:
            assert isinstance(result[name], str), f"{name}: nothing was found"
            assert "PromiseBrokenError" in result[name], result[name]
            assert re.search(BROKEN[name][4], result[name], re.S), f"{name}: {result[name]}"
            assert "--set promise.on_violation=warn" in result[name]


# -- reactions


def train_lowered(world: World, folder: Path, settings: Settings) -> Any:
    def loop(run: Run[Any]) -> Any:
        train(run, lambda step, model, x, i: step.backward(loss_of(model, x) * (1 + draw()), weight=len(i)))
        return run_result(run)

    draws = torch.Generator().manual_seed(3)

    def draw() -> torch.Tensor:
        return torch.rand((), generator=draws)

    results = attempt(world, folder, loop, settings)
    events = [json.loads(line) for line in (folder / "timeline" / "rank-0.jsonl").read_text().splitlines()]
    return results, [event for event in events if "promise" in event]


def test_settings_lower_the_promise_at_a_violation(tmp_path: Path) -> None:
    settings = replace(LONGER, promise=PromiseSettings(on_violation="warn"))
    for results, events in run_ranks(train_lowered, 2, tmp_path, settings):
        assert results["promise"] == "tolerance"
        assert results["reason"].startswith("from step 0 on: a second computation of virtual rank")
        assert results["steps"] == 9
        assert [(event["promise"], event["step"]) for event in events] == [("tolerance", 0)]


def test_settings_disable_verification(tmp_path: Path) -> None:
    settings = replace(LONGER, promise=PromiseSettings(check=False))
    for results, events in run_ranks(train_lowered, 2, tmp_path, settings):
        assert results["promise"] == "exact"
        assert "verified_steps" not in results
        assert events == []


def train_with_attributes(world: World, folder: Path) -> Any:
    def loop(run: Run[Any]) -> Any:
        train(run, build=KeepsLargest)
        return run_result(run)

    return attempt(world, folder, loop, LONGER)


@pytest.mark.parametrize("size", [1, 2])
def test_verification_does_not_read_an_output_for_the_script(tmp_path: Path, size: int) -> None:
    for result in run_ranks(train_with_attributes, size, tmp_path):
        assert (result["promise"], result["verified_steps"]) == ("exact", 5), result


# -- verified steps


def test_verified_steps() -> None:
    assert [n for n in range(40) if is_early(n)] == [0, 1, 2, 4, 8]
    assert [n for n in range(1, 70) if is_candidate(n, begins_epoch=n % 30 == 0)] == [1, 2, 4, 8, 16, 30, 32, 60, 64]


def count_rounds(run: Run[Any]) -> Any:
    """Return the number of micro-batches that the body runs, and of those that count, by step."""
    rounds: dict[int, list[bool]] = {}

    def body(step: Step, model: nn.Module, x: torch.Tensor, i: torch.Tensor) -> None:
        rounds.setdefault(step.number, []).append(step.counts)
        whole(step, model, x, i)

    train(run, body)
    return rounds


def train_counted(world: World, folder: Path) -> Any:
    return attempt(world, folder, count_rounds, replace(LONGER, steps=70, batch=4))


def test_body_runs_more_often_only_in_verified_steps(tmp_path: Path) -> None:
    (rounds,) = run_ranks(train_counted, 1, tmp_path)
    assert [n for n, counts in rounds.items() if len(counts) > 4] == [0, 1, 2, 4, 8]
    assert {sum(counts) for counts in rounds.values()} == {4}
