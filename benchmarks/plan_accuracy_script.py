"""Train a ResNet, a GPT-2 or a Llama of transformers from a configuration. benchmarks/plan_accuracy.py plans it.

unisono run benchmarks/plan_accuracy_script.py --set kind=llama
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import unisono

TOKENS, LENGTH, CLASSES, PIXELS = 1000, 64, 10, 64
"""Size of the vocabulary, tokens of a sample, classes of images, and pixels of a side."""


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 20
    kind: Literal["gpt2", "llama", "resnet"] = "llama"
    width: int = 256
    depth: int = 4


def llama(width: int, depth: int) -> LlamaForCausalLM:
    """Return a Llama whose keys and values have fewer heads than its queries."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def gpt2(width: int, depth: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with tied embeddings."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=width, n_layer=depth, n_head=4))


def resnet(width: int, depth: int) -> ResNetForImageClassification:
    """Return a ResNet of bottleneck blocks with four stages, for images in color."""
    sizes = [width // 4, width // 2, width, 2 * width]
    config = ResNetConfig(embedding_size=width // 8, hidden_sizes=sizes, depths=[depth] * 4)
    config.num_labels = CLASSES
    return ResNetForImageClassification(config)


def word_loss(output: Any, tokens: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy with the next token, and the number of tokens."""
    logits = output["logits"][:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()


def image_loss(output: Any, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy with the class, and the number of images."""
    return F.cross_entropy(output["logits"], labels, reduction="sum"), len(labels)


MODELS = {"gpt2": gpt2, "llama": llama, "resnet": resnet}


def words(model: nn.Module, batch: tuple[Tensor]) -> Any:
    """Compute the logits of the next tokens."""
    return model(input_ids=batch[0], use_cache=False)


def images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
    """Compute the logits of the classes."""
    return model(pixel_values=batch[0])


def main(run: unisono.Run[Settings]) -> None:
    settings, draw = run.settings, torch.Generator().manual_seed(0)
    loss: Any = word_loss
    forward: Any = words
    data = TensorDataset(torch.randint(0, TOKENS, (256, LENGTH), generator=draw))
    if settings.kind == "resnet":
        loss, forward = image_loss, images
        pixels = torch.randn(256, 3, PIXELS, PIXELS, generator=draw)
        data = TensorDataset(pixels, torch.randint(0, CLASSES, (256,), generator=draw))
    model: nn.Module = run.place(lambda: MODELS[settings.kind](settings.width, settings.depth))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        step.run(model, loss, forward=forward)
        step.update(optimizer)


if __name__ == "__main__":
    unisono.main(main, Settings)
