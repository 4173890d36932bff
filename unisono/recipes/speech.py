"""Train a small network to recognise spoken words, and ask it about voices that it has never heard.

    unisono run speech --ranks 2 --set source=spoken                    ten digits, 104 voices: about a minute
    unisono run speech --ranks 2 --set data=words                       words/yes/a.wav, words/no/b.wav, ...
    unisono copy speech mine.py                                         own it, change it: unisono run mine.py

Data     the first line on the screen says which: a folder of your own, or draws of ten recorded digits (the Debian
         package asterisk-core-sounds-en-wav), or digits in synthetic voices (`pip install 'unisono[recipes]'`)
Model    a convolutional net of 0.3 million parameters over log-mel frames; each frame votes, the clip is the mean vote
Result   about 95 % of the digits right in voices kept apart (10 % is no idea at all); a person's own recordings of the
         digits, where they are installed, are reported and are no bar: no person was in the training
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import unisono
from unisono.recipes.datasets.spoken_words import Clips, recorded_digits, voices


@dataclass(frozen=True, kw_only=True)
class Model:
    mels: int = 40  # bands from 60 Hz to just below half the sampling rate
    width: int = 96
    depth: int = 4  # each block looks twice as far as the one before it
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64  # clips
    epochs: int | None = 8
    lr: float = 3e-3  # the highest; it warms up to there and goes back to nearly nothing
    weight_decay: float = 0.05
    clip: float | None = 1.0
    data: Path | None = None  # a folder of folders of wave files, one for each word
    source: Literal["auto", "spoken", "recorded"] = "auto"  # spoken: synthetic; recorded: a Debian package
    voices: int = 1000  # of the synthesizer, at most; it has 104
    draws: int = 4  # of speed, pitch and accent, for each voice and word
    augment: float = 1.0  # how much a training clip is changed each time it is seen; 0: not at all
    model: Model = Model()

    def __post_init__(self) -> None:
        """What does not go with this model is said before it is made."""
        for axis, size, true in (
            ("tensor", self.parallel.tensor, "Each of its blocks begins with a convolution, and these are not cut."),
            ("context", self.parallel.context, "It has no attention: a convolution looks at each frame's neighbours."),
        ):
            if size > 1:
                do = f"--set parallel.{axis}=1 --set parallel.shard={size}"
                raise unisono.SettingsError(f"The speech recipe was asked for parallel.{axis}={size}.", true, do)


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    corpus = voices(
        settings.source, data=settings.data, count=settings.voices, draws=settings.draws, seed=settings.seed
    )
    run.print(corpus.line())
    train_set = Frames(corpus.train, corpus.rate, settings.model.mels, augment=settings.augment)
    valid_set = Frames(corpus.valid, corpus.rate, settings.model.mels)

    model = run.place(lambda: Listener(settings.model, len(corpus.words)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    total = run.count_steps(train_set)  # run.total_steps, known also with --set epochs=1
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set, collate_fn=padded):
        step.run(model, loss_sum, forward=vote)  # every micro-batch of this process, forward and backward
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    result = run.evaluate(model, valid_set, accuracy, forward=listen, collate_fn=padded)
    run.log(result)
    run.print(f"validation: {result['accuracy']:.1%} of {len(valid_set)} clips right, {corpus.validation}")
    real = recorded_digits() if corpus.spoken else None
    if real is not None:
        heard = Frames(real, corpus.rate, settings.model.mels)
        share = run.evaluate(model, heard, accuracy, forward=listen, collate_fn=padded)["accuracy"]
        run.log(recorded_accuracy=share)
        run.print(f"for information: {share * len(real):.0f} of {len(real)} digits right that a person has recorded")


def vote(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What each frame is taken for: logits [batch, length, words]."""
    frames, counts, _ = batch
    return model(frames, counts)


