"""Describe the machine, versions and command of a measurement, and summarize numbers by median and quartiles.

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

ROOT = Path(__file__).resolve().parents[1]


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles."""
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return median and quartiles of the ratios of pairs, which other load on the machine slows down alike."""
    return spread([a / b for a, b in zip(mine, theirs, strict=True)])


def machine() -> dict[str, Any]:
    """Return processor, cores, load and versions."""
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


def python_path() -> str:
    """Return PYTHONPATH for a process that imports this checkout, and the folders that are in it already."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def command(name: str) -> str:
    """Return the command line of a benchmark."""
    return " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]])


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks."""
    flags = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    flags.add_argument("--quick", action="store_true", help="a smoke test; its figures have no meaning")
    flags.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return flags


def show(name: str, figures: dict[str, Any], table: Callable[[], str], *, as_json: bool) -> None:
    """Print the figures with command, machine and versions."""
    context = {"command": command(name), "machine": machine()}
    if as_json:
        print(json.dumps({**context, **figures}))
    else:
        print(f"{table()}\n\n{context['command']}\n{line()}")


def line() -> str:
    """Describe machine and versions in one line."""
    facts = machine()
    return (
        f"{facts['processor']}, {facts['cores']} cores ({facts['kernels']}), load {facts['load']}; "
        f"Python {facts['python']}, torch {facts['torch']}, unisono {facts['unisono']}"
    )


if __name__ == "__main__":
    print(line())
