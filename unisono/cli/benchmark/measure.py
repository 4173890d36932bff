"""The script that `unisono bench` runs in every process: measure each collective at each size, and each pair.

    measure.py LINES.jsonl '{"names": ["all_reduce", "pairs"], "sizes": [1024, 65536]}'

All processes start a call together, and it lasts until the last of them is done. Results are medians.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unisono.cli.benchmark.collective_kinds import KINDS
from unisono.cli.benchmark.pair_rounds import rounds
from unisono.cli.benchmark.units import bandwidth, duration, size_of
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import Message, ProcessGroup, wait_for, wrap_peer_errors
from unisono.distributed.ring_allreduce import ring_all_reduce_
from unisono.environment import World
from unisono.exchange.tree.tree_exchange import TreeExchange
from unisono.plan.assignment import assign_evenly

BUDGET_SECONDS = 0.2
LEAST, MOST = 5, 100
"""Smallest and largest number of calls within the budget."""
WARM_UP = 2
"""Calls that are not counted, because the first ones connect and allocate."""

SMALL, LARGE = 1, 2**20
"""Numbers of float32 elements that pairs send to each other: 4 bytes and 4 MB."""


class Call(NamedTuple):
    """A call of a collective. Only `run` is timed."""

    run: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    after: Callable[[], Any] = lambda: None


def main() -> None:
    """Measure what the command line names, and write results on rank 0."""
    world = World.current()
    measure_in(world, Path(sys.argv[1]) if world.is_main else None, json.loads(sys.argv[2]))


def measure_in(world: World, file: Path | None, plan: Mapping[str, Any], *, quiet: bool = False) -> None:
    """Join the group, and measure. The main process appends results to `file`."""
    torch.set_num_threads(1)
    with join(world) as group, wrap_peer_errors("unisono bench"):
        hosts = group.all_gather_object(world.host)
        if file is None:
            measure(group, plan, lambda row: None, hosts)
            return
        with open(file, "a", encoding="utf-8") as lines:

            def write(row: dict[str, Any]) -> None:
                lines.write(json.dumps(row) + "\n")
                lines.flush()

            show = Screen(plan["sizes"], quiet=quiet)
            measure(group, plan, lambda row: (write(row), show(row)), hosts)  # type: ignore[func-returns-value]


def measure(
    group: ProcessGroup, plan: Mapping[str, Any], report: Callable[[dict[str, Any]], Any], hosts: Sequence[str]
) -> None:
    """Measure everything in the plan. This function is collective."""
    about = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "ranks": group.size,
        "hosts": hosts,
        "device": " and ".join(dict.fromkeys(group.all_gather_object(group.device.type))),
        "back_end": dist.get_backend(),
        "torch": torch.__version__,
        "neighbors": len(group.neighbors) == group.size - 1,
    }
    report({"about": about})
    for name in plan["names"]:
        if name == "pairs":
            for row in pairs(group):
                report(row)
        # without shared memory, tree_messages is the tree itself
        elif name != "tree_messages" or any(group.all_gather_object(bool(group.neighbors))):
            for size in plan["sizes"]:
                report(_measured(group, name, size))
                gc.collect()


def _measured(group: ProcessGroup, name: str, size: int) -> dict[str, Any]:
    """Measure a collective with `size` bytes, rounded up to a multiple of the number of processes."""
    count = -(-size // (4 * group.size)) * group.size  # float32 elements
    seconds, times = seconds_of(group, CALLS[name](group, count))
    speed = 4 * count / seconds
    return {
        "collective": name,
        "bytes": size,
        "seconds": seconds,
        "times": times,
        "algorithm_bytes_per_second": speed,
        "bus_bytes_per_second": speed * KINDS[name].bus(group.size),
    }


def seconds_of(group: ProcessGroup, call: Call) -> tuple[float, int]:
    """Return the median time until the last process is done, and the number of calls; the same on every process."""
    taken: list[float] = []
    count = WARM_UP + 1
    while len(taken) < count:
        call.before()
        group.barrier()
        begin = time.perf_counter()
        call.run()
        _synchronize(group.device)
        taken.append(time.perf_counter() - begin)
        call.after()
        if len(taken) == WARM_UP + 1:  # all processes must make the same number of calls
            (slowest,) = group.max_(torch.tensor(taken[-1:], dtype=torch.float64, device=group.device)).tolist()
            count = WARM_UP + max(LEAST, min(MOST, int(BUDGET_SECONDS / slowest)))
    slowest_each = group.max_(torch.tensor(taken[WARM_UP:], dtype=torch.float64, device=group.device)).tolist()
    return statistics.median(slowest_each), len(slowest_each)


def _synchronize(device: torch.device) -> None:
    """Wait until an accelerator has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# -- the collectives, each with `count` elements in total


def _all_reduce(group: ProcessGroup, count: int) -> Call:
    tensor = torch.ones(count, device=group.device)
    return Call(lambda: group.all_reduce(tensor).wait(), lambda: tensor.fill_(1.0))


def _ring(group: ProcessGroup, count: int) -> Call:
    tensor = torch.ones(count, device=group.device)
    return Call(lambda: ring_all_reduce_(group, tensor), lambda: tensor.fill_(1.0))


