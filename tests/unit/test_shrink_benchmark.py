"""The students and figures of the benchmark that shrinks models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.shrink import Row, loss, quality, recovered
from benchmarks.shrink_starts import narrow_image, narrow_speech
from unisono.recipes import image, speech


def test_a_narrow_speech_student_begins_with_all_that_the_teacher_uses() -> None:
    """A teacher whose states have half of its channels in a rotated basis, and that uses half of its neurons."""
    shape = speech.Model(mels=6, width=16, depth=2)
    torch.manual_seed(0)
    large = speech.FrameClassifier(shape, 5)
    frames, mask = torch.randn(8, 30, shape.mels), torch.ones(8, 30)
    mask[:4, 20:] = 0
    directions = torch.linalg.qr(torch.cat([torch.ones(16, 1), torch.randn(16, 7)], 1)).Q[:, 1:]
    with torch.no_grad():
        blocks = [block for block in large.blocks if isinstance(block, speech.Block)]
        for layer in (large.enter, *(block.think for block in blocks)):
            layer.weight.copy_(directions @ (directions.T @ layer.weight))
            layer.bias.copy_(directions @ torch.randn(7))
        for block in blocks:
            block.think.weight[:, ::2] = 0
            block.norm.bias.copy_(directions @ torch.randn(7))
        small = narrow_speech(large, replace(shape, width=8), frames, mask)
        torch.testing.assert_close(small.eval()(frames, mask), large(frames, mask), rtol=1e-3, atol=1e-3)
    assert sum(p.numel() for p in small.parameters()) < 0.3 * sum(p.numel() for p in large.parameters())


def test_a_narrow_image_student_begins_with_all_that_the_teacher_uses() -> None:
    """A teacher that uses half of the channels of each layer."""
    shape = image.Model(width=8)
    torch.manual_seed(0)
    large, small = (image.ResNet((1, 8, 8), 5, replace(shape, width=width)) for width in (8, 4))
    images = torch.randn(32, 1, 8, 8)
    with torch.no_grad():
        for norm in large.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                for value in (norm.weight, norm.bias, norm.running_mean):
                    assert value is not None
                    torch.nn.init.normal_(value)
                norm.weight[::2] = norm.bias[::2] = 0
        student = narrow_image(large, small, images).eval()
        torch.testing.assert_close(student(images), large.eval()(images), rtol=1e-3, atol=1e-3)
    assert student(images).std() > 0.1
    assert sum(p.numel() for p in small.parameters()) < 0.3 * sum(p.numel() for p in large.parameters())


def rows(right: list[int], nats: list[float]) -> list[Row]:
    return [Row([(r, n, 1) for r, n in zip(right, nats, strict=True)], 0)]


def test_the_way_from_a_student_alone_to_the_original() -> None:
    alone, student = rows([1, 0, 0, 0] * 10, [4.0] * 40), rows([1, 1, 1, 0] * 10, [2.0] * 40)
    original = rows([1, 1, 1, 1] * 10, [1.0] * 40)
    by_loss = recovered([alone, student, original], loss, 1)
    assert by_loss.startswith("0.67 of the way, standard error 0.00 (seeds: 0.67;")
    by_accuracy = recovered([alone, student, original], lambda totals: quality(totals, bits=False), 4)
    assert by_accuracy.startswith("0.67 of the way, standard error 0.00 (seeds: 0.67;")  # all groups are alike
    assert by_accuracy.endswith("; 10 groups)")
    single = recovered([alone, student, original], lambda totals: quality(totals, bits=False), 1)
    error = float(single.partition("standard error ")[2].partition(" ")[0])
    assert error == pytest.approx(0.09, abs=0.02)  # of 2/3 with 30 of 40 samples: sqrt(2/9 / 30)
    assert recovered([alone, student, alone], loss, 1).startswith("alone and original do not differ")
