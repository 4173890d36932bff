"""Checkpoints: states are restored to the bit, damaged ones are skipped, and a failed save changes nothing."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import signal
import subprocess
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import save
from unisono.checkpoint import manifest
from unisono.checkpoint.load import Checkpoint, fingerprint, load, metadata_of, newest
from unisono.environment import World
from unisono.errors import CheckpointError
from unisono.tensors.codec import TensorTable, decode, encode, specs_of
from unisono.tensors.digest import fingerprint_of
from unisono.testing import run_ranks


def save_thing(run_dir: Path, state: Any, steps: int = 1, keep: int = 2) -> Path:
    """Save a checkpoint of a run with one tracked object, `thing`."""
    return save(run_dir, steps, {"thing": state}, {"models": ["thing"]}, keep)


def load_thing(run_dir: Path, state: Any) -> Any:
    return load(save_thing(run_dir, state)).states["thing"]


def equal(a: Any, b: Any) -> bool:
    """Return whether types, at any depth, and bits are equal."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def names_of(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# -- a saved state is loaded


THINGS: dict[str, Any] = {
    "numbers": {"int": 2**70, "float": 0.1 + 0.2, "small": 5e-324, "inf": -math.inf, "nan": math.nan, "zero": -0.0},
    "words": {"text": "ü\n\udc80", "yes": True, "no": False, "none": None, "": "an empty name", "~": "our own mark"},
    "sequences": {"list": [1, [2.5, []], ()], "tuple": (1, (2, [3])), "set": {1, 2}, "frozen": frozenset({"a"})},
    "keys": {0: "int", "0": "text", True: "bool", None: "none", 0.5: "float", (1, "x"): "tuple"},
    "an optimizer's": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.999), "lr": 1}]},
    "nothing": {},
    "a bare tensor": torch.arange(3),
    "names that look alike": {"a": {"b.c": torch.ones(2)}, "a.b": {"c": torch.zeros(2)}, 0: torch.ones(1), "0": None},
    "alike in a map": {0: torch.ones(1), "0": torch.zeros(1)},
    "values": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]),
    "no elements": {"flat": torch.zeros(0), "deep": torch.zeros(2, 0, 3), "two": [torch.zeros(0), torch.zeros(0)]},
    "no dimensions": [torch.tensor(1.5), torch.tensor(True), torch.tensor(7)],
    "rows and columns": torch.arange(6.0).view(2, 3).t(),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.ones(1).expand(4),
    "every second": torch.arange(6.0)[::2],
}


@pytest.mark.parametrize("thing", THINGS)
def test_a_state_is_restored(tmp_path: Path, thing: str) -> None:
    tensors = TensorTable()
    plain = json.loads(json.dumps(encode(THINGS[thing], "x", tensors)))
    assert set(specs_of(plain)) == set(tensors)
    assert equal(THINGS[thing], decode(plain, tensors))
    assert equal(THINGS[thing], load_thing(tmp_path, THINGS[thing]))


DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64"]


def test_every_dtype_is_restored_to_the_bit(tmp_path: Path) -> None:
    state = {name: torch.tensor([0.0, 1.0, 3.0]).to(getattr(torch, name)) for name in DTYPES}
    assert equal(state, load_thing(tmp_path, state))
    assert len({fingerprint_of({"x": tensor}) for tensor in state.values()}) == len(DTYPES)


def test_subclasses_of_containers_are_restored_as_builtins(tmp_path: Path) -> None:
    pair = namedtuple("pair", "a b")
    state = {"milestones": Counter({30: 2}), "ordered": OrderedDict(a=1), "pair": pair(1, 2), "size": torch.Size([3])}
    expected = {"milestones": {30: 2}, "ordered": {"a": 1}, "pair": (1, 2), "size": (3,)}
    assert equal(expected, load_thing(tmp_path, state))


def test_numpy_scalars_are_restored_as_python_numbers(tmp_path: Path) -> None:
    state = {"best": np.float64(0.1), "half": np.float32(0.5), "seen": np.int64(7), "ended": np.bool_(True)}
    assert equal({"best": 0.1, "half": 0.5, "seen": 7, "ended": True}, load_thing(tmp_path, state))


