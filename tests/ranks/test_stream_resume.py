"""Streams on several processes: a resume on another number of them has the samples and bits of one process."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.loops import attempt, linear, loss_of, sgd
from tests.shards import write_lines, write_tars
from unisono.config import LoaderSettings, Settings
from unisono.data.streaming.stream import Stream
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.run import Run

COUNTS = (11, 0, 3, 17, 6)  # a prime number in total: short tails, and empty virtual ranks
LENGTH, BATCH = sum(COUNTS), 8
STEPS = 2 * -(-LENGTH // BATCH) + 1  # two epochs, and the beginning of a third
STOP = 7  # in the middle of the second

SETTINGS = Settings(steps=STEPS, batch=BATCH, virtual_ranks=5, seed=3)
FORMS: dict[str, tuple[Callable[..., Stream], str, Settings]] = {
    "tar": (Stream.tar, "part-*.tar", SETTINGS),
    "packed lines, a worker": (
        Stream.json_lines,
        "part-*.jsonl.gz",
        replace(SETTINGS, loader=LoaderSettings(workers=1)),
    ),
}


def features(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Add noise, which is drawn where the sample is fetched."""
    i = sample["cls"]
    assert len(sample["txt"]) == i
    return torch.tensor([i / 20, 1.0, (i % 3) - 1.0]) + 0.1 * torch.rand(3), i


def stream_of(form: str, folder: Path) -> Stream:
    build, pattern, _ = FORMS[form]
    return build(str(folder / pattern), window=6, map=features)


def write(folder: Path) -> Path:
    write_tars(folder, COUNTS)
    write_lines(folder, COUNTS, packed=True)
    return folder


def train_and_record(run: Run[Any], form: str, data: str, stop: int | None = None) -> dict[str, Any]:
    return follow(run, stream_of(form, Path(data)), stop)


def follow(run: Run[Any], stream: Stream, stop: int | None = None) -> dict[str, Any]:
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    seen: list[tuple[int, int]] = []
    losses = []
    for step in run.steps(stream):
        for x, i in step:
            seen += [(step.epoch, int(n)) for n in i]
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
        losses.append(step.loss)
        if step.number + 1 == stop:
            run.stop()
    return {"seen": seen, "losses": losses, "weights": run.context.state.fingerprint()}


def train(world: World, data: str, folder: str, stop: int | None = None, resume: bool = False) -> dict[str, Any]:
    return {
        form: attempt(
            world,
            Path(folder) / form,
            partial(train_and_record, form=form, data=data, stop=stop),
            FORMS[form][2],
            resume=resume,
        )
        for form in FORMS
    }


def seen_by(ranks: list[dict[str, Any]], form: str) -> Counter[tuple[int, int]]:
    for rank in ranks:
        assert isinstance(rank[form], dict), rank[form]
    return Counter(sample for rank in ranks for sample in rank[form]["seen"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[str, Any]:
    """Return the record of one process that is never stopped."""
    (alone,) = run_ranks(train, 1, str(data), str(tmp_path_factory.mktemp("whole")))
    return {form: {**alone[form], "seen": seen_by([alone], form)} for form in FORMS}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[int], tuple[Path, list[dict[str, Any]]]]:
    """Return the folder of a run that was stopped on `size` processes, and the record of each process."""
    known: dict[int, tuple[Path, list[dict[str, Any]]]] = {}

    def stopped(size: int) -> tuple[Path, list[dict[str, Any]]]:
        if size not in known:
            folder = tmp_path_factory.mktemp("stopped")
            known[size] = folder, run_ranks(train, size, str(data), str(folder), STOP)
        return known[size]

    return stopped


def test_every_sample_is_seen_once_an_epoch(whole: dict[str, Any]) -> None:
    for form in FORMS:
        seen = whole[form]["seen"]
        expected = [(epoch, i) for epoch in (0, 1) for i in range(LENGTH)]
        assert {**seen} == dict.fromkeys([*expected, *(s for s in seen if s[0] == 2)], 1)
        assert sum(seen.values()) == 2 * LENGTH + BATCH


@pytest.mark.ci
@pytest.mark.parametrize(("before", "after"), [*product((1, 2, 3, 4), repeat=2)])
def test_stopped_on_some_processes_and_resumed_on_others(
    whole: dict[str, Any], stopped: Any, data: Path, tmp_path: Path, before: int, after: int
) -> None:
    """No sample is lost or repeated, and the bits are those of one process that was never stopped."""
    folder, first = stopped(before)
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("store*"))
    second = run_ranks(train, after, str(data), str(tmp_path / "run"), None, True)
    for form in FORMS:
        assert seen_by(first, form) + seen_by(second, form) == whole[form]["seen"]
        assert first[0][form]["losses"] + second[0][form]["losses"] == whole[form]["losses"]
        assert {rank[form]["weights"] for rank in second} == {whole[form]["weights"]}