def loss_sum(votes: Tensor, frames: Tensor, counts: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """How much the words surprise their frames, in nats, and how many frames count: these, not clips, are weighed."""
    wanted = labels[:, None].expand(counts.shape)
    nats = F.cross_entropy(votes.flatten(0, 1), wanted.flatten(), reduction="none")
    return (nats * counts.flatten()).sum(), counts.sum()


def listen(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What a clip is taken for: the mean of its frames' votes, log odds [batch, words]."""
    _, counts, _ = batch
    odds = F.log_softmax(vote(model, batch), dim=-1)
    return (odds * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)


def accuracy(output: Tensor, frames: Tensor, counts: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """How many clips are right, and how many there are."""
    return (output.argmax(-1) == labels).sum(), len(labels)


class Frames(Dataset[tuple[Tensor, int]]):
    """Clips as (log-mel frames [length, mels], label): a frame each 16 ms, each band's mean over the clip taken off.

    augment  0: as they are. 1: each time at another speed and pitch (up to 15 %), in noise of another loudness, and
             with some time and some bands missing, as torch's generator draws: the run seeds it for each micro-batch
    """

    def __init__(self, clips: Clips, rate: int, mels: int, augment: float = 0.0) -> None:
        self.clips, self.augment = clips, augment
        self.window = 2 ** round(math.log2(0.032 * rate))  # samples: 32 ms, or near it
        self.bank = mel_bank(mels, self.window, rate)
        self.shape = torch.hann_window(self.window)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sound, label = self.clips[index]
        if self.augment:
            speed = 1 + 0.15 * self.augment * float(2 * torch.rand(()) - 1)
            length = max(1, round(len(sound) / speed))
            sound = F.interpolate(sound[None, None], length, mode="linear", align_corners=False)[0, 0]
            quiet = [int(torch.randint(len(sound) // 4 + 1, ())) for _ in range(2)]  # before and after
            sound = F.pad(sound, quiet)
            loudness = sound.std(correction=0) * 10 ** float(-2 * torch.rand(()))  # 0 to 40 dB below the voice
            sound = sound + 0.5 * self.augment * loudness * torch.randn(len(sound))
        sound = F.pad(sound, (0, max(0, self.window - len(sound))))
        spectrum = torch.stft(sound, self.window, self.window // 2, window=self.shape, return_complex=True)
        frames = (spectrum.abs().square().T @ self.bank + 1e-6).log()
        frames = frames.clamp(min=float(frames.max()) - 9)
        frames = frames - frames.mean(0)
        if self.augment:  # SpecAugment, arXiv 1904.08779: what is missing has the mean's value
            erase(frames, 0, 0.2 * self.augment)
            erase(frames, 1, 0.2 * self.augment)
        return frames, label


def erase(frames: Tensor, dim: int, share: float) -> None:
    """Set a stretch of up to this share of a dim to 0, in place."""
    size = frames.shape[dim]
    width = int(torch.randint(int(share * size) + 1, ()))
    frames.narrow(dim, int(torch.randint(size - width + 1, ())), width).zero_()


def mel_bank(mels: int, window: int, rate: int) -> Tensor:
    """Triangles of equal width on the mel scale, which is how wide a pitch step feels: [window // 2 + 1, mels]."""

    def mel(hertz: Tensor) -> Tensor:
        return 2595 * torch.log10(1 + hertz / 700)

    bins = mel(torch.linspace(0, rate / 2, window // 2 + 1))
    low, high = mel(torch.tensor([60.0, 0.95 * rate / 2]))
    edges = torch.linspace(float(low), float(high), mels + 2)
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Clips of unlike length as (frames [batch, length, mels], counts [batch, length], labels [batch]): `counts` is 1
    where there is a frame and 0 where the clip is over."""
    clips = [frames for frames, _ in samples]
    frames = nn.utils.rnn.pad_sequence(clips, batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips])
    counts = (torch.arange(frames.shape[1]) < lengths[:, None]).float()
    return frames, counts, torch.tensor([label for _, label in samples])


class Listener(nn.Module):
    """Frames to votes. What is over stays 0 in every layer, and no layer looks at a whole clip or batch: so what a clip
    is taken for does not depend on what it was padded with, or on its neighbours."""

    def __init__(self, model: Model, words: int) -> None:
        super().__init__()
        self.enter = nn.Linear(model.mels, model.width)
        self.blocks = nn.ModuleList(Block(model, 2**i) for i in range(model.depth))
        self.leave = nn.Sequential(nn.LayerNorm(model.width), nn.Dropout(model.dropout), nn.Linear(model.width, words))

    def forward(self, frames: Tensor, counts: Tensor) -> Tensor:
        """frames [batch, length, mels] and counts [batch, length] to votes, logits [batch, length, words]."""
        x = self.enter(frames)
        for block in self.blocks:
            x = block(x, counts[..., None])
        return self.leave(x)


class Block(nn.Module):
    """Look around, five frames that are `spread` apart, and add what was found."""

    def __init__(self, model: Model, spread: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width)
        self.look = nn.Conv1d(model.width, model.width, 5, padding=2 * spread, dilation=spread)
        self.think = nn.Linear(model.width, model.width)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        seen = self.look((self.norm(x) * counts).transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.think(F.gelu(seen)))


if __name__ == "__main__":
    unisono.main(main, Settings)
