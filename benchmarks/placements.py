"""Every placement of three recipes beside one process, with `unisono prove`; writes docs/agreement.md.

    python -m benchmarks.placements                                  some minutes
    python -m benchmarks.placements --only text --page text.md       this recipe alone, on a page of its own

Real models and data, small batches: agreement and memory are what is measured, and five steps of each show it. Times
of steps say little: the processes share the cores of one machine.
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
from unisono.cli.prove import KINDS, Row, size
from unisono.env import inherited

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "agreement.md"
STEPS = 5
RECIPES = {
    "text": ("a GPT, 0.8 million parameters, tied", ["batch=16"]),
    "image": ("a ResNet with batch norm, 0.3 million", ["source=digits", "batch=32"]),
    "image with group norm": ("the same with group norm", ["source=digits", "batch=32", "model.norm=group"]),
    "speech": (
        "a convolutional net over time, 0.2 million",
        ["source=spoken", "voices=3", "draws=1", "batch=16", "model.dropout=0.0"],
    ),
}
"""What each is, and its settings, by a title whose first word is the recipe's name. Without dropout, which draws
otherwise where activations are divided."""

HEAD = """# Placements beside one process

The same {steps} steps under every placement on 2 and 4 processes, compared with one process by `unisono prove`
([placements.md](placements.md#do-they-agree) says how). *Loss*, *gradient* (the worst tensor of all steps, before
clipping) and *norm* are relative errors, of which {gradient:g} is the limit, and {loss:g} of a loss. *Weights* is their
error over the way that they went. *Bits*: is all of it the same, to the last bit? Of *parameters, gradients, optimizer*
it says what the process with most holds, each at its largest in a step; *share* is the worst of the three over what is
expected: one process's, divided by the shards (with `gather=step`, of the optimizer state only), the stretches of a
pipeline, and the parts of every matrix.
"""

FOOT = """
This page is written by `python -m benchmarks.placements` ([the code](../benchmarks/placements.py)). {machine}. The
processes share these cores, so the times are not what a machine for each would take.
"""


def proved(recipe: str) -> dict[str, Any]:
    """What `unisono prove RECIPE --json` says."""
    words = [word for each in RECIPES[recipe][1] for word in ("--set", each)]
    command = [
        sys.executable,
        "-m",
        "unisono.cli.main",
        "prove",
        recipe.split()[0],
        "--steps",
        str(STEPS),
        "--json",
        *words,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=inherited({"PYTHONPATH": str(ROOT)}), check=False
    )
    if not done.stdout.strip():
        raise SystemExit(done.stderr)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def table(recipe: str, told: dict[str, Any]) -> str:
    """A section of the page."""
    what, sets = RECIPES[recipe]
    lines = [f"## {recipe}", "", f"{what[0].upper()}{what[1:]}; `{' '.join(f'--set {each}' for each in sets)}`.", ""]
    if "placements" not in told:
        return "\n".join([*lines, f"Not measured: {told.get('failed', told.get('error', {}))}", ""])
    lines += [
        "| placement | processes | loss | gradient | norm | weights | bits | parameters, gradients, optimizer | share "
        "| s a step | |",
        "|---" * 11 + "|",
    ]
    lines += [row(found) for found in [told["one"], *told["placements"]] if found["verdict"] != "refused"]
    said = remarks(told["placements"])
    return "\n".join([*lines, *[""][: len(said)], *said, ""])


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is to be said of some of them, once: why they are refused or fail, or why not all processes hold as much."""
    those: dict[str, list[str]] = {}
    for found in rows:
        words = f"{found['verdict']}. {found['reason']}" if found["reason"] else Row(**found).uneven
        those.setdefault(words, []).append(f"`{found['placement']}`")
    return [f"- {', '.join(names)}: {words.rstrip('.')}." for words, names in those.items() if words]


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
    flags.add_argument("--page", type=Path, default=PAGE, help="where the tables go (docs/agreement.md)")
    asked = flags.parse_args()
    sections, limits = [], {"gradient": 1e-5, "loss": 1e-6}
    for recipe in asked.only:
        told = proved(recipe)
        sections.append(table(recipe, told))
        print(sections[-1], flush=True)
    head = HEAD.format(steps=STEPS, **limits)
    asked.page.write_text("\n".join([head, *sections]) + FOOT.format(machine=line()), encoding="utf-8")


if __name__ == "__main__":
    main()
