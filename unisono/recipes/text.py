"""Train a small language model, byte by byte, on the source code of Python's own standard library.

    unisono run text --ranks 2                                    100 steps, under a minute on two cores
    unisono run text --ranks 2 --set model.depth=8 --set steps=1000
    unisono copy text mine.py                                     own it, change it: unisono run mine.py

Data     the Python that runs brings it: about 11 MB, no download (the first line on the screen says which)
Model    a GPT of 0.8 million parameters: rotary positions, squared ReLU, token weights tied to the output
Result   about 2.4 bits a byte on files the model has not seen (8 is no idea at all, `gzip -9` needs 1.9)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.recipes.datasets.python_source import IGNORED, ByteWindows, python_source


@dataclass(frozen=True, kw_only=True)
class Model:
    width: int = 128  # a multiple of 2 * heads
    depth: int = 4
    heads: int = 4
    context: int = 128  # bytes the model can look back on
    dropout: float = 0.0  # 100 steps see no byte twice: there is nothing to memorise yet


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64  # windows of model.context bytes
    steps: int | None = 100
    lr: float = 7e-3  # the highest; it warms up to there and goes back to nearly nothing
    momentum: float = 0.95  # Adam's; 0.1 less while the learning rate is highest. Gradients that are late want none
    weight_decay: float = 0.1
    clip: float | None = 1.0
    validate_bytes: int = 2**17  # of about 600,000; all of them with --set validate_bytes=1000000
    sample_bytes: int = 300  # text to write at the end
    model: Model = Model()

    def __post_init__(self) -> None:
        """What would be wrong once the model is made is said before anything starts."""
        width, heads, depth, parallel = self.model.width, self.model.heads, self.model.depth, self.parallel
        if heads < 1 or width < 1 or width % (2 * heads):
            raise unisono.SettingsError(
                f"The text recipe was asked for model.width={width} and model.heads={heads}.",
                f"Rotary positions need an even width per head; here it is {width / max(1, heads):g}.",
                f"--set model.width={2 * max(1, heads) * max(1, round(width / (2 * max(1, heads))))}",
            )
        for axis, size in (("tensor", parallel.tensor), ("context", parallel.context)):
            if size > 1 and heads % size:
                more = size * -(-heads // size)
                raise unisono.SettingsError(
                    f"The text recipe was asked for parallel.{axis}={size} and model.heads={heads}.",
                    f"Each process computes whole heads, and {heads} is no multiple of {size}.",
                    f"--set parallel.{axis}={max(n for n in range(1, size) if heads % n == 0)}, or, another model: "
                    f"--set model.heads={more} --set model.width={2 * more * -(-width // (2 * more))}",
                )
        if parallel.pipeline > depth + 3:
            raise unisono.SettingsError(
                f"The text recipe was asked for parallel.pipeline={parallel.pipeline} and model.depth={depth}.",
                f"Its model is a row of {depth + 3} layers with weights: embedding, blocks, norm and head.",
                f"--set parallel.pipeline={depth + 3}, or: --set model.depth={parallel.pipeline - 3}",
            )


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    corpus = python_source()
    run.print(corpus.line())
    train_set = ByteWindows(corpus.train, settings.model.context)
    valid_set = ByteWindows(corpus.valid[: settings.validate_bytes], settings.model.context)

    angles = unisono.SequenceDims(positions={"cos": 0, "sin": 0})  # where sequences are divided, so are these
    model = run.place(lambda: GPT(settings.model), sequence=angles)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=settings.weight_decay
    )
    total = run.count_steps(train_set)  # run.total_steps, known also with --set epochs=1
    least = max(round(settings.momentum - 0.1, 9), 0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.lr, total_steps=total, base_momentum=least, max_momentum=settings.momentum
    )
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set):
        step.run(model, loss_sum)  # every micro-batch of this process, forward and backward
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    result = run.evaluate(model, valid_set, bits_per_byte)
    run.log(result)
    run.print(
        f"validation: {result['bits_per_byte']:.3f} bits per byte, on {valid_set.bytes:,} bytes it has never seen"
    )
    if settings.sample_bytes:  # every process writes the same, since each may hold a part of the model only
        run.print(f"\nIt writes:\n\n{write(model, settings.sample_bytes, settings.model.context, settings.seed)}\n")


def loss_sum(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """How much these targets surprise the model, in nats, and how many there are."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != IGNORED).sum()


def bits_per_byte(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same in bits."""
    nats, count = loss_sum(output, tokens, targets)
    return nats / math.log(2), count


class GPT(nn.Module):
    """A byte-level decoder. At the start every block adds little, which keeps the first steps calm."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.depth))
        self.norm = nn.RMSNorm(model.width)
        self.head = nn.Linear(model.width, 256, bias=False)
        self.head.weight = self.tokens.weight
        # 0.15 gives first guesses that are nearly even, yet lets 100 steps of Adam move an embedding a long way.
        nn.init.normal_(self.tokens.weight, std=0.15)
        self.scale = 1 / (0.15 * math.sqrt(model.width))
        angles = torch.outer(
            torch.arange(model.context), 1000.0 ** -torch.linspace(0, 1, model.width // model.heads // 2)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length], with length <= context, to logits [batch, length, 256]."""
        x = self.tokens(tokens)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x) * self.scale)


class Block(nn.Module):
    """Look back, then think: attention and a feed-forward part, each added to what was there."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width = model.width
        self.head_width = width // model.heads  # a process that holds some of the heads finds out how many
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
        seen = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)
        x = x + self.dropout(self.look(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.relu(self.up(self.norm_think(x))).square()))


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(inputs))
    return layer


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of channels by an angle that grows with the position (rotary embedding, arXiv 2104.09864)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


@torch.no_grad()
def write(model: nn.Module, length: int, context: int, seed: int) -> str:
    """Let the model go on from "def ", one byte after another; it may only see `context` bytes at a time."""
    model.eval()
    device = next(model.parameters()).device
    dice = torch.Generator(device).manual_seed(seed)
    text = torch.tensor([list(b"\n    def ")], device=device)
    for _ in range(length):
        odds = F.softmax(model(text[:, -context:])[:, -1] / 0.9, dim=-1)  # much cooler, a young model writes but spaces
        text = torch.cat((text, torch.multinomial(odds, 1, generator=dice)), dim=1)
    written = bytes(text[0].tolist()).decode(errors="replace").strip("\n")
    return "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in written
    )  # no escape codes


if __name__ == "__main__":
    unisono.main(main, Settings)
