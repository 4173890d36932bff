"""Train the text recipe under every exchange and compare validation losses; write docs/measured/validation.md.

    python -m benchmarks.validation                       about a quarter of an hour
    python -m benchmarks.validation --only tree local     these alone, to the screen

All exchanges train the same small GPT with the same data, batches and learning rates, without tuning. The exception are
stale gradients, which have a lower learning rate and no momentum. An exchange whose validation loss is more than 2 %
above the tree's after as many samples is trained for longer until it is not, and the table has the factor.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import line
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "validation.md"
STEPS = 400
SMALL = ["batch=32", "model.width=64", "model.depth=2", "model.context=64", "validate_bytes=65536", "sample_bytes=0"]
CLOSE = 1.02
"""Largest accepted ratio to the tree's validation loss."""
MORE = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Factors of the number of steps, tried in this order."""


class Arm(NamedTuple):
    title: str
    ranks: int
    sets: tuple[str, ...]


def arms() -> list[Arm]:
    compressed = [Arm(f"tree, {kind}", 2, (f"compress.kind={kind}",)) for kind in ("fp16", "bf16", "int8")]
    late_start = ("compress.start_step=100",)  # early gradients change too quickly for error feedback
    compressed += [
        Arm("tree, topk", 2, ("compress.kind=topk", "compress.ratio=0.25", *late_start)),
        Arm("tree, powersgd of rank 4", 2, ("compress.kind=powersgd", *late_start)),
        Arm("tree, powersgd of rank 16", 2, ("compress.kind=powersgd", "compress.rank=16", *late_start)),
        Arm("tree, powersgd of rank 24", 2, ("compress.kind=powersgd", "compress.rank=24", *late_start)),
    ]
    diloco = (
        "exchange=local_sgd",
        "local_sgd.sync_every=20",
        "local_sgd.outer_momentum=0.5",
    )  # 0.9 is for runs with hundreds of synchronizations
    average = ("exchange=local_sgd", "local_sgd.sync_every=20", "local_sgd.outer_optimizer=average")
    stale = ("momentum=0.0", "lr=2e-3")  # stale gradients diverge with the settings of synchronous steps
    return [
        Arm("tree", 2, ()),
        Arm("wide", 2, ("exchange=wide",)),
        Arm("allreduce", 2, ("exchange=allreduce",)),
        Arm("ring", 2, ("exchange=ring",)),
        Arm("ddp", 2, ("exchange=ddp",)),
        *compressed,
        Arm("allreduce, int8", 2, ("exchange=allreduce", "compress.kind=int8")),
        Arm("server, synchronous", 3, ("exchange=server",)),
        Arm("server, at most 2 updates late", 4, ("exchange=server", "server.staleness=2", *stale)),
        Arm("server, asynchronous", 4, ("exchange=server", "server.staleness=none", *stale)),
        Arm("local SGD, every 20 steps", 2, average),
        Arm("post-local SGD, from step 100 on", 2, (*average, "local_sgd.warmup_steps=100")),
        Arm("DiLoCo, every 20 steps", 2, diloco),
        Arm("DiLoCo, 8 bits", 2, (*diloco, "local_sgd.bits=8")),
        Arm("DiLoCo, 4 bits", 2, (*diloco, "local_sgd.bits=4")),
        Arm(
            "DiLoCo, 4 bits, 2 fragments, overlapped",
            2,
            (*diloco, "local_sgd.bits=4", "local_sgd.num_fragments=2", "local_sgd.sync_delay=2"),
        ),
    ]


def train(arm: Arm, steps: int) -> dict[str, Any]:
    """Train the recipe, and return the contents of result.json."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "text", "--ranks", str(arm.ranks), "--run-dir", f"{folder}/run", "--json"]
        words += [word for each in [f"steps={steps}", *SMALL, *arm.sets] for word in ("--set", each)]
        command = [sys.executable, "-m", "unisono.cli.main", *words]
        environment = inherited({"PYTHONPATH": str(ROOT)})
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        if process.returncode:
            raise SystemExit(f"{arm.title}: {' '.join(words)}\n{process.stderr[-3000:]}")
        found: dict[str, Any] = json.loads((Path(folder) / "run" / "result.json").read_text())
        return found


def train_until_close(arm: Arm, goal: float) -> Iterator[dict[str, Any]]:
    """Yield results after as many steps as the tree, and after more, until one is close to the goal."""
    for times in MORE:
        yield (found := train(arm, round(STEPS * times)))
        if found["bits_per_byte"] <= CLOSE * goal:
            return


HEAD = f"""# What exchanges learn

The small text recipe (`{" ".join(f"--set {each}" for each in SMALL)}`) is trained under every
[exchange](../guide/exchanges/index.md) for {STEPS} steps, with the same data, batches and learning rates except where
the row says otherwise.

- **Validation** is in bits per byte, on text that is not in the training data.
- **Ratio** is that value over the tree's.
- **Samples needed**: if the ratio is more than {CLOSE:.2f}, the number of samples after which it was not;
  {", ".join(map(str, MORE))} times were tried.
- **kB a step** is what a process sends, where the exchange counts it.

| exchange | processes | validation | ratio | samples needed | kB a step | promise |
|---|---|---|---|---|---|---|
"""

FOOT = """ This page is written by `python -m benchmarks.validation` (`benchmarks/validation.py`). {machine}."""


def row(arm: Arm, found: list[dict[str, Any]], goal: float) -> str:
    first, last = found[0], found[-1]
    close = last["bits_per_byte"] <= CLOSE * goal
    needed = (
        f"{last['samples'] / first['samples']:g} times: {last['samples']:,}" if close else f"more than {MORE[-1]} times"
    )
    sent = f"{first['bytes_per_step'] / 1000:,.0f}" if "bytes_per_step" in first else ""
    settings = f" `{' '.join(arm.sets)}`" if arm.sets else ""
    cells = [f"{arm.title}{settings}", str(arm.ranks), f"{first['bits_per_byte']:.4f}"]
    cells += [f"{first['bits_per_byte'] / goal:.4f}", needed, sent, first["promise"]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", nargs="*", help="arms whose title begins with one of these words; no page is written")
    flags.add_argument("--page", type=Path, default=PAGE, help="where the table goes (docs/measured/validation.md)")
    args = flags.parse_args()
    tree, *others = arms()
    goal = train(tree, STEPS)
    rows = [row(tree, [goal], goal["bits_per_byte"])]
    print(rows[0], flush=True)
    for arm in others:
        if args.only is None or any(arm.title.startswith(word) for word in args.only):
            rows.append(row(arm, list(train_until_close(arm, goal["bits_per_byte"])), goal["bits_per_byte"]))
            print(rows[-1], flush=True)
    if args.only is None:
        args.page.write_text(HEAD + "\n".join(rows) + "\n" + FOOT.format(machine=line()), encoding="utf-8")


if __name__ == "__main__":
    main()
