"""Processes with and without an accelerator in one run: collectives, and training under each exchange.

The accelerator is the machine's own, or a stand-in (tests/standin).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import test_collectives, training
from tests.standin import standin
from unisono.config import BalanceSettings, CompressSettings, LocalSGDSettings, ServerSettings, Settings
from unisono.distributed import init
from unisono.distributed.collectives import Collectives
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import Message, ProcessGroup, wait_for
from unisono.distributed.ring_allreduce import ring_all_reduce_
from unisono.environment import World
from unisono.testing import SlowAt, run_ranks

SIZE = 3

TIMES = 20.0
"""A slowdown that is much larger than the difference between the processor and the accelerator. For so little
computation the stand-in takes three to four times as long as the processor, because of its overhead per operation."""


def with_accelerator(world: World, library: str, *ranks: int) -> World:
    """Give this process an accelerator if its rank is in `ranks`."""
    standin.equip(library, equipped=world.rank in ranks)
    return replace(world, local_rank=0)


def tensor_on(group: ProcessGroup, numbers: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=group.device)


def run_collectives(world: World, library: str) -> dict[str, Any]:
    """Run each collective, and return results and devices."""
    with join(with_accelerator(world, library, 0, 2)) as group:
        rank, n = group.rank, group.size
        given: dict[str, torch.Tensor] = {"sum": group.sum_(tensor_on(group, [rank, 1.0]))}
        given["max"] = group.max_(tensor_on(group, [rank, -rank]))
        given["everybody"] = torch.empty(2 * n, device=group.device)
        group.all_gather(given["everybody"], tensor_on(group, [rank, 10.0 * rank])).wait()
        given["came"] = torch.empty(2, 1, device=group.device)
        right, left = (rank + 1) % n, (rank - 1) % n
        sends = [Message(tensor_on(group, [rank + 0.5]), right), Message(tensor_on(group, []), right)]
        wait_for(group.send_and_receive(sends, [Message(given["came"][1], left)]))
        given["came"] = given["came"][1]
        given["trade"] = group.all_to_all(tensor_on(group, [rank] * n, torch.int64), [1] * n, [1] * n)
        given["bits"] = group.all_to_all(tensor_on(group, [rank == 1] * n, torch.bool), [1] * n, [1] * n)
        given["added"] = group.deterministic_all_reduce(tensor_on(group, [1.0, rank, 3.0, 4.0]))
        given["shared"] = tensor_on(group, [[rank, 2.0], [3.0, 4.0]]).t()
        group.broadcast_([given["shared"]], source=1)
        given["ring"] = ring_all_reduce_(group, tensor_on(group, [rank] * 40))
        verbs = Collectives(group).all_reduce({"a": tensor_on(group, [rank + 1.0])})["a"]
        return {
            "kind": group.device.type,
            "mixed": group.mixed,
            "objects": group.all_gather_object([rank, group.device.type]),
            "places": {tensor.device.type for tensor in (*given.values(), verbs)},
            "numbers": {name: tensor.tolist() for name, tensor in given.items()} | {"verbs": verbs.tolist()},
        }


def accelerators_of_two_vendors(world: World, library: str) -> tuple[bool, str, list[float]]:
    """Return the state of a group of accelerators with the same device type in torch."""
    init.device_kind = lambda device: ["cuda", "cuda", "rocm"][world.rank]
    with join(with_accelerator(world, library, 0, 1, 2)) as group:
        return group.mixed, torch.distributed.get_backend(), group.sum_(tensor_on(group, [1.0])).tolist()


def test_accelerators_of_two_vendors_use_a_common_backend(accelerator: str) -> None:
    assert run_ranks(accelerators_of_two_vendors, SIZE, accelerator) == [(True, "gloo", [3.0])] * SIZE


@pytest.mark.parametrize(
    ("device", "hip", "kind"),
    [("cuda", None, "cuda"), ("cuda", "7.1", "rocm"), ("cpu", "7.1", "cpu"), ("xpu", None, "xpu")],
)
def test_amd_and_nvidia_devices_are_different_kinds(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, kind: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert init.device_kind(torch.device(device)) == kind


def test_collectives_return_tensors_on_their_device(accelerator: str) -> None:
    found = run_ranks(run_collectives, SIZE, accelerator)
    group_kind = [f["kind"] for f in found]
    assert group_kind == [group_kind[0], "cpu", group_kind[0]] != ["cpu"] * 3
    assert all(f["mixed"] and f["places"] == {f["kind"]} for f in found)
    for rank, f in enumerate(found):
        assert f["objects"] == [[0, group_kind[0]], [1, "cpu"], [2, group_kind[0]]]
        assert f["numbers"] == {
            "sum": [3, 3],
            "max": [2, 0],
            "everybody": [0, 0, 1, 10, 2, 20],
            "came": [(rank - 1) % SIZE + 0.5],
            "trade": [0, 1, 2],
            "bits": [False, True, False],
            "added": [3, 3, 9, 12],
            "shared": [[1, 3], [2, 4]],
            "ring": [3] * 40,
            "verbs": [6],
        }


@pytest.mark.parametrize("what", ["moved", "folded"])
def test_collectives_of_scripts(accelerator: str, what: str) -> None:
    assert run_ranks(run_script_collective, SIZE, accelerator, what) == [[]] * SIZE


def run_script_collective(world: World, library: str, what: str) -> Any:
    return getattr(test_collectives, what)(with_accelerator(world, library, 1))


def test_processes_of_one_kind_do_not_copy() -> None:
    assert run_ranks(group_kind, 2) == [(False, "cpu")] * 2


def group_kind(world: World) -> tuple[bool, str]:
    with join(with_accelerator(world, "")) as group:
        return group.mixed, group.comm_device.type


def train(world: World, library: str, with_: tuple[int, ...], *more: Any, slow: int | None = None) -> dict[str, Any]:
    with SlowAt(TIMES) if world.rank == slow else nullcontext():
        return training.train(with_accelerator(world, library, *with_), *more)


WAYS: dict[str, dict[str, Any]] = {
    "tree": {"clip": 0.5},
    "wide": {"exchange": "wide"},
    "allreduce": {"exchange": "allreduce"},
    "ring": {"exchange": "ring"},
    "int8": {"compress": CompressSettings(kind="int8")},
    "topk": {"compress": CompressSettings(kind="topk"), "exchange": "allreduce"},
    "powersgd": {"compress": CompressSettings(kind="powersgd", rank=2)},
    "server": {"exchange": "server", "server": ServerSettings(count=1)},
    "bf16": {"precision": "bf16"},
    "local_sgd": {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(sync_every=2, sites=2)},
    "one virtual rank each": {"virtual_ranks": 2},
}


def kind_for(accelerator: str, kind: str) -> str:
    """Return the kind of a model: without dropout on a GPU, whose random numbers differ from those of the CPU."""
    return kind if accelerator else kind + training.WITHOUT_DROPOUT


@pytest.mark.ci
@pytest.mark.gpu
@pytest.mark.parametrize("case", WAYS)
def test_run_matches_up_to_rounding(accelerator: str, tmp_path: Path, case: str) -> None:
    size = 3 if case in ("tree", "server") else 2  # the first two of three processes share memory
    config, kind = training.settings(**WAYS[case]), kind_for(accelerator, "mlp" if case == "bf16" else "gpt")
    alike = run_ranks(train, size, "", (), kind, config, str(tmp_path / "alike"))
    mixed = run_ranks(train, size, accelerator, (size - 1,), kind, config, str(tmp_path / "mixed"))
    within = (
        0.02 if case in ("bf16", "int8", "topk", "powersgd") else 1e-5
    )  # coarse rounding amplifies small differences
    assert mixed[0]["losses"] == pytest.approx(alike[0]["losses"], rel=within)
    assert mixed[0]["norms"] == pytest.approx(alike[0]["norms"], rel=10 * within)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 1])
def test_slower_process_computes_less(accelerator: str, tmp_path: Path, slow: int) -> None:
    config: Settings = training.settings(steps=40, batch=24, virtual_ranks=12)
    kind = kind_for(accelerator, "mlp")
    alike = run_ranks(train, 1, "", (), kind, config, str(tmp_path / "alike"))
    found = run_ranks(train_slowed, 2, accelerator, slow, kind, config, str(tmp_path / "mixed"))
    counts = found[0]["result"]["assignments"][0]["virtual_ranks"]
    assert counts[slow] < 6 < counts[1 - slow]
    assert [f["result"]["assignments"] for f in found] == [found[0]["result"]["assignments"]] * 2
    assert found[0]["losses"] == pytest.approx(alike[0]["losses"], rel=1e-4)


def train_slowed(world: World, library: str, slow: int, kind: str, config: Settings, folder: str) -> dict[str, Any]:
    return train(world, library, (0,), kind, config, folder, slow=slow)


def test_work_stealing(accelerator: str, tmp_path: Path) -> None:
    from tests.ranks.test_rebalance import train_with_stealing

    config = training.settings(steps=10, balance=BalanceSettings(work_stealing=True))
    (reference,) = run_ranks(train_with_stealing, 1, config, str(tmp_path / "alone"), "gpt", 1.0)
    found = run_ranks(steal_beside_an_accelerator, 2, accelerator, config, str(tmp_path / "claimed"))
    assert found[0]["losses"] == pytest.approx(reference["losses"], rel=1e-4)
    assert sum(f["rounds"] for f in found) == reference["rounds"]
    assert sum(f["guests"] for f in found) > 0


def steal_beside_an_accelerator(world: World, library: str, config: Settings, folder: str) -> dict[str, Any]:
    from tests.ranks.test_rebalance import train_with_stealing

    return train_with_stealing(with_accelerator(world, library, 1), config, folder, "gpt", 5.0)
