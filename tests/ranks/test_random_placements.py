"""Runs drawn at random: however they lie over processes, and wherever they stop and go on, they have the same bits."""

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


class Drawn(NamedTuple):
    """What is computed; `settings` say nothing of where."""

    settings: Settings
    kind: str
    length: int
    noise: bool  # on the gradients, from the loop's own generators


FORMS = (
    CompressSettings(kind="fp16"),
    CompressSettings(kind="bf16"),
    CompressSettings(kind="int8"),
    CompressSettings(kind="topk", ratio=0.1),
    CompressSettings(kind="powersgd", rank=2),
)


def draw_run(draw: Random) -> Drawn:
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
    return Drawn(config, draw.choice(["mlp", "gpt", "sometimes", "tensors", "weighted"]), length, draw.random() < 0.3)


def draw_placement(draw: Random, run: Drawn) -> tuple[int, Settings]:
    """A number of processes, and how the run lies over them."""
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
        )
        if not check(config, size, CommandLine()):
            return size, config


def train(size: int, config: Settings, run: Drawn, folder: Path, resume: bool, stop: int | None) -> list[Any]:
    return run_ranks(training.train, size, run.kind, config, str(folder), run.length, resume, None, stop, run.noise)


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 60)]


@pytest.mark.parametrize("seed", [*range(4), *SLOW])
def test_placement_never_changes_the_result(tmp_path: Path, seed: int) -> None:
    draw = Random(seed)
    run = draw_run(draw)
    size, steps = 2 if run.settings.exchange == "server" else 1, run.settings.steps
    assert steps is not None
    assert not check(run.settings, size, CommandLine())
    alone = train(size, run.settings, run, tmp_path / "alone", False, None)[-1]
    losses: list[float] = []
    norms: list[float] = []
    stops = sorted(draw.sample(range(1, steps), min(steps - 1, draw.choice([0, 1, 2]))))
    for stop in [*stops, None]:
        size, config = draw_placement(draw, run)
        found = train(size, config, run, tmp_path / "anywhere", bool(losses), stop)
        losses += found[-1]["losses"]
        norms += found[-1]["norms"]
    assert losses == alone["losses"]
    assert norms == alone["norms"]
    assert {f["state"] for f in found} == {alone["state"]}
