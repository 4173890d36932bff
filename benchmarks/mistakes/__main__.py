"""Measure every case and write docs/measured/correctness.md.

    python -m benchmarks.mistakes --peers /path/to/venv/bin/python     about ten minutes
    python -m benchmarks.mistakes                                      ours and DistributedDataParallel: half a minute

The peers' Python needs torch, accelerate and lightning. Libraries that it lacks are reported as not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

import unisono
from benchmarks.mistakes.play import ROOT, play_ddp, play_ours, play_peer
from benchmarks.mistakes.stage import ACCELERATE, DDP, FABRIC, MODULES, TRAINER, Case, case
from unisono.environment import inherited

PAGE = ROOT / "docs" / "measured" / "correctness.md"
PACKAGES = {ACCELERATE: "accelerate", TRAINER: "lightning", FABRIC: "lightning"}

HEAD = """# Silent mistakes

Each row is a way in which distributed training goes wrong without an error: the loss looks plausible, and the model
or the metric is a different one. Each figure is measured in real processes on CPUs (two, unless the cell says
otherwise), with the default settings of each library. **Bold** is correct. A dash: the library leaves this to the
script, so there is nothing to measure.

"""

FOOT = """
How to get each one right elsewhere, and what was measured with other settings:

{notes}

The last row was looked for and not found. A layer that no sample used keeps `grad=None` in all of them. With
DistributedDataParallel by hand, `find_unused_parameters`, `static_graph`, both with `gradient_as_bucket_view`, and
`fully_shard` were tried.

This page is written by `python -m benchmarks.mistakes --peers PYTHON` (`benchmarks/mistakes`, one file a row).
`tests/parity/test_silent_mistakes.py` tests the column of Unisono. {versions}."""


def measure(name: str, player: str, python: str | None) -> list[Any] | None:
    """Return the figure for each number of processes; None if the library is not installed."""
    sizes = case(name).sizes
    if player == "Unisono":
        return [play_ours(name, size) for size in sizes]
    if player == DDP:
        return [play_ddp(name, size) for size in sizes]
    return [play_peer(name, player, size, python) for size in sizes] if python else None


def describe(played: Case, figures: list[Any] | None) -> tuple[str, bool]:
    """Return the figures as text, and whether they are right."""
    if figures is None:
        return "not measured", False
    words = [played.describe(figure) for figure in figures]
    if len(words) == 1:
        text = words[0]
    elif len(set(words)) == 1:
        text = f"{words[0]} on {', '.join(map(str, played.sizes))}"
    else:
        text = "; ".join(f"{size}: {word}" for size, word in zip(played.sizes, words, strict=True))
    return text, all(played.is_right(figure) for figure in figures)


def versions(python: str | None) -> dict[str, str]:
    """Return the versions of the libraries in this Python."""
    program = (
        "import json, importlib.metadata as m; have = {d.name.lower(): d.version for d in m.distributions()}; "
        f"print(json.dumps({{k: have[k] for k in {sorted(set(PACKAGES.values()))!r} if k in have}}))"
    )
    if python is None:
        return {}
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, env=inherited({}))
    found: dict[str, str] = json.loads(done.stdout)
    return found


def page(found: dict[str, dict[str, list[Any] | None]], have: dict[str, str]) -> str:
    columns = ["Unisono", ACCELERATE, TRAINER, FABRIC, DDP]
    titles = [f"{c} {have[PACKAGES[c]]}" if have.get(PACKAGES.get(c, "")) else c for c in columns]
    lines = [f"| | what goes wrong | right | {' | '.join(titles)} |", "|---" * (3 + len(columns)) + "|"]
    notes = []
    for name, figures in found.items():
        played = case(name)
        cells = []
        for column in columns:
            text, right = describe(played, figures[column]) if column in figures else ("–", False)
            cells.append(f"**{text}**" if right else text)
        lines.append(f"| {name} | {played.wrong} | {played.right} | {' | '.join(cells)} |")
        others = [f"{p}: {describe(played, f)[0]}." for p, f in figures.items() if p not in columns]
        if played.note or others:
            notes.append(f"- *{name}*: {' '.join([*others, played.note]).strip()}")
    names = [f"torch {torch.__version__}", f"unisono {unisono.__version__}"]
    names += [f"{package} {version}" for package, version in have.items()]
    return HEAD + "\n".join(lines) + "\n" + FOOT.format(notes="\n".join(notes), versions=", ".join(names))


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--peers", metavar="PYTHON", type=os.path.abspath, help="a Python with the other libraries")
    flags.add_argument("--page", type=Path, default=PAGE, help="where the table goes (docs/measured/correctness.md)")
    flags.add_argument("--only", nargs="*", default=list(MODULES), choices=list(MODULES), help="these cases")
    flags.add_argument("--json", type=Path, help="store figures in this file, and do not measure those that it has")
    args = flags.parse_args()
    have = versions(args.peers)
    found: dict[str, dict[str, list[Any] | None]] = {}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    for name in args.only:
        for player in ("Unisono", *case(name).peers):
            row = found.setdefault(name, {})
            if row.get(player) is None:
                package = PACKAGES.get(player.partition(",")[0])
                there = package is None or package in have
                row[player] = measure(name, player, args.peers) if there else None
                print(f"{name:16} {player:20} {describe(case(name), row[player])[0]}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(found), encoding="utf-8")
    args.page.write_text(page({name: found[name] for name in MODULES if name in found}, have), encoding="utf-8")


if __name__ == "__main__":
    main()
