"""Export small models in every format with `unisono export`, and report how their outputs differ, or why not.

    python -m benchmarks.export_formats --folder build/formats      a stopped benchmark continues there
    python -m benchmarks.export_formats --models text gpt2 --formats onnx "torch, int8"

Each model is trained for two steps. The command itself loads the export again in a fresh process without Unisono, and
computes the largest difference of outputs, relative to their norm. A file of weights has no outputs: here, a fresh
process compares its tensors with those of the checkpoint, byte for byte.

A format whose packages are not installed is left out, and named. The exit status is 1 if an export fails without a
message, or with one that the table of this file does not expect.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from benchmarks.machine import ROOT, line, parser, python_path
from unisono.checkpoint.load import load, newest
from unisono.environment import inherited
from unisono.errors import SettingsError
from unisono.export.formats import WEIGHTS, require_format, suffix_of
from unisono.tensors.digest import as_bytes

SCRIPT = "benchmarks/export_formats_script.py"


class Model(NamedTuple):
    """A model, and how to train it.

    Attributes:
        text: What it is.
        target: The recipe or script.
        sets: Its settings.
        needs: Modules that must be installed.
        model: The name under which the run tracks the model; "" if it tracks one.
        fits: The formats for which it is meant, in addition to those of every model.
    """

    text: str
    target: str
    sets: tuple[str, ...]
    needs: tuple[str, ...] = ()
    model: str = ""
    fits: tuple[str, ...] = ()


TEXT = ("batch=16", "model.width=32", "model.depth=2", "model.context=32", "validate_bytes=3000", "sample_bytes=0")
TRANSFORMERS = ("transformers",)
MODELS = {
    "text": Model("a GPT", "text", TEXT),
    "distill": Model("its student", "distill", ("batch=16", "validate_bytes=3000"), model="student"),
    "image": Model(
        "a ResNet",
        "image",
        ("source=digits", "batch=32", "train_images=128", "valid_images=64", "model.width=8"),
        ("sklearn",),
    ),
    "speech": Model(
        "a convolutional net over time",
        "speech",
        ("source=spoken", "voices=3", "draws=1", "batch=16", "model.width=32"),
        ("espeakng_loader",),
    ),
    "topics": Model("a bag of embeddings", "topics", ("batch=32", "width=16")),
    "resnet": Model("ResNet of transformers", SCRIPT, ("kind=resnet",), TRANSFORMERS, fits=("hf",)),
    "gpt2": Model("GPT-2 of transformers", SCRIPT, ("kind=gpt2",), TRANSFORMERS, fits=("hf", "gguf", "gguf, int8")),
    "llama": Model("Llama of transformers", SCRIPT, ("kind=llama",), TRANSFORMERS, fits=("hf", "gguf", "gguf, int8")),
    "lora": Model(
        "the Llama with LoRA",
        SCRIPT,
        ("kind=lora",),
        ("transformers", "peft"),
        fits=("hf", "peft", "gguf", "gguf, int8"),
    ),
}
"""Models by name."""

FOR_ALL = (WEIGHTS, "torch", "aoti", "onnx", "executorch", f"{WEIGHTS}, int8", "torch, int8", "aoti, int8")
COLUMNS = (*FOR_ALL[:5], "hf", "peft", "gguf", *FOR_ALL[5:], "gguf, int8")
"""Formats, with the quantization if there is one."""

TENSORS = """
import hashlib, sys
from safetensors import safe_open

assert "unisono" not in sys.modules
digest = hashlib.sha256()
with safe_open(sys.argv[1], "np") as file:
    for name in sorted(file.keys()):
        value = file.get_tensor(name)
        digest.update(f"{name} {list(value.shape)}".encode() + value.tobytes())
print(digest.hexdigest())
"""
"""Print a digest of the tensors in a file of safetensors."""


class Command(NamedTuple):
    """A finished command."""

    status: int
    out: str
    error: str
    seconds: float


def unisono(*words: str) -> Command:
    """Run a command of this library."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "unisono.cli.main", *words],
        cwd=ROOT,
        env=inherited({"PYTHONPATH": python_path()}),
        capture_output=True,
        text=True,
        check=False,
    )
    return Command(done.returncode, done.stdout, done.stderr, time.perf_counter() - begin)


def trained(name: str, folder: Path) -> Path:
    """Train a model, and the teacher of a student before it, unless that has been done. Return its run directory."""
    run, sets = folder / name, [*MODELS[name].sets, "steps=2" if name != "topics" else "epochs=1"]
    if (run / "result.json").is_file():
        return run
    if name == "distill":
        sets.append(f"teacher={trained('text', folder)}")
    words = [word for each in sets for word in ("--set", each)]
    ended = unisono("run", MODELS[name].target, "--run-dir", str(run), *words)
    if ended.status:
        raise SystemExit(ended.error)
    return run


