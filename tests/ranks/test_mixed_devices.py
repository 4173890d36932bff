"""Processes with an accelerator beside processes without one: what travels, and a run under every exchange.

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
"""So much slower than it is: far more than what makes an accelerator slower, or quicker, than the processor. With so
little to compute a stand-in takes three to four times as long, as giving its orders does."""


def equipped(world: World, library: str, *ranks: int) -> World:
    """This process has an accelerator, if it is one of these."""
    standin.equip(library, equipped=world.rank in ranks)
    return replace(world, local_rank=0)


def on(group: ProcessGroup, numbers: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=group.device)


def every_collective(world: World, library: str) -> dict[str, Any]:
    """What each of them gives here, as numbers; and where it lies."""
    with join(equipped(world, library, 0, 2)) as group:
        rank, n = group.rank, group.size
        given: dict[str, torch.Tensor] = {"sum": group.sum_(on(group, [rank, 1.0]))}
        given["max"] = group.max_(on(group, [rank, -rank]))
        given["everybody"] = torch.empty(2 * n, device=group.device)
        group.all_gather(given["everybody"], on(group, [rank, 10.0 * rank])).wait()
        given["came"] = torch.empty(2, 1, device=group.device)
        right, left = (rank + 1) % n, (rank - 1) % n
        sends = [Message(on(group, [rank + 0.5]), right), Message(on(group, []), right)]
        wait_for(group.send_and_receive(sends, [Message(given["came"][1], left)]))
        given["came"] = given["came"][1]
        given["trade"] = group.all_to_all(on(group, [rank] * n, torch.int64), [1] * n, [1] * n)
        given["bits"] = group.all_to_all(on(group, [rank == 1] * n, torch.bool), [1] * n, [1] * n)
        given["added"] = group.deterministic_all_reduce(on(group, [1.0, rank, 3.0, 4.0]))
        given["shared"] = on(group, [[rank, 2.0], [3.0, 4.0]]).t()
        group.broadcast_([given["shared"]], source=1)
        given["ring"] = ring_all_reduce_(group, on(group, [rank] * 40))
        verbs = Collectives(group).all_reduce({"a": on(group, [rank + 1.0])})["a"]
        return {
            "kind": group.device.type,
            "mixed": group.mixed,
            "objects": group.all_gather_object([rank, group.device.type]),
            "places": {tensor.device.type for tensor in (*given.values(), verbs)},
            "numbers": {name: tensor.tolist() for name, tensor in given.items()} | {"verbs": verbs.tolist()},
        }


def of_two_makers(world: World, library: str) -> tuple[bool, str, list[float]]:
    """Accelerators that torch calls by one name."""
    init.device_kind = lambda device: ["cuda", "cuda", "rocm"][world.rank]
    with join(equipped(world, library, 0, 1, 2)) as group:
        return group.mixed, torch.distributed.get_backend(), group.sum_(on(group, [1.0])).tolist()


def test_accelerators_of_two_makers_meet_by_the_back_end_that_both_have(accelerator: str) -> None:
    assert run_ranks(of_two_makers, SIZE, accelerator) == [(True, "gloo", [3.0])] * SIZE


@pytest.mark.parametrize(
    ("device", "hip", "kind"),
    [("cuda", None, "cuda"), ("cuda", "7.1", "rocm"), ("cpu", "7.1", "cpu"), ("xpu", None, "xpu")],
)
def test_amds_devices_are_another_kind_than_nvidias(
    monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, kind: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert init.device_kind(torch.device(device)) == kind


def test_every_collective_brings_tensors_to_where_they_belong(accelerator: str) -> None:
    found = run_ranks(every_collective, SIZE, accelerator)
    kinds = [f["kind"] for f in found]
    assert kinds == [kinds[0], "cpu", kinds[0]] != ["cpu"] * 3
    assert all(f["mixed"] and f["places"] == {f["kind"]} for f in found)
    for rank, f in enumerate(found):
        assert f["objects"] == [[0, kinds[0]], [1, "cpu"], [2, kinds[0]]]
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
def test_the_collectives_for_scripts(accelerator: str, what: str) -> None:
    assert run_ranks(for_scripts, SIZE, accelerator, what) == [[]] * SIZE


def for_scripts(world: World, library: str, what: str) -> Any:
    return getattr(test_collectives, what)(equipped(world, library, 1))


def test_processes_of_one_kind_copy_nothing() -> None:
    assert run_ranks(kinds, 2) == [(False, "cpu")] * 2


def kinds(world: World) -> tuple[bool, str]:
    with join(equipped(world, "")) as group:
        return group.mixed, group.comm_device.type


def train(world: World, library: str, with_: tuple[int, ...], *more: Any, slow: int | None = None) -> dict[str, Any]:
    with SlowAt(TIMES) if world.rank == slow else nullcontext():
        return training.train(equipped(world, library, *with_), *more)


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


@pytest.mark.parametrize("way", WAYS)
def test_a_run_is_the_same_to_rounding(accelerator: str, tmp_path: Path, way: str) -> None:
    size = 3 if way in ("tree", "server") else 2  # the first two of three share memory
    config, kind = training.settings(**WAYS[way]), "mlp" if way == "bf16" else "gpt"
    alike = run_ranks(train, size, "", (), kind, config, str(tmp_path / "alike"))
    mixed = run_ranks(train, size, accelerator, (size - 1,), kind, config, str(tmp_path / "mixed"))
    within = 0.02 if way in ("bf16", "int8", "topk", "powersgd") else 1e-5  # what is rounded coarsely falls either way
    assert mixed[0]["losses"] == pytest.approx(alike[0]["losses"], rel=within)
    assert mixed[0]["norms"] == pytest.approx(alike[0]["norms"], rel=10 * within)


@pytest.mark.parametrize("slow", [0, 1])
def test_the_slower_one_computes_less(accelerator: str, tmp_path: Path, slow: int) -> None:
    config: Settings = training.settings(steps=40, batch=24, virtual_ranks=12)
    alike = run_ranks(train, 1, "", (), "mlp", config, str(tmp_path / "alike"))
    found = run_ranks(slowed, 2, accelerator, slow, config, str(tmp_path / "mixed"))
    counts = found[0]["result"]["deals"][0]["virtual_ranks"]
    assert counts[slow] < 6 < counts[1 - slow]
    assert [f["result"]["deals"] for f in found] == [found[0]["result"]["deals"]] * 2
    assert found[0]["losses"] == pytest.approx(alike[0]["losses"], rel=1e-4)


def slowed(world: World, library: str, slow: int, config: Settings, folder: str) -> dict[str, Any]:
    return train(world, library, (0,), "mlp", config, folder, slow=slow)


def test_claims(accelerator: str, tmp_path: Path) -> None:
    from tests.ranks.test_rebalance import claimed

    config = training.settings(steps=10, balance=BalanceSettings(work_stealing=True))
    (alone,) = run_ranks(claimed, 1, config, str(tmp_path / "alone"), "gpt", 1.0)
    found = run_ranks(claimed_beside, 2, accelerator, config, str(tmp_path / "claimed"))
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert sum(f["rounds"] for f in found) == alone["rounds"]
    assert sum(f["guests"] for f in found) > 0


def claimed_beside(world: World, library: str, config: Settings, folder: str) -> dict[str, Any]:
    from tests.ranks.test_rebalance import claimed

    return claimed(equipped(world, library, 1), config, folder, "gpt", 5.0)
