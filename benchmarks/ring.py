"""Compare our ring all-reduce with gloo's, and with a lower bound.

    python -m benchmarks.ring            about a minute
    python -m benchmarks.ring --quick    a smoke test

Three calls alternate in the same processes: gloo's all_reduce; ours (distributed/ring_allreduce.py); and "bound", in
which each process sends 2 (n - 1) / n of the tensor's bytes to its right neighbor in one message, receives as many
from its left neighbor, and adds nothing. A barrier precedes each call, and the slowest process's time counts. The
figures are medians with quartiles: gloo's time, and the ring's bandwidth relative to gloo and to the bound. "work" is
the processor time of all processes and threads over gloo's, which other load on the machine does not change.
"difference" is the largest difference of the two sums, relative to the largest element.
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


def time_calls(world: World, megabytes: int, count: int) -> dict[str, Any]:
    """Return the seconds of each call by name, their processor time in "work", and "difference"."""
    with join(world) as group:
        n, rank = group.size, group.rank
        values = torch.randn(megabytes * MEGABYTE // 4, generator=torch.Generator().manual_seed(rank))
        tensor = values.clone()
        sent = torch.ones(2 * (n - 1) * len(values) // n)
        received = torch.empty_like(sent)
        right, left = Message(sent, (rank + 1) % n), Message(received, (rank - 1) % n)
        calls = {
            "gloo": lambda: group.all_reduce(tensor).wait(),
            "ring": lambda: ring_all_reduce_(group, tensor),
            "bound": lambda: wait_for(group.send_and_receive([right], [left])),
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        work = dict.fromkeys(calls, 0.0)
        sums: dict[str, torch.Tensor] = {}
        for number in range(WARM_UP + count):
            for name in sorted(calls, reverse=bool(number % 2)):
                tensor.copy_(values)
                group.barrier()
                start, worked = time.perf_counter(), time.process_time()
                calls[name]()
                seconds[name].append(time.perf_counter() - start)
                work[name] += time.process_time() - worked
                if number == 0:
                    sums[name] = tensor.clone()
        slowest = group.max_(torch.tensor([seconds[name][WARM_UP:] for name in calls], dtype=torch.float64))
        difference = (sums["ring"] - sums["gloo"]).abs().max() / sums["gloo"].abs().max()
        all_work = group.sum_(torch.tensor(list(work.values()), dtype=torch.float64)).tolist()
        return {
            **dict(zip(calls, slowest.tolist(), strict=True)),
            "work": dict(zip(calls, all_work, strict=True)),
            "difference": float(difference),
        }


def main() -> None:
    flags = parser(__doc__)
    args = flags.parse_args()
    figures = {}
    for ranks in (2, 4):
        for megabytes in (1,) if args.quick else (1, 16, 64):
            figures[f"{ranks} processes, {megabytes} MB"] = run_ranks(
                time_calls, ranks, megabytes, 3 if args.quick else 25, seconds=300.0
            )[0]

    def table() -> str:
        lines = [
            "| | gloo, ms | bandwidth over gloo | over the bound | work | difference |",
            "|---|---|---|---|---|---|",
        ]
        for name, found in figures.items():
            gloo = spread([1e3 * seconds for seconds in found["gloo"]])
            over_gloo, bound = ratio(found["gloo"], found["ring"]), ratio(found["bound"], found["ring"])
            work = found["work"]["ring"] / found["work"]["gloo"]
            lines.append(
                f"| {name} | {gloo:.1f} | {over_gloo:.2f} | {bound:.2f} | {work:.2f} | {found['difference']:.0e} |"
            )
        return "\n".join(lines)

    show("ring", figures, table, as_json=args.json)


if __name__ == "__main__":
    main()
