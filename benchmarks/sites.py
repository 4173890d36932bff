"""Two sites and a thin line between them: what each exchange sends, how fast it is, and where it arrives.

Four processes, two in each of two network namespaces, 20 ms of delay each way and 100 Mbit/s (thin_line.py; root). Each
site is started by torchrun, as two hosts would be. The model is the text recipe's, with small batches: a step's compute
is short beside what the line takes, as it is with large models on many devices.

    bytes       that a site sends through the line in a step, headers and all, counted by its network card
    samples/s   over the loop, without start and end; the same step as for bytes
    bits        a byte of validation text, after as many samples as the tree. It does not depend on the line, so these
                runs are made without it, one process for the tree and two for two sites, with the very same bits

python -m benchmarks.sites                      the line, then validation
python -m benchmarks.sites --line               the line only
python -m benchmarks.sites --more 1.5           validation only, with 1.5 times the tree's samples
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import parser, show
from benchmarks.thin_line import INTERFACE, ThinLine, address, missing
from unisono.environment import inherited

SCRIPT = Path(__file__).with_name("sites_script.py")
DELAY_SECONDS, BITS_PER_SECOND = 0.02, 100e6
EVERY = 50

COMMON = {"batch": 16, "model.context": 32, "model.depth": 2, "virtual_ranks": 4, "lr": 3e-3}
DILOCO = {"exchange": "local_sgd", "local_sgd.sync_every": EVERY, "local_sgd.outer_momentum": 0.5}
"""The paper's momentum of 0.9 is for hundreds of meetings, and these runs have dozens."""
WAYS: dict[str, dict[str, Any]] = {
    "tree": {},
    "DiLoCo": DILOCO,
    "DiLoCo, 8 bits": {**DILOCO, "local_sgd.bits": 8},
    "DiLoCo, 4 bits": {**DILOCO, "local_sgd.bits": 4},
    "DiLoCo, 4 bits, streaming": {
        **DILOCO,
        "local_sgd.bits": 4,
        "local_sgd.num_fragments": 5,
        "local_sgd.sync_delay": 5,
    },
    "local SGD": {"exchange": "local_sgd", "local_sgd.sync_every": EVERY, "local_sgd.outer_optimizer": "average"},
}
TIMED = ("tree", "DiLoCo", "DiLoCo, 8 bits", "DiLoCo, 4 bits", "DiLoCo, 4 bits, streaming")


def words(asked: dict[str, Any]) -> list[str]:
    return [word for name, value in asked.items() for word in ("--set", f"{name}={value}")]


def on_the_line(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two processes in each of two sites. Returns their result.json."""
    with ThinLine(delay_seconds=DELAY_SECONDS, bits_per_second=BITS_PER_SECOND) as line:
        sites = []
        for site in range(2):
            join = ["--nnodes=2", f"--node-rank={site}", f"--master-addr={address(0)}", "--master-port=29500"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *join]
            command = [*line.inside(site), *torchrun, str(SCRIPT), "--run-dir", str(folder), *words(asked)]
            log = open(folder.with_suffix(f".{site}.log"), "w+", encoding="utf-8")  # noqa: SIM115  (closed below)
            environment = inherited({"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(SCRIPT.parents[1])})
            sites.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
        for process, log in sites:
            with log:
                if process.wait():
                    log.seek(0)
                    raise RuntimeError(f"a site failed:\n{log.read()[-3000:]}")
    return read(folder)


def here(asked: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """The same without a line."""
    command = [sys.executable, "-m", "unisono.cli.main", "run", str(SCRIPT), "--ranks", str(ranks)]
    subprocess.run([*command, "--run-dir", str(folder), *words(asked)], check=True, capture_output=True)
    return read(folder)


def read(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def measure(folder: Path, steps: int, *, line: bool, validation: bool, more: float) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in WAYS}
    for number, (name, way) in enumerate(WAYS.items()):
        if line and name in TIMED:
            # the last meeting that is counted ends before the last step begins
            asked = {**COMMON, **way, "steps": EVERY * (1 if name == "tree" else 4) + 1, "validate": False}
            result = on_the_line(asked, folder / f"line-{number}")
            found[name] |= {key: result[key] for key in ("loop_samples_per_second", "line_bytes_per_step")}
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        if validation:
            own = round(steps * more) if way else steps
            asked = {**COMMON, **way, "steps": own, "validate_bytes": 2**17}
            result = here(asked, 2 if way else 1, folder / f"here-{number}")
            found[name] |= {"steps": own, "bits": result["bits_per_byte"]}
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    """Every way beside the tree."""
    tree = found["tree"]
    lines = [
        "| exchange | bytes a step | tree's / this | samples/s | this / tree's | steps | bits a byte | beside tree |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, way in found.items():
        cells = [name]
        sent, speed, bits = way.get("line_bytes_per_step"), way.get("loop_samples_per_second"), way.get("bits")
        cells += [f"{sent:,.0f}", f"{tree['line_bytes_per_step'] / sent:.0f}"] if sent else ["", ""]
        cells += [f"{speed:.0f}", f"{speed / tree['loop_samples_per_second']:.1f}"] if speed else ["", ""]
        cells += [str(way["steps"]), f"{bits:.3f}", f"{bits / tree['bits'] - 1:+.1%}"] if bits else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--line", action="store_true", help="the line only")
    flags.add_argument("--more", type=float, default=0.0, help="validation only, with so many times the tree's samples")
    flags.add_argument("--steps", type=int, default=3200, help="of the tree, for validation")
    asked = flags.parse_args()
    why = "" if asked.more else missing()
    if why:
        print(f"The line is left out: {why}.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder),
            EVERY if asked.quick else asked.steps,
            line=not (asked.more or why),
            validation=not asked.line,
            more=asked.more or 1.0,
        )
    show("sites", {"ways": found}, lambda: table(found), as_json=asked.json)


if __name__ == "__main__":
    main()
