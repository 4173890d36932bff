"""Train a small network to recognize spoken words, and validate it on voices that it was not trained on.

    unisono run speech --ranks 2 --set source=spoken                    ten digits, 104 voices: about a minute
    unisono run speech --ranks 2 --set data=words                       words/yes/a.wav, words/no/b.wav, ...
    unisono copy speech mine.py                                         then edit it and: unisono run mine.py

Data     your own folder of wave files; or digits in synthetic voices (`pip install 'unisono[recipes]'`); or variations
         of ten recorded digits (Debian's package asterisk-core-sounds-en-wav)
Model    a convolutional network of 0.3 million parameters over log-mel frames; predictions are averaged over frames
Result   accuracy of about 95 % on digits in held-out synthetic voices (chance: 10 %). Accuracy on a person's recorded
         digits is reported where they are installed; the training has no recordings, so it may be low
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
from unisono.recipes.datasets.spoken_words import Clips, clips_of, load_recorded_digits, load_spoken_words


@dataclass(frozen=True, kw_only=True)
class Model:
    mels: int = 40  # number of mel bands, from 60 Hz to just below half the sampling rate
    width: int = 96  # number of channels
    depth: int = 4  # number of blocks; each one has twice the dilation of the one before
    dropout: float = 0.1  # dropout probability


@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    batch: int = 64  # global batch size, in clips
    epochs: int | None = 8
    lr: float = 3e-3  # peak learning rate of the one-cycle schedule
    weight_decay: float = 0.05  # weight decay of AdamW
    clip: float | None = 1.0
    data: Path | None = None  # your own data set: a folder with one folder of wave files per word
    source: Literal["auto", "spoken", "recorded"] = "auto"  # spoken: synthetic voices; recorded: a Debian package
    voices: int = 1000  # largest number of synthetic voices; the synthesizer has 104
    draws: int = 4  # number of clips per voice and word, each with random speed, pitch and accent
    augment: float = 1.0  # strength of the augmentation of training clips; 0: none
    model: Model = Model()

    def __post_init__(self) -> None:
        """Refuse parallelism that this model does not support."""
        for axis, reason in (
            ("tensor", "Each block begins with a convolution, which cannot be divided."),
            ("context", "It has no attention: a convolution needs each frame's neighbors."),
        ):
            self.parallel.refuse("The speech recipe", reason, [axis])


def main(run: unisono.Run[Settings]) -> None:
    settings = run.settings
    corpus = load_spoken_words(
        settings.source, data=settings.data, count=settings.voices, draws=settings.draws, seed=settings.seed
    )
    run.print(corpus.summary())
    train_set = MelFrames(corpus.train, corpus.rate, settings.model.mels, augment=settings.augment)
    valid_set = MelFrames(corpus.valid, corpus.rate, settings.model.mels)

    model = run.place(lambda: FrameClassifier(settings.model, len(corpus.words)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    total_steps = run.count_steps(train_set)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=total_steps)
    run.track(model=model, optimizer=optimizer, schedule=schedule)

    for step in run.steps(train_set, collate_fn=pad):
        step.run(model, loss_sum, forward=frame_logits)  # forward and backward of this process's micro-batches
        step.update(optimizer, schedule, clip=settings.clip)
        run.log(loss=step.loss)

    result = run.evaluate(model, valid_set, accuracy, forward=clip_log_probabilities, collate_fn=pad)
    run.log(result)
    run.print(f"validation: accuracy {result['accuracy']:.1%} on {len(valid_set)} clips {corpus.validation}")
    recorded = load_recorded_digits() if corpus.synthetic else None
    if recorded is not None:
        frames = MelFrames(recorded, corpus.rate, settings.model.mels)
        metrics = run.evaluate(model, frames, accuracy, forward=clip_log_probabilities, collate_fn=pad)
        run.log(recorded_accuracy=metrics["accuracy"])
        run.print(f"accuracy on {len(recorded)} digits recorded by a person: {metrics['accuracy']:.1%}")


def frame_logits(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the logits of each frame: [batch, length, words]."""
    frames, mask, _ = batch
    return model(frames, mask)


