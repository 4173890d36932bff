"""Check what the files of a checkpoint say, before anything is allocated for it. Reads files only; no torch.

The manifest proves that no file has changed since the checkpoint was written. It does not prove that this library wrote
the checkpoint. So each file is checked by itself and against the others:

    state.json              the forms of all entries; dtype and shape of each tensor; one spec for each name
    rank-00000.json         which tensors, and which parts: they are within the tensors, and cover each of them once
    rank-00000.safetensors  the header: these tensors, with these dtypes and shapes, one after another, to the end
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from unisono.checkpoint.regular_file import open_regular, read_regular
from unisono.json_forms import (
    Form,
    is_count,
    is_encodable,
    is_object,
    is_printable,
    is_text,
    list_of,
    object_of,
    parse_value,
)

FORMAT = 4
"""Version of the files of a checkpoint, stored in state.json. (1 had torch's index of one file; 2 had no layout; 3 did
not say to which run a checkpoint belongs.)"""

STATE, SUFFIX = "state.json", ".safetensors"

MOST_JSON = 1 << 28
"""Largest size of state.json and of a report in bytes."""

MOST_HEADER = 100_000_000
"""Largest header of a safetensors file in bytes: the limit of the safetensors library."""

MOST_BYTES = 1 << 60
"""Size in bytes that no tensor has, so that no product of its sizes overflows."""

MOST_DIMS = 64
"""Number of dimensions that torch allows."""

DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "complex128": ("", 16),
    "complex32": ("", 4),
    "float8_e4m3fnuz": ("", 1),
    "float8_e5m2fnuz": ("", 1),
    "float8_e8m0fnu": ("", 1),
}
"""Dtypes by torch's names: the name in the safetensors format ("": the tensor is stored as bytes), and bytes."""


class StoredTensor(NamedTuple):
    """Dtype and shape of a tensor, as state.json states them."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the size of the elements."""
        return prod(self.shape) * DTYPES[self.dtype][1]


class StoredPart(NamedTuple):
    """A part of a tensor: the file, the index of its first element in the whole, and its shape."""

    file_name: str
    start: Sequence[int]
    shape: Sequence[int]


def read_state(folder: Path) -> dict[str, Any]:
    """Return state.json of a checkpoint.

    Raises:
        OSError: It cannot be read.
        ValueError: It has another form. One of another version of the format is not checked any further.
    """
    path = folder / STATE
    state = parse_value(read_regular(path, MOST_JSON))
    if not isinstance(state, dict):
        raise ValueError("it holds no object")
    if state.get("format") == FORMAT and not isinstance(state["format"], bool):
        check_state(state)
    return state


def problem_of(folder: Path, files: Mapping[str, Mapping[str, Any]], steps: int | None) -> str | None:
    """Return a text about the first file that does not fit the others; None if all do.

    Args:
        folder: The checkpoint.
        files: Size and sha256 of each file, as the manifest states them.
        steps: Number of steps done, as the name of the folder states it; None: it has another name.
    """
    name = STATE
    try:
        state = read_state(folder)
        if steps is not None and (not is_count(state.get("steps")) or state["steps"] != steps):
            return f"{folder / STATE} belongs to the checkpoint after step {_short(state.get('steps'))}"
        if state.get("format") != FORMAT:
            return None
        specs, reports = check_state(state), dict[str, Any]()
        for name in _reports_among(files):
            reports[name] = read_report(folder, name, specs)
        if loose := {n for n in files if n.endswith(SUFFIX)} ^ {_file_of(n) for n in reports}:
            return f"{folder / min(loose)} and its report do not both exist"
        for name, report in reports.items():
            if report["file"] != files[_file_of(name)]:
                return f"{folder / name} does not belong to {_file_of(name)}"
            name = _file_of(name)
            check_header(folder / name, _stored_in(report, specs))
        name = STATE
        parts_of(reports, specs)
    except (OSError, ValueError) as error:
        return f"{folder / name} is wrong ({error})"
    return None


def read_parts(folder: Path, names: Collection[str], specs: Mapping[str, StoredTensor]) -> dict[str, list[StoredPart]]:
    """Return where each tensor is stored.

    Args:
        folder: The checkpoint.
        names: Names of its files.
        specs: The tensors of its state.json.

    Raises:
        OSError: A report cannot be read.
        ValueError: A report has another form, or the parts do not cover each tensor exactly once.
    """
    return parts_of({name: read_report(folder, name, specs) for name in _reports_among(names)}, specs)


# -- state.json

