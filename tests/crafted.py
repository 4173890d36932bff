"""Checkpoints that somebody has crafted: files that this library did not write, under a manifest that fits them.

    draft = Draft(folder)                           the files of a checkpoint, decoded
    draft.state["steps"] = -1                       a change
    draft.seal()                                    the files are written, with a new manifest

`CASES` has a name and a change for each. A change gets the draft, and a checkpoint of the same step of another run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from unisono.checkpoint.manifest import MANIFEST, SIGNATURE, WrittenFile, sealed

Change = Callable[["Draft", Path], Any]
STATE = "state.json"
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, float("nan"), 10**30, "x", [], {}, [[]], {"~": "map"})
DEEP = "[" * 100_000 + "]" * 100_000


class Draft:
    """The files of a checkpoint that was written by two processes.

    Attributes:
        state, reports, headers: JSON, by the name of the file but for the state.
        data: what follows the header of each safetensors file.
        text: files whose content is this in place of their JSON.
        last: changes of the folder after everything was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = json.loads((folder / STATE).read_bytes())
        self.reports = {path.name: json.loads(path.read_bytes()) for path in folder.glob("rank-*.json")}
        self.headers: dict[str, Any] = {}
        self.data: dict[str, bytes] = {}
        for path in folder.glob("*.safetensors"):
            content = path.read_bytes()
            length = 8 + int.from_bytes(content[:8], "little")
            self.headers[path.name], self.data[path.name] = json.loads(content[8:length]), content[length:]
        self.text: dict[str, str | bytes] = {}
        self.entries: Callable[[dict[str, Any]], Any] = lambda entries: None
        self.last: list[Callable[[Path], Any]] = []

    def seal(self) -> None:
        """Write all files, and a manifest that fits them."""
        files = {}
        for name, header in self.headers.items():
            head = json.dumps(header).encode()
            content = len(head).to_bytes(8, "little") + head + self.data[name]
            files[name] = self._write(name, content)
            report = self.reports[name.replace(".safetensors", ".json")]
            if isinstance(report.get("file"), dict):
                report["file"] = files[name]._asdict()
        if (self.folder / SIGNATURE).exists():
            files[SIGNATURE] = self._write(SIGNATURE, (self.folder / SIGNATURE).read_bytes())
        for name, report in {**self.reports, STATE: self.state}.items():
            files[name] = self._write(name, json.dumps(report).encode())
        manifest = json.loads(sealed(files))
        self.entries(manifest["files"])
        manifest = json.loads(sealed({name: _Entry(entry) for name, entry in manifest["files"].items()}))  # type: ignore[misc]
        self._write(MANIFEST, json.dumps(manifest).encode())
        for change in self.last:
            change(self.folder)

    def _write(self, name: str, content: bytes) -> WrittenFile:
        given = self.text.get(name, content)
        content = given.encode() if isinstance(given, str) else given
        (self.folder / name).write_bytes(content)
        return WrittenFile.of(content)

    @property
    def weight(self) -> dict[str, Any]:
        """The reference to the first tensor of the model, whose rows two files hold."""
        found: dict[str, Any] = self.state["states"]["model"]["weight"]
        return found


class _Entry:
    """An entry of a manifest with any content."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def _asdict(self) -> Any:
        return self.content


def divide(folder: Path) -> None:
    """Store the model's weight [2, 3] in two files, a row in each, as two processes that shard it do."""
    draft = Draft(folder)
    header, name = draft.headers["rank-00000.safetensors"], draft.weight["name"]
    begin, end = header[name]["data_offsets"]
    rows, data = draft.weight["shape"], draft.data["rank-00000.safetensors"]
    half = (end - begin) // 2
    for other in header.values():
        other["data_offsets"] = [at - half * (at >= end) for at in other["data_offsets"]]
    header[name] = {"dtype": "F32", "shape": [1, rows[1]], "data_offsets": [begin, begin + half]}
    draft.data["rank-00000.safetensors"] = data[: begin + half] + data[end:]
    report = draft.reports["rank-00000.json"]
    report["whole"].remove(name)
    report["parts"][name] = [[0, 0], [1, rows[1]]]
    draft.reports["rank-00001.json"] = {**report, "whole": [], "parts": {name: [[1, 0], [1, rows[1]]]}}
    draft.headers["rank-00001.safetensors"] = {name: {**header[name], "data_offsets": [0, half]}}
    draft.data["rank-00001.safetensors"] = data[begin + half : end]
    draft.seal()


