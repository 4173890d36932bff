"""Train a small byte-level language model on the source code of Python's standard library.

    unisono run text --ranks 2                                    100 steps, under a minute on two cores
    unisono run text --ranks 2 --set model.depth=8 --set steps=1000
    unisono copy text mine.py                                     then edit it and: unisono run mine.py

Data     the source code that comes with Python: about 11 MB, no download
Model    a GPT of 0.8 million parameters: rotary positions, squared ReLU, input and output embeddings tied
Result   about 2.4 bits per byte on held-out files (a uniform guess: 8 bits; `gzip -9`: 1.9 bits)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows, load_python_source


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 128  # number of channels; a multiple of 2 * heads
    depth: int = 4  # number of blocks
    heads: int = 4  # number of attention heads in each block
    context: int = 128  # largest number of bytes that the model attends to
    dropout: float = 0.0  # 100 steps use no byte twice, so there is nothing to regularize


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64  # global batch size, in windows of model.context bytes
    steps: int | None = 100
    lr: float = 7e-3  # peak learning rate of the one-cycle schedule
    momentum: float = 0.95  # Adam's beta1; 0.1 less at the peak of the schedule. Use 0 with stale gradients
    weight_decay: float = 0.1  # weight decay of AdamW
    clip: float | None = 1.0
    validate_bytes: int = 2**17  # number of validation bytes to use, of about 600,000
    sample_bytes: int = 300  # length of the text to generate after training; 0: none
    model: Model = Model()

    def __post_init__(self) -> None:
        """Refuse values that the model cannot be built with."""
        width, heads, depth, parallel = self.model.width, self.model.heads, self.model.depth, self.parallel
        if heads < 1 or width < 1 or width % (2 * heads):
            raise unisono.SettingsError(
                f"The text recipe cannot have model.width={width} with model.heads={heads}.",
                f"Rotary embeddings need an even width per head; here it is {width / max(1, heads):g}.",
                f"--set model.width={2 * max(1, heads) * max(1, round(width / (2 * max(1, heads))))}",
            )
        for axis, size in (("tensor", parallel.tensor), ("context", parallel.context)):
            if size > 1 and heads % size:
                more = size * -(-heads // size)
                raise unisono.SettingsError(
                    f"The text recipe cannot have parallel.{axis}={size} with model.heads={heads}.",
                    f"Each process computes whole heads, and {heads} is not a multiple of {size}.",
                    f"--set parallel.{axis}={max(n for n in range(1, size) if heads % n == 0)}, or change the model: "
                    f"--set model.heads={more} --set model.width={2 * more * -(-width // (2 * more))}",
                )
        if parallel.pipeline > depth + 3:
            raise unisono.SettingsError(
                f"The text recipe cannot have parallel.pipeline={parallel.pipeline} with model.depth={depth}.",
                f"The model has only {depth + 3} layers to divide: embedding, {depth} blocks, norm and head.",
                f"--set parallel.pipeline={depth + 3}, or: --set model.depth={parallel.pipeline - 3}",
            )


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    corpus = load_python_source()
    run.print(corpus.summary())
    train_set = ByteWindows(corpus.train, settings.model.context)
    valid_set = ByteWindows(corpus.valid[: settings.validate_bytes], settings.model.context)

    angles = unisono.SequenceDims(positions={"cos": 0, "sin": 0})  # context parallelism divides these, too
    model = run.place(lambda: GPT(settings.model), sequence=angles)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay
    )
    total_steps = run.count_steps(train_set)
    base_momentum = max(round(settings.momentum - 0.1, 9), 0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, total_steps=total_steps, base_momentum=base_momentum, max_momentum=settings.momentum
    )
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set):
        step.run(model, loss_sum)  # forward and backward of this process's micro-batches
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    result = run.evaluate(model, valid_set, bits_per_byte)
    run.log(result)
    run.print(f"validation: {result['bits_per_byte']:.3f} bits per byte on {valid_set.bytes:,} held-out bytes")
    if settings.sample_bytes:  # on every process, because each may hold only a part of the model
        text = generate(model, settings.sample_bytes, settings.model.context, settings.seed)
        run.print(f"\nGenerated text:\n\n{text}\n")


def loss_sum(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy, in nats, and the number of targets."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != IGNORED).sum()


def bits_per_byte(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy, in bits, and the number of targets."""
    nats, count = loss_sum(output, tokens, targets)
    return nats / math.log(2), count


class GPT(nn.Module):
    """A byte-level decoder. Residual branches start small, which stabilizes the first steps."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.depth))
        self.norm = nn.RMSNorm(model.width)
        self.head = nn.Linear(model.width, 256, bias=False)
        self.head.weight = self.tokens.weight
        # With 0.15 the first predictions are nearly uniform, and 100 steps of Adam can still move an embedding far.
        nn.init.normal_(self.tokens.weight, std=0.15)
        self.scale = 1 / (0.15 * math.sqrt(model.width))
        angles = torch.outer(
            torch.arange(model.context), 1000.0 ** -torch.linspace(0, 1, model.width // model.heads // 2)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, length], with length <= context, to logits [batch, length, 256]."""
        x = self.tokens(tokens)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x) * self.scale)


class Block(nn.Module):
    """Causal attention and a feed-forward network, each with a residual connection."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width = model.width
        self.head_width = width // model.heads  # the number of heads is inferred: tensor parallelism divides them
        self.norm_look = nn.RMSNorm(width)
        self.query_key_value = linear(width, 3 * width)
        self.look = linear(width, width, gain=0.3)
        self.norm_think = nn.RMSNorm(width)
        self.up = linear(width, 4 * width)
        self.down = linear(4 * width, width, gain=0.3)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = self.query_key_value(self.norm_look(x)).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = qkv.permute(3, 0, 2, 1, 4)  # each [batch, heads, length, width per head]
        attended = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        x = x + self.dropout(self.look(attended.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.relu(self.up(self.norm_think(x))).square()))


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Make a linear layer whose outputs have about `gain` times the scale of its inputs."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels by angles that grow with the position (rotary embedding, arXiv 2104.09864)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the bits per byte of a file, for each window of model.context bytes."""
    return predict_windows(ByteWindows(path.read_bytes(), settings.model.context))


def predict_windows(data: ByteWindows) -> unisono.Prediction:
    """Predict the bits per byte of each window, and return its number of bytes with it."""

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        tokens, targets = batch
        nats = F.cross_entropy(model(tokens).transpose(1, 2), targets, reduction="none")  # 0 where a target is IGNORED
        count = (targets != IGNORED).sum(1)
        return {"bits_per_byte": nats.sum(1) / math.log(2) / count.clamp(min=1), "bytes": count}

    return unisono.Prediction(data, forward=forward)


@torch.no_grad()
def generate(model: nn.Module, length: int, context: int, seed: int) -> str:
    """Sample `length` bytes after the prompt "def ". The model is given the last `context` bytes each time."""
    temperature = 0.9  # a model trained for 100 steps generates only spaces at much lower ones
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(b"\n    def ")], device=device)
    for _ in range(length):
        probabilities = F.softmax(model(tokens[:, -context:])[:, -1] / temperature, dim=-1)
        tokens = torch.cat((tokens, torch.multinomial(probabilities, 1, generator=generator)), dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace").strip("\n")
    # The terminal must not receive escape codes.
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