ABOUT: dict[str, Form] = {
    "format": is_count,
    "steps": is_count,
    "models": list_of(is_printable),
    "identity": lambda value: is_object(value) and is_encodable(value),
    "changes": list_of(lambda change: _is_change(change)),
    "states": is_object,
}
MORE: dict[str, Form] = {
    "promise": lambda value: list_of(is_text)(value) and len(value) == 2 and is_encodable(value),
    "options": lambda value: is_object(value) and is_encodable(value),
}


def _is_change(value: Any) -> bool:
    return (
        is_object(value)
        and value.keys() == {"step", "field", "from", "to"}
        and is_count(value["step"])
        and is_text(value["field"])
        and is_encodable(value)
    )


def check_state(state: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the tensors of a state.json by name, in the order in which they were encoded.

    Raises:
        ValueError: An entry is missing or unknown, or has another form.
    """
    for name, form in ABOUT.items():
        if name not in state:
            raise ValueError(f"it has no {name}")
        if not form(state[name]):
            raise ValueError(f"{name} cannot be {_short(state[name])}")
    for name in state.keys() - ABOUT.keys():
        if name not in MORE or not MORE[name](state[name]):
            raise ValueError(f"it has the entry {_short(name)}: {_short(state[name])}")
    states, specs = state["states"], dict[str, StoredTensor]()
    for name in state["models"]:
        if name not in states:
            raise ValueError(f"it has no state of the model {_short(name)}")
    for name, value in states.items():
        if not is_printable(name):
            raise ValueError(f"a state is called {_short(name)}")
        check_encoded(value, specs)
    return specs


def check_encoded(item: Any, specs: dict[str, StoredTensor]) -> None:
    """Check a value that unisono.tensors.codec has encoded, and add its tensors to `specs`.

    Raises:
        ValueError: It cannot be decoded.
    """
    if isinstance(item, list):
        for inner in item:
            check_encoded(inner, specs)
    elif isinstance(item, dict) and "~" not in item:
        for inner in item.values():
            check_encoded(inner, specs)
    elif isinstance(item, dict) and item["~"] == "tensor":
        _check_reference(item, specs)
    elif isinstance(item, dict):
        of = item.get("of")
        if item.keys() != {"~", "of"} or not isinstance(of, list):
            raise ValueError(f"no value is encoded as {_short(item)}")
        if item["~"] == "map":
            if any(not isinstance(pair, list) or len(pair) != 2 for pair in of):
                raise ValueError(f"no dict is encoded as {_short(item)}")
            _check_unique([_key(pair[0]) for pair in of])
            for _, inner in of:
                check_encoded(inner, specs)
        elif item["~"] == "tuple":
            check_encoded(of, specs)
        elif item["~"] in ("set", "frozenset"):
            _check_unique([_key(inner) for inner in of])
        else:
            raise ValueError(f"no value is encoded as {_short(item)}")


def _key(item: Any) -> Any:
    """Return an encoded key of a dict, or element of a set, which must be hashable."""
    if isinstance(item, dict) and item.keys() == {"~", "of"} and isinstance(item["of"], list):
        if item["~"] == "tuple":
            return tuple(map(_key, item["of"]))
        if item["~"] == "frozenset":
            return frozenset(map(_key, item["of"]))
    if isinstance(item, (dict, list)):
        raise ValueError(f"a key or an element of a set cannot be {_short(item)}")
    return item


def _check_unique(keys: list[Any]) -> None:
    if len(set(keys)) != len(keys):
        raise ValueError(f"there are equal keys among {_short(keys)}")


def _check_reference(item: Mapping[str, Any], specs: dict[str, StoredTensor]) -> None:
    if item.keys() != {"~", "name", "dtype", "shape"} or not isinstance(item["name"], str):
        raise ValueError(f"no tensor is encoded as {_short(item)}")
    name, dtype, shape = item["name"], item["dtype"], item["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"the tensor {_short(name)} cannot have the dtype {_short(dtype)}")
    if not _is_shape(shape) or prod(max(n, 1) for n in shape) * DTYPES[dtype][1] > MOST_BYTES:
        raise ValueError(f"the tensor {_short(name)} cannot have the shape {_short(shape)}")
    spec = StoredTensor(dtype, tuple(shape))
    if specs.setdefault(name, spec) != spec:
        raise ValueError(f"the tensor {_short(name)} has two dtypes or shapes")


def _is_shape(value: Any) -> bool:
    return list_of(is_count)(value) and len(value) <= MOST_DIMS


# -- reports

REPORT: dict[str, Form] = {
    "attempt": is_text,
    "file": lambda value: is_object(value) and value.keys() == {"size", "sha256"},
    "whole": list_of(is_text),
    "parts": object_of(lambda box: isinstance(box, list) and len(box) == 2 and all(map(_is_shape, box))),
}


def read_report(folder: Path, name: str, specs: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the report about a safetensors file: which tensors it holds, and which parts.

    Raises:
        OSError: It cannot be read.
        ValueError: It has another form, or names a tensor or a part that state.json does not have.
    """
    report = parse_value(read_regular(folder / name, MOST_JSON))
    if not isinstance(report, dict) or report.keys() != REPORT.keys():
        raise ValueError(f"{name} is no report about a file")
    for entry, form in REPORT.items():
        if not form(report[entry]):
            raise ValueError(f"{entry} cannot be {_short(report[entry])}")
    named = [*report["whole"], *report["parts"]]
    if len({*named}) != len(named) or not {*named} <= specs.keys():
        raise ValueError(f"it has a tensor twice, or one that {STATE} does not have")
    for tensor, (start, shape) in report["parts"].items():
        whole = specs[tensor].shape
        if not len(start) == len(shape) == len(whole) or any(
            not (n and a + n <= of) for a, n, of in zip(start, shape, whole, strict=True)
        ):
            raise ValueError(f"{_short(tensor)} of the shape {[*whole]} has no part {shape} at {start}")
    return report


def parts_of(
    reports: Mapping[str, Mapping[str, Any]], specs: Mapping[str, StoredTensor]
) -> dict[str, list[StoredPart]]:
    """Return the parts of each tensor. Raises ValueError unless they cover each tensor exactly once."""
    found: dict[str, list[StoredPart]] = {name: [] for name in specs}
    for report_name, report in reports.items():
        for name in report["whole"]:
            found[name].append(StoredPart(_file_of(report_name), [0] * len(specs[name].shape), specs[name].shape))
        for name, (start, shape) in report["parts"].items():
            found[name].append(StoredPart(_file_of(report_name), start, shape))
    for name, parts in found.items():
        count, needed = sum(prod(part.shape) for part in parts), prod(specs[name].shape)
        if count != needed:
            raise ValueError(f"{_short(name)} is incomplete: the files hold {count} of its {needed} elements")
        if len(parts) > 1 and _overlap(parts):
            raise ValueError(f"two parts of {_short(name)} overlap")
    return found


def _overlap(parts: list[StoredPart]) -> bool:
    """Return whether two parts share an element.

    Parts are swept along the dim in which most of them begin at another index. So shards of 1,000 processes are not
    compared in pairs.
    """
    dims = range(len(parts[0].start))
    if not dims:
        return True
    along = max(dims, key=lambda dim: len({part.start[dim] for part in parts}))
    active: list[StoredPart] = []
    for part in sorted(parts, key=lambda part: part.start[along]):
        active = [other for other in active if other.start[along] + other.shape[along] > part.start[along]]
        for other in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(part.start, part.shape, other.start, other.shape, strict=True)
            ):
                return True
        active.append(part)
    return False


