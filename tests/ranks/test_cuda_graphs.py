"""Replayed micro-batches have the bits of computed ones, and graphs are off where they would not.

A stand-in for a CUDA graph computes the captured function again, in the memory that a graph uses. It runs the same code
of ours on the CPU: keys, static memory, gradients, hooks, comparisons. tests/gpu captures on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.training import Points, settings, tensors
from unisono.config import ParallelSettings, PromiseSettings, Settings
from unisono.distributed.init import join_process_group
from unisono.environment import World
from unisono.testing import build_run, close_run, finish_run, run_ranks, run_result
from unisono.train.cuda_graphs import graphed_loss
from unisono.train.cuda_graphs.micro_batch_graph import Replay, same_memory

SCALE = 1.0


def rerun(passes: Sequence[Replay]) -> list[Replay]:
    """Compute the passes again in each replay."""
    for run in passes:
        run()
    return [torch.enable_grad()(run) for run in passes]


class Net(nn.Module):
    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind, self.calls, self.heat = kind, 0, 1.0
        self.first, self.last, self.unused = nn.Linear(12, 32), nn.Linear(32, 5), nn.Linear(3, 3)
        self.norm: nn.Module = nn.BatchNorm1d(32) if kind == "batch norm" else nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        if self.kind == "dropout":
            x = F.dropout(x, training=self.training)
        elif self.kind == "python's generator":
            x = x * (1 + 0.1 * random.random())
        elif self.kind == "attribute":
            self.calls += 1
        out: torch.Tensor = self.last(x) / self.heat
        return out


def loss_of(scale: float, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return scale * SCALE * F.cross_entropy(out, y, reduction="sum"), len(y)


def tensor_weight(out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.cross_entropy(out, y, reduction="sum"), (y >= 0).sum()


def train(world: World, folder: Path, kind: str, config: Settings, *, graphs: bool) -> tuple[str, str, int]:
    """Return the fingerprint, why graphs are off, and the number of replays."""
    global SCALE
    graphed_loss.CAPTURES["cpu"] = rerun
    config = replace(config, parallel=ParallelSettings(cuda_graphs=graphs), promise=PromiseSettings(check=False))
    with join_process_group(world) as group:
        run = build_run(config, world, group, folder / f"{graphs}")
        model = run.place(partial(Net, kind))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(model=model, optimizer=optimizer)
        losses: Any = None
        data: Any = Points(61) if kind == "own data set" else tensors(61)
        for step in run.steps(data):
            losses = step._parts.losses
            if kind == "closure":
                scale = 1.0 + step.number // 6
                step.run(model, lambda out, x, y: loss_of(scale, out, x, y))  # noqa: B023
            elif kind == "global":
                SCALE = 1.0 + step.number // 6
                step.run(model, lambda *given: loss_of(1.0, *given))
            elif kind == "step.add":

                def counted(out: Any, x: Any, y: Any) -> Any:
                    step.add("right", float((out.argmax(1) == y).sum()), len(y))  # noqa: B023
                    return loss_of(1.0, out, x, y)

                step.run(model, counted)
                run.log(right=step.mean("right"))
            elif kind == "tensor weight":
                step.run(model, tensor_weight)
            elif kind == "mean":
                step.run(model, lambda out, x, y: (F.cross_entropy(out, y), len(y)), mean=True)
            else:
                step.run(model, partial(loss_of, 1.0))
            step.update(optimizer, clip=1.0)
            if kind == "annealed" and step.number % 6 == 5:
                model.heat *= 1.5
            if kind == "frozen" and step.number == 5:
                model.first.requires_grad_(False)
            if kind == "replaced" and step.number == 5:
                model.last.weight.data = model.last.weight.data.clone()
            if kind == "modes" and step.number % 4 == 3:
                model.norm.train(not model.norm.training)
        finish_run(run)
        result = run_result(run)
        close_run(run)
    return (
        f"{result['weights_sha256']} {result['loss']} {result.get('right')}",
        getattr(losses, "off", ""),
        losses.replays if graphs else 0,
    )


def compare(tmp_path: Path, kind: str, size: int = 1, **changes: Any) -> list[tuple[str, str, int]]:
    """Train without and with graphs, assert that the results are equal, and return those with graphs."""
    config: Settings = settings(**{"steps": 24, "batch": 8, "virtual_ranks": 2, **changes})
    usual = run_ranks(partial(train, graphs=False), size, tmp_path, kind, config)
    replayed = run_ranks(partial(train, graphs=True), size, tmp_path, kind, config)
    assert [found for found, _, _ in replayed] == [found for found, _, _ in usual]
    return replayed


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("plain", {}),
        ("plain", {"virtual_ranks": 1}),
        ("plain", {"virtual_ranks": 1, "micro_batch": 4}),
        ("plain", {"virtual_ranks": 4, "micro_batch": 1}),
        ("plain", {"precision": "bf16"}),
        ("plain", {"precision": "fp16"}),
        ("own data set", {}),
        ("tensor weight", {}),
        ("mean", {}),
        ("closure", {}),
        ("global", {}),
        ("annealed", {}),
        ("frozen", {}),
        ("replaced", {}),
        ("modes", {}),
    ],
)
def test_replays_have_the_bits_of_the_usual_way(tmp_path: Path, kind: str, changes: Any) -> None:
    ((_, off, replays),) = compare(tmp_path, kind, **changes)
    assert (off, replays > 8) == ("", True)


def test_a_capture_computes_with_other_parameters_in_the_same_memory() -> None:
    """torch accumulates gradients of the model's own on the default stream, which a capture must not touch."""
    model = nn.ModuleDict({"tokens": nn.Embedding(7, 4), "rnn": nn.LSTM(4, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["tokens"].weight
    own = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]

    def loss() -> torch.Tensor:
        out: torch.Tensor = model["head"](model["rnn"](model["tokens"](torch.arange(7)))[0])
        return out.square().sum()

    usual = torch.autograd.grad(loss(), own)
    with same_memory([model], own) as others:
        assert [name for name, _ in model.named_parameters()] == names
        assert list(map(id, model.parameters())) == list(map(id, others)) != list(map(id, own))
        assert [p.data_ptr() for p in others] == [p.data_ptr() for p in own]
        found = torch.autograd.grad(loss(), others)
    assert all(map(torch.equal, found, usual))
    assert list(map(id, model.parameters())) == list(map(id, own))
    assert all(map(torch.equal, torch.autograd.grad(loss(), own), usual))


def test_replays_on_two_processes(tmp_path: Path) -> None:
    one = compare(tmp_path / "1", "plain", virtual_ranks=4)
    for found, off, replays in compare(tmp_path / "2", "plain", 2, virtual_ranks=4):
        assert (found, off, replays > 8) == (one[0][0], "", True)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("dropout", "a forward pass draws random numbers on the CPU"),
        ("python's generator", "a forward pass draws random numbers on the CPU"),
        ("attribute", "a forward pass changes an attribute of a module"),
        ("batch norm", "a forward pass changes a buffer"),
        ("step.add", "the loss function calls step.add"),
    ],
)
def test_graphs_are_off_where_a_replay_would_leave_something_out(tmp_path: Path, kind: str, why: str) -> None:
    ((_, off, replays),) = compare(tmp_path, kind)
    assert replays == 0
    assert off == why
