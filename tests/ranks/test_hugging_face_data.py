"""Streaming data sets of Hugging Face: the same samples and bits on any number of processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.loops import attempt, linear, loss_of, sgd
from tests.shards import write_lines
from unisono.data.streaming.stream import Stream
from unisono.errors import DataError
from unisono.testing import run_ranks
from unisono.train.run import Run

datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install 'unisono[huggingface]'")


def streaming(folder: str) -> Any:
    files = sorted(map(str, Path(folder).glob("*.jsonl")))
    rows = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=f"{folder}/cache")
    return rows.filter(lambda row: row["cls"] != 4).map(lambda row: {"x": [row["cls"] / 20, 1.0, len(row["txt"]) / 20]})


def features(row: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor(row["x"]), row["cls"]


def train_on(run: Run[Any], folder: str) -> Any:
    model = run.place(linear)
    optimizer = sgd(model)
    run.track(model=model, optimizer=optimizer)
    seen = []
    for step in run.steps(Stream.hugging_face(streaming(folder), window=4, map=features)):
        for x, i in step:
            seen += i.tolist()
            step.backward(loss_of(model, x), weight=len(i))
        step.update(optimizer)
    return seen, run.context.state.fingerprint()


def test_bits_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    write_lines(tmp_path / "data", (9, 3, 8))
    loop = partial(train_on, folder=str(tmp_path / "data"))
    runs = {n: run_ranks(attempt, n, tmp_path / str(n), loop) for n in (1, 2)}
    for here in (here for ranks in runs.values() for here in ranks):
        assert not isinstance(here, str), here
        assert here[1] == runs[1][0][1]
    assert [sorted(i for seen, _ in ranks for i in seen) for ranks in runs.values()] == [
        [i for i in range(20) if i != 4]
    ] * 2


def test_data_set_without_streaming_is_refused() -> None:
    with pytest.raises(DataError, match=r"load_dataset\(\.\.\., streaming=True\)"):
        Stream.hugging_face(datasets.Dataset.from_dict({"x": [1, 2]}))
