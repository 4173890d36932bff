"""Parts of the detector: targets, losses, detections, average precision; and annotations in COCO's format."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pictures import need_pillow
from unisono import DataError
from unisono.recipes.vision.anchor_free_detector import (
    Detector,
    assign,
    box_iou,
    cells_of,
    detection_loss,
    detections,
    generalized_iou,
)
from unisono.recipes.vision.average_precision import average_precisions
from unisono.recipes.vision.box_annotations import BoxedPictures, pad_boxes, read_annotations
from unisono.recipes.vision.drawn_shapes import SCENE_SHAPES, write_scenes
from unisono.recipes.vision.picture_files import pillow

CELLS = cells_of(64)


def test_cells_of_two_levels() -> None:
    assert CELLS.shape == (64 + 16, 3)
    assert CELLS[0].tolist() == [4, 4, 8]
    assert CELLS[9].tolist() == [12, 12, 8]
    assert CELLS[-1].tolist() == [56, 56, 16]


def test_cells_look_for_the_smallest_object_near_them_at_its_level() -> None:
    boxes = torch.tensor([[[2.0, 2, 22, 22], [8, 8, 16, 16], [2, 0, 62, 62], [0, 0, 9, 9]]])
    found = assign(CELLS, boxes, torch.tensor([[3, 1, 2, -1]]))
    by_cell = {tuple(CELLS[i].tolist()): int(found.labels[0, i]) for i in range(len(CELLS)) if found.labels[0, i] >= 0}
    assert by_cell.pop((12, 12, 8)) == 1  # in both, and the second is smaller
    assert {place for place, label in by_cell.items() if label == 3} == {
        (x, y, 8) for x in (4, 12, 20) for y in (4, 12, 20)
    } - {(12, 12, 8)}
    assert {place for place, label in by_cell.items() if label == 2} == {
        (x, y, 16) for x in (24, 40) for y in (8, 24, 40)
    }
    cell = next(i for i in range(len(CELLS)) if CELLS[i].tolist() == [12, 12, 8])
    assert found.boxes[0, cell].tolist() == [8, 8, 16, 16]
    assert (assign(CELLS, boxes, torch.full((1, 4), -1)).labels == -1).all()


def test_generalized_iou_of_boxes_by_distances() -> None:
    a = torch.tensor([1.0, 1, 1, 1])
    assert generalized_iou(a, a) == 1
    assert generalized_iou(a, 2 * a) == pytest.approx(4 / 16)
    wide = torch.tensor([3.0, 1, 1, 1])  # both: 4, union: 8, around both: 8
    assert generalized_iou(a, wide) == pytest.approx(0.5)
    tall = torch.tensor([1.0, 3, 1, 1])  # with `wide` both: 4, union: 12, around both: 16
    assert generalized_iou(wide, tall) == pytest.approx(4 / 12 - 4 / 16)


def test_iou_of_boxes() -> None:
    a = torch.tensor([[0.0, 0, 2, 2], [5, 5, 6, 6]])
    b = torch.tensor([[1.0, 1, 3, 3], [0, 0, 2, 2], [0, 0, 0, 0]])
    assert torch.allclose(box_iou(a, b), torch.tensor([[1 / 7, 1, 0], [0, 0, 0]]))


def test_loss_is_small_for_the_right_output_and_its_gradient_is_finite() -> None:
    boxes, labels = torch.tensor([[[8.0, 8, 24, 24]], [[0, 0, 0, 0]]]), torch.tensor([[1], [-1]])
    found = assign(CELLS, boxes, labels)
    right = torch.zeros(2, len(CELLS), 3 + 5)
    right[..., :3] = -12.0
    right[0, found.labels[0] >= 0, 1] = 12.0
    x, y = CELLS[:, 0], CELLS[:, 1]
    right[0, :, 3:7] = torch.stack((x - 8, y - 8, 24 - x, 24 - y), 1).clamp(min=0.5)
    right[1, :, 3:7] = 4.0
    right.requires_grad_()
    wrong = right.detach().roll(1, 2).abs().requires_grad_()
    (small, weight), (large, _) = (detection_loss(output, CELLS, boxes, labels) for output in (right, wrong))
    count = int((found.labels >= 0).sum())
    assert weight == count + 2
    assert small < large
    assert small <= count * 0.7 + 0.1  # what remains is the entropy of the centerness
    small.backward()
    assert right.grad is not None
    assert right.grad.isfinite().all()
    assert (right.grad[1, :, 3:] == 0).all()  # a picture without objects teaches classes only


def test_overlapping_detections_of_a_class_are_removed() -> None:
    output = torch.full((1, len(CELLS), 2 + 5), -9.0)
    output[..., 2:6] = 1.0
    for cell, label, logit in ((9, 0, 3.0), (10, 0, 2.0), (9, 1, 1.0), (63, 1, 2.5)):
        output[0, cell, label] = logit
        output[0, cell, 6] = 9.0
    output[0, 9, 2:6], output[0, 10, 2:6] = torch.tensor([10.0, 10, 18, 10]), torch.tensor([18.0, 10, 10, 10])
    rows = detections(output, CELLS, most=4)[0]
    assert rows[:3, 5].tolist() == [0, 1, 1]
    assert rows[0, :4].tolist() == rows[2, :4].tolist() == [2, 2, 30, 22]
    assert rows[0, 4] > rows[1, 4] > rows[2, 4] > 0.5 > rows[3, 4]
    assert detections(output[:, :2], CELLS[:2], most=20).shape == (1, 4, 6)


def test_detections_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(1)
    model = Detector(3, 4).eval()
    pictures = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    with torch.no_grad():
        output = model(pictures)
    assert output.shape == (4, 80, 8)
    assert torch.equal(detections(output, CELLS)[2:3], detections(output[2:3], CELLS))


def row(box: tuple[float, ...], score: float, label: int) -> list[float]:
    return [*box, score, float(label)]


def test_average_precision_of_known_curves() -> None:
    """Class 0 has two objects and three detections: right, wrong, right. Class 1 is missed, class 2 does not exist."""
    one, two, far = (0.0, 0.0, 10.0, 10.0), (20.0, 0.0, 30.0, 10.0), (50.0, 50.0, 60.0, 60.0)
    none = row((0.0, 0.0, 0.0, 0.0), -1, 0)
    found = torch.tensor(
        [
            [row(one, 0.9, 0), row(far, 0.8, 0), none],
            [row((20.0, 0.0, 31.0, 10.0), 0.3, 0), row(one, 0.95, 2), none],
        ]
    )
    boxes, labels = torch.tensor([[one, (0.0, 0.0, 0.0, 0.0)], [two, far]]), torch.tensor([[0, -1], [0, 1]])
    values = average_precisions(found, boxes, labels, classes=3)
    assert values == [pytest.approx(0.5 * 1 + 0.5 * 2 / 3), 0.0, None]
    twice = torch.tensor([[row(one, 0.9, 0), row(one, 0.8, 0)]])  # the second one is wrong
    assert average_precisions(twice, boxes[:1], labels[:1], 1) == [1.0]
    assert average_precisions(twice.flip(1), boxes[:1], labels[:1], 1) == [1.0]
    assert average_precisions(twice, torch.tensor([[one, two]]), torch.tensor([[0, 0]]), 1) == [0.5]


# -- annotations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    need_pillow()
    write_scenes(tmp_path / "data", 6, 2)
    return tmp_path / "data"


def test_annotations_are_those_of_the_scenes(folder: Path) -> None:
    found = read_annotations(folder / "train.json")
    assert found.classes == SCENE_SHAPES
    assert [picture.path for picture in found.pictures] == sorted((folder / "train").iterdir())
    assert any(not picture.boxes for picture in found.pictures)
    picture = next(picture for picture in found.pictures if picture.boxes)
    left, top, right, bottom = picture.boxes[0]
    with pillow().open(picture.path) as opened:
        assert 0 <= left < right <= opened.width
        assert 0 <= top < bottom <= opened.height


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"category_id": 6}, "Its category_id is 6, and the categories are 1, 2, 3, 4, 5."),
        ({"category_id": None}, "Its category_id is None, and"),
        ({"category_id": [1]}, r"Its category_id is \[1\], and"),
        ({"image_id": {}}, "Its image_id is {}, and no image has this id."),
        ({"image_id": 77}, "Its image_id is 77, and no image has this id."),
        ({"bbox": [1, 2, 3]}, r"Its bbox is \[1, 2, 3\], and must be four numbers"),
        ({"bbox": [1, 2, 0, 5]}, r"Its bbox is \[1, 2, 0, 5\]: width and height must be positive"),
        ({"bbox": [1, 2, float("nan"), 5]}, "width and height must be positive"),
        ({"bbox": [1, 2, 500, 5]}, r"Its bbox is \[1, 2, 500, 5\], and its picture ends at \d+ x \d+"),
    ],
)
def test_a_wrong_annotation_is_named(folder: Path, change: dict[str, Any], problem: str) -> None:
    path = folder / "train.json"
    content = json.loads(path.read_text())
    content["annotations"][1] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"(?s)Annotation 1 of {path} is wrong.*{problem}.*correct it, or remove it"):
        read_annotations(path)


def test_annotations_that_cannot_be_read_are_named(folder: Path) -> None:
    path = folder / "train.json"
    content = json.loads(path.read_text())
    for text, error in (
        ("{", "It is not in COCO's format: JSONDecodeError"),
        ("[]", "It is not in COCO's format: TypeError"),
        ("{}", "It is not in COCO's format: KeyError: 'categories'"),
        (json.dumps({**content, "annotations": []}), "No picture of .* has an object"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=error):
            read_annotations(path)
    with pytest.raises(DataError, match=r"(?s)Cannot read annotations from .*other.json.*No such file.*--set data="):
        read_annotations(folder / "other.json")


def test_a_picture_of_another_size_is_named(folder: Path) -> None:
    picture = read_annotations(folder / "train.json").pictures[0]
    width, height = picture.size
    BoxedPictures([picture], 48)[0]
    pillow().new("RGB", (200, 100)).save(picture.path)
    with pytest.raises(
        DataError, match=rf"(?s)The boxes of {picture.path} are of .*200 x 100 pixels, .* {width:g} x {height:g}"
    ):
        BoxedPictures([picture], 48)[0]


def test_annotations_that_are_none_are_named(folder: Path) -> None:
    content = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps({**content, "annotations": [7]}))
    with pytest.raises(DataError, match=r"(?s)Annotation 0 of .* is wrong.*It is '7', and must be an object"):
        read_annotations(folder / "train.json")


def test_crowds_are_left_out(folder: Path) -> None:
    content = json.loads((folder / "train.json").read_text())
    content["annotations"][0]["iscrowd"] = 1
    (folder / "train.json").write_text(json.dumps(content))
    found = read_annotations(folder / "train.json")
    assert found.crowds == 1
    assert sum(len(picture.labels) for picture in found.pictures) == len(content["annotations"]) - 1


def test_boxes_move_with_the_pixels(folder: Path) -> None:
    """A white box in a black picture stays inside of its box after scaling, moving and flipping."""
    pillow_ = pillow()
    picture = pillow_.new("RGB", (80, 40))
    picture.paste((255, 255, 255), (10, 5, 30, 25))
    picture.save(folder / "white.png")
    found = read_annotations(folder / "train.json").pictures[0]
    boxed = type(found)(folder / "white.png", [[10.0, 5.0, 30.0, 25.0]], [2])
    for jitter in (None, 0.0):
        for seed in range(8):
            random.seed(seed)
            pixels, boxes, labels = BoxedPictures([boxed], 48, jitter=jitter)[0]
            assert (pixels.shape, boxes.shape, labels.tolist()) == ((3, 48, 48), (1, 4), [2])
            rows, columns = ((pixels[0] > 160).any(dim).nonzero() for dim in (1, 0))
            edges = [float(columns[0]), float(rows[0]), float(columns[-1]) + 1, float(rows[-1]) + 1]
            assert edges == pytest.approx(boxes[0].tolist(), abs=0.8)
    assert edges != pytest.approx([6, 3, 18, 15], abs=0.8)


def test_objects_are_padded_to_the_largest_number() -> None:
    pixels = torch.zeros(3, 4, 4, dtype=torch.uint8)
    samples = [(pixels, torch.ones(n, 4), torch.full((n,), n)) for n in (2, 0, 1)]
    batch = pad_boxes(samples)
    assert [tensor.shape for tensor in batch] == [(3, 3, 4, 4), (3, 2, 4), (3, 2)]
    assert batch[2].tolist() == [[2, 2], [-1, -1], [1, -1]]
    assert pad_boxes(samples, least=5)[2].shape == (3, 5)
    assert pad_boxes([(pixels, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))])[2].tolist() == [[-1]]
