"""The last collective of this process, from torch's flight recorder, which is always on."""

from __future__ import annotations

import json
import sys
from typing import Any


def collective_progress() -> bytes:
    """Return a value that changes when a collective of any group begins or ends. It takes some microseconds."""
    return _dump(collectives=False) or b""


def _dump(*, collectives: bool) -> bytes | None:
    c10d = sys.modules.get("torch._C._distributed_c10d")
    try:
        found: bytes = vars(c10d)["_dump_fr_trace_json"](includeCollectives=collectives)
    except (KeyError, RuntimeError, TypeError):  # a private function of torch, which may change
        return None
    return found


def last_call() -> tuple[str, bool]:
    """Return the oldest pending collective, or else the last one, and whether it is pending.

    The text is like "all_reduce #12 of float32[4096]"; "" if there is none, or this torch has no recorder. Reading two
    thousand entries takes a tenth of a second, so it is called only for a process that makes no progress.
    """
    trace = _dump(collectives=True)
    if trace is None:
        return "", False
    try:
        entries = json.loads(trace)["entries"]
        pending = [entry for entry in entries if _is_pending(entry)]
        entry = pending[0] if pending else entries[-1]
        return describe_call(entry), bool(pending)
    except (TypeError, ValueError, LookupError):
        return "", False


def _is_pending(entry: dict[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def describe_call(entry: dict[str, Any]) -> str:
    """Return a text for an entry of the recorder."""
    backend, _, name = str(entry["profiling_name"]).partition(":")
    group, about = entry["process_group"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    dtype = {"Float": "float32", "Double": "float64", "Long": "int64", "Int": "int32", "Byte": "uint8"}
    kinds = [dtype.get(kind, str(kind).lower()) for kind in entry["input_dtypes"]]
    sizes = [f"{kind}{size}" for kind, size in zip(kinds, entry["input_sizes"], strict=False)]
    of = f" of {', '.join(sizes[:3])}" if sizes else ""
    within = "" if about == "default_pg" or group in ("", "0") else f" in group {group}"
    return f"{'nccl ' if backend == 'nccl' else ''}{name or backend} #{number}{of}{within}"
