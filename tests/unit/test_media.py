"""Images, histograms and tables of a run: their files, and values that cannot be recorded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from unisono.train.recording.media_recorder import MediaRecorder, folder_of, histogram_of, table_json
from unisono.train.recording.png import encode_png, pixels_of


def recorder(folder: Path, *, rank: int = 0) -> tuple[MediaRecorder, list[dict[str, Any]], list[str]]:
    """Return a recorder of step 7 in a run of this directory, its events, and its notes."""
    events: list[dict[str, Any]] = []
    notes: list[str] = []
    context = SimpleNamespace(
        run_dir=folder,
        group=SimpleNamespace(rank=rank),
        waits=False,
        world=SimpleNamespace(dry=""),
        progress=SimpleNamespace(steps_done=7, step=SimpleNamespace(number=7), began=1.0),
        monitor=SimpleNamespace(event=events.append, note=notes.append),
    )
    return MediaRecorder(cast(Any, context)), events, notes


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pillow_reads_the_pixels(channels: int) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'unisono[recipes]'")
    pixels = np.random.default_rng(channels).integers(0, 256, (13, 7, channels), np.uint8)
    found = image.open(io.BytesIO(encode_png(pixels)))
    assert (found.mode, found.size) == ({1: "L", 3: "RGB", 4: "RGBA"}[channels], (7, 13))
    assert np.array_equal(np.asarray(found).reshape(13, 7, channels), pixels)


def test_images_of_all_layouts_and_types() -> None:
    gray = np.array([[0.0, 0.5], [1.0, 2.0], [np.nan, -1.0]], np.float32)
    expected = np.array([[0, 128], [255, 255], [0, 0]], np.uint8)[:, :, None]
    assert np.array_equal(pixels_of(gray), expected)
    for image in (torch.tensor(gray)[None], torch.tensor(gray, dtype=torch.bfloat16)[:, :, None].requires_grad_()):
        assert np.array_equal(pixels_of(image), expected)
    assert pixels_of(torch.rand(3, 5, 6)).shape == (5, 6, 3)
    assert pixels_of(np.zeros((5, 6, 4), np.uint8)).shape == (5, 6, 4)
    assert pixels_of(torch.tensor([[True, False]])).ravel().tolist() == [255, 0]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.zeros(5), r"not \[5\]"),
        (np.zeros((2, 5, 6)), r"not \[2, 5, 6\]"),
        (np.zeros((0, 6)), r"not \[0, 6\]"),
        (np.zeros((5, 6), np.int64), "not int64"),
    ],
)
def test_what_is_no_image(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pixels_of(image)


def test_histograms() -> None:
    found = histogram_of(torch.tensor([[0.0, 1.0], [1.0, float("nan")]], dtype=torch.bfloat16), 2)
    assert found == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0], "not_finite": 1}
    assert histogram_of([True, False, True], 2)["counts"] == [1, 2]
    with pytest.raises(ValueError, match="no finite value"):
        histogram_of(torch.tensor([float("inf")]), 2)


def test_tables() -> None:
    found = table_json(["a", "b"], [[torch.tensor(1.5), None], (np.int64(2), float("nan")), ["x", Path("y")]])
    assert json.loads(found) == {"columns": ["a", "b"], "data": [[1.5, None], [2, "nan"], ["x", "y"]]}
    with pytest.raises(ValueError, match="another length than the 2 columns"):
        table_json(["a", "b"], [[1]])


def test_names_become_different_folders_inside_media() -> None:
    names = ["a", "a/b", "a%2Fb", "..", ".", "", "A b", "é", "x" * 300, "x" * 299 + "y"]
    folders = [folder_of(name) for name in names]
    assert len(set(folders)) == len(names)
    assert all("/" not in folder and not folder.startswith(".") and 0 < len(folder) < 240 for folder in folders)


def test_files_and_events(tmp_path: Path) -> None:
    media, events, notes = recorder(tmp_path)
    media.text("words", "first")
    media.text("words", "second")
    media.table("table", ["a"], [[1]])
    media.histogram("h", [1.0, 2.0], 1)
    media.image("val/x", torch.zeros(3, 2, 2))
    assert (tmp_path / "media/words/7.txt").read_text() == "second"
    assert events[1:] == [
        {"media": "text", "name": "words", "step": 7, "file": "media/words/7.txt"},
        {"media": "table", "name": "table", "step": 7, "file": "media/table/7.json"},
        {"media": "histogram", "name": "h", "step": 7, "counts": [2], "edges": [1.0, 2.0]},
        {"media": "image", "name": "val/x", "step": 7, "file": "media/val%2Fx/7.png"},
    ]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["7.json", "7.png", "7.txt"]
    assert notes == []


def test_a_figure_is_an_image(tmp_path: Path) -> None:
    figures = pytest.importorskip("matplotlib.figure", reason="Matplotlib is not installed: pip install matplotlib")
    figure = figures.Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 3, 2])
    media, events, notes = recorder(tmp_path)
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state(legacy=False)["state"]["key"]
    media.figure("f", figure)
    assert (events[0]["media"], notes) == ("image", [])
    content = (tmp_path / events[0]["file"]).read_bytes()
    assert content.startswith(b"\x89PNG")
    assert content[16:24] == bytes([0, 0, 0, 100, 0, 0, 0, 50])
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert np.array_equal(np.random.get_state(legacy=False)["state"]["key"], numpy_before)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    media, events, _ = recorder(tmp_path, rank=1)
    media.text("words", "first")
    media.image("i", "no image")
    assert (list(tmp_path.iterdir()), events) == ([], [])


def test_what_cannot_be_recorded_is_one_note(tmp_path: Path) -> None:
    media, events, notes = recorder(tmp_path)
    for _ in range(3):
        media.image("x", torch.zeros(5))
    (tmp_path / "media").write_text("a file is in the way")
    for name in ("a", "b"):
        media.text(name, "words")
    assert events == []
    assert notes == [
        "The image 'x' is not recorded: An image is [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, not [5]. "
        "Training continues.",
        "The text 'a' is not recorded: Not a directory. Training continues.",
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_note(tmp_path: Path) -> None:
    media, events, notes = recorder(tmp_path)
    (tmp_path / "media" / "a").mkdir(parents=True)
    (tmp_path / "media" / "a" / ".7.txt.part").symlink_to("/dev/full")
    media.text("a", "words" * 10_000)
    assert notes == ["The text 'a' is not recorded: No space left on device. Training continues."]
    assert events == []


def test_names_that_some_trackers_cannot_store_are_changed_with_one_note(tmp_path: Path) -> None:
    media, events, notes = recorder(tmp_path)
    names = ["a" * 5000, "a" * 4999 + "b", "é" * 150, "../../x", "/etc/x", "a//b", ".", "", "a\0b", "\ud800"]
    for name in names:
        media.text(name, "words")
        media.histogram(name, [1.0], 1)
    assert len(notes) == 1
    assert notes[0].startswith(f"The text {'a' * 40!r}... is recorded as {'a' * 40!r}..., because a name ")
    found = [event["name"] for event in events]
    assert len(set(found)) == len(names) - 1, "of all, only . and the empty name become one"
    assert all(len(name.encode()) <= 90 and not {"", ".", ".."} & set(name.split("/")) for name in found)
    assert all(name.isprintable() for name in found)
    assert found[6:12:2] == ["_/_/x", "_/etc/x", "a/_/b"]
    assert all((tmp_path / event["file"]).is_file() for event in events if "file" in event)
    media.text("val/sample 1", "words")
    assert (events[-1]["name"], len(notes)) == ("val/sample 1", 1)
