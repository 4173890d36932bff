"""Mixtures, packed sequences and cached shards on several processes: the samples and bits of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.loops import Numbers, attempt, linear, loss_of, sgd
from tests.ranks.test_stream_resume import features, follow, write
from unisono.config import LoaderSettings, Settings
from unisono.data.mixture import Mixture
from unisono.data.packing import Packed, next_tokens
from unisono.data.streaming.stream import Stream
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

STEPS, STOP = 14, 6
SETTINGS = Settings(steps=STEPS, batch=9, virtual_ranks=5, seed=3)
TABLE = {0: {"tar": 3, "lines": 1, "numbers": 1}, 8: {"lines": 2, "numbers": 1}}


def ramp(step: int) -> dict[str, float]:
    return {"tar": 1.0, "lines": step / STEPS, "numbers": max(0.0, 1 - step / 10)}


def mixture(folder: Path, weights: Any) -> Mixture:
    return Mixture(
        {
            "tar": Stream.tar(str(folder / "part-*.tar"), window=6, map=features),
            "lines": Stream.json_lines(str(folder / "part-*.jsonl.gz"), window=4, map=features),
            "numbers": Numbers(),
        },
        weights,
    )


def tokens(sample: dict[str, Any]) -> list[int]:
    return [sample["cls"] + 1] * (1 + sample["cls"] % 7)


def packed(folder: Path, *, keep_whole: bool) -> Packed:
    stream = Stream.json_lines(str(folder / "part-*.jsonl.gz"), window=5, map=tokens)
    return Packed(stream, 6, keep_whole=keep_whole)


FORMS: dict[str, tuple[Callable[[Path], Any], Settings]] = {
    "table": (partial(mixture, weights=TABLE), SETTINGS),
    "function, a worker": (partial(mixture, weights=ramp), replace(SETTINGS, loader=LoaderSettings(workers=1))),
    "cut": (partial(packed, keep_whole=False), SETTINGS),
    "whole": (partial(packed, keep_whole=True), SETTINGS),
}


def train_form(run: Run[Any], form: str, data: str, stop: int | None) -> dict[str, Any]:
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    seen: list[str] = []
    for step in run.steps(FORMS[form][0](Path(data))):
        for batch in step:
            if isinstance(batch, dict):
                targets = next_tokens(batch["input_ids"], batch["document_ids"])
                seen += [f"{step.number}: {row}" for row in batch["input_ids"].tolist()]
                x = torch.stack([batch["input_ids"], batch["position_ids"], targets], -1).float().flatten(0, 1)
                step.backward(loss_of(model, x / 100), weight=int((targets >= 0).sum()))
            else:
                x, i = batch
                seen += [f"{step.number}: {int(n)} {row.sum()}" for n, row in zip(i, x, strict=True)]
                step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
        if step.number + 1 == stop:
            run.stop()
    return {"seen": seen, "weights": run.context.state.fingerprint()}


def train(world: World, data: str, folder: str, stop: int | None = None, resume: bool = False) -> dict[str, Any]:
    return {
        form: attempt(
            world,
            Path(folder) / form,
            partial(train_form, form=form, data=data, stop=stop),
            FORMS[form][1],
            resume=resume,
        )
        for form in FORMS
    }


def seen_by(ranks: list[dict[str, Any]], form: str) -> Counter[str]:
    for rank in ranks:
        assert isinstance(rank[form], dict), rank[form]
    return Counter(sample for rank in ranks for sample in rank[form]["seen"])


@pytest.mark.ci
def test_stopped_on_three_processes_and_resumed_on_two(tmp_path: Path) -> None:
    data = str(write(tmp_path / "data"))
    whole = run_ranks(train, 1, data, str(tmp_path / "whole"))
    first = run_ranks(train, 3, data, str(tmp_path / "run"), STOP)
    second = run_ranks(train, 2, data, str(tmp_path / "run"), None, True)
    for form in FORMS:
        assert seen_by(first, form) + seen_by(second, form) == seen_by(whole, form)
        assert {rank[form]["weights"] for rank in second} == {whole[0][form]["weights"]}


def resumed_with_others(world: World, data: str, folder: str) -> list[str]:
    def loop(run: Run[Any], weights: Any) -> Any:
        return follow(run, mixture(Path(data), weights), 2)  # type: ignore[arg-type]  # any data

    changed: list[Any] = [lambda step: {"tar": 1}, TABLE | {9: {"tar": 1}}]
    attempt(world, Path(folder), partial(loop, weights=TABLE), SETTINGS)
    return [attempt(world, Path(folder), partial(loop, weights=other), SETTINGS, resume=True) for other in changed]


@pytest.mark.ci
def test_a_resume_with_other_weights_is_refused(tmp_path: Path) -> None:
    (messages,) = run_ranks(resumed_with_others, 1, str(write(tmp_path / "data")), str(tmp_path / "run"))
    for message in messages:
        assert "with weights" in message
        assert "--accept-change length" in message


def unequal(world: World, data: str, folder: str) -> Any:
    def loop(run: Run[Any]) -> Any:
        run.place(linear)
        next(iter(run.steps(mixture(Path(data), {"tar": 1, "lines": 1 + world.rank}))))

    return attempt(world, Path(folder), loop, SETTINGS)


def test_other_weights_on_another_process_are_named(tmp_path: Path) -> None:
    messages = run_ranks(unequal, 2, str(write(tmp_path / "data")), str(tmp_path / "run"))
    assert all("The data must be the same on every process" in message for message in messages)
