"""Compare exchanges between two sites with a slow link: bytes sent, throughput and validation loss.

Four processes run in two network namespaces, two in each, with a delay of 20 ms each way and 100 Mbit/s (thin_line.py;
needs root). torchrun starts each site, as on two hosts. The model is the text recipe's with small batches, so that
computing a step takes short compared to communication, as with large models on many devices.

    bytes       sent by a site per step, including headers, from the counter of its network interface
    samples/s   of the loop, without start and end, in the same steps
    bits        per byte of validation text, after as many samples as the tree. It does not depend on the link, so these
                runs use local processes: one for the tree, two for two sites. Their results are bit-identical

python -m benchmarks.sites                      the link, then validation
python -m benchmarks.sites --line               only the link
python -m benchmarks.sites --more 1.5           only validation, with 1.5 times the tree's samples
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
"""The paper's momentum of 0.9 is for hundreds of synchronizations, and these runs have dozens."""
EXCHANGES: dict[str, dict[str, Any]] = {
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


def set_flags(sets: dict[str, Any]) -> list[str]:
    """Return the command's flags for these settings."""
    return [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]


def train_over_link(sets: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train on two sites of two processes, and return the contents of result.json."""
    with ThinLine(delay_seconds=DELAY_SECONDS, bits_per_second=BITS_PER_SECOND) as line:
        sites = []
        for site in range(2):
            join = ["--nnodes=2", f"--node-rank={site}", f"--master-addr={address(0)}", "--master-port=29500"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *join]
            command = [*line.inside(site), *torchrun, str(SCRIPT), "--run-dir", str(folder), *set_flags(sets)]
            log = open(folder.with_suffix(f".{site}.log"), "w+", encoding="utf-8")  # noqa: SIM115  (closed below)
            environment = inherited({"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(SCRIPT.parents[1])})
            sites.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
        for process, log in sites:
            with log:
                if process.wait():
                    log.seek(0)
                    raise RuntimeError(f"a site failed:\n{log.read()[-3000:]}")
    return read_result(folder)


def train_locally(sets: dict[str, Any], ranks: int, folder: Path) -> dict[str, Any]:
    """Train without the link, and return the contents of result.json."""
    command = [sys.executable, "-m", "unisono.cli.main", "run", str(SCRIPT), "--ranks", str(ranks)]
    subprocess.run([*command, "--run-dir", str(folder), *set_flags(sets)], check=True, capture_output=True)
    return read_result(folder)


def read_result(folder: Path) -> dict[str, Any]:
    """Return the contents of result.json."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def measure(folder: Path, steps: int, *, line: bool, validation: bool, more: float) -> dict[str, dict[str, Any]]:
    """Train under each exchange, over the link, for validation, or both."""
    figures: dict[str, dict[str, Any]] = {name: {} for name in EXCHANGES}
    for number, (name, exchange) in enumerate(EXCHANGES.items()):
        if line and name in TIMED:
            # One step more, because the last synchronization that counts must end before the last step starts.
            sets = {**COMMON, **exchange, "steps": EVERY * (1 if name == "tree" else 4) + 1, "validate": False}
            result = train_over_link(sets, folder / f"line-{number}")
            figures[name] |= {key: result[key] for key in ("loop_samples_per_second", "line_bytes_per_step")}
            print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
        if validation:
            own_steps = round(steps * more) if exchange else steps
            sets = {**COMMON, **exchange, "steps": own_steps, "validate_bytes": 2**17}
            result = train_locally(sets, 2 if exchange else 1, folder / f"here-{number}")
            figures[name] |= {"steps": own_steps, "bits": result["bits_per_byte"]}
            print(f"{name}: {figures[name]}", file=sys.stderr, flush=True)
    return figures


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Format a row per exchange, with ratios to the tree."""
    tree = figures["tree"]
    lines = [
        "| exchange | bytes per step | tree / this | samples/s | this / tree | steps | bits per byte | over the tree |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name, row in figures.items():
        cells = [name]
        sent, speed, bits = row.get("line_bytes_per_step"), row.get("loop_samples_per_second"), row.get("bits")
        cells += [f"{sent:,.0f}", f"{tree['line_bytes_per_step'] / sent:.0f}"] if sent else ["", ""]
        cells += [f"{speed:.0f}", f"{speed / tree['loop_samples_per_second']:.1f}"] if speed else ["", ""]
        cells += [str(row["steps"]), f"{bits:.3f}", f"{bits / tree['bits'] - 1:+.1%}"] if bits else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--line", action="store_true", help="only the link")
    flags.add_argument("--more", type=float, default=0.0, help="only validation, with this multiple of samples")
    flags.add_argument("--steps", type=int, default=3200, help="steps of the tree, for validation")
    args = flags.parse_args()
    reason = "" if args.more else missing()
    if reason:
        print(f"The link is skipped: {reason}.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(
            Path(folder),
            EVERY if args.quick else args.steps,
            line=not (args.more or reason),
            validation=not args.line,
            more=args.more or 1.0,
        )
    show("sites", {"exchanges": figures}, lambda: table(figures), as_json=args.json)


if __name__ == "__main__":
    main()
