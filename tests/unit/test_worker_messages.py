"""A loader worker sends small tensors as bytes, and its batches equal those that the process itself fetches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from unisono.data.loader import Loader, Schedule
from unisono.data.worker_messages import MOST_BYTES, DescriptorChannel
from unisono.plan.assignment import Slot
from unisono.plan.batch_order import BatchOrder

Sample = Callable[[int], Any]
SMALL, LARGE = (3,), (MOST_BYTES // 4 // 2 + 1,)  # of one sample; a batch has 2, of 4 bytes a number


def numbers(shape: tuple[int, ...], sample: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 0.1 + sample, dtype=dtype)


def of_two_types(shape: tuple[int, ...]) -> Sample:
    """Return samples of float32 and float64, of which every batch of two has both."""
    return lambda sample: numbers(shape, sample, (torch.float32, torch.float64)[sample % 2])


def in_channels_last(shape: tuple[int, ...]) -> Sample:
    return lambda sample: (
        torch.arange(12 * shape[0], dtype=torch.float32)
        .add(sample)
        .reshape(1, 3, 4, -1)
        .to(memory_format=torch.channels_last)[0]
    )


SAMPLES: dict[str, Callable[[tuple[int, ...]], Sample]] = {
    "tensors": lambda shape: lambda sample: numbers(shape, sample),
    "tensors of two types": of_two_types,
    "arrays of two types": lambda shape: lambda sample: of_two_types(shape)(sample).numpy(),
    "channels last": in_channels_last,
    "labels": lambda shape: lambda sample: (numbers(shape, sample), sample, str(sample), sample / 3),
    "a mapping": lambda shape: lambda sample: {"x": numbers(shape, sample), "y": [sample, np.float32(sample)]},
    "empty": lambda shape: lambda sample: (numbers((0, *shape), sample), numbers((), sample, torch.bfloat16)),
}


class Computed(Dataset[Any]):
    """Four samples that a function computes."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> Any:
        return self.sample(number)


def batches(sample: Sample, workers: int, collate: Callable[[list[Any]], Any] = default_collate) -> list[Any]:
    """Return both batches of an epoch in order."""
    order = BatchOrder(length=4, batch=2, virtual_ranks=1, shuffle=False)
    loader = Loader(
        Computed(sample),
        order,
        Schedule(((0, 1),)),
        slot=Slot(0),
        first=0,
        last=2,
        device=torch.device("cpu"),
        collate=collate,
        workers=workers,
    )
    try:
        return [batch for _, batch in loader]
    finally:
        loader.close()


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors(part)]
    return [value] if isinstance(value, torch.Tensor) else []


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_worker_sends_what_the_process_would_fetch(kind: str, shape: tuple[int, ...]) -> None:
    sample = SAMPLES[kind](shape)
    for ours, theirs in zip(batches(sample, 0), batches(sample, 1), strict=True):
        assert str(ours) == str(theirs)
        assert len(tensors(ours)) == len(tensors(theirs)) > 0
        for mine, other in zip(tensors(ours), tensors(theirs), strict=True):
            assert mine.equal(other)
            assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())
            assert other.data_ptr() % 64 == 0


def test_only_small_tensors_are_sent_as_bytes() -> None:
    for _, large, small in batches(lambda sample: (sample, numbers(LARGE, sample), numbers(SMALL, sample)), 1):
        assert large.is_shared()
        assert not small.is_shared()


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "float16": np.arange(MOST_BYTES, dtype=np.float16).reshape(2, -1),
    "columns first": np.asfortranarray(np.arange(3 * MOST_BYTES).reshape(3, 4, -1)),
    "dates": np.arange(MOST_BYTES).astype("datetime64[D]"),
    "words": np.array([f"word {number}" for number in range(MOST_BYTES)]),
    "records": np.ones(MOST_BYTES, dtype=[("label", np.int32), ("weight", np.float64)]),
    "big-endian": np.arange(MOST_BYTES, dtype=">i4"),
    "objects": np.array([{"a": 1}] * MOST_BYTES, dtype=object),
    "small": np.arange(3),
    "one": np.array(3.5),
    "empty": np.ones((0, MOST_BYTES)),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_worker_sends_arrays_of_numpy(kind: str) -> None:
    array = ARRAYS[kind]
    array.flags.writeable = kind != "dates"
    for found in batches(lambda sample: sample, 1, lambda samples: {"x": array})[:1]:
        assert type(found["x"]) is np.ndarray
        assert (found["x"].dtype, found["x"].shape) == (array.dtype, array.shape)
        assert found["x"].strides == array.strides or not array.nbytes
        np.testing.assert_array_equal(found["x"], array)
        assert found["x"].flags.writeable
        found["x"][...] = found["x"]