def _tree(group: ProcessGroup, count: int) -> Call:
    """Return the exchange of a step after backward, with `count` elements and one virtual rank per process."""
    param = torch.nn.Parameter(torch.ones(count, device=group.device))
    exchange = TreeExchange([param], group.size, group)
    spans, rank = assign_evenly(group.size, group.size), group.rank
    one = torch.ones(1, dtype=torch.float64, device=group.device)

    def before() -> None:
        exchange.begin(spans, {rank: 1}, lambda: one)
        exchange.enter(rank, last=False)
        param.backward(torch.ones_like(param))
        exchange.leave()

    def run() -> None:
        exchange.launch()
        assert exchange.finish(float(group.size))

    def after() -> None:
        exchange.commit()
        exchange.zero()

    return Call(run, before, after)


def _tree_messages(group: ProcessGroup, count: int) -> Call:
    return _tree(replace(group, neighbors={}, hosts=()), count)


def _all_gather(group: ProcessGroup, count: int) -> Call:
    out, mine = torch.empty(count, device=group.device), torch.ones(count // group.size, device=group.device)
    return Call(lambda: group.all_gather(out, mine).wait())


def _reduce_scatter(group: ProcessGroup, count: int) -> Call:
    tensor, mine = (
        torch.ones(count, device=group.comm_device),
        torch.empty(count // group.size, device=group.comm_device),
    )
    return Call(lambda: _reduce_scatter_single(mine, tensor))


def _broadcast(group: ProcessGroup, count: int) -> Call:
    tensor = torch.ones(count, device=group.comm_device)
    return Call(lambda: dist.broadcast(tensor, src=0))


def _all_to_all(group: ProcessGroup, count: int) -> Call:
    tensor, each = torch.ones(count, device=group.device), [count // group.size] * group.size
    return Call(lambda: group.all_to_all(tensor, each, each))


def _send_receive(group: ProcessGroup, count: int) -> Call:
    mine, theirs = torch.ones(count, device=group.device), torch.empty(count, device=group.device)
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return Call(lambda: wait_for(group.send_and_receive([Message(mine, right)], [Message(theirs, left)])))


# torch 2.13 renamed it, and warns about the old name
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CALLS: Mapping[str, Callable[[ProcessGroup, int], Call]] = {
    "all_reduce": _all_reduce,
    "ring": _ring,
    "tree": _tree,
    "tree_messages": _tree_messages,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_receive": _send_receive,
}
assert CALLS.keys() == KINDS.keys()


# -- pairs


def pairs(group: ProcessGroup) -> list[dict[str, Any]]:
    """Measure latency and bandwidth of every pair while the other processes wait. This function is collective."""
    mine = []
    for turn in rounds(group.size):
        group.barrier()
        for one, other in turn:
            if group.rank in (one, other):
                there = other if group.rank == one else one
                small, large = (_there_and_back(group, there, n, group.rank == one) for n in (SMALL, LARGE))
                if group.rank == one:
                    mine.append(
                        {"ranks": [one, other], "latency_seconds": small, "bytes_per_second": 4 * LARGE / large}
                    )
    return sorted((row for rows in group.all_gather_object(mine) for row in rows), key=lambda row: row["ranks"])


def _there_and_back(group: ProcessGroup, there: int, count: int, first: bool) -> float:
    """Return the lower quartile of half the round trip, which other load affects least. Both peers call it."""
    tensor = torch.ones(count, device=group.device)
    times = 50 if count == SMALL else LEAST
    taken = []
    for _ in range(WARM_UP + times):
        begin = time.perf_counter()
        for sends in (first, not first):
            message = [Message(tensor, there)]
            wait_for(group.send_and_receive(message, []) if sends else group.send_and_receive([], message))
        _synchronize(group.device)
        taken.append((time.perf_counter() - begin) / 2)
    return statistics.quantiles(taken[WARM_UP:], n=4, method="inclusive")[0]


# -- the screen


class Screen:
    """Print a line for each collective: the time of the smallest size, and the bus bandwidth of the larger ones."""

    def __init__(self, sizes: Sequence[int], *, quiet: bool) -> None:
        self.sizes, self.quiet = sizes, quiet
        self.large = [size for size in sizes if size >= 2**16][-5:] or list(sizes[-1:])
        self.row: dict[int, dict[str, Any]] = {}
        self.headed = False

    def __call__(self, row: dict[str, Any]) -> None:
        if self.quiet:
            return
        if "about" in row:
            about = row["about"]
            hosts = len(set(about["hosts"]))
            where = f"{about['ranks']} processes on {hosts} host{'s' * (hosts > 1)}, {about['device']}"
            print(f"{where}, {about['back_end']}, torch {about['torch']}", flush=True)
        elif "collective" in row:
            self._collective(row)
        else:
            one, other = row["ranks"]
            line = f"{duration(row['latency_seconds']):>10}  {bandwidth(row['bytes_per_second']):>12}"
            print(f"ranks {one:>3} and {other:>3}{line}", flush=True)

    def _collective(self, row: dict[str, Any]) -> None:
        if not self.headed:
            self.headed = True
            print(f"\n{'':14}{size_of(self.sizes[0]):>10}{'bus bandwidth, MB/s':>{max(12 * len(self.large), 22)}}")
            print(
                f"{'':{24 if len(self.large) > 1 else 34}}" + "".join(f"{size_of(size):>12}" for size in self.large),
                flush=True,
            )
        self.row[row["bytes"]] = row
        if row["bytes"] == self.sizes[-1]:
            wide = [self.row[size]["bus_bytes_per_second"] / 1e6 for size in self.large]
            cells = "".join(f"{each:>12.0f}" if each >= 10 else f"{each:>12.2f}" for each in wide)
            gap = "" if len(wide) > 1 else f"{'':10}"
            print(f"{row['collective']:14}{duration(self.row[self.sizes[0]]['seconds']):>10}{gap}{cells}", flush=True)
            self.row = {}


if __name__ == "__main__":
    main()
