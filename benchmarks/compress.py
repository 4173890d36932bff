"""Train the text recipe with compressed gradients, and report validation loss and bytes per step.

    python -m benchmarks.compress                                 the recipe's defaults, on two processes: a minute each
    python -m benchmarks.compress --small                         a model of 0.1 million parameters, on one process
    python -m benchmarks.compress --bytes                         two steps of a wide model: only the bytes matter
    python -m benchmarks.compress --only powersgd                 rows that contain this word

Validation losses do not depend on the machine's speed, so this can run on a busy machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import parser, show
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[1]

ROWS: list[tuple[str, ...]] = [
    (),
    ("exchange=wide",),
    ("exchange=ddp",),
    *((f"compress.kind={kind}", "compress.groups=2") for kind in ("fp16", "bf16", "int8")),
    ("compress.kind=int8",),
    ("compress.kind=topk",),
    ("compress.kind=topk", "compress.ratio=0.1"),
    ("compress.kind=topk", "compress.ratio=0.25"),
    ("compress.kind=topk", "compress.ratio=0.25", "compress.start_step=50"),
    ("compress.kind=powersgd",),
    ("compress.kind=powersgd", "compress.start_step=50"),
    ("compress.kind=powersgd", "compress.rank=16"),
    ("compress.kind=powersgd", "compress.rank=16", "compress.start_step=30"),
]
SMALL = ["model.width=64", "model.depth=2", "model.heads=2", "model.context=64", "batch=32", "validate_bytes=32768"]
WIDE = ["model.width=512", "batch=8", "model.context=16", "steps=2", "validate_bytes=500"]
QUICK = ["model.width=16", "model.depth=1", "model.heads=2", "model.context=16", *WIDE[1:2], *WIDE[3:]]


def run(sets: Sequence[str], ranks: int) -> dict[str, Any]:
    """Train, and return the contents of result.json."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["run", "text", "--ranks", str(ranks), "--run-dir", f"{folder}/run"]
        words += [word for each in (*sets, "sample_bytes=0") for word in ("--set", each)]
        process = subprocess.run(
            [sys.executable, "-m", "unisono.cli.main", *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=inherited({"PYTHONPATH": str(ROOT)}),
            check=False,
        )
        if process.returncode:
            raise SystemExit(f"{process.stdout}\n{process.stderr}")
        result: dict[str, Any] = json.loads((Path(folder) / "run" / "result.json").read_text(encoding="utf-8"))
        return result


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows, with ratios to the first one, which is the tree."""
    first = rows[0]
    head = ("", "bits per byte", "relative to the tree", "bytes per step", "relative to the tree", "promise")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        loss = f"{row['bits_per_byte']:.4f} | {row['bits_per_byte'] / first['bits_per_byte'] - 1:+.2%}"
        share = row["bytes_per_step"] / first["bytes_per_step"] if first["bytes_per_step"] else None
        sent = f"{row['bytes_per_step']:,} | {share:.1%}" if share is not None else "one process |"
        lines.append(f"| `{' '.join(row['sets']) or 'exchange=tree'}` | {loss} | {sent} | {row['promise']} |")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--small", action="store_true", help="a small model, on one process")
    flags.add_argument("--bytes", action="store_true", help="two steps of a wide model, on two processes")
    flags.add_argument("--only", default="", help="the tree, and rows that contain this word")
    args = flags.parse_args()
    model = QUICK if args.quick else SMALL if args.small else WIDE if args.bytes else []
    rows = []
    for sets in ROWS:
        if sets and args.only not in " ".join(sets):
            continue
        result = run([*model, *sets], ranks=1 if args.small else 2)
        rows.append({"sets": sets, **{k: result[k] for k in ("bits_per_byte", "bytes_per_step", "promise")}})
        print(table([*rows[:1], *rows[1:][-1:]]).splitlines()[-1], file=sys.stderr, flush=True)
    show("compress", {"rows": rows}, lambda: table(rows), as_json=args.json)


if __name__ == "__main__":
    main()
