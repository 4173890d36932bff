"""Compare one process with several GPUs with a process for each of them: speed, and memory of each GPU.

    python -m benchmarks.gpu.threads          needs two GPUs

For people who come from torch.nn.DataParallel. The arms are whole runs of one GPT, which alternate:

    one GPU                 --ranks 1
    threads                 --ranks 1 --set parallel.data_parallel_devices=2     a thread for each GPU
    layers                  --ranks 1 --set parallel.model_parallel_devices=2    half of the layers on each GPU
    processes               --ranks 2
    shards                  --ranks 2 --set parallel.shard=2

The figures are those of the second half of a run's steps. `memory` is the peak of each GPU, `balance` the smaller one
over the larger one. A dry run has the arms that two CPU "devices" can run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.device import Device, measured_device
from benchmarks.machine import parser, python_path, show, spread
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[2]


class Arm(NamedTuple):
    """A way to use two devices.

    ranks   the number of processes
    sets    settings
    on_cpu  further settings that let it run on the CPU; None: it cannot
    """

    ranks: int
    sets: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] | None = ()


ARMS = {
    "one GPU": Arm(1),
    "threads": Arm(1, ("parallel.data_parallel_devices=2",), None),
    "layers": Arm(1, ("parallel.model_parallel_devices=2",), ('parallel.devices=["cpu","cpu"]',)),
    "processes": Arm(2),
    "shards": Arm(2, ("parallel.shard=2",)),
}


def train(arm: Arm, *, dry: bool) -> dict[str, Any]:
    """Return samples per second and the peak memory of each GPU, in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "unisono.cli.main", "run", "benchmarks/gpu/threads_script.py"]
        words += ["--ranks", str(arm.ranks), "--run-dir", f"{folder}/run", "--set", f"small={str(dry).lower()}"]
        sets = (*arm.sets, *((arm.on_cpu or ()) if dry else ()))
        words += [word for each in sets for word in ("--set", each)]
        environment = inherited({"PYTHONPATH": python_path()})
        subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=True)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder, "run").glob("measured-*.json"))]
    return {
        "samples_per_second": sum(found["samples_per_second"] for found in ranks),
        "memory": [peak for found in ranks for peak in found["memory"]],
    }


def measure(device: Device, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the results of each arm in each round."""
    arms = {name: arm for name, arm in ARMS.items() if not device.dry or arm.on_cpu is not None}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in reversed(arms) if number % 2 else arms:
            found[name].append(train(arms[name], dry=device.dry))
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = ["| | samples per second | to one GPU | memory | balance |", "|---|---|---|---|---|"]
    one = spread([row["samples_per_second"] for row in found["one GPU"]]).median if found["one GPU"] else 0.0
    for name, rows in found.items():
        speed = spread([row["samples_per_second"] for row in rows]).median
        memory = rows[-1]["memory"]
        balance = f"{min(memory) / max(memory):.2f}" if memory and max(memory) else ""
        held = ", ".join(f"{each / 1e9:.2f} GB" for each in memory)
        lines.append(f"| {name} | {speed:.1f} | {speed / one:.2f} | {held} | {balance} |")
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__).parse_args()
    device = measured_device()
    found = measure(device, 2 if device.dry or args.quick else 3)
    show("gpu.threads", {"device": device.name, "arms": found}, lambda: table(found), as_json=args.json)


if __name__ == "__main__":
    main()
