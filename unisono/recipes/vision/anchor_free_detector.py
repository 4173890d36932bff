"""A one-stage detector without anchors: FCOS (arXiv 1904.01355) with two levels, losses and decoding included.

Each cell of two grids, one for every 8 and one for every 16 pixels, predicts a class, the distances to the four edges
of the object that it is in, and how near to the object's center it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRIDES = (8, 16)
LARGEST = (32.0, math.inf)
"""For each level, the largest distance from a cell to an edge of its object."""

RADIUS = 1.5
"""A cell near an object's center looks for the object: nearer than this number of strides."""

CANDIDATES = 100
"""Detections of a picture before those that overlap are removed."""


class Found(NamedTuple):
    """What the cells look for in a micro-batch."""

    labels: Tensor
    """int64 [batch, cells], -1 where there is no object"""
    boxes: Tensor
    """float32 [batch, cells, 4]"""


class Detector(nn.Module):
    """The model, for pictures whose width and height are multiples of 16.

    Args:
        classes: The number of classes.
        width: Channels of the first stage.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, width, 2), Residual(width, 2 * width), Residual(2 * width, 4 * width))
        self.deep = Residual(4 * width, 4 * width)
        self.join = nn.ModuleList(nn.Conv2d(4 * width, 2 * width, 1) for _ in STRIDES)
        self.class_tower, self.box_tower = (
            nn.Sequential(convolution(2 * width, 2 * width), convolution(2 * width, 2 * width)) for _ in range(2)
        )
        self.classify = nn.Conv2d(2 * width, classes, 3, padding=1)
        self.measure = nn.Conv2d(2 * width, 5, 3, padding=1)
        self.scales = nn.Parameter(torch.ones(len(STRIDES)))
        nn.init.constant_(self.classify.get_parameter("bias"), -math.log(99))  # at first, 1 % of cells have an object

    def forward(self, pictures: Tensor) -> Tensor:
        """Map bytes [batch, 3, size, size] to [batch, cells, classes + 5]: logits, distances in pixels, centerness."""
        fine = self.stem((pictures.float() - 114) / 64)
        coarse = self.join[1](self.deep(fine))
        fine = self.join[0](fine) + F.interpolate(coarse, scale_factor=2.0)
        levels = []
        for x, stride, scale in zip((fine, coarse), STRIDES, self.scales, strict=True):
            logits, measured = self.classify(self.class_tower(x)), self.measure(self.box_tower(x))
            distances = (scale * measured[:, :4]).clamp(max=6).exp() * stride
            levels.append(torch.cat((logits, distances, measured[:, 4:]), 1).flatten(2))
        return torch.cat(levels, 2).transpose(1, 2)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with a norm and an activation. Group norm treats each picture on its own."""
    norm = nn.GroupNorm(math.gcd(8, outputs), outputs)
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm, nn.ReLU())


class Residual(nn.Module):
    """Two convolutions with a residual connection, which halve the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(convolution(inputs, outputs, 2), convolution(outputs, outputs))
        self.past = nn.Conv2d(inputs, outputs, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, outputs, height / 2, width / 2]."""
        return self.past(x) + self.body(x)


