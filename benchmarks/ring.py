"""All-reduce around a ring beside gloo's own, and beside what any all-reduce must send.

    python -m benchmarks.ring            about a minute
    python -m benchmarks.ring --quick    a smoke test

Three calls take turns in the same processes: gloo's all_reduce, ours (distributed/ring_allreduce.py), and "bound":
every process sends to its right and receives from its left 2 (n - 1) / n of the tensor's bytes, in one message, and
adds nothing. Before a call all meet, and it lasts until the last one is done. The figures are medians over turns, with
quartiles: gloo's time, and how much of gloo's and of the bound's bandwidth the ring has (1 is as much). "work" is its
processor time over gloo's, of all processes and their threads: it counts nothing that others did on the machine.
"apart" is how far the two sums are from each other, in parts of the largest number.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.machine import parser, ratio, show, spread
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import Message, wait_for
from unisono.distributed.ring_allreduce import ring_all_reduce_
from unisono.environment import World
from unisono.testing import run_ranks

MEGABYTE = 2**20
WARM_UP = 2


def turns(world: World, megabytes: int, count: int) -> dict[str, Any]:
    """{"gloo": [seconds of each turn], "ring": ..., "bound": ..., "work": {"gloo": seconds, ...}, "apart": ...}."""
    with join(world) as group:
        n, rank = group.size, group.rank
        mine = torch.randn(megabytes * MEGABYTE // 4, generator=torch.Generator().manual_seed(rank))
        tensor = mine.clone()
        sent = torch.ones(2 * (n - 1) * len(mine) // n)
        came = torch.empty_like(sent)
        right, left = Message(sent, (rank + 1) % n), Message(came, (rank - 1) % n)
        calls = {
            "gloo": lambda: group.all_reduce(tensor).wait(),
            "ring": lambda: ring_all_reduce_(group, tensor),
            "bound": lambda: wait_for(group.send_and_receive([right], [left])),
        }
        taken: dict[str, list[float]] = {name: [] for name in calls}
        work = dict.fromkeys(calls, 0.0)
        sums: dict[str, torch.Tensor] = {}
        for turn in range(WARM_UP + count):
            for name in sorted(calls, reverse=bool(turn % 2)):
                tensor.copy_(mine)
                group.barrier()
                began, begin = time.process_time(), time.perf_counter()
                calls[name]()
                taken[name].append(time.perf_counter() - begin)
                work[name] += time.process_time() - began
                if turn == 0:
                    sums[name] = tensor.clone()
        slowest = group.max_(torch.tensor([taken[name][WARM_UP:] for name in calls], dtype=torch.float64))
        apart = (sums["ring"] - sums["gloo"]).abs().max() / sums["gloo"].abs().max()
        all_work = group.sum_(torch.tensor(list(work.values()), dtype=torch.float64)).tolist()
        found = dict(zip(calls, slowest.tolist(), strict=True))
        return {**found, "work": dict(zip(calls, all_work, strict=True)), "apart": float(apart)}


def main() -> None:
    flags = parser(__doc__)
    asked = flags.parse_args()
    figures = {}
    for ranks in (2, 4):
        for megabytes in (1,) if asked.quick else (1, 16, 64):
            figures[f"{ranks} processes, {megabytes} MB"] = run_ranks(
                turns, ranks, megabytes, 3 if asked.quick else 25, seconds=300.0
            )[0]

    def table() -> str:
        lines = ["| | gloo, ms | of gloo's bandwidth | of the bound's | work | apart |", "|---|---|---|---|---|---|"]
        for name, found in figures.items():
            gloo = spread([1e3 * seconds for seconds in found["gloo"]])
            beside, bound = ratio(found["gloo"], found["ring"]), ratio(found["bound"], found["ring"])
            work = found["work"]["ring"] / found["work"]["gloo"]
            lines.append(f"| {name} | {gloo:.1f} | {beside:.2f} | {bound:.2f} | {work:.2f} | {found['apart']:.0e} |")
        return "\n".join(lines)

    show("ring", figures, table, as_json=asked.json)


if __name__ == "__main__":
    main()
