"""ViT (arXiv 2010.11929): patches of a picture as a sequence, with a class token and learned positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VisionTransformer(nn.Module):
    """The model: ViT-B/16 with the defaults, 86,567,656 parameters with 1,000 classes.

    Args:
        classes: The number of classes.
        width: Channels of each attention head.
        heads: Attention heads in each block.
        depth: The number of blocks.
        patch: Width and height of a patch, in pixels.
        size: Width and height of pictures, in pixels; a multiple of `patch`.
    """

    def __init__(
        self, classes: int, width: int = 64, heads: int = 12, depth: int = 12, patch: int = 16, size: int = 224
    ) -> None:
        super().__init__()
        channels = width * heads
        self.patches = nn.Conv2d(3, channels, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, channels))
        self.positions = nn.Parameter(torch.empty(1, 1 + (size // patch) ** 2, channels))
        self.blocks = nn.Sequential(*(AttentionBlock(channels, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.head = nn.Linear(channels, classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.zeros_(self.head.weight)

    def forward(self, pictures: Tensor) -> Tensor:
        """Map normalized pictures [batch, 3, size, size] to logits [batch, classes]."""
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


class AttentionBlock(nn.Module):
    """Attention and a feed-forward network, each after a norm and with a residual connection."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_look, self.norm_think = nn.LayerNorm(channels, eps=1e-6), nn.LayerNorm(channels, eps=1e-6)
        self.query_key_value, self.look = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.think = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, channels] to the same shape."""
        qkv = self.query_key_value(self.norm_look(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width]
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.look(attended.transpose(1, 2).flatten(2))
        return x + self.think(self.norm_think(x))
