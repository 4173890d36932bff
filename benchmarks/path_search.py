"""Train paths of the `supernet` recipe from scratch: the best, a random and the worst one of a search.

    python -m benchmarks.path_search                        digits, three seeds: about ten minutes on two cores
    python -m benchmarks.path_search --source fashion       where Fashion-MNIST can be had
    python -m benchmarks.path_search --quick                a smoke test

Each seed searches with a super-network of its own, and trains the three paths that the search has named with the same
seed, on all images for training. Accuracies are those of the test images, which neither the super-network nor the
search has used.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, parser, python_path, show
from unisono.environment import inherited

NAMES = ("best", "random", "worst")
QUICK = ("epochs=1", "layers=2", "population=4", "generations=1")


def trained(folder: Path, ranks: int, sets: Sequence[str]) -> dict[str, Any]:
    """Train the recipe, and return its result.json. A run that has ended is not repeated."""
    file = folder / "result.json"
    if not file.is_file():
        words = [word for each in sets for word in ("--set", each)]
        command = [sys.executable, "-m", "unisono", "run", "supernet", "--ranks", str(ranks), "--run-dir", str(folder)]
        env = inherited({"PYTHONPATH": python_path()})
        subprocess.run([*command, *words], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, check=True)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def compare(folder: Path, ranks: int, seed: int, sets: Sequence[str]) -> dict[str, Any]:
    """Search with a seed, train the paths that the search has named, and return their accuracies."""
    sets = [*sets, f"seed={seed}"]
    search = trained(folder / f"search-{seed}", ranks, sets)
    row: dict[str, Any] = {"seed": seed}
    for name in NAMES:
        path = search[f"{name}_path"]
        alone = trained(folder / f"path-{seed}-{path}", ranks, [*sets, f"path={path}"])
        row[name] = {"path": path, "shared": search[f"{name}_accuracy"], "alone": alone["accuracy"]}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the accuracies of each seed, and their means."""
    lines = ["seed  path of the search   shared weights  from scratch"]
    for row in rows:
        for name in NAMES:
            found = row[name]
            text = f"{name} {found['path']}"
            lines.append(f"{row['seed']:4}  {text:19}  {found['shared']:14.2%}  {found['alone']:12.2%}")
    for name in NAMES:
        lines.append(f"mean of {name}: {statistics.fmean(row[name]['alone'] for row in rows):.2%} from scratch")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--source", default="digits", choices=("digits", "fashion"))
    flags.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of all runs")
    flags.add_argument("--seeds", type=int, default=3)
    flags.add_argument("--ranks", type=int, default=2)
    flags.add_argument("--folder", type=Path, help="keep the runs here; those that have ended are not repeated")
    args = flags.parse_args()
    sets = [f"source={args.source}", *args.set, *(QUICK if args.quick else ())]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).absolute()
        rows = [compare(folder, args.ranks, seed, sets) for seed in range(1 if args.quick else args.seeds)]
    show("path_search", {"rows": rows}, lambda: table(rows), as_json=args.json)


if __name__ == "__main__":
    main()
