"""Pictures of any kind become tensors of one size, damaged ones are named, and a folder is scanned once."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.house.sources import ROOT
from tests.pictures import damaged_files, jpeg, need_pillow, settle, write_pictures, write_tar
from tests.unit.test_shard_writer import write as write_shards
from unisono import DataError, SettingsError, Stream
from unisono.recipes.vision import drawn_shapes, picture_index
from unisono.recipes.vision.drawn_shapes import SHAPES, TEXTURES, class_names, draw_class, draw_scene, write_scenes
from unisono.recipes.vision.picture_files import SUFFIXES, TarPicture, pillow, read_picture, without_damaged
from unisono.recipes.vision.picture_index import PictureIndex, index_pictures
from unisono.recipes.vision.picture_sets import PictureFolder, load_sets
from unisono.recipes.vision.picture_transforms import CenterView, RandomView, random_box

VIEWS = RandomView(16), CenterView(16)
MORE: dict[str, Any] = {"classes": None, "window": 10, "skip": False, "drawn": 10}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_pillow()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# -- files


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr", "LA", "RGBA", "I;16"])
def test_a_picture_of_any_mode_becomes_the_same_colors(mode: str, tmp_path: Path) -> None:
    """The picture is gray. Half of its height is brighter, and transparent where the mode has transparency."""
    gray = np.repeat(np.array([[64], [192]], np.uint8), 40, 0).repeat(80, 1)  # [80, 80]
    picture = pillow().fromarray(gray)
    if mode == "I;16":
        picture = pillow().fromarray(gray.astype(np.uint16) << 8)
    elif "A" in mode:
        picture = picture.convert(mode)
        picture.putalpha(pillow().fromarray(np.where(gray == 64, 255, 0).astype(np.uint8)))
    else:
        picture = picture.convert(mode)
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr", "RGB", "L") else "a.png")
    picture.save(path, **({"quality": 100} if path.suffix == ".jpg" else {}))
    found = read_picture(path, str(path), CenterView(8)).float()
    assert found.shape == (3, 8, 8)
    dark, bright = found[:, :3].mean(), found[:, 5:].mean()
    if mode == "1":  # dithered
        assert dark < 100 < 150 < bright
    else:
        assert dark == pytest.approx(64, abs=3)
        assert bright == pytest.approx(255 if "A" in mode else 192, abs=3)


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path: Path) -> None:
    picture = pillow().new("RGBA", (20, 20), (255, 0, 0, 255)).convert("P")
    picture.save(tmp_path / "a.png", transparency=bytes([0] * 256))
    assert read_picture(tmp_path / "a.png", "a", CenterView(4)).float().mean() == 255


@pytest.mark.parametrize("size", [(1, 1), (1, 60), (300, 2), (5, 5)])
def test_a_tiny_picture_is_enlarged(size: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "tiny.png"
    pillow().new("RGB", size, (10, 20, 30)).save(path)
    for view in VIEWS:
        random.seed(1)
        found = read_picture(path, str(path), view)
        assert found.shape == (3, 16, 16)
    assert found.flatten(1).float().mean(1).tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("text.jpg", "It is no picture: it has 20 bytes and begins with b'This is '"),
        ("empty.png", "It is no picture: it has 0 bytes and is empty"),
        ("cut.jpg", "Pillow reports: image file is truncated"),
        ("header.jpg", "Pillow reports: .*[Tt]runcated|It is no picture"),
    ],
)
def test_a_file_that_is_no_picture_is_named(name: str, fact: str, tmp_path: Path) -> None:
    path = tmp_path / name
    content = damaged_files()[name]
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"(?s)Cannot read the picture {path}.*({fact}).*or: rm {path}, or do this"):
        read_picture(path, str(path), VIEWS[1], "do this")
    with pytest.raises(DataError, match=f"(?s)Cannot read the picture s/{name}.*({fact}).*write the tar again"):
        read_picture(content, f"s/{name}", VIEWS[1])


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "link.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(DataError, match=r"(?s)link.jpg.*The file is gone, or is a link to nothing.*rm -f"):
        read_picture(tmp_path / "link.jpg", "link.jpg", VIEWS[1])


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    """As root, become another user for the read."""
    path = tmp_path / "secret.jpg"
    path.write_bytes(jpeg())
    path.chmod(0)
    with (
        pytest.raises(DataError, match=r"(?s)secret.jpg.*no permission.*chmod a\+r .*secret.jpg"),
        _no_root(),
    ):
        read_picture(path, str(path), VIEWS[1])


@contextmanager
def _no_root() -> Iterator[None]:
    """Be another user than root, who may read every file."""
    pillow().init()  # it loads files of its own
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_large_jpeg_is_decoded_at_an_eighth_of_its_size(tmp_path: Path) -> None:
    path = tmp_path / "large.jpg"
    pillow().new("RGB", (1600, 1200), (90, 90, 90)).save(path)
    sizes = []

    def view(opened: Any) -> torch.Tensor:
        found = CenterView(100)(opened)
        sizes.append(opened.size)
        return found

    assert read_picture(path, "large", view).float().mean() == 90
    assert sizes == [(200, 150)]


def test_random_views_depend_on_the_seed_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg())
    seen = list[torch.Tensor]()
    for seed in (1, 2, 1):
        random.seed(seed)
        torch.manual_seed(len(seen))
        np.random.seed(len(seen))
        seen.append(read_picture(tmp_path / "a.jpg", "a", VIEWS[0]))
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


def test_random_boxes_are_inside_and_large_enough() -> None:
    for width, height in ((100, 80), (7, 300), (1, 1)):
        for _ in range(200):
            left, top, right, bottom = random_box(width, height, 0.4)
            assert 0 <= left < right <= width + 1e-9
            assert 0 <= top < bottom <= height + 1e-9
            area, ratio = (right - left) * (bottom - top), (right - left) / (bottom - top)
            assert area >= min(0.4 * width * height, min(width, height) ** 2 * 4 / 3) - 1e-9
            assert 0.74 < ratio < 1.34


def test_damaged_samples_are_skipped_or_raised(caplog: pytest.LogCaptureFixture) -> None:
    def read(number: int) -> int:
        if number % 2:
            raise DataError(f"Cannot read {number}.", "It is odd.")
        return number

    assert without_damaged([0, 1, 2], read, skip=True) == [0, 2]
    assert "Skipped sample 1: Cannot read 1. It is odd." in caplog.text
    with pytest.raises(DataError, match="Cannot read 1"):
        without_damaged([0, 1, 2], read, skip=False)
    with pytest.raises(DataError, match="All 2 samples of a micro-batch are damaged"):
        without_damaged([1, 3], read, skip=True)


# -- tar files


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"a.cls": b"1"}, "The sample a has no picture.*It has cls"),
        ({"a.jpg": b"x"}, "The sample a has no label.*It has jpg"),
        ({"a.jpg": b"x", "a.cls": b"7"}, "The label 7 of the sample a is out of range.*from 0 to 2.*--set classes=8"),
        ({"a.jpg": b"x", "a.cls": b"-1"}, "The label -1 of the sample a is out of range.*write the tar again"),
        ({"a.jpg": b"x", "a.cls": b"1"}, "Cannot read the picture a.jpg.*It is no picture: it has 1 bytes"),
        ({"a.jpg": b"x", "a.cls": b"one"}, "Sample 0 of the shard .*a.tar is damaged.*invalid literal"),
    ],
)
def test_a_wrong_sample_of_a_tar_is_named(members: dict[str, bytes], error: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", members)
    stream = Stream.tar(tmp_path / "a.tar", map=TarPicture(VIEWS[1], classes=3))
    with pytest.raises(DataError, match=f"(?s){error}"):
        stream[0]


def test_shards_have_the_classes_of_their_index(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data", classes=4)
    shutil.rmtree(folder / "val" / "circle-plain")
    for part in ("train", "val"):
        write_shards(folder / part, tmp_path / "shards" / part, 30_000)
    sets = load_sets(str(tmp_path / "shards"), None, VIEWS, **MORE)
    assert (len(sets.classes), len(sets.train), len(sets.valid)) == (4, 90, 15)  # type: ignore[arg-type]
    assert "90 pictures in " in sets.summary
    assert {int(label) for _, label in (sets.valid[n] for n in range(15))} == {1, 2, 3}
    with pytest.raises(SettingsError, match=r"(?s)Shards need the setting valid.*--set valid=SHARDS"):
        load_sets(str(tmp_path / "shards" / "train"), None, VIEWS, **MORE)
    with pytest.raises(SettingsError, match=r"(?s)Cannot use classes=4 with the shards in .*--set classes=none"):
        load_sets(str(tmp_path / "shards"), None, VIEWS, **{**MORE, "classes": 4})
    parts = str(tmp_path / "shards" / "val"), str(tmp_path / "shards" / "train")
    with pytest.raises(DataError, match=r"(?s)train has the class circle-plain, and .*val does not.*rm -r FOLDER/circ"):
        load_sets(*parts, VIEWS, **MORE)
    write_shards(folder / "val", tmp_path / "files", form="files")
    with pytest.raises(DataError, match=r"(?s)files have no classes.*--form classes"):
        load_sets(str(tmp_path / "files"), parts[0], VIEWS, **MORE)


# -- folders


def test_an_index_has_all_files(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data")
    (folder / "train" / "circle-plain" / "notes.txt").write_text("ignored")
    (folder / "train" / ".hidden").mkdir()
    index = index_pictures(folder / "train")
    assert index.classes == ("circle-plain", "square-plain", "triangle-plain")
    assert [index.path(n) for n in range(len(index))] == sorted((folder / "train").rglob("*.jpg"))
    assert [index.classes[label] for label in index.labels] == [index.path(n).parent.name for n in range(len(index))]
    assert index.ignored == 1
    assert index.held.sum() == 9  # a tenth of each class
    assert index.names.nbytes + index.ends.nbytes + index.labels.nbytes < 30 * len(index)


def test_a_folder_is_scanned_again_only_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, scans = write_pictures(tmp_path / "data") / "train", list[Path]()
    scan = picture_index._scan  # noqa: SLF001

    def counted(path: Path) -> PictureIndex:
        scans.append(path)
        return scan(path)

    monkeypatch.setattr(picture_index, "_scan", counted)
    first = index_pictures(folder)
    again = index_pictures(folder)
    assert len(scans) == 1
    assert [again.path(n) for n in range(len(again))] == [first.path(n) for n in range(len(first))]
    assert (again.labels.tolist(), again.held.tolist()) == (first.labels.tolist(), first.held.tolist())
    (folder / "circle-plain" / "new.jpg").write_bytes(jpeg())  # the folder has changed just now: it is not cached
    assert [len(index_pictures(folder)) for _ in range(2)] == [len(first) + 1] * 2
    assert len(scans) == 3
    settle(folder)
    for _ in range(2):
        index_pictures(folder)
    assert len(scans) == 4
    (cached,) = (tmp_path / "cache" / "unisono" / "pictures").iterdir()
    for content in (b"", b"damaged", cached.read_bytes()[:-30]):
        cached.write_bytes(content)
        assert len(index_pictures(folder)) == len(first) + 1
    assert len(scans) == 7


def test_a_folder_without_classes_or_pictures_is_refused(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data") / "train"
    with pytest.raises(DataError, match=r"(?s)Cannot find pictures in .*nowhere.*No such file.*--set data=FOLDER"):
        index_pictures(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"(?s)Cannot find pictures.*Not a directory"):
        index_pictures(next(folder.rglob("*.jpg")))
    (folder / "empty").mkdir()
    (folder / "other").mkdir()
    (folder / "other" / "a.txt").write_text("no picture")
    with pytest.raises(DataError) as caught:
        index_pictures(folder)
    assert f"The class {folder / 'empty'} has no pictures.\n  It is empty." in str(caught.value)
    assert f"Next: rmdir {folder / 'empty'}, or add pictures." in str(caught.value)
    assert f"The class {folder / 'other'} has no pictures.\n  It has 1 other entries (a.txt)." in str(caught.value)
    (tmp_path / "one" / "only").mkdir(parents=True)
    with pytest.raises(DataError, match=r"(?s)fewer than two classes.*It has 1 folders \(only\).*mkdir .*OTHER_CLASS"):
        index_pictures(tmp_path / "one")


def test_validation_pictures_have_the_labels_of_the_training_set(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data", classes=4)
    for path in (folder / "val" / "circle-plain").iterdir():
        path.unlink()
    (folder / "val" / "circle-plain").rmdir()
    sets = load_sets(str(folder), None, VIEWS, **MORE)
    assert sets.summary.endswith("90 pictures for training, 15 for validation, 4 classes")
    assert {int(label) for _, label in (sets.valid[n] for n in range(15))} == {1, 2, 3}
    (folder / "val" / "circle-plain").symlink_to(folder / "train" / "circle-plain")
    (folder / "val" / "whale").symlink_to(folder / "train" / "circle-plain")
    with pytest.raises(DataError, match=r"(?s)val has the class whale, and .*train does not.*1 of its 5 classes"):
        load_sets(str(folder), None, VIEWS, **MORE)


def test_a_part_is_held_out_without_a_validation_set(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "data") / "train"
    sets = load_sets(str(folder), None, VIEWS, **MORE)
    assert isinstance(sets.train, PictureFolder)
    assert isinstance(sets.valid, PictureFolder)
    assert (len(sets.train), len(sets.valid)) == (81, 9)
    assert sets.train.numbers is not None
    assert sets.valid.numbers is not None
    assert sorted([*sets.train.numbers, *sets.valid.numbers]) == list(range(90))
    for name in sets.classes:
        for path in sorted((folder / name).iterdir())[1:]:
            path.unlink()
    with pytest.raises(DataError, match=r"(?s)too few pictures for a validation set.*no class has two"):
        load_sets(str(folder), None, VIEWS, **MORE)


@pytest.mark.parametrize(
    ("data", "valid", "classes", "error"),
    [
        ("a.tar", None, 3, "Tar files need the setting valid.*--set valid="),
        ("a-{0..3}.tar", "b.tar", None, "Tar files need the setting classes.*--set classes=1000"),
        (None, None, 101, "Cannot draw pictures of 101 classes.*--set classes=20"),
        (".", None, 3, r"Cannot use classes=3 with the folder \.\..*--set classes=none"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    data: str | None, valid: str | None, classes: int | None, error: str
) -> None:
    with pytest.raises(SettingsError, match=f"(?s){error}"):
        load_sets(data, valid, VIEWS, **{**MORE, "classes": classes})


# -- drawn pictures


def test_drawn_pictures_are_a_function_of_their_numbers() -> None:
    assert len(set(class_names(100))) == 100 == len(SHAPES) * len(TEXTURES)
    first, again, other = draw_class(37, 5), draw_class(37, 5), draw_class(37, 6)
    assert np.array_equal(first, again)
    assert first.shape != other.shape or not np.array_equal(first, other)
    assert first.dtype == np.uint8
    assert all(48 <= side <= 96 for side in first.shape[:2])
    scene = next(scene for scene in map(draw_scene, range(50)) if len(scene.boxes) > 1)
    height, width = scene.pixels.shape[:2]
    assert all(
        x >= 0 and y >= 0 and w > 3 and h > 3 and x + w <= width and y + h <= height for x, y, w, h in scene.boxes
    )


def test_files_are_the_same_with_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_shapes, "CHUNK", 3)
    for workers in (1, 2):
        drawn_shapes.write_classes(tmp_path / f"classes-{workers}", 8, 2, 4, workers=workers)
        write_scenes(tmp_path / f"scenes-{workers}", 8, 4, workers=workers)
    for kind in ("classes", "scenes"):
        one, two = (
            {path.relative_to(tmp_path / f"{kind}-{n}"): path.read_bytes() for path in files}
            for n in (1, 2)
            if (files := [p for p in (tmp_path / f"{kind}-{n}").rglob("*") if p.is_file()])
        )
        assert one == two
        assert len(one) == 12 + 2 * (kind == "scenes")
        assert {path.suffix for path in one} <= SUFFIXES | {".json"}


SMALL_DISK = """
import os, subprocess, sys
os.makedirs(sys.argv[1])
if subprocess.run(["mount", "-n", "-t", "tmpfs", "-o", "size=200k", "tmpfs", sys.argv[1]]).returncode:
    sys.exit("no mount")
