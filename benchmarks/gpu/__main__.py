"""Prove the library on the GPUs of this machine: the tests marked gpu, then the benchmarks. Writes benchmarks/GPU.md.

    make gpu                                          with the environment of `make setup`
    PYTHONPATH=. python3 -m benchmarks.gpu            from a checkout that is not installed
    PYTHONPATH=. python3 -m benchmarks.gpu --dry      without a GPU: does every line run? Writes build/GPU.md

Images with torch for CUDA usually lack cyclopts with docstring-parser and rich-rst, braceexpand, and espeakng-loader,
which the speech recipe needs. All are small wheels: `pip download --no-deps`, then `pip install --target FOLDER`, and
FOLDER in PYTHONPATH.

Every part has a time limit, and the page is written again after each part, so that an interrupted run keeps its
findings. All parts together take at most eight minutes on one GPU.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

from benchmarks.machine import python_path
from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[2]
PAGE, DRY_PAGE = ROOT / "benchmarks" / "GPU.md", ROOT / "build" / "GPU.md"
PACKAGES = ("torch", "numpy", "triton", "transformers", "cyclopts", "pytest")
PLUGINS = ("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "no:cacheprovider")
FILES = ("tests/gpu", "tests/ranks/test_mixed_devices.py", "tests/cli/test_cpu_ranks.py")
"""Where tests have the mark `gpu`: other files import packages that images with torch for CUDA lack."""


class Part(NamedTuple):
    """A part of the page: its title, the command after `python`, its time limit in seconds, and the GPUs it needs."""

    title: str
    words: tuple[str, ...]
    seconds: int
    gpus: int = 1


TESTS = Part(
    "Tests",
    ("-m", "pytest", *PLUGINS, "-m", "gpu", "-q", "--timeout", "150", *FILES),
    270,
)
BENCHMARKS = (
    Part("The exchange's work, beside the memory's bandwidth", ("-m", "benchmarks.gpu.kernels"), 40),
    Part("Memory and checkpoints", ("-m", "benchmarks.gpu.memory"), 70),
    Part("Steps: GPT", ("-m", "benchmarks.gpu.steps", "--model", "GPT"), 90),
    Part("Steps: MLP", ("-m", "benchmarks.gpu.steps", "--model", "MLP"), 60),
    Part("Steps: ResNet-50", ("-m", "benchmarks.gpu.steps", "--model", "ResNet-50", "--pairs", "3"), 90),
    Part("One process with two GPUs, and a process for each", ("-m", "benchmarks.gpu.threads"), 240, gpus=2),
)


def machine() -> str:
    """Return the facts about this machine, as a list of Markdown."""
    facts = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in PACKAGES)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            facts.append(f"{about.name}, {about.total_memory / 2**30:.0f} GB, {about.multi_processor_count} processors")
        facts += [f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}", f"driver {_driver()}"]
    else:
        facts.append("no CUDA device")
    return "\n".join(f"- {fact}" for fact in facts)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is missing"


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run(part: Part, *more: str, dry: bool) -> tuple[str, bool]:
    """Run a part. Return its output and whether it succeeded.

    pytest loads no other plugins of the environment: a warning of theirs is an error here.
    """
    changes = {"PYTHONPATH": python_path(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = inherited({**changes, **({"UNISONO_GPU": "dry"} if dry else {})})
    words = [sys.executable, *part.words, *more]
    try:
        ended = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=part.seconds * (5 if dry else 1)
        )
    except subprocess.TimeoutExpired as late:
        shown = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else str(late.stdout)
        return f"{shown[-3000:]}\nStopped after {part.seconds} s.", False
    if ended.returncode:
        return f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}", False
    return ended.stdout.strip(), True


def tests(workers: int, *, dry: bool) -> tuple[str, bool]:
    """Run the tests. Return a summary with every failure and every reason for a skip, and whether none failed."""
    report = ROOT / "build" / "gpu-tests.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    parallel = ("-n", str(workers), "--dist", "loadscope") if workers > 1 else ()
    output, ok = run(TESTS, *parallel, f"--junitxml={report}", dry=dry)
    if not report.exists():
        return f"```\n{output}\n```", False
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    lines, counts = list[str](), {"passed": 0, "failed": 0, "skipped": 0}
    reasons: dict[str, int] = {}
    for case in cases:
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        failures = [*case.findall("failure"), *case.findall("error")]
        skipped = case.find("skipped")
        kind = "failed" if failures else "skipped" if skipped is not None else "passed"
        counts[kind] += 1
        if skipped is not None:
            reasons[skipped.get("message", "")] = reasons.get(skipped.get("message", ""), 0) + 1
        for failure in failures:
            text = (failure.text or failure.get("message") or "").strip()
            lines.append(f"\n**Failed: `{name}`**\n\n```\n{text[-1500:]}\n```")
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    skips = [f"- {count} skipped: {reason}" for reason, count in sorted(reasons.items())]
    return "\n".join([f"{summary}.", "", *skips, *lines]), ok


def write(page: Path, sections: Sequence[tuple[str, str, str]], *, dry: bool) -> None:
    """Write the page with the sections (title, command, text) that exist so far."""
    page.parent.mkdir(exist_ok=True)
    head = "# GPU: a dry run without a GPU; its figures have no meaning" if dry else "# Measured on a GPU"
    lines = [head, "", f"`python3 -m benchmarks.gpu{' --dry' * dry}`, {date.today().isoformat()}.", "", machine(), ""]
    for title, command, text in sections:
        lines += [f"## {title}", "", f"`{command}`", "", text, ""]
    page.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--dry", action="store_true", help="try every part without a GPU")
    flags.add_argument("--workers", type=int, default=8, help="tests at once (8)")
    flags.add_argument("--only", choices=["tests", "benchmarks"], help="one half")
    args = flags.parse_args()
    if not args.dry and not torch.cuda.is_available():
        print("No CUDA device was found.\n  Next: python3 -m benchmarks.gpu --dry", file=sys.stderr)
        return 2
    page, sections, good = DRY_PAGE if args.dry else PAGE, list[tuple[str, str, str]](), True
    for part in [*([TESTS] * (args.only != "benchmarks")), *(BENCHMARKS * (args.only != "tests"))]:
        start = time.perf_counter()
        if not args.dry and torch.cuda.device_count() < part.gpus:
            text, ok = f"Skipped: it needs {part.gpus} GPUs.", True
        elif part is TESTS:
            text, ok = tests(args.workers, dry=args.dry)
        else:
            output, ok = run(part, dry=args.dry)
            text = output if ok else f"```\n{output}\n```"
        seconds = time.perf_counter() - start
        print(f"{'ok    ' if ok else 'FAILED'} {seconds:5.0f} s  {part.title}", flush=True)
        sections.append((part.title, f"python3 {' '.join(part.words)}", text))
        write(page, sections, dry=args.dry)
        good &= ok
    print(f"Next: read {page.relative_to(ROOT)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
