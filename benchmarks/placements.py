"""Compare every parallel layout of three recipes with one process; write docs/measured/agreement.md.

    python -m benchmarks.placements                                  some minutes
    python -m benchmarks.placements --only text --page text.md       this recipe alone, on a page of its own

Models and data are real, and batches small: five steps are enough to measure agreement and memory. Times say little,
because the processes share the cores of one machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import line
from unisono.cli.commands.prove import KINDS, LayoutRow, size
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "agreement.md"
STEPS = 5
MOST = 1.1
"""Largest accepted ratio of a process's memory to its theoretical share."""
RECIPES = {
    "text": ("a GPT, 0.8 million parameters, tied", ["batch=16"]),
    "image": ("a ResNet with batch norm, 0.3 million", ["source=digits", "batch=32"]),
    "image with group norm": ("the same with group norm", ["source=digits", "batch=32", "model.norm=group"]),
    "speech": (
        "a convolutional net over time, 0.2 million",
        ["source=spoken", "voices=3", "draws=1", "batch=16", "model.dropout=0.0"],
    ),
}
"""Description and settings of each model. The first word of a title is the recipe's name. There is no dropout, because
its masks differ if activations are divided."""

HEAD = """# Layouts that agree

Each recipe is trained for {steps} steps on one process, and then for the same {steps} steps under every parallel
layout on 2 and 4 processes that `unisono prove` knows. [Compare layouts](../guide/parallel/prove.md) says what is
compared, and [Parallel layouts](../guide/parallel/index.md) how each layout divides a model. A layout is correct if
the two runs are equal up to rounding. Each row is one layout:

- **loss**, **gradient**, **norm**: the largest relative difference from one process, over all steps. For the
  gradient, that of the tensor with the largest difference, before clipping. 1e-7 is the last digit of float32. The
  limit is {loss:g} for the loss, and {gradient:g} for the gradient and its norm. A row beyond it says *differs*.
- **weights**: the difference after the last step, relative to the change since the start. The limit is a tenth,
  because Adam makes a whole step even from a gradient that is zero except for rounding.
- **bits**: whether everything is bit-identical. *Equal* is promised where samples, parameters or layers are divided.
  Where a sum itself is computed in parts (`tensor`, `context`, and a weight that two pipeline stages use), it is
  *other*, up to rounding.
- **parameters, gradients, optimizer**: their memory on the process that has most, each at its largest.
- **share**: the largest ratio of these three to the expected share. That is the memory of one process, divided by the
  shards (with `reshard=step`, which keeps whole parameters and gradients during a step, only that of the optimizer)
  and by the parts of every matrix; in a pipeline, of the parameters of the layers of this process. 1.00 is ideal.
  Above {share:.2f} is reported.
- **s a step**: the median without the first step. It says little, because all processes share the cores of one
  machine.

Below each table are the layouts that a model is refused for, with the reason, and uneven pipeline stages. Stages are
uneven because a layer is not cut, and because a weight that two stages use is on both."""

FOOT = """
This page is written by `python -m benchmarks.placements` (`benchmarks/placements.py`). {machine}.
The processes share these cores, so the times are not those of a machine for each process.
"""


def prove(recipe: str) -> dict[str, Any]:
    """Return the output of `unisono prove RECIPE --json`."""
    words = ["prove", recipe.split()[0], "--steps", str(STEPS), "--json"]
    words += [word for each in RECIPES[recipe][1] for word in ("--set", each)]
    command = [sys.executable, "-m", "unisono.cli.main", *words]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=inherited({"PYTHONPATH": str(ROOT)}), check=False
    )
    if not process.stdout.strip():
        raise SystemExit(process.stderr)
    comparison: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return comparison


def table(recipe: str, comparison: dict[str, Any]) -> str:
    """Format a section of the page."""
    what, sets = RECIPES[recipe]
    lines = [f"## {recipe}", "", f"{what[0].upper()}{what[1:]}; `{' '.join(f'--set {each}' for each in sets)}`.", ""]
    if "placements" not in comparison:
        return "\n".join([*lines, f"Not measured: {comparison.get('failed', comparison.get('error', {}))}", ""])
    lines += [
        "| layout | processes | loss | gradient | norm | weights | bits | parameters, gradients, optimizer | share "
        "| s a step | |",
        "|---" * 11 + "|",
    ]
    lines += [row(found) for found in [comparison["one"], *comparison["placements"]] if found["verdict"] != "refused"]
    notes = remarks(comparison["placements"])
    return "\n".join([*lines, *[""][: len(notes)], *notes, ""])


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """List remarks with their layouts: reasons of refusals and failures, too much memory, uneven stages."""
    layouts: dict[str, list[str]] = {}
    for found in rows:
        words = [f"{found['verdict']}. {found['reason'].rstrip('.')}"] if found["reason"] else []
        words += [f"it holds {kind} for {share:.2f} shares" for kind, share in found["share"].items() if share > MOST]
        words += [uneven] if (uneven := LayoutRow(**found).uneven) else []
        for each in words:
            layouts.setdefault(each, []).append(f"`{found['placement']}`")
    return [f"- {', '.join(names)}: {words}." for words, names in layouts.items()]


def row(found: dict[str, Any]) -> str:
    def short(error: float | None) -> str:
        return "" if error is None else "0" if error == 0 else f"{error:.1e}"

    bits = {True: "equal", False: "other", None: ""}[found["equal"]]
    cells = [f"`{found['placement']}`" if found["verdict"] else found["placement"], str(found["processes"])]
    cells += [short(found[name]) for name in ("loss", "gradient", "norm", "weights")]
    cells += [bits, ", ".join(size(found["bytes"][kind]) for kind in KINDS) if found["bytes"] else ""]
    cells += [f"{max(found['share'].values()):.2f}" if found["share"] else ""]
    cells += [f"{found['seconds']:.3f}" if found["seconds"] is not None else "", found["verdict"]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES), help="these recipes")
    flags.add_argument("--page", type=Path, default=PAGE, help="where the tables go (docs/measured/agreement.md)")
    args = flags.parse_args()
    sections, wrong, limits = [], [], {"gradient": 1e-5, "loss": 1e-6, "share": MOST}
    for recipe in args.only:
        comparison = prove(recipe)
        wrong += [recipe] if not comparison.get("agree") else []
        sections.append(table(recipe, comparison))
        print(sections[-1], flush=True)
    head = HEAD.format(steps=STEPS, **limits)
    args.page.write_text("\n".join([head, *sections]) + FOOT.format(machine=line()), encoding="utf-8")
    if wrong:
        raise SystemExit(f"Some layouts of {' and '.join(wrong)} disagree with one process: see {args.page}")


if __name__ == "__main__":
    main()
