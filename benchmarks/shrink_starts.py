"""Small models of the recipes image and speech that begin with what a large one computes, as in the recipe distill."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unisono.recipes import image, speech

EXACT = "gelsd"
"""The driver of least squares. torch's default one found too low a rank where a channel was constant."""


def inputs_of(model: nn.Module, *batch: Tensor) -> dict[nn.Module, Tensor]:
    """Return what each module of a model is given for a batch, in eval mode."""
    seen: dict[nn.Module, Tensor] = {}
    hooks = [module.register_forward_pre_hook(lambda m, args: seen.update({m: args[0]})) for module in model.modules()]
    model.eval()(*batch)
    for hook in hooks:
        hook.remove()
    return seen


def most_used(rows: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return which channels of rows [n, channels] change the output of a layer [outputs, channels, ...] most."""
    used = weight.transpose(0, 1).flatten(1).square().sum(1)
    return (rows.var(0) * used).topk(count).indices.sort().values


def predicted(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least squares prediction of all channels from those that are kept: [channels, kept] and [channels]."""
    known = torch.cat([rows[:, kept], torch.ones(len(rows), 1)], 1).double()
    found = torch.linalg.lstsq(known, rows.double(), driver=EXACT).solution.T.float()
    return found[:, :-1], found[:, -1]


@torch.no_grad()
def narrow_speech(
    large: speech.FrameClassifier, shape: speech.Model, frames: Tensor, mask: Tensor
) -> speech.FrameClassifier:
    """Return a model with fewer channels that begins with what the large one computes for a batch.

    As the recipe distill does it: its channels are principal components of the large one's states (SliceGPT, arXiv
    2401.15024), in a basis in which their mean over channels is 0, as after a layer norm. It has the neurons that
    contribute most, and the next layer takes a linear prediction of the others from these.
    """
    seen = inputs_of(large, frames, mask)
    blocks = [block for block in large.blocks if isinstance(block, speech.Block)]
    norms = [norm for norm in large.modules() if isinstance(norm, nn.LayerNorm)]
    counts = mask.bool()
    states = torch.cat([F.layer_norm(seen[norm][counts], norm.normalized_shape) for norm in norms]).double()
    energy, components = torch.linalg.eigh(states.T @ states)  # from the smallest to the largest
    rank = shape.width - 1
    basis = (components[:, -rank:] @ zero_mean_basis(shape.width)).float()
    # A norm divides by the root of the mean over channels: fewer channels, and not all of the sum of squares.
    gain = math.sqrt(len(energy) / shape.width * energy[-rank:].sum() / energy.sum())

    small = speech.FrameClassifier(shape, large.get_parameter("leave.2.bias").numel())
    values = {"enter.weight": basis.T @ large.enter.weight, "enter.bias": basis.T @ large.enter.bias}
    for number, old in enumerate(blocks):
        weight, shift, rest = through_norm(old.norm, basis)
        inner = seen[old.think][counts]
        neurons = most_used(inner, old.think.weight, shape.width)
        mix, constant = predicted(inner, neurons)
        taps, bias = old.look.weight[neurons], old.look.get_parameter("bias")[neurons]
        values |= {
            f"blocks.{number}.{name}": value
            for name, value in {
                "norm.weight": torch.full((shape.width,), gain),
                "norm.bias": shift,
                "look.weight": torch.einsum("nck,cs->nsk", taps, weight),
                "look.bias": bias + torch.einsum("nck,c->n", taps, rest),
                "think.weight": basis.T @ old.think.weight @ mix,
                "think.bias": basis.T @ (old.think.bias + old.think.weight @ constant),
            }.items()
        }
    weight, shift, rest = through_norm(norms[-1], basis)
    leave = large.get_parameter("leave.2.weight")
    values |= {"leave.0.weight": torch.full((shape.width,), gain), "leave.0.bias": shift}
    values |= {"leave.2.weight": leave @ weight, "leave.2.bias": large.get_parameter("leave.2.bias") + leave @ rest}
    small.load_state_dict(values)
    return small


def zero_mean_basis(width: int) -> Tensor:
    """Return orthonormal rows [width - 1, width], each with a mean of 0."""
    vectors = torch.eye(width, dtype=torch.float64)
    vectors[:, 0] = 1
    return torch.linalg.qr(vectors).Q[:, 1:].T


def through_norm(norm: nn.LayerNorm, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the next layer's weights are multiplied by, the narrower norm's bias, and what that bias lacks."""
    weight = norm.weight[:, None] * basis
    shift = torch.linalg.lstsq(weight, norm.bias[:, None], driver=EXACT).solution[:, 0]
    return weight, shift, norm.bias - weight @ shift


@torch.no_grad()
def narrow_image(large: image.ResNet, small: image.ResNet, images: Tensor) -> image.ResNet:
    """Fill a model that has fewer channels with what the large one computes for a batch, and return it.

    It has the channels that contribute most. Each layer takes a linear prediction of the others from these.
    """
    seen = inputs_of(large, images)
    old_blocks, new_blocks = (
        [block for block in model.blocks if isinstance(block, image.Block)] for model in (large, small)
    )
    after = [block.first for block in old_blocks[1:]]
    consumers: list[nn.Module] = [*after, large.head]
    kept = []  # by each block's output
    for number, consumer in enumerate(consumers):
        weight, count = consumer.get_parameter("weight"), new_blocks[number].second.out_channels
        kept.append(most_used(rows_of(seen[consumer]), weight, count))
    before = kept[0]  # the first block adds its input to its output, so both have the same channels
    pixels = torch.arange(images.shape[1])
    take_over(large.stem[0], large.stem[1], small.stem[0], small.stem[1], seen, pixels, before)
    for old, new, output in zip(old_blocks, new_blocks, kept, strict=True):
        inner = most_used(rows_of(seen[old.second]), old.second.weight, new.first.out_channels)
        take_over(old.first, old.first_norm, new.first, new.first_norm, seen, before, inner)
        take_over(old.second, old.second_norm, new.second, new.second_norm, seen, inner, output)
        if isinstance(old.past, nn.Sequential) and isinstance(new.past, nn.Sequential):
            take_over(old.past[0], old.past[1], new.past[0], new.past[1], seen, before, output)
        before = output
    mix, constant = predicted(seen[large.head], before)
    small.head.weight.copy_(large.head.weight @ mix)
    small.head.bias.copy_(large.head.bias + large.head.weight @ constant)
    return small


def rows_of(values: Tensor) -> Tensor:
    """Return [rows, channels] of [batch, channels, ...]."""
    return values.movedim(1, -1).flatten(0, -2)


def take_over(
    old: nn.Module,
    old_norm: nn.Module,
    new: nn.Module,
    new_norm: nn.Module,
    seen: dict[nn.Module, Tensor],
    inputs: Tensor,
    outputs: Tensor,
) -> None:
    """Fill a convolution and its batch norm with those channels of larger ones."""
    mix, constant = predicted(rows_of(seen[old]), inputs)
    weight = old.get_parameter("weight")[outputs]
    new.get_parameter("weight").copy_(torch.einsum("ochw,ck->okhw", weight, mix))
    norm = {name: value[outputs] if value.dim() else value for name, value in old_norm.state_dict().items()}
    new_norm.load_state_dict(norm)
    new_norm.get_buffer("running_mean").sub_(torch.einsum("ochw,c->o", weight, constant))
