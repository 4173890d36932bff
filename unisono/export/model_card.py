"""The model card of an export: a README in Markdown that says where the model comes from (arXiv 1810.03993)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.config.toml_file import flat_items
from unisono.export.formats import KINDS
from unisono.report.result_file import read_result

FACTS = ("torch", "numpy", "device", "processor", "instruction_set", "python")
"""Entries of environment.json that are shown."""


def model_card(run_dir: Path, report: Mapping[str, Any]) -> str:
    """Return the text.

    Args:
        run_dir: The run directory.
        report: The content of export.json.
    """
    result, environment = read_result(run_dir) or {}, _json(run_dir / "environment.json")
    values = {
        name: value
        for name, value in result.items()
        if isinstance(value, float) and name not in ("seconds", "samples_per_second", "bytes_per_step")
    }
    lines = [
        f"# {report['class']}",
        "",
        f"{report['parameters']:,} parameters, {report['format']}, exported by Unisono from {run_dir.name} after step "
        f"{report['step']}.",
        "",
        *_table("Results of the run", values, "Value"),
        *_table("Settings that differ from the defaults", _settings(run_dir / "settings.toml"), "Value"),
        *_table("Environment", {name: environment[name] for name in FACTS if name in environment}, "Value"),
        *_table("Inputs", {name: list(map(str, size)) for name, size in report.get("inputs", {}).items()}, "Shape"),
        "## Reproduction",
        "",
        f"Script: `{environment.get('script', 'unknown')}`. Promise: **{result.get('promise', 'unknown')}**, "
        f"{result.get('reason', 'the run has not ended')}. SHA-256 of the weights:",
        "",
        f"```text\n{report['weights_sha256']}\n```",
        "",
        "## The exported program",
        "",
        "Loaded again in a process without Unisono, its outputs differ from those of the model by "
        f"{report['relative']:.1e}, relative to their norm, on {report['samples']} samples of the training data. "
        f"The export has {report['bytes'] / 1e6:.2f} MB.{_costs(report)}",
        "",
        *_quality(report),
        *_quantization(report),
    ]
    return "\n".join(lines)


def _costs(report: Mapping[str, Any]) -> str:
    if "milliseconds" not in report:
        return ""
    return (
        f" A call with these samples takes {report['milliseconds']:.2f} ms on one thread, and the process "
        f"{report['megabytes']:.0f} MB of memory."
    )


def _quality(report: Mapping[str, Any]) -> list[str]:
    """Return the evaluation of the script, with the model and with the program."""
    original, exported = (report.get("quality", {}).get(name, {}) for name in ("original", "exported"))
    if not original:
        return []
    rows = [
        f"| `{_cell(name)}` | {_cell(value)} | {_cell(exported[name]) if name in exported else ''} |"
        for name, value in original.items()
    ]
    missing = [f"The program was not evaluated: {report['not_evaluated']}", ""] if not exported else []
    text = "The evaluation of the script, in float32:"
    return ["## Quality", "", text, "", "| Name | Model | Program |", "|---|---|---|", *rows, "", *missing]


def _quantization(report: Mapping[str, Any]) -> list[str]:
    if "quantize" not in report:
        return []
    sizes = f"| MB of the file | {report['unquantized_bytes'] / 1e6:.2f} | {report['bytes'] / 1e6:.2f} |"
    names = {"milliseconds": "ms of a call", "megabytes": "MB of memory of the process"}
    rows = [
        f"| {text} | {report[f'unquantized_{name}']:.2f} | {report[name]:.2f} |"
        for name, text in names.items()
        if name in report
    ]
    floats = ", ".join(f"`{name}`" for name in report["float_layers"]) or "none"
    return [
        "## Quantization",
        "",
        f"{report['quantized_layers']} {_kind(report)}. Linear layers in float: {floats}. "
        "The outputs differ from those of the unquantized model by "
        f"{report['relative_to_unquantized']:.1e}, relative to their norm.",
        "",
        "| | Unquantized | Quantized |",
        "|---|---|---|",
        sizes,
        *rows,
        "",
    ]


def _kind(report: Mapping[str, Any]) -> str:
    if report["format"] == "gguf":
        return "matrices are Q8_0: blocks of 32 integers of 8 bits that share a scale"
    return f"linear layers are quantized with torchao: {KINDS[report['quantize']]}"


def _table(title: str, values: Mapping[str, Any], column: str) -> list[str]:
    if not values:
        return []
    rows = [f"| `{name}` | {_cell(value)} |" for name, value in values.items()]
    return [f"## {title}", "", f"| Name | {column} |", "|---|---|", *rows, ""]


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _settings(path: Path) -> dict[str, Any]:
    """Return the settings whose line names another source than the default."""
    try:
        text = path.read_text(encoding="utf-8")
        values = dict(flat_items(tomllib.loads(text)))
    except (OSError, ValueError):
        return {}
    sources = {line.partition("=")[0].strip(): line.rpartition("#")[2].strip() for line in text.splitlines()}
    return {name: value for name, value in values.items() if sources.get(name, "default") != "default"}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