def measured(run: Run[Any], form: str, data: str) -> Any:
    stream = stream_of(form, Path(data))

    def total(output: torch.Tensor, x: torch.Tensor, i: torch.Tensor) -> dict[str, Any]:
        return {"rows": (i.sum(), 1), "output": (output.sum(), len(i))}

    model = run.place(linear)
    rows = run.predict(model, stream)
    return run.evaluate(model, stream, total)["output"], rows.tolist()


def evaluate(world: World, data: str, folder: str) -> dict[str, Any]:
    return {
        form: attempt(
            world,
            Path(folder) / form,
            partial(measured, form=form, data=data),
            FORMS[form][2],
        )
        for form in FORMS
    }


def test_evaluation_of_a_stream(data: Path, tmp_path: Path) -> None:
    (alone,), both = (run_ranks(evaluate, n, str(data), str(tmp_path / str(n))) for n in (1, 2))
    for form in FORMS:
        assert not isinstance(alone[form], str), alone[form]
        assert len(alone[form][1]) == LENGTH
        assert both[0][form] == both[1][form] == alone[form]


def damaged(world: World, data: str, folder: str) -> dict[str, Any]:
    loop = partial(train_and_record, form="tar", data=data)
    skip = replace(SETTINGS, loader=LoaderSettings(on_error="skip"))
    longer = attempt(world, Path(folder) / "skip", loop, skip)
    return {"stop": attempt(world, Path(folder) / "stop", loop), "skip": longer}


def test_a_damaged_shard_ends_every_process_or_is_skipped(tmp_path: Path) -> None:
    """One process counts the shard and finds the damage; the others do not wait for it in vain."""
    path = write(tmp_path / "data") / "part-4.tar"
    path.write_bytes(path.read_bytes()[:5000])  # one sample is whole
    results = {n: run_ranks(damaged, n, str(tmp_path / "data"), str(tmp_path / str(n))) for n in (1, 2)}
    for ranks in results.values():
        assert any(f"of the shard {path} is damaged." in recorded["stop"] for recorded in ranks)
        assert all(isinstance(recorded["stop"], str) for recorded in ranks)
        seen = Counter(sample for recorded in ranks for sample in recorded["skip"]["seen"])
        assert {i for epoch, i in seen if epoch == 0} == set(range(LENGTH - 5))
    assert {recorded["skip"]["weights"] for ranks in results.values() for recorded in ranks} == {
        results[1][0]["skip"]["weights"]
    }


def other(world: World, data: str, folder: str) -> Any:
    def loop(run: Run[Any], window: int) -> Any:
        build, pattern, _ = FORMS["tar"]
        return follow(run, build(str(Path(data) / pattern), window=window, map=features), 2)

    attempt(world, Path(folder), lambda run: loop(run, 6))
    return attempt(world, Path(folder), lambda run: loop(run, 7), resume=True)


def test_a_resume_with_another_order_is_refused(data: Path, tmp_path: Path) -> None:
    (message,) = run_ranks(other, 1, str(data), str(tmp_path))
    assert "window 7" in message
    assert "window 6" in message
    assert "--accept-change length" in message
