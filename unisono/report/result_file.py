"""Read the result of a run. A file that is damaged counts as absent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.json_forms import Form, fits, is_count, is_number, is_text, maybe, object_of, parse

ENERGY: Mapping[str, Form] = {"kwh": is_number, "joules": is_number, "joules_per_sample": is_number, "source": is_text}

RESULT: Mapping[str, Form] = {
    **dict.fromkeys(("steps", "resumed_at", "samples", "ranks", "virtual_ranks", "servers"), is_count),
    **dict.fromkeys(("seconds", "samples_per_second", "late_mean", "late_most"), is_number),
    **dict.fromkeys(("bytes_per_step", "bytes_uncompressed"), is_number),
    **dict.fromkeys(("promise", "reason", "weights_sha256"), maybe(is_text)),
    "phases": object_of(is_number),
    "energy": lambda value: is_text(value) or is_energy(value),
}
"""Entries of result.json that readers use."""


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of result.json; None if it cannot be read, or if an entry has another form."""
    try:
        result = parse((run_dir / "result.json").read_bytes())
    except OSError:
        return None
    return result if result is not None and fits(result, RESULT) else None


def is_energy(value: Any) -> bool:
    """Return whether a value has the form of a measured energy."""
    return isinstance(value, dict) and fits(value, ENERGY) and {"kwh", "joules", "source"} <= value.keys()