def cells_of(size: int) -> Tensor:
    """Return the cells of pictures of this size: float32 [cells, 3] with x and y of their centers, and their stride."""
    levels = []
    for stride in STRIDES:
        centers = (torch.arange(size // stride) + 0.5) * stride
        y, x = torch.meshgrid(centers, centers, indexing="ij")
        levels.append(torch.stack((x, y, torch.full_like(x, stride)), 2).flatten(0, 1))
    return torch.cat(levels)


def assign(cells: Tensor, boxes: Tensor, labels: Tensor) -> Found:
    """Return what each cell looks for: the smallest object around it whose center is near and whose size fits.

    Args:
        cells: See cells_of.
        boxes: float32 [batch, objects, 4].
        labels: int64 [batch, objects], -1 where there is no object.
    """
    x, y, stride = cells.to(boxes.device).unbind(1)
    distances = distances_to(x[:, None], y[:, None], boxes[:, None])  # [batch, cells, objects, 4]
    centers = (boxes[..., :2] + boxes[..., 2:]) / 2
    offset = (torch.stack((x, y), 1)[:, None] - centers[:, None]).abs().amax(3)
    largest = distances.amax(3)
    most = torch.where(stride == STRIDES[0], LARGEST[0], LARGEST[1])[:, None]
    least = torch.where(stride == STRIDES[0], 0.0, LARGEST[0])[:, None]
    fits = (distances.amin(3) > 0) & (offset < RADIUS * stride[:, None]) & (largest > least) & (largest <= most)
    area = ((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]))[:, None]
    smallest, index = torch.where(fits & (labels >= 0)[:, None], area, math.inf).min(2)
    found = torch.where(smallest < math.inf, labels.gather(1, index), -1)
    return Found(found, boxes.gather(1, index[..., None].expand(-1, -1, 4)))


def distances_to(x: Tensor, y: Tensor, boxes: Tensor) -> Tensor:
    """Return the distances from points to the left, top, right and bottom of boxes: [..., 4]."""
    return torch.stack((x - boxes[..., 0], y - boxes[..., 1], boxes[..., 2] - x, boxes[..., 3] - y), -1)


def detection_loss(output: Tensor, cells: Tensor, boxes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and their weight: the cells that look for an object, and one for each picture.

    FCOS divides by the number of such cells in the whole batch. With a weight, a step does this for any division of the
    batch. The part for pictures keeps the weight of a batch without objects above 0.
    """
    found = assign(cells, boxes, labels)
    positive, logits, centerness = found.labels >= 0, output[..., :-5], output[..., -1]
    truth = (found.labels[..., None] == torch.arange(logits.shape[2], device=logits.device)).float()
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    wrong = (truth - logits.sigmoid()).abs()
    focal = (0.25 * truth + 0.75 * (1 - truth)) * wrong.square() * entropy  # arXiv 1708.02002
    x, y, _ = cells.to(output.device).unbind(1)
    distances = distances_to(x, y, found.boxes).clamp(min=1e-3)
    near = [distances[..., i::2].amin(-1) / distances[..., i::2].amax(-1) for i in (0, 1)]
    central = F.binary_cross_entropy_with_logits(centerness, (near[0] * near[1]).sqrt(), reduction="none")
    overlap = 1 - generalized_iou(output[..., -5:-1], distances)
    losses = focal.sum() + torch.where(positive, overlap + central, 0.0).sum()
    return losses, positive.sum() + len(output)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the generalized IoU (arXiv 1902.09630) of boxes given by distances [..., 4] from one point in both."""
    both, either = torch.minimum(a, b), torch.maximum(a, b)
    areas = [(d[..., 0] + d[..., 2]) * (d[..., 1] + d[..., 3]) for d in (a, b, both, either)]
    union = areas[0] + areas[1] - areas[2]
    return areas[2] / union - (areas[3] - union) / areas[3]


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of each box [..., n, 4] with each box [..., m, 4]: [..., n, m]."""
    a, b = a[..., :, None, :], b[..., None, :, :]
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    both, *areas = (s[..., 0] * s[..., 1] for s in (sides, a[..., 2:] - a[..., :2], b[..., 2:] - b[..., :2]))
    return both / (areas[0] + areas[1] - both).clamp(min=1e-9)


def detections(output: Tensor, cells: Tensor, most: int = 20, overlap: float = 0.6) -> Tensor:
    """Return the detections of each picture: [batch, most, 6] with left, top, right, bottom, score and label.

    Of two that overlap and have one label, the one with the lower score is removed. Unused rows have a score of -1.
    """
    x, y, _ = cells.to(output.device).unbind(1)
    logits, distances = output[..., :-5], output[..., -5:-1]
    scores = (logits.sigmoid() * output[..., -1:].sigmoid()).sqrt().flatten(1)
    scores, index = scores.topk(min(max(most, CANDIDATES), scores.shape[1]))
    labels, cell = index % logits.shape[2], index // logits.shape[2]
    edges = torch.stack((x, y, x, y), 1) + distances * distances.new_tensor([-1, -1, 1, 1])
    boxes = edges.gather(1, cell[..., None].expand(-1, -1, 4))
    same = (box_iou(boxes, boxes) > overlap) & (labels[:, :, None] == labels[:, None])
    keep = torch.ones_like(scores, dtype=torch.bool)
    for place in range(scores.shape[1] - 1):  # from the highest score to the lowest
        keep[:, place + 1 :] &= ~(same[:, place, place + 1 :] & keep[:, place, None])
    scores, index = torch.where(keep, scores, -1.0).topk(min(most, scores.shape[1]))
    rows = torch.cat((boxes, labels[..., None].float()), 2).gather(1, index[..., None].expand(-1, -1, 5))
    return torch.cat((rows[..., :4], scores[..., None], rows[..., 4:]), 2)
