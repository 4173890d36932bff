"""Count what parallel.param_dtype=bf16 saves: bytes of parameters that are received, and that are held at once.

    python -m benchmarks.casts            half a minute
    python -m benchmarks.casts --quick    a smoke test

Two processes share the text recipe's GPT, with batch 16 and 8 virtual ranks. The baselines are float32 and autocast,
which both gather float32. The figures are the bytes of parameters that a process receives in a step, and the largest
tensor that is gathered at once. Gradients are sent in float32 in all cases. Counts do not depend on the machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.utils.data import TensorDataset

from benchmarks.machine import parser, show
from unisono.config import ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.parallel.fsdp.gather_order import AllGather
from unisono.recipes.text import GPT, Model, loss_sum
from unisono.testing import build_run, close_run, run_ranks

KINDS = {"float32": ("fp32", "fp32"), "autocast": ("bf16", "fp32"), "param_dtype": ("fp32", "bf16")}
"""The settings precision and parallel.param_dtype of each kind."""

COLUMNS = {"parameters": "parameters in", "at once": "at once"}


class Counter:
    """Counts the bytes of parameters that this process receives."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(COLUMNS, 0)

    def watch(self) -> None:
        """Start counting the parameters that FSDP2 gathers."""
        for kind in (_fsdp_collectives.DefaultAllGather, AllGather):  # once a step, or layer by layer
            kind.__call__ = self._counted(kind.__call__)  # type: ignore[method-assign]

    def _counted(self, all_gather: Any) -> Any:
        def gather(comm: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *more: Any, **named: Any) -> Any:
            self.bytes["parameters"] += output_tensor.nbytes - input_tensor.nbytes
            self.bytes["at once"] = max(self.bytes["at once"], output_tensor.nbytes)
            return all_gather(comm, output_tensor, input_tensor, *more, **named)

        return gather


def count_bytes(world: World, kind: str, gather: Any, model: Model, folder: str) -> dict[str, int]:
    """Return the bytes of a step."""
    precision, param_dtype = KINDS[kind]
    parallel = ParallelSettings(shard=world.size, reshard=gather, param_dtype=param_dtype)  # type: ignore[arg-type]
    config = Settings(steps=2, batch=16, precision=precision, parallel=parallel)  # type: ignore[arg-type]
    counter = Counter()
    with join(world) as group:
        run = build_run(config, world, group, Path(folder))
        placed = run.place(lambda: GPT(model))
        optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
        run.track(model=placed, optimizer=optimizer)
        tokens = torch.randint(0, 256, (32, model.context + 1), generator=torch.Generator().manual_seed(0))
        for step in run.steps(TensorDataset(tokens[:, :-1], tokens[:, 1:].contiguous())):
            if step.number == 1:
                counter.watch()
            step.run(placed, loss_sum)
            step.update(optimizer)
        close_run(run)
    return counter.bytes


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':24}" + "".join(f"{name:>18}" for name in COLUMNS.values())]
    for row in rows:
        cells = "".join(f"{row[name] / 1e6:>15.2f} MB" for name in COLUMNS)
        lines.append(f"{row['kind'] + ', ' + row['gather']:24}{cells}")
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__).parse_args()
    model = Model(width=32, depth=2, context=16) if args.quick else Model()
    rows = []
    for gather in ("layer", "step"):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found = run_ranks(count_bytes, 2, kind, gather, model, folder, seconds=300)[0]
            rows.append({"kind": kind, "gather": gather, **found})
    show("casts", {"rows": rows}, lambda: table(rows), as_json=args.json)


if __name__ == "__main__":
    main()
