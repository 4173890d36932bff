"""The last collective of this process, from torch's flight recorder. It records by itself, without any variable set."""

from __future__ import annotations

import json
import sys
from typing import Any


def last_call() -> tuple[str, bool]:
    """The oldest collective that is not over, or else the last one, in words; and whether it is not over.

    As in "all_reduce #12 of float32[4096]". ("", False): none, or this torch has no recorder. Two thousand entries take
    a tenth of a second, so it is asked only of a process that is still.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return "", False
    try:
        told = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(includeCollectives=True))
        entries = told.get("entries", [])
        pending = [entry for entry in entries if _is_pending(entry)]
        entry = pending[0] if pending else entries[-1]
        return words(entry), bool(pending)
    except (AttributeError, RuntimeError, TypeError, ValueError, LookupError):  # private, so it may be another one
        return "", False


def _is_pending(entry: dict[str, Any]) -> bool:
    return not entry["retired"] and entry["state"] != "completed"


def words(entry: dict[str, Any]) -> str:
    """An entry of the recorder's, in words."""
    backend, _, name = str(entry["profiling_name"]).partition(":")
    group, about = entry["process_group"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    dtype = {"Float": "float32", "Double": "float64", "Long": "int64", "Int": "int32", "Byte": "uint8"}
    kinds = [dtype.get(kind, str(kind).lower()) for kind in entry["input_dtypes"]]
    sizes = [f"{kind}{size}" for kind, size in zip(kinds, entry["input_sizes"], strict=False)]
    of = f" of {', '.join(sizes[:3])}" if sizes else ""
    within = "" if about == "default_pg" or group in ("", "0") else f" in group {group}"
    return f"{'nccl ' if backend == 'nccl' else ''}{name or backend} #{number}{of}{within}"