def test_tied_tensors_are_stored_once_and_views_separately() -> None:
    weight, table = torch.randn(4, 4), torch.arange(8.0)
    tensors = TensorTable()
    state = {"embed": weight, "head": weight, "param": torch.nn.Parameter(weight), "all": table, "half": table[:4]}
    plain = encode(state, "x", tensors)
    assert sorted(tensors) == ["x.all", "x.embed", "x.half"]
    assert tensors["x.half"].data_ptr() != table.data_ptr()
    assert not any(tensor.requires_grad for tensor in tensors.values())
    assert equal(state["half"], decode(plain, tensors)["half"])


def test_a_view_is_stored_without_its_base(tmp_path: Path) -> None:
    path = save_thing(tmp_path, torch.zeros(1_000_000)[:3])
    assert sum(file.stat().st_size for file in path.iterdir()) < 10_000


@pytest.mark.parametrize(
    ("thing", "what"),
    [
        (object(), "object"),
        (b"bytes", "bytes"),
        (lambda: 0, "function"),
        (1j, "complex"),
        (np.zeros(2), "ndarray"),
        (torch.eye(2).to_sparse(), r"Tensor with layout torch\.sparse_coo"),
    ],
)
def test_objects_that_need_code_to_be_read_are_refused(tmp_path: Path, thing: Any, what: str) -> None:
    with pytest.raises(CheckpointError, match=rf"(?s)Cannot save thing\.deep\.0 of type {what}\..*state_dict\(\)"):
        save_thing(tmp_path, {"deep": [thing]})
    assert not (tmp_path / "checkpoints").exists()


