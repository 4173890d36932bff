"""ResNet-50 (arXiv 1512.03385) with its stride in the 3x3 convolutions, at any width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

STAGES = (3, 4, 6, 3)
"""Blocks of each stage; each stage has twice the channels of the one before it, and half its resolution."""

EXPANSION = 4
"""The channels of a block's output, relative to those of its 3x3 convolution."""

SMALL = 96
"""Pictures up to this size in pixels begin with a smaller stem, which keeps twice the resolution."""


class BottleneckResNet(nn.Module):
    """The model: 25,557,032 parameters with a width of 64 and 1,000 classes.

    Args:
        classes: The number of classes.
        width: Channels of the 3x3 convolutions in the first stage.
        size: Width and height of pictures, in pixels.
    """

    def __init__(self, classes: int, width: int = 64, size: int = 224) -> None:
        super().__init__()
        small = size <= SMALL
        self.stem = nn.Conv2d(3, width, 3 if small else 7, 2, padding=1 if small else 3, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        blocks = list[nn.Module]()
        inputs = width
        for stage, depth in enumerate(STAGES):
            for block in range(depth):
                middle = width * 2**stage
                blocks.append(Bottleneck(inputs, middle, stride=2 if stage and not block else 1))
                inputs = EXPANSION * middle
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pictures: Tensor) -> Tensor:
        """Map normalized pictures [batch, 3, size, size] to logits [batch, classes]."""
        x = self.pool(F.relu(self.stem_norm(self.stem(pictures))))
        return self.head(self.blocks(x).mean((2, 3)))


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection, which starts as zero (arXiv 1706.02677)."""

    def __init__(self, inputs: int, middle: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * middle
        self.reduce, self.reduce_norm = nn.Conv2d(inputs, middle, 1, bias=False), nn.BatchNorm2d(middle)
        self.look = nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False)
        self.look_norm = nn.BatchNorm2d(middle)
        self.expand, self.expand_norm = nn.Conv2d(middle, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.expand_norm.weight)
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, height, width] to [batch, 4 * middle, height / stride, width / stride]."""
        y = F.relu(self.reduce_norm(self.reduce(x)))
        y = F.relu(self.look_norm(self.look(y)))
        return F.relu(self.past(x) + self.expand_norm(self.expand(y)))
