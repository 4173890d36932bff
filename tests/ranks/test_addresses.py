"""Parameters, buffers and optimizer state are aligned under any placement, whatever memory a model was built in."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from tests import rounding
from tests.ranks.loops import SETTINGS, attempt
from unisono.config import ParallelSettings
from unisono.data import alignment
from unisono.distributed.process_group import to_local
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run


def in_one_piece() -> nn.Module:
    """Build a model whose parameters and buffer are consecutive in numpy's memory, as in a file that is mapped."""
    model = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))
    model.register_buffer("table", torch.zeros(13, 13))
    memory, at = np.random.RandomState(0).randn(1000).astype(np.float32) / 4, 1
    for t in [*model.parameters(), *model.buffers()]:
        t.data = torch.from_numpy(memory[at : at + t.numel()]).view(t.shape)
        at += t.numel()
    return model


def loop(run: Run[Any], stop_after: int | None) -> Any:
    seen: set[int] = set()
    model = run.place(in_one_piece)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)

    def look(module: nn.Module, _: Any) -> None:
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        seen.update(to_local(t.detach()).data_ptr() % 64 for t in held)

    for part in model.modules():
        part.register_forward_pre_hook(look)
        part.register_full_backward_pre_hook(look)
    x = torch.randn(24, 13, generator=torch.Generator().manual_seed(0))
    for step in run.steps(TensorDataset(x, torch.arange(24) % 3)):
        states = [v for of in optimizer.state.values() for v in of.values() if isinstance(v, torch.Tensor) and v.dim()]
        seen.update(to_local(v).data_ptr() % 64 for v in states)
        for part, y in step:
            step.backward(F.cross_entropy(model(part @ model.table), y, reduction="sum"), weight=len(y))
        step.update(optimizer)
        if stop_after == step.number + 1:
            run.stop()
    return seen, run.context.state.fingerprint()


def work(
    world: World, folder: str, shard: int, gather: Any, aligned: bool, stop_after: int | None, resume: bool = False
) -> Any:
    if not aligned:
        alignment.align_ = lambda tensors: None
    config = replace(SETTINGS, steps=4, batch=4, parallel=ParallelSettings(shard=shard, reshard=gather))
    return attempt(world, Path(folder), partial(loop, stop_after=stop_after), config, resume=resume)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (found,) = run_ranks(work, 1, str(tmp_path_factory.mktemp("plain")), 1, "layer", True, None)
    assert isinstance(found, tuple), found
    return found


def test_one_process_aligns_parameters(plain: Any) -> None:
    assert plain[0] == {0}


@pytest.mark.parametrize(("shard", "gather"), [(1, "layer"), (2, "layer"), (2, "step")])
def test_two_processes_align_parameters(tmp_path: Path, plain: Any, shard: int, gather: str) -> None:
    for found in run_ranks(work, 2, str(tmp_path), shard, gather, True, None):
        assert found == plain


def test_a_resumed_run_aligns_parameters(tmp_path: Path, plain: Any) -> None:
    run_ranks(work, 2, str(tmp_path), 1, "layer", True, 2)
    (found,) = run_ranks(work, 1, str(tmp_path), 1, "layer", True, None, True)
    assert found == plain


@pytest.mark.skipif(not rounding.depends_on_addresses(), reason=rounding.ALIKE)
def test_without_alignment_shards_have_other_bits(tmp_path: Path) -> None:
    """The script chooses the addresses of whole parameters; gathered ones begin at a multiple of 64 bytes."""
    (whole,) = run_ranks(work, 1, str(tmp_path / "whole"), 1, "layer", False, None)
    part, _ = run_ranks(work, 2, str(tmp_path / "part"), 2, "step", False, None)
    assert whole[0] != part[0]
    assert whole[1] != part[1]