def _stored_in(report: Mapping[str, Any], specs: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors that a safetensors file holds, by name."""
    parts = {name: StoredTensor(specs[name].dtype, tuple(shape)) for name, (_, shape) in report["parts"].items()}
    return {**{name: specs[name] for name in report["whole"]}, **parts}


def _reports_among(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("rank-") and name.endswith(".json"))


def _file_of(report: str) -> str:
    return report.removesuffix(".json") + SUFFIX


# -- safetensors files


def check_header(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Check that a safetensors file holds these tensors and nothing else.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds other tensors, or bytes that belong to none.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MOST_HEADER, size - 8):
            raise ValueError(f"its header cannot have {length:,} bytes")
        header = parse_value(file.read(length))
    if not isinstance(header, dict) or header.keys() != tensors.keys():
        raise ValueError("it does not hold the tensors that its report names")
    spans = []
    for name, tensor in tensors.items():
        kind = DTYPES[tensor.dtype][0]
        entry = {"dtype": kind, "shape": [*tensor.shape]} if kind else {"dtype": "U8", "shape": [tensor.bytes]}
        found = header[name]
        offsets: Any = found.get("data_offsets") if isinstance(found, dict) else None
        if not (list_of(is_count)(offsets) and len(offsets) == 2) or found != {**entry, "data_offsets": offsets}:
            raise ValueError(f"{_short(name)} is {_short(found)} there instead of {entry}")
        if offsets[1] - offsets[0] != tensor.bytes:
            raise ValueError(f"{_short(name)} has {offsets[1] - offsets[0]} bytes there instead of {tensor.bytes}")
        spans.append((offsets[0], offsets[1]))
    spans.sort()
    if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), size - 8 - length]:
        raise ValueError("its tensors overlap, or bytes belong to none of them")


def _short(value: Any) -> str:
    """Return a value for a message: in one line, escaped, and cut."""
    return ascii(value)[1:-1] if isinstance(value, str) and len(value) < 100 else reprlib.repr(value)
