"""Random runs have the same bits for any layout over processes, and for any stop and resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from tests.ranks import training
from unisono.config import (
    BalanceSettings,
    CheckpointSettings,
    CommandLine,
    CompressSettings,
    DivergenceSettings,
    LoaderSettings,
    ParallelSettings,
    ServerSettings,
    Settings,
)
from unisono.config.validate import check
from unisono.testing import run_ranks


class RandomRun(NamedTuple):
    """A computation. Its settings do not choose a layout."""

    settings: Settings
    kind: str
    length: int
    noise: bool  # added to gradients, from global generators


FORMS = (
    CompressSettings(kind="fp16"),
    CompressSettings(kind="bf16"),
    CompressSettings(kind="int8"),
    CompressSettings(kind="topk", ratio=0.1),
    CompressSettings(kind="powersgd", rank=2),
)


def draw_run(draw: Random) -> RandomRun:
    virtual_ranks = draw.choice([2, 3, 4, 5, 7, 8, 8, 12, 13])
    batch = draw.choice([virtual_ranks, 2 * virtual_ranks, 3 * virtual_ranks + 1, virtual_ranks + 16])
    config = training.settings(
        steps=draw.randint(3, 12),
        batch=batch,
        virtual_ranks=virtual_ranks,
        micro_batch=draw.choice([None, None, 1, 2, 3]),
        clip=draw.choice([None, 0.3]),
        seed=draw.randrange(100),
        precision=draw.choice(["fp32", "fp32", "bf16"]),
        exchange=draw.choice(["tree", "tree", "tree", "wide", "server"]),
    )
    if config.exchange == "tree" and draw.random() < 0.3:
        form = replace(draw.choice(FORMS), groups=draw.choice([None, 2]), start_step=draw.choice([0, 2]))
        config = replace(config, compress=form)
    length = max(batch, draw.choice([batch + 1, 2 * batch - 1, 57, 101]))
    return RandomRun(
        config, draw.choice(["mlp", "gpt", "sometimes", "tensors", "weighted"]), length, draw.random() < 0.3
    )


def draw_layout(draw: Random, run: RandomRun) -> tuple[int, Settings]:
    """Choose a number of processes, and settings of the layout."""
    while True:
        size = draw.choice([1, 2, 2, 3, 3, 4, 5])
        config = replace(
            run.settings,
            parallel=ParallelSettings(
                shard=1 if run.noise else draw.choice([1, 1, 2, size]),
                reshard=draw.choice(["layer", "step"]),
                offload=draw.random() < 0.2,
                replicate_shards=draw.random() < 0.2,
                activation_checkpoint=draw.choice(["none", "none", "full", "selective"]),
            ),
            loader=LoaderSettings(workers=draw.choice([0, 0, 0, 1, 2]), prefetch=draw.choice([1, 2])),
            server=ServerSettings(count=1 if run.noise else draw.choice([1, 2])),
            balance=BalanceSettings(by_speed=draw.random() < 0.5, work_stealing=draw.random() < 0.3),
            divergence=DivergenceSettings(every=draw.choice([0, 1, 3])),
            checkpoint=CheckpointSettings(every=draw.choice([0, 1, 3]), async_save=draw.random() < 0.5),
            audit_every=draw.choice([0, 0, 0, 2]),
            noise_scale_every=draw.choice([0, 0, 0, 2]),
        )
        if not check(config, size, CommandLine()):
            return size, config


def train(size: int, config: Settings, run: RandomRun, folder: Path, resume: bool, stop: int | None) -> list[Any]:
    return run_ranks(training.train, size, run.kind, config, str(folder), run.length, resume, None, stop, run.noise)


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60)]


@pytest.mark.ci
@pytest.mark.parametrize("seed", [*range(4), *SLOW])
def test_layout_never_changes_the_result(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    run = draw_run(draw)
    size, steps = 2 if run.settings.exchange == "server" else 1, run.settings.steps
    assert steps is not None
    assert not check(run.settings, size, CommandLine())
    reference = train(size, run.settings, run, tmp_path / "alone", False, None)[-1]
    losses: list[float] = []
    norms: list[float] = []
    stops = sorted(draw.sample(range(1, steps), min(steps - 1, draw.choice([0, 1, 2]))))
    for stop in [*stops, None]:
        size, config = draw_layout(draw, run)
        found = train(size, config, run, tmp_path / "anywhere", bool(losses), stop)
        losses += found[-1]["losses"]
        norms += found[-1]["norms"]
    assert losses == reference["losses"]
    assert norms == reference["norms"]
    assert {f["state"] for f in found} == {reference["state"]}
