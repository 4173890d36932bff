"""Embeddings with sparse gradients have the same bits on any number of processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.loops import SETTINGS, Loop, attempt
from unisono.config import ParallelSettings
from unisono.environment import World
from unisono.exchange import gradient_accumulation
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run


class Words(nn.Module):
    """An embedding of three words with twelve tokens per sample, so that each word repeats in a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(3, 5, sparse=True)
        self.words = nn.Embedding(3, 5, sparse=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.bag(x) + self.words(x).sum(1))
        return found


def loop(*, clip: float | None = None, merge: bool = True) -> Loop:
    def body(run: Run[Any]) -> Any:
        words = torch.randint(0, 3, (64, 12), generator=torch.Generator().manual_seed(1))
        model = run.place(Words)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        run.track(model=model, optimizer=optimizer)
        grads: list[bytes] = []
        with pytest.MonkeyPatch.context() as patch:
            if not merge:
                patch.setattr(gradient_accumulation, "coalesced", lambda grad: grad)
            for step in run.steps(torch.utils.data.TensorDataset(words, words[:, 0])):
                for x, y in step:
                    step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
                if run.settings.parallel.shard == 1:
                    grads += [p.grad.to_dense().numpy().tobytes() for p in model.parameters() if p.grad is not None]
                step.update(optimizer, clip=clip)
        return run.context.state.fingerprint(), grads, run_promise(run)[0]

    return body


CASES: dict[str, tuple[Loop, dict[str, Any]]] = {
    "plain": (loop(), {}),
    "several micro-batches": (loop(), {"virtual_ranks": 5, "micro_batch": 1}),
    "clipped": (loop(clip=0.1), {}),
    "without merging": (loop(merge=False), {}),
}


def train_replicas(world: World, folder: Path) -> dict[str, Any]:
    config = replace(SETTINGS, batch=16)
    return {name: attempt(world, folder / name, body, replace(config, **more)) for name, (body, more) in CASES.items()}


def train_shards(world: World, folder: Path) -> Any:
    config = replace(SETTINGS, batch=16, parallel=ParallelSettings(shard=world.size, reshard="step"))
    return attempt(world, folder, loop(clip=0.1), config)


def test_sparse_gradients_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    (truth,) = run_ranks(train_replicas, 1, tmp_path / "1")
    assert {promise for _, _, promise in truth.values()} == {"exact"}
    for result in run_ranks(train_replicas, 3, tmp_path / "3"):
        differ = [name for name in truth if result[name] != truth[name]]
        assert differ == ["without merging"]
    assert [result[0] for result in run_ranks(train_shards, 2, tmp_path / "shards")] == [truth["clipped"][0]] * 2