# -- changes of JSON


def put(*path: Any) -> Change:
    """Return the change that stores a value: at(draft, key, key, ..., value)."""
    *keys, last, value = path

    def change(draft: Draft, other: Path) -> None:
        place: Any = vars(draft)[keys[0]]
        for key in keys[1:]:
            place = place[key]
        place[last] = deepcopy(value)

    return change


def drop(*path: Any) -> Change:
    *keys, last = path

    def change(draft: Draft, other: Path) -> None:
        place: Any = vars(draft)[keys[0]]
        for key in keys[1:]:
            place = place[key]
        del place[last]

    return change


def entry(name: str, value: Any) -> Change:
    """Return the change that adds an entry to the manifest, or replaces one."""

    def change(draft: Draft, other: Path) -> None:
        draft.entries = lambda entries: entries.update({name: value})

    return change


def text(name: str, change: Callable[[Draft], str | bytes]) -> Change:
    return lambda draft, other: draft.text.update({name: change(draft)})


def after(change: Callable[[Path], Any]) -> Change:
    return lambda draft, other: draft.last.append(change)


ONE, TWO = "rank-00000.safetensors", "rank-00001.safetensors"
FIRST, SECOND = "rank-00000.json", "rank-00001.json"
WEIGHT = "model.weight"
SHA = "0" * 64