def test_arrays_keep_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    received = received_descriptors(monkeypatch)
    found = batches(lambda sample: sample, 1, lambda samples: np.full(MOST_BYTES, samples[0]))
    assert len(received) == len(found) == 2
    assert open_files("/dev/shm/torch_") == 0
    assert [(batch[0], batch[-1]) for batch in found] == [(0, 0), (2, 2)]


def test_arrays_are_sent_without_space_for_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")  # as torch does

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", refuse)  # the worker is forked after this
    received = received_descriptors(monkeypatch)
    found = batches(lambda sample: sample, 1, lambda samples: np.full(MOST_BYTES, samples[0]))
    assert not received
    assert [(batch[0], batch[-1]) for batch in found] == [(0, 0), (2, 2)]


def received_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of each descriptor that this process receives."""
    received = list[int]()
    receive = DescriptorChannel.receive

    def noted(self: DescriptorChannel, number: int) -> int:
        received.append(number)
        return receive(self, number)

    monkeypatch.setattr(DescriptorChannel, "receive", noted)
    return received


def test_more_tensors_than_a_socket_takes_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    many, received = 600, received_descriptors(monkeypatch)
    for number, batch in enumerate(batches(lambda sample: sample, 1, lambda samples: large_ones(samples[0], many))):
        assert [int(tensor[0]) for tensor in batch] == [2 * number + part for part in range(many)]
        assert all(tensor.is_shared() for tensor in batch)
    assert 0 < len(received) < 2 * many  # torch sent the others


def large_ones(first: int, many: int) -> list[torch.Tensor]:
    return [torch.full((MOST_BYTES,), first + part, dtype=torch.int16) for part in range(many)]


def test_descriptors_are_closed() -> None:
    sockets = open_files("socket:")
    assert open_files("/dev/shm/torch_") == 0
    read = batches(lambda sample: numbers(LARGE, sample), 2)
    assert open_files("/dev/shm/torch_") == len(read)  # those of tensors that are in use
    del read
    assert open_files("/dev/shm/torch_") == 0
    assert open_files("socket:") == sockets


def open_files(name: str) -> int:
    """Return the number of open files of this process whose name begins so."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the folder itself
            found += str(entry.readlink()).startswith(name)
    return found


def test_tensors_that_share_memory_share_it_after_they_are_sent() -> None:
    def halves(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = torch.stack(samples)
        return {"all": tokens, "second": tokens[:, 16:]}  # 64 bytes on, so it is aligned

    for batch in batches(lambda sample: numbers((32,), sample), 1, halves):
        batch["second"].fill_(7)
        assert batch["all"][:, 16:].eq(7).all()
        assert not batch["all"][:, :16].eq(7).any()
        assert batch["second"].stride() == (32, 1)


def test_shared_memory_of_the_script_stays_shared() -> None:
    seen = torch.zeros(4).share_memory_()

    def marked(sample: int) -> tuple[int, torch.Tensor]:
        return sample, seen

    for number, batch in enumerate(batches(marked, 1, lambda samples: [part for _, part in samples])):
        batch[0][number] = 1
    assert seen.tolist() == [1, 1, 0, 0]


def test_a_batch_that_cannot_be_sent_is_an_error_of_its_fetch() -> None:
    with pytest.raises(TypeError, match="cannot pickle 'generator' object") as caught:
        batches(lambda sample: sample, 1, lambda samples: (sample for sample in samples))
    assert caught.value.__notes__ == ["while fetching the samples 0, 1 of step 0, virtual rank 0"]


def test_other_messages_of_a_worker_are_those_of_torch() -> None:
    def functions(sample: int) -> tuple[bool, ...]:
        """Return which functions make a large and a small tensor of a message that the data set sends."""
        content = [bytes(ForkingPickler.dumps(numbers(shape, sample))) for shape in (LARGE, SMALL)]
        return tuple(b"rebuild_storage_fd" in each and b"unisono" not in each for each in content)

    assert batches(functions, 1, tuple) == [((True, True), (True, True))] * 2