def test_no_file_is_a_pickle(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    path = save(tmp_path, 4, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, {"models": []}, 1)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    for file in path.iterdir():
        content = file.read_bytes()
        if file.suffix == ".json":
            json.loads(content)
        else:  # eight bytes with the length of a header of JSON, then the tensors
            json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_metadata_is_restored(tmp_path: Path) -> None:
    identity = {"seed": 3, "batch": 16, "clip": None}
    path = save(tmp_path, 7, {"m": torch.ones(1)}, {"models": ["m"], "identity": identity, "changes": []}, 1)
    checkpoint = load(path)
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.steps == 7
    assert checkpoint.about == {"steps": 7, "models": ["m"], "identity": identity, "changes": []} == metadata_of(path)


# -- the list of checkpoints


def test_the_newest_are_kept_and_drafts_are_removed(tmp_path: Path) -> None:
    for steps in (10, 20, 30):
        save_thing(tmp_path, torch.ones(steps), steps, keep=2)
    left = tmp_path / "checkpoints" / ".step-00000035.unfinished"
    left.mkdir()
    (left / "state.json").write_text("{")
    assert newest(tmp_path, pytest.fail) == tmp_path / "checkpoints" / "step-00000030"
    save_thing(tmp_path, torch.ones(40), 40, keep=3)
    assert names_of(tmp_path) == ["step-00000020", "step-00000030", "step-00000040"]
    assert [steps for steps, _ in manifest.checkpoints(tmp_path)] == [40, 30, 20]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_thing(tmp_path, torch.zeros(2), 10)
    save_thing(tmp_path, torch.ones(2), 10)
    assert equal(load(tmp_path / "checkpoints" / "step-00000010").states["thing"], torch.ones(2))
    assert names_of(tmp_path) == ["step-00000010"]


def test_a_checkpoint_appears_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the final name is always complete: it is renamed last."""
    seen: list[tuple[str, str | None]] = []
    rename = Path.rename

    def watched(path: Path, target: Path) -> Path:
        assert names_of(tmp_path) == [path.name]
        seen.append((path.name, manifest.damage_of(path)))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", watched)
    save_thing(tmp_path, torch.ones(5), 12)
    assert seen == [(".step-00000012.unfinished", None)]
    assert names_of(tmp_path) == ["step-00000012"]


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert newest(tmp_path, pytest.fail) is None
    with pytest.raises(CheckpointError, match="There is no checkpoint in it"):
        fingerprint(tmp_path)
    with pytest.raises(CheckpointError, match="There is no such directory"):
        fingerprint(tmp_path / "nowhere")


# -- damage


def flip(path: Path) -> None:
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(next(path.glob("*.safetensors")), 20)


DAMAGE = {
    "a flipped bit": (flip, r"safetensors has been changed: its sha256"),
    "cut off": (cut, r"safetensors has 20 bytes instead of \d+"),
    "tensors are gone": (lambda path: next(path.glob("*.safetensors")).unlink(), r"safetensors is missing"),
    "the state is gone": (lambda path: (path / "state.json").unlink(), r"state\.json is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), r"manifest\.json cannot be read"),
    "half a manifest": (lambda path: (path / "manifest.json").write_text('{"files'), r"manifest\.json cannot be read"),
    "a manifest of a list": (lambda path: (path / "manifest.json").write_text("[1]"), r"manifest\.json cannot be read"),
    "bytes": (lambda path: (path / "manifest.json").write_bytes(b"\xff\0"), r"manifest\.json cannot be read"),
    "a manifest of nothing": (lambda path: (path / "manifest.json").write_text('{"files": {}}'), "names no files"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path: Path, damage: str) -> None:
    apply, words = DAMAGE[damage]
    older, newer = save_thing(tmp_path, torch.ones(9), 10), save_thing(tmp_path, torch.zeros(9), 20)
    assert manifest.damage_of(newer) is None
    apply(newer)
    notes: list[str] = []
    assert newest(tmp_path, notes.append) == older
    (note,) = notes
    assert note.startswith(f"The checkpoint after step 20 is damaged and skipped: {newer}/")
    assert re.search(words, note)
    with pytest.warns(RuntimeWarning, match="after step 20 is damaged and skipped"):
        assert fingerprint(tmp_path)["step"] == 10
    with pytest.raises(CheckpointError, match=words):
        fingerprint(newer)


def test_an_error_if_all_are_damaged(tmp_path: Path) -> None:
    for steps in (10, 20):
        flip(save_thing(tmp_path, torch.ones(9), steps))
    with pytest.raises(CheckpointError, match=r"(?s)is intact.*2 checkpoints: .*step-00000020.*step-00000010"):
        newest(tmp_path, lambda note: None)


def test_a_damaged_checkpoint_does_not_replace_intact_ones(tmp_path: Path) -> None:
    """A run resumes from step 10, because 30 is damaged. Its next checkpoint has a number below 30, and counts."""
    save_thing(tmp_path, torch.ones(9), 10)
    flip(save_thing(tmp_path, torch.ones(9), 30))
    save_thing(tmp_path, torch.ones(9), 20, keep=1)
    assert names_of(tmp_path) == ["step-00000020", "step-00000030"]
    assert newest(tmp_path, lambda note: None) == tmp_path / "checkpoints" / "step-00000020"
    save_thing(tmp_path, torch.ones(9), 30, keep=1)
    assert names_of(tmp_path) == ["step-00000030"]
    assert newest(tmp_path, pytest.fail) == tmp_path / "checkpoints" / "step-00000030"


# -- the fingerprint


def test_a_fingerprint_covers_names_dtypes_shapes_and_bytes() -> None:
    one = {"m": {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])}}
    others = [
        {"m": {"v": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.0])}},
        {"m": {"w": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.tensor([0.0])}},
        {"m": {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([0.0])}},
        {"m": {"w": torch.tensor([1.0, 2.0000002]), "b": torch.tensor([0.0])}},
        {"m": {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([-0.0])}},
        {"m": {"w": torch.tensor([1.0, 2.0])}},
        {"m": {"w": torch.tensor([1.0, 2.0]).view(torch.int32), "b": torch.tensor([0.0])}},
    ]
    assert len({fingerprint_of(state) for state in [one, *others]}) == 1 + len(others)


def test_a_fingerprint_covers_nothing_else() -> None:
    weight = torch.arange(6.0).view(2, 3)
    one = {"m": {"w": weight, "steps": 3, "bag": {"a", "b", "c"}}}
    same = {"m": {"bag": {"c", "b", "a"}, "steps": 3, "w": torch.nn.Parameter(weight.t().contiguous().t())}}
    assert fingerprint_of(one) == fingerprint_of(same)
    assert fingerprint_of({"a": {"b": 1}, "a.b": 2}) != fingerprint_of({"a": {"b": 3}, "a.b": 2})


def test_the_fingerprint_of_a_run(tmp_path: Path) -> None:
    model = {"w": torch.ones(3)}
    prints = [
        fingerprint(save(tmp_path / str(lr), 5, {"m": model, "o": {"lr": lr}}, {"models": ["m"]}, 1), state=True)
        for lr in (0.1, 0.2)
    ]
    assert prints[0]["weights_sha256"] == prints[1]["weights_sha256"] == fingerprint_of({"m": model})
    assert prints[0]["state_sha256"] != prints[1]["state_sha256"]
    again = fingerprint(tmp_path / "0.1")
    assert again == {key: value for key, value in prints[0].items() if key != "state_sha256"}


# -- a save that fails


def check_a_failed_save(run_dir: Path, state: Any, words: str) -> None:
    """Check that saving `state` after step 20 fails with these words, and only the checkpoint after step 10 remains."""
    with pytest.raises(
        CheckpointError, match=rf"(?s)after step 20 .*{words}.*B are free there.*correct the permissions.*--resume"
    ) as caught:
        save_thing(run_dir, state, 20)
    assert "The checkpoint after step 10 is complete." in str(caught.value)
    assert names_of(run_dir) == ["step-00000010"]
    assert newest(run_dir, pytest.fail) == run_dir / "checkpoints" / "step-00000010"


def saves_with_small_files_only(world: World, run_dir: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    save_thing(Path(run_dir), torch.ones(9), 10)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    check_a_failed_save(Path(run_dir), torch.ones(100_000), r"File too large.*It takes 400 kB")
    check_a_failed_save(Path(run_dir), {"text": "x" * 200_000}, "File too large")


def test_a_file_size_limit_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(saves_with_small_files_only, 1, str(tmp_path))


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"(?s)(NotADirectory|FileExists)Error.*There is no earlier one"):
        save_thing(tmp_path, torch.ones(3))
    assert (tmp_path / "checkpoints").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_to_write(tmp_path: Path) -> None:
    save_thing(tmp_path, torch.ones(9), 10)
    (tmp_path / "checkpoints").chmod(0o500)
    try:
        check_a_failed_save(tmp_path, torch.ones(9), "PermissionError")
    finally:
        (tmp_path / "checkpoints").chmod(0o700)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of one megabyte in memory, which vanishes with the process that holds it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=1m tmpfs '{folder}' && echo ready && exec cat"
    try:
        holder = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", mount],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        pytest.skip(f"a disk of our own needs unshare: {error}")
    with holder:
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            pytest.skip(f"no disk of our own may be mounted here: {holder.stderr.read().decode().strip()}")
        inside = Path("/proc", str(holder.pid), "root", *folder.parts[1:])  # the mount is the holder's alone
        if not os.access(inside, os.W_OK):
            pytest.skip("a disk of our own was mounted, but cannot be reached")
        yield inside


def test_a_full_disk_is_reported_and_changes_nothing(small_disk: Path) -> None:
    save_thing(small_disk, torch.ones(9), 10)
    check_a_failed_save(small_disk, torch.ones(500_000), rf"{os.strerror(errno.ENOSPC)}.*It takes 2 MB")
    save_thing(small_disk, torch.ones(9), 20)
    assert fingerprint(small_disk)["step"] == 20


class Extra(torch.nn.Module):
    """A module with a large tensor outside of its parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = torch.nn.Parameter(torch.zeros(600, 600)), torch.zeros(600, 600)

    def get_extra_state(self) -> torch.Tensor:
        return self.table.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.table = state


def test_a_large_extra_state_is_loaded(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from unisono.checkpoint.safetensors_reader import LazyTensor, SafetensorsFiles, StoredPart
    from unisono.checkpoint.sharded_state import load_module

    model = Extra()
    saved = {name: torch.full((600, 600), 2.0 + i) for i, name in enumerate(model.state_dict())}
    save_file(saved, tmp_path / "all.safetensors")
    part, files = StoredPart("all.safetensors", [0, 0], [600, 600]), SafetensorsFiles(tmp_path)
    load_module(model, {n: LazyTensor(files, n, torch.float32, t.shape, [part]) for n, t in saved.items()})
    assert torch.equal(model.weight, saved["weight"])
    assert torch.equal(model.table, saved["_extra_state"])
