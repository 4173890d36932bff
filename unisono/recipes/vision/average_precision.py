"""Average precision of detections, as COCO defines it: the area under the curve of precision over recall."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.recipes.vision.anchor_free_detector import box_iou


def average_precisions(
    found: Tensor, boxes: Tensor, labels: Tensor, classes: int, overlap: float = 0.5
) -> list[float | None]:
    """Return the average precision of each class; None if no picture has an object of it.

    Args:
        found: [pictures, detections, 6] with left, top, right, bottom, score and label; scores below 0 do not count.
        boxes: [pictures, objects, 4], the true ones.
        labels: [pictures, objects], -1 where there is no object.
        classes: The number of classes.
        overlap: The least intersection over union of a right detection.
    """
    return [_average_precision(found, boxes, labels == label, label, overlap) for label in range(classes)]


def _average_precision(found: Tensor, boxes: Tensor, true: Tensor, label: int, overlap: float) -> float | None:
    total = int(true.sum())
    if not total:
        return None
    picture, place = ((found[..., 5] == label) & (found[..., 4] >= 0)).nonzero(as_tuple=True)
    order = found[picture, place, 4].argsort(descending=True, stable=True)
    picture, place = picture[order], place[order]
    ious = torch.where(true[picture], box_iou(found[picture, place, None, :4], boxes[picture])[:, 0], -1.0)
    free, hits = true.clone(), torch.zeros(len(picture), dtype=torch.float64)
    for detection, row in enumerate(picture.tolist()):
        best, index = torch.where(free[row], ious[detection], -1.0).max(0)
        if best >= overlap:
            free[row, index], hits[detection] = False, 1
    right = hits.cumsum(0)
    precision = right / torch.arange(1, len(hits) + 1, dtype=torch.float64)
    envelope = precision.flip(0).cummax(0).values.flip(0)  # the highest precision at this recall or a higher one
    return float((envelope * hits).sum() / total)