from functools import partial
from unisono import DataError
from unisono.recipes.vision import drawn_shapes
try:
    drawn_shapes.cached("some", partial(drawn_shapes.write_classes, pictures=300, classes=2, valid=2))
except DataError as error:
    print(error)
print(os.listdir(f"{sys.argv[1]}/unisono/drawn-shapes-1"))
"""


def test_a_disk_that_fills_while_pictures_are_drawn_is_named_and_freed(tmp_path: Path) -> None:
    need_pillow()
    words = ["unshare", "-m", sys.executable, "-c", SMALL_DISK, str(tmp_path / "disk")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "disk")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    if "no mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("needs root to mount a small disk")
    error, facts, remedy, files = done.stdout.splitlines()
    assert error == f"Cannot write drawn pictures to {tmp_path}/disk/unisono/drawn-shapes-1."
    assert facts.startswith("  The system reports: ")
    assert facts.endswith("MB free.")
    assert "export XDG_CACHE_HOME=FOLDER" in remedy
    assert files == "[]"


def test_the_cache_never_has_a_part_of_the_pictures(tmp_path: Path) -> None:
    def killed(folder: Path) -> None:
        (folder / "half").write_text("a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drawn_shapes.cached("some", killed)

    def whole(folder: Path) -> None:
        (folder / "whole").write_text("b")

    folder = drawn_shapes.cached("some", whole)
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert drawn_shapes.cached("some", killed) == folder
