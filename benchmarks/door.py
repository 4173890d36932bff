"""How long the door takes: `import unisono` and `unisono --help`, in milliseconds beside an empty Python.

    python -m benchmarks.door            ten seconds
    python -m benchmarks.door --quick    a smoke test

New processes, taking turns; wall time from start to exit.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import parser, show, spread

DOORS = {
    "python -c pass": ["-c", "pass"],
    "import unisono": ["-c", "import unisono"],
    "unisono --help": ["-m", "unisono.cli.main", "--help"],
}


def milliseconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return 1e3 * (time.perf_counter() - began)


def measure(turns: int) -> dict[str, Any]:
    for arguments in DOORS.values():  # compiles what has not been compiled
        milliseconds(arguments)
    times: dict[str, list[float]] = {name: [] for name in DOORS}
    for _ in range(turns):
        for name, arguments in DOORS.items():
            times[name].append(milliseconds(arguments))
    return {"turns": turns, "milliseconds": {name: spread(column) for name, column in times.items()}}


def table(found: dict[str, Any]) -> str:
    rows = [f"{name:15} {times:.0f}" for name, times in found["milliseconds"].items()]
    return "\n".join([f"milliseconds, median (quartiles) of {found['turns']}", *rows])


def main() -> None:
    asked = parser(__doc__).parse_args()
    found = measure(2 if asked.quick else 20)
    show("door", found, lambda: table(found), as_json=asked.json)


if __name__ == "__main__":
    main()
