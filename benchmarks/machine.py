"""What a figure stands on: the machine, the versions, the command; and how many numbers become three.

python -m benchmarks.machine
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import unisono


class Spread(NamedTuple):
    """The median of many numbers and the quartiles around it."""

    low: float
    median: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of mine to theirs, turn by turn: what others do on the machine makes both longer."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def machine() -> dict[str, Any]:
    """Processor, cores, load, and the versions that matter."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text(encoding="utf-8").splitlines() if names.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "unisono": unisono.__version__,
    }


def command(name: str) -> str:
    return " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has."""
    flags = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument("--quick", action="store_true", help="a smoke test: the figures mean nothing")
    flags.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return flags


def show(name: str, figures: dict[str, Any], table: Callable[[], str], *, as_json: bool) -> None:
    """Print the figures with what they stand on."""
    stand = {"command": command(name), "machine": machine()}
    if as_json:
        print(json.dumps({**stand, **figures}))
    else:
        print(f"{table()}\n\n{stand['command']}\n{line()}")


def line() -> str:
    facts = machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores ({facts['kernels']}), load {facts['load']}; "
        f"Python {facts['python']}, torch {facts['torch']}, unisono {facts['unisono']}"
    )


if __name__ == "__main__":
    print(line())