def exported(name: str, column: str, folder: Path) -> dict[str, Any]:
    """Export a model, and return the report of the command, or the message of a refusal: {"refused": ...}."""
    run = trained(name, folder)
    kind, _, quantize = column.partition(", ")
    out = folder / "exports" / f"{name}-{column.replace(', ', '-')}{suffix_of(kind)}"
    out.parent.mkdir(exist_ok=True)
    words = ["--format", kind, "--no-evaluate", "--force", "--json"]
    words += ["--quantize", quantize] if quantize else []
    words += ["--model", MODELS[name].model] if MODELS[name].model else []
    ended = unisono("export", str(run), str(out), *words)
    lines = [line.strip() for line in (ended.error or "no message").strip().splitlines()]
    if ended.status:
        clear = "Traceback" not in ended.error and ended.status in (1, 2)
        return {"refused": lines[:2], "clear": clear, "seconds": ended.seconds, "screen": ended.out + ended.error}
    report: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    if column == WEIGHTS:
        report["relative"] = 0.0 if same_tensors(run, out, MODELS[name].model or "model") else float("nan")
    return {**report, "seconds": ended.seconds}


def same_tensors(run: Path, file: Path, model: str) -> bool:
    """Return whether a fresh process reads the tensors of the checkpoint from a file of weights."""
    command = [sys.executable, "-I", "-c", TENSORS, str(file)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    states = load(newest(run, print) or run).states
    with safe_open(file, "pt") as opened:
        names, several = sorted(opened.keys()), f"{model}." if model not in ("model",) else ""
    digest = hashlib.sha256()
    for name in names:
        value = states[model][name.removeprefix(several)].contiguous()
        digest.update(f"{name} {list(value.shape)}".encode() + as_bytes(value).numpy().tobytes())
    return digest.hexdigest() == found


def missing(name: str, column: str) -> str:
    """Return what is not installed for a cell, or ""."""
    if lacking := [package for package in MODELS[name].needs if find_spec(package) is None]:
        return " and ".join(lacking)
    kind, _, quantize = column.partition(", ")
    try:
        require_format(kind, "")
    except SettingsError as error:
        return error.problems[0].facts.partition(" needs ")[2].rstrip(".")
    return "torchao" if quantize and kind != "gguf" and find_spec("torchao") is None else ""


def cell(found: dict[str, Any]) -> str:
    """Format a cell of the table."""
    if "missing" in found:
        return "–"
    if "refused" in found:
        return "refused" if found["clear"] else "FAILED"
    return f"{found['relative']:.0e}" if found["relative"] else "0"


def table(cells: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return differences, sizes and seconds of models and formats, and the messages of refusals."""
    names, columns = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    lines = []
    figures = {
        "Largest relative difference": cell,
        "Kilobytes": lambda found: f"{found['bytes'] / 1000:,.0f}" if "bytes" in found else "",
        "Milliseconds of a call": lambda found: f"{found['milliseconds']:.2f}" if "milliseconds" in found else "",
        "Seconds of the command": lambda found: f"{found['seconds']:.0f}" if "seconds" in found else "",
    }
    for title, shown in figures.items():
        lines += [f"**{title}**\n", f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        for name in names:
            row = [shown(cells[name, column]) if (name, column) in cells else "" for column in columns]
            lines.append(f"| {name} | {' | '.join(row)} |")
        lines.append("")
    messages: dict[str, list[str]] = {}
    for (name, column), found in cells.items():
        if "missing" in found:
            messages.setdefault(f"not installed: {found['missing']}", []).append(f"{name} {column}")
        elif "refused" in found:
            messages.setdefault(" ".join(found["refused"]), []).append(f"{name} {column}")
    return "\n".join([*lines, *(f"- {'; '.join(each)}: {text}" for text, each in messages.items())])


def measured(name: str, column: str, folder: Path) -> dict[str, Any]:
    """Return what is known about a cell: from an earlier start of this benchmark, or from an export."""
    known = folder / "cells" / f"{name}-{column.replace(', ', '-')}.json"
    if known.is_file():
        found: dict[str, Any] = json.loads(known.read_text(encoding="utf-8"))
        return found
    if lacking := missing(name, column):
        return {"missing": lacking}
    found = exported(name, column, folder)
    known.parent.mkdir(exist_ok=True)
    known.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"{name}, {column}: {cell(found)} {' '.join(found.get('refused', []))}", file=sys.stderr, flush=True)
    return found


def wrong(name: str, column: str, found: dict[str, Any]) -> bool:
    """Return whether a cell is other than it must be: a crash, or a refusal of a format that is meant for the model."""
    meant = column in (*FOR_ALL, *MODELS[name].fits)
    return "refused" in found and (meant or not found["clear"])


def main(words: Sequence[str] | None = None) -> int:
    flags = parser(__doc__)
    flags.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    flags.add_argument("--formats", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    flags.add_argument("--folder", type=Path, help="keep runs and exports there, and continue")
    given = flags.parse_args(words)
    with contextlib.ExitStack() as stack:
        folder = (given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        cells = {(name, column): measured(name, column, folder) for name in given.models for column in given.formats}
    print(table(cells), line(), sep="\n\n")
    return int(any(wrong(*key, found) for key, found in cells.items()))


if __name__ == "__main__":
    sys.exit(main())