def loss_sum(logits: Tensor, frames: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy over frames, in nats, and the number of frames."""
    targets = labels[:, None].expand(mask.shape)
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (nats * mask.flatten()).sum(), mask.sum()


def clip_log_probabilities(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the log probabilities of each clip, averaged over its frames: [batch, words]."""
    _, mask, _ = batch
    log_probabilities = F.log_softmax(frame_logits(model, batch), dim=-1)
    return (log_probabilities * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def accuracy(output: Tensor, frames: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the number of correct clips and the number of clips."""
    return (output.argmax(-1) == labels).sum(), len(labels)


class MelFrames(Dataset[tuple[Tensor, int]]):
    """Clips as (log-mel frames [length, mels], label), one frame per 16 ms, with mean 0 per band and clip.

    Augmentation changes speed and pitch by up to 15 %, adds silence and noise, and erases some time steps and bands. It
    draws from torch's global generator, which the run seeds for each micro-batch.

    Args:
        clips: Waveforms with their labels.
        rate: Sampling rate, in Hz.
        mels: Number of mel bands.
        augment: Strength of the augmentation, from 0 (none) to 1.
    """

    def __init__(self, clips: Clips, rate: int, mels: int, augment: float = 0.0) -> None:
        self.clips, self.augment = clips, augment
        self.window = 2 ** round(math.log2(0.032 * rate))  # samples: the power of two nearest to 32 ms
        self.filters = mel_filters(mels, self.window, rate)
        self.hann = torch.hann_window(self.window)

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        waveform, label = self.clips[index]
        if self.augment:
            waveform = augment_waveform(waveform, self.augment)
        waveform = F.pad(waveform, (0, max(0, self.window - len(waveform))))
        spectrum = torch.stft(waveform, self.window, self.window // 2, window=self.hann, return_complex=True)
        frames = (spectrum.abs().square().T @ self.filters + 1e-6).log()
        frames = frames.clamp(min=float(frames.max()) - 9)
        frames = frames - frames.mean(0)
        if self.augment:  # SpecAugment, arXiv 1904.08779; 0 is the mean
            erase_(frames, 0, 0.2 * self.augment)
            erase_(frames, 1, 0.2 * self.augment)
        return frames, label


def augment_waveform(waveform: Tensor, strength: float) -> Tensor:
    """Change the speed, and with it the pitch, of a waveform [samples]; add silence at both ends, and noise."""
    speed = 1 + 0.15 * strength * float(2 * torch.rand(()) - 1)
    length = max(1, round(len(waveform) / speed))
    waveform = F.interpolate(waveform[None, None], length, mode="linear", align_corners=False)[0, 0]
    silence = [int(torch.randint(len(waveform) // 4 + 1, ())) for _ in range(2)]  # before and after
    waveform = F.pad(waveform, silence)
    loudness = waveform.std(correction=0) * 10 ** float(-2 * torch.rand(()))  # 0 to 40 dB below the voice
    return waveform + 0.5 * strength * loudness * torch.randn(len(waveform))


def erase_(frames: Tensor, dim: int, fraction: float) -> None:
    """Set a random range of a dim to 0, in place. It covers at most this fraction of the dim."""
    size = frames.shape[dim]
    width = int(torch.randint(int(fraction * size) + 1, ()))
    frames.narrow(dim, int(torch.randint(size - width + 1, ())), width).zero_()


def mel_filters(mels: int, window: int, rate: int) -> Tensor:
    """Make triangular filters [window // 2 + 1, mels] of equal width on the mel scale."""

    def mel(hertz: Tensor) -> Tensor:
        return 2595 * torch.log10(1 + hertz / 700)

    bins = mel(torch.linspace(0, rate / 2, window // 2 + 1))
    low, high = mel(torch.tensor([60.0, 0.95 * rate / 2]))
    edges = torch.linspace(float(low), float(high), mels + 2)
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def pad(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Collate clips into (frames [batch, length, mels], mask [batch, length], labels [batch]).

    The mask is 1 for frames and 0 for padding.
    """
    clips = [frames for frames, _ in samples]
    frames = nn.utils.rnn.pad_sequence(clips, batch_first=True)
    lengths = torch.tensor([len(clip) for clip in clips])
    mask = (torch.arange(frames.shape[1]) < lengths[:, None]).float()
    return frames, mask, torch.tensor([label for _, label in samples])


class FrameClassifier(nn.Module):
    """A network of dilated convolutions that classifies each frame.

    Padding is masked before each convolution, and no layer computes statistics over a clip or batch. The prediction for
    a clip therefore depends neither on the amount of padding nor on the other clips of the batch.
    """

    def __init__(self, model: Model, words: int) -> None:
        super().__init__()
        self.enter = nn.Linear(model.mels, model.width)
        self.blocks = nn.ModuleList(Block(model, 2**i) for i in range(model.depth))
        self.leave = nn.Sequential(nn.LayerNorm(model.width), nn.Dropout(model.dropout), nn.Linear(model.width, words))

    def forward(self, frames: Tensor, mask: Tensor) -> Tensor:
        """Map frames [batch, length, mels] and mask [batch, length] to logits [batch, length, words]."""
        x = self.enter(frames)
        for block in self.blocks:
            x = block(x, mask[..., None])
        return self.leave(x)


class Block(nn.Module):
    """A dilated convolution over 5 frames and a linear layer, with a residual connection."""

    def __init__(self, model: Model, dilation: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width)
        self.look = nn.Conv1d(model.width, model.width, 5, padding=2 * dilation, dilation=dilation)
        self.think = nn.Linear(model.width, model.width)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.look((self.norm(x) * mask).transpose(1, 2)).transpose(1, 2)
        return x + self.dropout(self.think(F.gelu(y)))


def predict(settings: Settings, model: nn.Module, path: Path) -> unisono.Prediction:
    """Predict the word of each wave file of a folder, or of one file, with its probability."""
    corpus = load_spoken_words(
        settings.source, data=settings.data, count=settings.voices, draws=settings.draws, seed=settings.seed
    )
    files, clips = clips_of(path, corpus.rate)

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        best = clip_log_probabilities(model, batch).max(-1)
        return {"file": batch[2], "word": best.indices, "probability": best.values.exp()}

    def describe(row: dict[str, Tensor]) -> dict[str, object]:
        name, word = str(files[int(row["file"])]), corpus.words[int(row["word"])]
        return {"file": name, "word": word, "probability": float(row["probability"])}

    frames = MelFrames(clips, corpus.rate, settings.model.mels)
    return unisono.Prediction(frames, forward=forward, collate_fn=pad, describe=describe)


if __name__ == "__main__":
    unisono.main(main, Settings, predict=predict)
