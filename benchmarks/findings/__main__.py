"""Plant bottlenecks, look for them in the report, take the advice, and compare the expected gain with the measured one.

    python -m benchmarks.findings                 about six minutes
    python -m benchmarks.findings --only storage --only uneven-batch
    python -m benchmarks.findings --healthy       runs without a bottleneck, about seven minutes

Every case is a run of benchmarks/findings/planted.py. Its report must name the cause. Then the run starts again with
the advice taken. The measured gain is the share of the time for a sample that this saves, without the first steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.machine import line
from benchmarks.thin_line import INTERFACE, ThinLine, address, missing
from unisono.environment import inherited
from unisono.report.findings.evidence import Evidence, Finding
from unisono.report.findings.find_all import find_all
from unisono.report.run_files import RunFiles

SCRIPT = Path(__file__).with_name("planted.py")


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep cores busy with other programs."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class Case(NamedTuple):
    """A planted bottleneck.

    Attributes:
        kind: The finding that is expected.
        ranks: The number of processes.
        settings: The settings of the run.
        advice: The settings that take the advice; they replace others of the same name.
        beside: Other programs that run beside it until the advice is taken, each on a core.
        link: If not 0, the processes are on two hosts with a link of so many bits in a second.
    """

    kind: str
    ranks: int
    settings: str
    advice: str
    beside: int = 0
    link: float = 0


CASES = {
    "decoding": Case(
        "data", 1, "plant=decoding cost=4 width=1024 depth=10 virtual_ranks=1 steps=99", "loader.workers={}"
    ),
    "storage": Case(
        "storage", 1, "plant=storage cost=5 width=512 depth=8 virtual_ranks=1 steps=99", "loader.workers={}"
    ),
    "few-workers": Case(
        "storage",
        1,
        "plant=storage cost=6 width=512 depth=8 virtual_ranks=1 loader.workers=1 steps=150",
        "loader.workers={}",
    ),
    "slow-rank": Case(
        "straggler", 2, "plant=slow-rank cost=20 width=768 depth=4 batch=16 virtual_ranks=8 steps=300", "plant=nothing"
    ),
    "uneven-batch": Case("uneven", 2, "plant=per-sample cost=6 depth=2 batch=3 steps=500", "batch={}"),
    "uneven-virtual-ranks": Case(
        "uneven", 2, "plant=per-sample cost=2 depth=2 batch=12 virtual_ranks=3 steps=300", "virtual_ranks={}"
    ),
    "micro-batches": Case(
        "micro-batches", 1, "width=64 depth=16 batch=48 virtual_ranks=16 length=112 steps=800", "virtual_ranks={}"
    ),
    "bubbles": Case(
        "bubbles", 2, "plant=per-sample cost=8 depth=4 batch=8 parallel.pipeline=2 steps=80", "micro_batch={}"
    ),
    "exchange": Case("exchange", 2, "width=512 depth=4 batch=8 steps=60", "compress.kind=bf16", link=200e6),
    "gathers": Case(
        "gathers", 2, "width=1536 depth=4 batch=16 virtual_ranks=8 parallel.shard=2 steps=40", "parallel.reshard=step"
    ),
    "checkpoints": Case(
        "checkpoints",
        1,
        "width=2048 depth=4 checkpoint.every=1 checkpoint.async_save=false steps=80",
        "checkpoint.every={}",
    ),
    "evaluations": Case("evaluations", 2, "plant=evaluations cost=256 every=2 width=512 steps=300", "every=FACTOR"),
    "garbage": Case("garbage", 1, "plant=garbage cost=100 every=1 virtual_ranks=1 width=512 steps=100", "plant=frozen"),
    "script": Case("script", 2, "plant=script cost=25 every=1 width=768 depth=4 batch=16 steps=150", "every=100"),
    "threads": Case("threads", 2, "threads=4 width=1024 depth=6 batch=32 steps=150", "threads={}"),
    "shared-cores": Case("shared-cores", 2, "width=1024 depth=6 batch=32 steps=250", "", beside=2),
}

HEALTHY = {
    "text, 1 rank": ("text", 1, "steps=60"),
    "text, 2 ranks": ("text", 2, "steps=100"),
    "image, 1 rank": ("image", 1, "steps=600"),
    "image, 2 ranks": ("image", 2, "steps=1000"),
    "speech, 1 rank": ("speech", 1, "steps=400"),
    "speech, 2 ranks": ("speech", 2, "steps=600"),
    "topics, 1 rank": ("topics", 1, "steps=6000"),
    "even layers, 2 ranks": (str(SCRIPT), 2, "width=1024 depth=6 batch=32 steps=250"),
    "rare checkpoints": (str(SCRIPT), 1, "width=1024 depth=6 batch=32 checkpoint.every=100 steps=200"),
    "a loader worker": (str(SCRIPT), 1, "plant=decoding cost=1 width=1024 depth=6 loader.workers=1 steps=250"),
    "a pipeline": (str(SCRIPT), 2, "width=1024 depth=6 batch=64 parallel.pipeline=2 micro_batch=4 steps=120"),
    "shards": (str(SCRIPT), 2, "width=1536 depth=4 batch=16 parallel.shard=2 parallel.reshard=step steps=200"),
}
"""Runs that have no bottleneck: the target, the ranks and the settings of each."""


def play_healthy(target: str, ranks: int, settings: str) -> tuple[float, list[Finding]]:
    """Play a run without a bottleneck. Return its seconds and what is found in it."""
    flags = [word for setting in settings.split() for word in ("--set", setting)]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        words = [sys.executable, "-m", "unisono", "run", target, "--ranks", str(ranks), "--run-dir", f"{place}/run"]
        done = subprocess.run([*words, *flags], cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words + flags)}\n{done.stdout}\n{done.stderr}")
        files = RunFiles(Path(place) / "run")
        files.read()
        return time.perf_counter() - began, find_all(files)


def run(case: Case, settings: dict[str, str], folder: Path) -> RunFiles:
    """Run the planted script, and return its files."""
    flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    if case.link:
        run_on_two_hosts(case.link, folder, flags)
        files = RunFiles(folder)
        files.read()
        return files
    words = [sys.executable, "-m", "unisono", "run", str(SCRIPT), "--ranks", str(case.ranks), "--run-dir", str(folder)]
    words += flags
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    files = RunFiles(folder)
    files.read()
    return files


def run_on_two_hosts(bits_per_second: float, folder: Path, flags: list[str]) -> None:
    """Run the planted script with one process on each of two hosts, which are network namespaces."""
    with ThinLine(delay_seconds=0.0005, bits_per_second=bits_per_second) as line_between:
        hosts = []
        for host in range(2):
            join = ["--nnodes=2", f"--node-rank={host}", f"--master-addr={address(0)}", "--master-port=29500"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *join]
            command = [*line_between.inside(host), *torchrun, str(SCRIPT), "--run-dir", str(folder), *flags]
            environment = inherited({"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": str(SCRIPT.parents[2])})
            hosts.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment))
        if any(list(map(subprocess.Popen.wait, hosts))):
            raise SystemExit("A process on the two hosts failed.")


def seconds_of_sample(files: RunFiles) -> float:
    """Return the mean seconds of a step for each sample of its batch."""
    evidence = Evidence(files)
    return evidence.step / evidence.number("batch")


def taken(case: Case, settings: dict[str, str], finding: Finding) -> dict[str, str]:
    """Return the settings with the advice taken."""
    changed = dict(settings)
    for word in case.advice.split():
        name, _, value = word.partition("=")
        if value == "{}":
            value = (
                finding.advice.partition(f"--set {name}=")[2].split()[0].rstrip(",;") if name in finding.advice else ""
            )
            if not value:
                raise SystemExit(f"The advice does not set {name}: {finding.advice}")
        if value == "FACTOR":
            factor = int(finding.advice.removeprefix("evaluate ").split()[0])
            value = str(factor * int(settings["every"]))
        changed[name] = value
    return changed


def play(name: str, case: Case, times: int) -> dict[str, Any]:
    """Play a case: alternate runs with the bottleneck and with the advice taken."""
    settings = dict(word.split("=", 1) for word in case.settings.split())
    before: list[float] = []
    after: list[float] = []
    expected: list[float] = []
    others: set[str] = set()
    finding = None
    with tempfile.TemporaryDirectory() as place:
        for turn in range(times):
            beside: AbstractContextManager[None] = busy_cores(case.beside) if case.beside else nullcontext()
            with beside:
                files = run(case, settings, Path(place) / f"before-{turn}")
            found = find_all(files)
            others |= {each.kind for each in found if each.kind != case.kind}
            mine = [each for each in found if each.kind == case.kind]
            if not mine:
                return {"case": name, "found": False, "others": sorted(others)}
            finding = mine[0]
            expected += [] if finding.gain is None else [finding.gain]
            before.append(seconds_of_sample(files))
            files = run(case, taken(case, settings, finding), Path(place) / f"after-{turn}")
            after.append(seconds_of_sample(files))
    assert finding is not None
    return {
        "case": name,
        "found": True,
        "kind": case.kind,
        "fact": finding.fact,
        "advice": finding.advice,
        "expected": median(expected) if expected else None,
        "measured": 1 - median(after) / median(before),
        "others": sorted(others),
    }


def main() -> None:
    """Play all cases, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, default=[])
    parser.add_argument("--times", type=int, default=1, help="runs of each kind; the median counts")
    parser.add_argument("--healthy", action="store_true", help="play runs without a bottleneck")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    if options.healthy:
        for name, healthy in HEALTHY.items():
            seconds, found = play_healthy(*healthy)
            print(f"{name:22} {seconds:4.0f} s  {[each.fact for each in found] or 'no finding'}", flush=True)
        print(f"\n{line()}")
        return
    for name, case in CASES.items():
        if options.only and name not in options.only:
            continue
        if case.link and (reason := missing()):
            print(f"{name:22} left out: {reason}", flush=True)
            continue
        row = play(name, case, options.times)
        if options.json:
            print(json.dumps(row), flush=True)
        elif not row["found"]:
            print(f"{name:22} NOT FOUND; found {row['others']}", flush=True)
        else:
            expected = "unknown" if row["expected"] is None else f"{row['expected']:7.0%}"
            print(
                f"{name:22} {expected}  {row['measured']:7.0%}  {row['fact']} {row['advice']}  {row['others'] or ''}",
                flush=True,
            )
    print(f"\npython -m benchmarks.findings --times {options.times}: {time.perf_counter() - began:.0f} s\n{line()}")


if __name__ == "__main__":
    main()
