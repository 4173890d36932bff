"""Train a small model of transformers from a configuration. benchmarks/export_formats.py starts this script.

unisono run benchmarks/export_formats_script.py --set kind=llama
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

TOKENS, LENGTH, CLASSES = 300, 16, 4
"""Size of the vocabulary, tokens of a sample, and classes of images."""


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 16
    steps: int | None = 2
    kind: Literal["gpt2", "llama", "lora", "resnet"] = "llama"


def llama() -> LlamaForCausalLM:
    """Return a Llama whose keys and values have fewer heads than its queries."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 with tied embeddings."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=32, n_embd=64, n_layer=2, n_head=4))


def lora() -> nn.Module:
    """Return the Llama with an adapter of every linear layer."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    adapted: nn.Module = get_peft_model(llama(), config)
    return adapted


def resnet() -> ResNetForImageClassification:
    """Return a ResNet of two stages, for images in color."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1])
    config.num_labels = CLASSES
    return ResNetForImageClassification(config)


def word_loss(logits: Tensor, tokens: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Return the sum of the cross entropy with the next token, in nats, and the number of tokens."""
    nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return {"nats": (nats, tokens[:, 1:].numel())}


def image_loss(logits: Tensor, images: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, int]]:
    """Return the sum of the cross entropy with the class, in nats, and the number of images."""
    return {"nats": (F.cross_entropy(logits, labels, reduction="sum"), len(labels))}


def word_logits(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Return the logits of the next tokens."""
    logits: Tensor = model(input_ids=batch[0])["logits"]
    return logits


def image_logits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the logits of the classes."""
    logits: Tensor = model(pixel_values=batch[0])["logits"]
    return logits


MODELS = {"gpt2": gpt2, "llama": llama, "lora": lora, "resnet": resnet}


def main(run: unisono.Run[Settings]) -> None:
    draw = torch.Generator().manual_seed(0)
    measure: Any = word_loss
    forward: Any = word_logits
    data = TensorDataset(torch.randint(0, TOKENS, (64, LENGTH), generator=draw))
    if run.settings.kind == "resnet":
        measure, forward = image_loss, image_logits
        images = torch.randn(64, 3, 32, 32, generator=draw)
        data = TensorDataset(images, torch.randint(0, CLASSES, (64,), generator=draw))
    model = run.place(MODELS[run.settings.kind])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        step.run(model, lambda logits, *batch: measure(logits, *batch)["nats"], forward=forward)
        step.update(optimizer)
    run.log(run.evaluate(model, data, measure, forward=forward))


if __name__ == "__main__":
    unisono.main(main, Settings)
