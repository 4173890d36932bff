"""Errors of dead loader workers differ from errors of the data set; batches of tensors are read at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from unisono.data import loader
from unisono.data.alignment import align
from unisono.data.fast_collate import are_rows, collate, read_rows, stack_tensors
from unisono.data.loader_workers import is_worker_death
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder, MicroBatchId
from unisono.plan.rng_keys import ROUND, micro_batch_key, mix

DEATHS = [
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
    EOFError(),  # from the socket for a tensor's memory
    ConnectionResetError(104, "Connection reset by peer"),
    ConnectionRefusedError(111, "Connection refused"),
    FileNotFoundError(2, "No such file or directory"),
]
OWN = [
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nsize mismatch"),
    RuntimeError("size mismatch"),
    EOFError("Caught EOFError in DataLoader worker process 0.\nno more input"),
    FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.\n7.png"),
    ValueError("bad"),
]


@pytest.mark.parametrize("error", DEATHS, ids=repr)
def test_a_worker_death_is_recognized(error: Exception) -> None:
    assert is_worker_death(error)


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_an_error_of_the_data_set_is_not_a_worker_death(error: Exception) -> None:
    assert not is_worker_death(error)


class Doubled(TensorDataset):
    """A derived data set, which may do anything."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


POINTS = TensorDataset(torch.randn(20, 3), torch.arange(20), torch.randn(20, 2, 4) > 0)
PART = Subset(POINTS, [7, -1, 3, 11, 0, 19])


@pytest.mark.parametrize(
    ("data", "samples"),
    [(POINTS, [4]), (POINTS, [0, 19, 7]), (PART, [5, 1, 0]), (Subset(PART, range(1, 5)), [1, 0])],
)
def test_a_batch_read_at_once_equals_the_collated_one(data: Any, samples: list[int]) -> None:
    assert are_rows(data, default_collate)
    usual = default_collate([data[sample] for sample in samples])
    batch = read_rows(data, samples)
    assert type(batch) is type(usual)
    for mine, theirs in zip(batch, usual, strict=True):
        assert mine.equal(theirs)
        assert (mine.dtype, mine.stride()) == (theirs.dtype, theirs.stride())


def test_only_contiguous_tensors_are_read_at_once() -> None:
    images = torch.randn(8, 3, 4, 4).to(memory_format=torch.channels_last)
    for data in (Doubled(torch.ones(3)), TensorDataset(images), TensorDataset(torch.randn(3, 8).T), [torch.ones(3)]):
        assert not are_rows(data, default_collate)
    assert not are_rows(POINTS, lambda samples: default_collate(samples))


def test_a_missing_sample_raises_index_error() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        read_rows(Subset(POINTS, [3, 20]), [0, 1])


class Pair(NamedTuple):
    left: int
    right: int


X = torch.randn(3, 4, 2)
BATCHES: dict[str, list[Any]] = {
    "tensors": [(X[0], X[1]), (X[1], X[2])],
    "channels last": [(X.permute(2, 0, 1)[0],), (X.permute(2, 0, 1)[1],)],
    "numbers and words": [(X[0], 3, 0.5, "a", True), (X[1], 4, 1.5, "b", False)],
    "arrays": [(np.ones(2), np.float32(1)), (np.zeros(2), np.float32(2))],
    "nested tensors": [((1, X[0]), [2, 3], {"a": X[1]}, Pair(1, 2)), ((4, X[1]), [5, 6], {"a": X[2]}, Pair(3, 4))],
    "nothing": [(), ()],
    "one tensor": [X[0], X[1]],
    "mappings": [{"a": 1}, {"a": 2}],
    "pairs": [Pair(1, 2), Pair(3, 4)],
}
WRONG: dict[str, list[Any]] = {
    "of several lengths": [(X[0], X[1]), (X[0],)],
    "of several shapes": [(X[0],), (X[0, :1],)],
    "of several kinds": [(X[0],), (3,)],
    "none": [(None,), (None,)],
    "not all tuples": [(X[0],), 3],
    "sparse": [(X[0].to_sparse(),), (X[1].to_sparse(),)],
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.equal(b) and (a.dtype, a.stride()) == (b.dtype, b.stride())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("samples", list(BATCHES.values()), ids=list(BATCHES))
def test_tuples_are_collated_as_by_torch(samples: list[Any]) -> None:
    assert same(collate(samples), default_collate(samples))


class Labeled(torch.Tensor):
    """A subclass of torch.Tensor."""


TENSORS: dict[str, list[Any]] = {
    "tensors": BATCHES["tensors"],
    "channels last": BATCHES["channels last"],
    "empty": [(X[0, :0],), (X[1, :0],)],
    "conjugate": [(X[0].to(torch.complex64).conj(),), (X[1].to(torch.complex64).conj(),)],
    "expanded": [(X[0, :1].expand(4, 2), torch.tensor(1)), (X[1, :1].expand(4, 2), torch.tensor(2))],
    "not aligned": [(torch.arange(9)[1:],), (torch.arange(9)[:-1],)],
    "one sample": [(X[0], X[1])],
}


@pytest.mark.parametrize("samples", list(TENSORS.values()), ids=list(TENSORS))
def test_tuples_of_tensors_are_stacked_as_by_torch_and_aligned(samples: list[Any]) -> None:
    batch = stack_tensors(samples)
    assert batch is not None
    assert same(batch, default_collate(samples))
    assert align(batch) is batch
    for tensor in batch:
        assert not tensor.is_conj()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_only_tuples_of_tensors_are_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [BATCHES[name] for name in BATCHES if name not in ("tensors", "channels last", "nothing")]
    labeled = [(X[0], X[1].as_subclass(Labeled)), (X[1], X[2].as_subclass(Labeled))]
    lengths, sparse, mixed = (WRONG[name] for name in ("of several lengths", "sparse", "not all tuples"))
    nested = [(torch.nested.nested_tensor([X[0], X[1]]),)] * 2
    for samples in (*others, labeled, [labeled[0], (X[0], X[1])], lengths, sparse, mixed, nested):
        assert stack_tensors(samples) is None
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, lambda batch, *, collate_fn_map: "taught")
    assert stack_tensors(BATCHES["tensors"]) is None


@pytest.mark.parametrize("samples", list(WRONG.values()), ids=list(WRONG))
def test_samples_that_cannot_be_collated_raise_torchs_error(samples: list[Any]) -> None:
    with pytest.raises((TypeError, RuntimeError)) as torchs:
        default_collate(samples)
    with pytest.raises(torchs.type) as ours:
        collate(samples)
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("kind", [torch.Tensor, tuple])
def test_a_registered_collate_function_is_used(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, lambda batch, *, collate_fn_map: f"{len(batch)} taught")
    samples = BATCHES["tensors"]
    assert collate(samples) == default_collate(samples) != []
    assert "taught" in str(collate(samples))


@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true")
def test_a_batch_that_is_fetched_out_of_turn_seeds_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Survivors compute the virtual ranks of a dead process with these random numbers."""
    seeds: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(loader, "seed_device", lambda key, device: seeds.append((key, device)))
    order, device = BatchOrder(length=20, batch=8, virtual_ranks=4, seed=3), torch.device("meta")
    where = loader.Loader(POINTS, order, loader.Schedule(((0, 4),)), slot=Slot(0), first=0, last=2, device=device)
    place, (x, *_) = where.fetch(MicroBatchId(1, 2, 0))
    assert x.device == device
    assert seeds == [(micro_batch_key(mix(3, ROUND), *place[:3]), device)]
    where.close()