def nested(levels: int) -> Any:
    """Return lists within each other."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def of_state() -> Iterator[tuple[str, Change]]:
    value: Any
    for key in ("format", "steps", "models", "identity", "changes", "states"):
        yield f"state without {key}", drop("state", key)
        for value in WRONG:
            yield f"{key} = {value!r}", put("state", key, value)
    reference = ("state", "states", "model", "weight")
    for shape in ([-2, -3], [2**62, 2**62], [2**31, 2**31], [0, 3], [3, 2], [6], [2.0, 3], [True, 3], "x", None, [2]):
        yield f"shape = {shape}", put(*reference, "shape", shape)
    dtype: Any
    for dtype in ("float64", "int32", "float16", "object", "Tensor", "__class__", "save", None, 3, []):
        yield f"dtype = {dtype!r}", put(*reference, "dtype", dtype)
    name: Any
    for name in ("model.bias", "nothing", "../weight", "\ud800", None, 3, []):
        yield f"name = {name!r}", put(*reference, "name", name)
    kind: Any
    for kind in ("pickle", "map", "set", "tuple", "frozenset", None, [], {}, 3):
        yield f"mark = {kind!r}", put(*reference, "~", kind)
    yield "no name", drop(*reference, "name")
    yield "one more key", put(*reference, "more", 1)
    odd = ("state", "states", "odd")
    for value in (
        {"~": "map", "of": [[[1], 2]]},
        {"~": "map", "of": [[1, 2], [1, 3]]},
        {"~": "map", "of": [1, 2]},
        {"~": "map", "of": {"a": 1}},
        {"~": "set", "of": [[1]]},
        {"~": "set", "of": [1, 1]},
        {"~": "tensor", "name": WEIGHT, "dtype": "float32", "shape": [3, 2]},
        {"~": "tensor", "name": "\ud800", "dtype": "float32", "shape": []},
        {"~": "tensor", "name": "empty", "dtype": "float32", "shape": [0, 2**53, 2**53, 2**53]},
        {"~": "tensor", "name": "empty", "dtype": "float32", "shape": [0] * 1000},
    ):
        yield f"odd = {value!r}", put(*odd, value)
    yield "a state with an odd name", put("state", "states", "\ud800\n", 1)
    yield "an entry more", put("state", "more", 1)
    yield "400 levels", put(*odd, nested(400))
    yield "100,000 levels", text(STATE, lambda draft: json.dumps(draft.state).replace("{", f'{{"odd": {DEEP}, ', 1))
    yield "two values of one name", text(STATE, lambda draft: json.dumps(draft.state).replace("{", '{"steps": 9, ', 1))
    yield (
        "a number of 5,000 digits",
        text(STATE, lambda d: json.dumps(d.state).replace("{", f'{{"odd": {"1" * 5000}, ', 1)),
    )
    for name in (STATE, FIRST, MANIFEST):
        yield f"empty {name}", text(name, lambda draft: "")
        yield f"half of {name}", text(name, lambda draft: json.dumps(draft.state)[: len(json.dumps(draft.state)) // 2])
        yield f"bytes in {name}", text(name, lambda draft: b"\xff\xfe\x00" * 9)
        yield f"100,000 levels in {name}", text(name, lambda draft: DEEP)
        yield f"a list in {name}", text(name, lambda draft: "[]")


def of_reports() -> Iterator[tuple[str, Change]]:
    value: Any
    for key in ("attempt", "file", "whole", "parts"):
        yield f"report without {key}", drop("reports", FIRST, key)
        for value in (None, -1, "x", [1], {"a": 1}, [[]]):
            yield f"report: {key} = {value!r}", put("reports", FIRST, key, value)
    for box in (
        [[0, 0], [-1, 3]],
        [[-1, 0], [1, 3]],
        [[2, 0], [-1, -3]],
        [[1, 0], [1, 3]],  # both files hold the second row
        [[0, 0], [2, 3]],
        [[0, 0], [1, 2]],
        [[0, 0], [1, 2**60]],
        [[0, 0], [0, 3]],
        [[0], [3]],
        [[0, 0, 0], [1, 1, 3]],
        [[0.0, 0], [1, 3]],
        [[False, 0], [True, 3]],
        [0, 1],
        [[0, 0]],
        "x",
    ):
        yield f"part = {box}", put("reports", FIRST, "parts", WEIGHT, box)
    yield "a part less", drop("reports", SECOND, "parts", WEIGHT)
    yield "a tensor twice", lambda draft, other: draft.reports[FIRST]["whole"].append("model.bias")
    yield "whole and in parts", lambda draft, other: draft.reports[FIRST]["whole"].append(WEIGHT)
    yield "an unknown tensor", lambda draft, other: draft.reports[FIRST]["whole"].append("nothing")
    yield "an unknown part", put("reports", FIRST, "parts", "nothing", [[0], [1]])
    yield "a tensor in two files", lambda draft, other: draft.reports[SECOND]["whole"].append("model.bias")


def of_headers() -> Iterator[tuple[str, Change]]:
    for key, value in (
        ("dtype", "F64"),
        ("dtype", "I32"),
        ("dtype", "OBJECT"),
        ("dtype", None),
        ("shape", [2]),
        ("shape", [-2]),
        ("shape", [1, 2]),
        ("shape", [2**62]),
        ("shape", "x"),
        ("data_offsets", [0, 2**62]),
        ("data_offsets", [-8, 0]),
        ("data_offsets", [8, 0]),
        ("data_offsets", [0, 0]),
        ("data_offsets", [0]),
        ("data_offsets", None),
    ):
        yield f"header: {key} = {value}", put("headers", ONE, "model.bias", key, value)
    yield (
        "overlapping tensors",
        lambda draft, other: draft.headers[ONE]["model.bias"].update(
            data_offsets=draft.headers[ONE][WEIGHT]["data_offsets"]
        ),
    )
    yield "an offset further", lambda draft, other: draft.headers[TWO][WEIGHT].update(data_offsets=[4, 16])
    yield "a tensor more", put("headers", ONE, "more", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    yield "a tensor less", drop("headers", TWO, WEIGHT)
    yield "metadata", put("headers", TWO, "__metadata__", {"format": "pt"})
    yield "no header", put("headers", TWO, [])
    yield "a byte more", lambda draft, other: draft.data.update({TWO: draft.data[TWO] + b"\0"})
    yield "a byte less", lambda draft, other: draft.data.update({TWO: draft.data[TWO][:-1]})
    yield "no bytes", lambda draft, other: draft.data.update({TWO: b""})
    for length in (2**63, 2**64 - 1, 99_999_999, 10**9, 1):
        yield f"a header of {length} bytes", text(TWO, lambda draft, n=length: n.to_bytes(8, "little") + b"{}" * 50)  # type: ignore[misc]
    yield "three bytes", text(TWO, lambda draft: b"\0\0\0")
    yield "a deep header", text(TWO, lambda draft: len(DEEP).to_bytes(8, "little") + DEEP.encode())


def of_manifest() -> Iterator[tuple[str, Change]]:
    value: Any
    for name in (
        "../state.json",
        "/etc/passwd",
        "a/../state.json",
        "state.json/",
        "\0",
        "",
        ".",
        "rank-1.json",
        "rank-00009.json",
        "rank-00009.safetensors",
        "rank-٠٠٠٠٠.json",
        "run.py",
        "rank-00000.pickle",
    ):
        yield f"manifest names {name!r}", entry(name, {"size": 0, "sha256": SHA})
    for value in (
        None,
        [],
        "x",
        {},
        {"size": 1},
        {"size": -1, "sha256": SHA},
        {"size": 1.5, "sha256": SHA},
        {"size": 2**70, "sha256": SHA},
        {"size": "1", "sha256": SHA},
        {"size": 1, "sha256": None},
        {"size": 1, "sha256": "../x"},
        {"size": 1, "sha256": SHA, "more": 1},
    ):
        yield f"manifest says {value!r}", entry(STATE, value)
    for missing in (STATE, FIRST, SECOND, ONE, TWO):
        yield f"manifest without {missing}", without(missing)


def without(name: str) -> Change:
    """Return the change that removes an entry of the manifest."""

    def change(draft: Draft, other: Path) -> None:
        draft.entries = lambda entries: entries.pop(name)

    return change


def of_files() -> Iterator[tuple[str, Change]]:
    def replaced(name: str, make: Callable[[Path], Any]) -> Change:
        def change(folder: Path) -> None:
            path = folder / name
            path.rename(folder.parent.parent / "outside")
            make(path)

        return after(change)

    def listening(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as end:
            here = os.open(path.parent, os.O_RDONLY)  # a path of a socket has at most 108 bytes
            end.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)

    makes: dict[str, Callable[[Path], Any]] = {
        "a link": lambda path: path.symlink_to(path.parent.parent.parent / "outside"),
        "a link to a device": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "a FIFO": os.mkfifo,
        "a folder": Path.mkdir,
        "a socket": listening,
        "nothing": lambda path: None,
    }
    for kind, make in makes.items():
        for name in (STATE, MANIFEST, FIRST, TWO):
            yield f"{kind} in place of {name}", replaced(name, make)
    yield "one more file", after(lambda folder: (folder / "rank-00007.json").write_text("[]"))
    yield "one more FIFO", after(lambda folder: os.mkfifo(folder / "rank-00007.json"))


def of_states() -> Iterator[tuple[str, Change]]:
    """Yield states of another form than the objects have that load them."""
    value: Any
    for name in (
        "model",
        "optimizer",
        "schedule",
        "layout",
        "exchange_state",
        "loss_scale",
        "random_numbers",
        "module_attributes",
    ):
        yield f"no state of {name}", drop("state", "states", name)
        for value in (None, -1, "x", [1], {}, {"state": 1, "attributes": 2, "names": 3, "of": 4}):
            yield f"state of {name} = {value!r}", put("state", "states", name, value)
    yield "one state more", put("state", "states", "more", {"a": 1})
    yield "180 levels", put("state", "states", "more", nested(180))
    for key in ("state", "param_groups"):
        for value in (None, 3, "x", [3], {"a": 3}, [{}], [{"params": [0]}]):
            yield f"optimizer: {key} = {value!r}", put("state", "states", "optimizer", key, value)
    group = ("state", "states", "optimizer", "param_groups", 0)
    for key in ("lr", "momentum", "nesterov", "params"):
        for value in ("x", None, [], {"a": 1}):
            yield f"optimizer: {key} = {value!r}", put(*group, key, value)
    for key in ("last_epoch", "T_max", "base_lrs", "_last_lr"):
        for value in ("x", {"a": 1}, [[]]):
            yield f"schedule: {key} = {value!r}", put("state", "states", "schedule", key, value)
    layout = ("state", "states", "layout")
    for key in ("names", "frozen", "began", "groups"):
        for value in (3, [3], {"optimizer": 3}):
            yield f"layout: {key} = {value!r}", put(*layout, key, value)
    yield (
        "forward is a number",
        put("state", "states", "module_attributes", {"attributes": {"0/": {"forward": 3}}, "buffers": {}}),
    )


CONTENTS = {
    f"{kind.__name__}: {name}": change
    for kind in (of_state, of_reports, of_headers, of_manifest, of_files)
    for name, change in kind()
}
"""Changes after which a checkpoint is refused, or holds the same."""

STATES = {f"of_states: {name}": change for name, change in of_states()}
"""Changes of states that only the objects of the run can check."""
