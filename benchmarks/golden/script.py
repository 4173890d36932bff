"""Train a small network, optionally with a crash or a stop. The golden runs use this script.

unisono run benchmarks/golden/script.py --ranks 2 --set net=cnn --set steps=6
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    steps: int | None = 8
    batch: int = 24
    net: Literal["mlp", "cnn", "rnn", "transformer", "llama"] = "mlp"
    optimizer: Literal["adamw", "sgd", "lbfgs", "adafactor"] = "adamw"
    dies: int = -1  # the step in which rank 1 is killed, once
    stop: int = -1  # the step after which the run receives SIGTERM, once


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
        )


class RNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(17, 12), nn.GRU(12, 20, batch_first=True), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Llama(nn.Module):
    """A Llama of Hugging Face, with random weights."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForSequenceClassification

        super().__init__()
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        heads: dict[str, Any] = {"num_key_value_heads": 2, "vocab_size": 17, "num_labels": 5, "pad_token_id": 0}
        self.model = LlamaForSequenceClassification(LlamaConfig(**sizes, **heads))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(33), nn.Linear(33, 5))


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": CNN,
    "rnn": RNN,
    "transformer": Transformer,
    "llama": Llama,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True),
    "adafactor": torch.optim.Adafactor,
}


def samples(net: str, count: int) -> TensorDataset:
    """Return random samples and classes: images of 4 by 4 pixels, vectors of 16 numbers, or sequences of 9 tokens."""
    generator = torch.Generator().manual_seed(11)
    classes = torch.randint(5, (count,), generator=generator)
    if net in ("rnn", "transformer", "llama"):
        return TensorDataset(torch.randint(17, (count, 9), generator=generator), classes)
    return TensorDataset(torch.randn(count, *((1, 4, 4) if net == "cnn" else (16,)), generator=generator), classes)


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    data = samples(settings.net, 203)
    model = run.place(NETS[settings.net])
    optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        if settings.parallel.cuda_graphs:
            step.run(model, lambda out, x, y: (F.cross_entropy(out, y, reduction="sum"), len(y)))
        for x, y in () if settings.parallel.cuda_graphs else step:
            if step.number == settings.dies and run.rank == 1 and once("died"):
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(F.cross_entropy(model(x), y, reduction="sum"), weight=len(y))
        step.update(optimizer)
        run.log(loss=step.loss)
        if step.number == settings.stop and run.rank == 0 and once("stopped"):
            os.kill(os.getpid(), signal.SIGTERM)
    accuracy = run.evaluate(model, data, lambda out, x, y: ((out.argmax(1) == y).sum(), len(y)))
    run.log(accuracy=float(next(iter(accuracy.values()))))


def once(name: str) -> bool:
    """Return True in the first call only, also if the process is started again."""
    folder = Path(os.environ["GOLDEN_FOLDER"])
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    unisono.main(main, Settings)
