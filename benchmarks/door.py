"""Measure the time of `import unisono` and `unisono --help`, in milliseconds, with `python -c pass` as the baseline.

    python -m benchmarks.door            ten seconds
    python -m benchmarks.door --quick    a smoke test

Each command runs in a new process, and commands alternate. Times are from start to exit.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import parser, show, spread

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import unisono": ["-c", "import unisono"],
    "unisono --help": ["-m", "unisono.cli.main", "--help"],
}


def milliseconds(arguments: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - start)


def measure(rounds: int) -> dict[str, Any]:
    for arguments in COMMANDS.values():  # the first start writes bytecode
        milliseconds(arguments)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            times[name].append(milliseconds(arguments))
    return {"turns": rounds, "milliseconds": {name: spread(column) for name, column in times.items()}}


def table(found: dict[str, Any]) -> str:
    rows = [f"{name:15} {times:.0f}" for name, times in found["milliseconds"].items()]
    return "\n".join([f"milliseconds, median (quartiles) of {found['turns']}", *rows])


def main() -> None:
    args = parser(__doc__).parse_args()
    found = measure(2 if args.quick else 20)
    show("door", found, lambda: table(found), as_json=args.json)


if __name__ == "__main__":
    main()
