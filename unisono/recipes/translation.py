"""Train a small transformer to translate: an encoder, a decoder, and batches of sentences of similar length.

    unisono run translation --ranks 2                                   numbers from English to German, in a minute
    unisono run translation --ranks 2 --set data=FILE                   your own pairs: sentence, tab, translation
    unisono copy translation mine.py                                    then edit it and: unisono run mine.py

Data     numbers of up to nine digits in words, made with a seed: "forty two" is "zwei und vierzig"
Model    encoder and decoder of two blocks each; batches by length, so that little of them is padding
Result   99.7 % of 700 held-out sentences are translated without a mistake, by greedy decoding
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.recipes.datasets.sentence_pairs import END, PAD, START, load_pairs


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    data: Path | None = None  # your own data: a file with a sentence, a tab and its translation in each line
    pairs: int = 20_000  # numbers that are drawn
    batch: int = 128  # global batch size, in pairs
    epochs: int | None = 4
    lr: float = 3e-3  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.01  # weight decay of AdamW
    clip: float | None = 1.0
    by_length: bool = True  # let the pairs of a batch have similar lengths
    width: int = 96  # number of channels; a multiple of heads
    depth: int = 2  # blocks of the encoder, and of the decoder
    heads: int = 4  # attention heads in each block
    dropout: float = 0.1  # dropout probability

    def __post_init__(self) -> None:
        """Refuse values that the model cannot be built with."""
        if self.heads < 1 or self.width % (2 * self.heads):
            raise unisono.SettingsError(
                f"The translation recipe cannot have width={self.width} with heads={self.heads}.",
                "Each head has the same, even number of channels.",
                f"--set width={2 * max(1, self.heads) * max(1, round(self.width / (2 * max(1, self.heads))))}",
            )
        self.parallel.refuse(
            "The translation recipe", "Its sentences are short, and source and target differ in length."
        )


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    pairs = load_pairs(settings.data, settings.pairs)
    run.print(pairs.summary())
    model = run.place(lambda: Translator(len(pairs.source), len(pairs.target), settings))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=settings.weight_decay
    )
    total_steps = run.count_steps(pairs.train)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    lengths = [len(source) + len(target) for source, target in pairs.train] if settings.by_length else None
    for step in run.steps(pairs.train, collate_fn=collate, lengths=lengths):
        for source, inputs, targets in step:
            loss = F.cross_entropy(
                model(source, inputs).flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
            )
            step.backward(loss, weight=(targets != PAD).sum())  # each word counts once, and padding does not
            step.add("padding", (targets == PAD).sum(), targets.numel())
        step.update(optimizer, schedule)
        run.log(loss=step.loss, padding=step.mean("padding"))

    def translate(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return greedy(model, batch[0], pairs.longest)

    result = run.evaluate(model, pairs.valid, correct, forward=translate, collate_fn=collate)
    run.log(result)
    run.print(f"validation: {result['exact']:.1%} of {len(pairs.valid):,} held-out sentences without a mistake")
    sample = pairs.valid[-4:]
    for (source, _), tokens in zip(
        sample, run.predict(model, sample, forward=translate, collate_fn=collate), strict=True
    ):
        run.print(f"  {pairs.source.decode(source.tolist())}  ->  {pairs.target.decode(tokens.tolist())}")


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Collate pairs into sources, inputs of the decoder (START and the target) and targets, each [pairs, words]."""
    sources, targets = zip(*pairs, strict=True)
    padded = nn.utils.rnn.pad_sequence(list(targets), batch_first=True, padding_value=PAD)
    inputs = F.pad(padded, (1, -1), value=START)
    return nn.utils.rnn.pad_sequence(list(sources), batch_first=True, padding_value=PAD), inputs, padded


def greedy(model: nn.Module, source: Tensor, longest: int) -> Tensor:
    """Translate with the most probable word each time: tokens [batch, longest], PAD after END.

    Every process makes the same number of calls, since the model may be divided between processes.
    """
    tokens = torch.full((len(source), longest + 1), PAD, device=source.device)
    tokens[:, 0] = START
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for length in range(1, longest + 1):
        best = model(source, tokens[:, :length])[:, -1].argmax(-1)
        tokens[:, length] = best.masked_fill(ended, PAD)
        ended |= best == END
    return tokens[:, 1:]


def correct(output: Tensor, source: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, Tensor | int]]:
    """Return the number of sentences and of words that are right."""
    right = (output[:, : targets.shape[1]] == targets) & (targets != PAD)
    words = targets != PAD
    return {"exact": ((right | ~words).all(1).sum(), len(targets)), "words": (right.sum(), words.sum())}


class Translator(nn.Module):
    """An encoder and a decoder (arXiv 1706.03762), with norms before attention and feed-forward."""

    def __init__(self, sources: int, targets: int, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.source, self.target = nn.Embedding(sources, width, PAD), nn.Embedding(targets, width, PAD)
        self.dropout = nn.Dropout(settings.dropout)
        self.encoder = nn.ModuleList(Block(settings, crossed=False) for _ in range(settings.depth))
        self.decoder = nn.ModuleList(Block(settings, crossed=True) for _ in range(settings.depth))
        self.norm_source, self.norm_target = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, targets)

    def forward(self, source: Tensor, inputs: Tensor) -> Tensor:
        """Map sources [batch, m] and targets so far [batch, n] to logits of the next words [batch, n, words]."""
        seen = (source != PAD)[:, None, None]  # of each pair, the same for all heads and positions
        x = self.source(source)
        x = self.dropout(x + positions(x))
        for block in self.encoder:
            x = block(x, seen)
        memory = self.norm_source(x)
        x = self.target(inputs)
        x = self.dropout(x + positions(x))
        before = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool, device=x.device).tril()
        for block in self.decoder:
            x = block(x, before, memory, seen)
        return self.head(self.norm_target(x))


class Block(nn.Module):
    """Attention to the sentence itself, in a decoder also to the source, and a feed-forward network."""

    def __init__(self, settings: Settings, *, crossed: bool) -> None:
        super().__init__()
        width = settings.width
        self.look, self.norm_look = Attention(width, settings.heads), nn.LayerNorm(width)
        if crossed:
            self.cross, self.norm_cross = Attention(width, settings.heads), nn.LayerNorm(width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        y = self.norm_look(x)
        x = x + self.dropout(self.look(y, y, mask))
        if memory is not None:
            x = x + self.dropout(self.cross(self.norm_cross(x), memory, seen))
        return x + self.dropout(self.think(x))


class Attention(nn.Module):
    """Multi-head attention of one sequence to another."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Map [batch, n, width] and [batch, m, width] to [batch, n, width]; the mask is true where x may look."""
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.key_value(memory).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


def positions(x: Tensor) -> Tensor:
    """Return waves of growing length by position for x [batch, length, channels]: [length, channels]."""
    _, length, width = x.shape
    rates = torch.exp(torch.arange(0, width, 2, device=x.device) * (-math.log(10_000.0) / width))
    angles = torch.arange(length, device=x.device)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Translate each line of a text file."""
    pairs = load_pairs(settings.data, settings.pairs)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    data = [(pairs.source.encode(line), torch.tensor([number])) for number, line in enumerate(lines)]

    def forward(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"line": batch[2][:, 0], "tokens": greedy(model, batch[0], pairs.longest)}

    def describe(row: dict[str, Tensor]) -> dict[str, object]:
        return {"text": lines[int(row["line"])], "translation": pairs.target.decode(row["tokens"].tolist())}

    return unisono.Prediction(data, forward=forward, collate_fn=collate, describe=describe)


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
