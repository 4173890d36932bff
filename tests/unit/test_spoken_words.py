"""Load spoken words: wave files, validation voices, and a synthesizer that repeats its bytes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.house.sources import ROOT
from tests.recipes.tones import cut_short, write_wave, write_words
from unisono import DataError
from unisono.recipes.datasets import espeak
from unisono.recipes.datasets.class_folders import files_by_class
from unisono.recipes.datasets.spoken_words import DIGITS, RECORDED, load_spoken_words, split_voices
from unisono.recipes.datasets.wav import check_waves, read_wave


def has_synthesizer() -> bool:
    """Return whether eSpeak NG is installed and works."""
    try:
        return bool(espeak.variants())
    except espeak.SynthesizerError:
        return False


needs_synthesizer = pytest.mark.skipif(not has_synthesizer(), reason="no synthesizer: pip install 'unisono[recipes]'")
needs_recordings = pytest.mark.skipif(
    not RECORDED.is_dir(), reason="no recorded digits: apt-get install asterisk-core-sounds-en-wav"
)


# -- wave files


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_integer_samples_of_each_width_are_read(tmp_path: Path, width: int) -> None:
    clip = read_wave(write_wave(tmp_path / "a.wav", hertz=250, seconds=0.1, width=width))
    assert (clip.dtype, clip.shape) == (torch.float32, (1600,))
    expected = 0.5 * np.sin(2 * np.pi * 250 * np.arange(1600) / 16_000)
    np.testing.assert_allclose(clip.numpy(), expected, atol=1.1 / 2 ** (8 * width - 1) + 1e-6)


def error_message(folder: Path) -> str:
    """Return the message of the error that loading this folder raises."""
    with pytest.raises(DataError) as caught:
        load_spoken_words(data=folder)
    return str(caught.value)


def test_stereo_file_is_reported_with_the_command_that_converts_it(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "my words")
    path = write_wave(folder / "word1" / "voice9_1.wav", channels=2)
    message = error_message(folder)
    assert f"Cannot use {path}." in message
    assert "It has 2 channels at 16,000 Hz, and must have 1 channel at 16,000 Hz" in message
    assert f"Next: sox {shlex.quote(str(path))} -r 16000 -c 1 -b 16 fixed.wav && mv fixed.wav" in message


def test_many_files_of_another_rate_are_one_error(tmp_path: Path) -> None:
    folder = write_words(tmp_path)
    paths = [write_wave(folder / "word2" / f"loud{i}_2.wav", rate=44_100) for i in range(7)]
    message = error_message(folder)
    assert "It has 1 channel at 44,100 Hz, and must have 1 channel at 16,000 Hz, as in most files." in message
    assert "in most files. 7 of 22 files are invalid." in message
    assert [str(path) in message for path in paths] == [True] + [False] * 6
    files = shlex.quote(str(folder / "word2")) + "/*.wav"
    assert f'Next: for f in {files}; do sox "$f" -r 16000 -c 1 -b 16 fixed.wav' in message


def test_message_does_not_claim_that_most_files_are_valid(tmp_path: Path) -> None:
    for word in ("yes", "no"):
        for i in range(3):
            write_wave(tmp_path / word / f"voice{i}_1.wav", channels=2)
    message = error_message(tmp_path)
    assert "must have 1 channel at 16,000 Hz. 6 of 6 files are invalid." in message
    assert f"{tmp_path}/no/*.wav {tmp_path}/yes/*.wav; do sox" in message


@pytest.mark.parametrize(
    ("size", "fact"),
    [
        (1000, "Its header gives 2,400 samples, but it ends at 1,000 bytes."),
        (4843, "Its header gives 2,400 samples, but it ends at 4,843 bytes."),  # one byte too short
        (20, "It ends in its header, at 20 bytes."),
        (0, "It ends in its header, at 0 bytes."),
        (44, "Its header gives 2,400 samples, but it ends at 44 bytes."),
    ],
)
def test_truncated_file_is_reported(tmp_path: Path, size: int, fact: str) -> None:
    folder = write_words(tmp_path)
    path = cut_short(folder / "word0" / "voice0_0.wav", size)
    message = error_message(folder)
    assert str(path) in message
    assert fact in message
    assert f"Next: Copy it again, or: rm {path}" in message


def test_other_formats_and_empty_files_are_reported(tmp_path: Path) -> None:
    folder = write_words(tmp_path)
    (folder / "word0" / "text.wav").write_text("This file has the wrong suffix.")
    write_wave(folder / "word1" / "empty.wav", seconds=0)
    message = error_message(folder)
    assert "text.wav.\n  It cannot be read: file does not start with RIFF id." in message
    assert "empty.wav.\n  It has no samples." in message


def test_file_damaged_after_the_check_is_reported(tmp_path: Path) -> None:
    corpus = load_spoken_words(data=write_words(tmp_path))
    path = corpus.train.clips[3]
    assert isinstance(path, Path)
    cut_short(path, 500)
    with pytest.raises(DataError, match=path.name):
        corpus.train[3]


# -- folders


def test_folder_needs_two_words_with_two_files_each(tmp_path: Path) -> None:
    assert "there is no such folder." in error_message(tmp_path / "nowhere")
    assert "It has 0 folders of wave files, one per class." in error_message(tmp_path)
    folder = write_words(tmp_path, words=1)
    assert "It has 1 folders of wave files (word0)" in error_message(folder)
    empty = folder / "word1"
    empty.mkdir()
    assert f"Cannot train on {empty}: " in error_message(folder)
    assert "It has 0 wave files, and needs two" in error_message(folder)
    assert f"Next: rmdir {empty}" in error_message(folder)
    write_wave(empty / "voice0.wav")
    assert "It has 1 wave files" in error_message(folder)
    assert f"Next: rm -r {empty}" in error_message(folder)
    write_wave(empty / "voice1.wav")
    assert len(load_spoken_words(data=folder).valid) == 2


def test_hidden_files_and_background_noise_are_skipped(tmp_path: Path) -> None:
    folder = write_words(tmp_path)
    write_wave(folder / "_background_noise_" / "rain.wav", rate=44_100)
    write_wave(folder / ".old" / "a.wav", channels=2)
    (folder / "word0" / "notes.txt").write_text("none")
    (folder / "licence").write_text("CC0")
    files = files_by_class(folder, "wave files", {".wav"}, ignored="._")
    assert [(word, len(paths)) for word, paths in files.items()] == [("word0", 5), ("word1", 5), ("word2", 5)]
    assert check_waves([path for paths in files.values() for path in paths])[0] == 16_000
    assert load_spoken_words(data=folder).words == ("word0", "word1", "word2")


def test_validation_uses_held_out_voices(tmp_path: Path) -> None:
    corpus = load_spoken_words(data=write_words(tmp_path))
    sides = [{Path(str(clip)).name[:6] for clip in part.clips} for part in (corpus.train, corpus.valid)]
    assert sides[0] & sides[1] == set()
    assert len(sides[1]) == 1
    assert "1 held-out voice" in corpus.summary()
    assert corpus.words == ("word0", "word1", "word2")
    assert "\n" not in corpus.summary()


def test_validation_uses_files_of_each_word_if_voices_are_unknown(tmp_path: Path) -> None:
    for word in ("yes", "no"):
        for i in range(10):  # the part before the first _ is the word, so no voice has both words
            write_wave(tmp_path / word / f"{word}_{i}.wav", seconds=0.05)
    corpus = load_spoken_words(data=tmp_path)
    assert sorted(corpus.valid.labels) == [0, 0, 1, 1]
    assert sorted(corpus.train.labels) == [0] * 8 + [1] * 8
    assert "file names do not tell them" in corpus.summary()


def test_corpus_depends_on_contents_and_not_on_the_folder(tmp_path: Path) -> None:
    here = write_words(tmp_path / "here")
    there = tmp_path / "quite" / "elsewhere"
    shutil.copytree(here, there)
    assert load_spoken_words(data=here).digest == load_spoken_words(data=there).digest
    write_wave(there / "word0" / "voice0_0.wav", seconds=0.5)
    assert load_spoken_words(data=here).digest != load_spoken_words(data=there).digest


# -- the synthesizer

SAY = """
from unisono.recipes.datasets.spoken_words import load_spoken_words
print(load_spoken_words("spoken", count=6, draws=2, seed=3).digest)
"""


@needs_synthesizer
def test_synthesizer_repeats_its_bytes_in_another_process() -> None:
    """Whispering voices consist of noise, which the synthesizer seeds from the clock by default."""
    words = [espeak.Utterance("three", f"en+{voice}", 160, 50) for voice in ("f1", "whisper", "Mike", "whisperf")]
    once = espeak.say(words, 1)
    assert [len(clip) > 5000 for clip in once] == [True] * 4
    assert espeak.say(words, 1) == once
    first = load_spoken_words("spoken", count=6, draws=2, seed=3)
    torch.rand(7)
    np.random.rand(7)
    other = subprocess.run([sys.executable, "-c", SAY], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert other.stdout.strip() == first.digest, other.stderr
    assert load_spoken_words("spoken", count=6, draws=2, seed=4).digest != first.digest


@needs_synthesizer
def test_held_out_voices_speak_each_digit() -> None:
    corpus = load_spoken_words("spoken", count=6, draws=2)
    assert corpus.words == DIGITS
    assert (len(corpus.train), len(corpus.valid)) == (100, 20)
    assert sorted(set(corpus.valid.labels)) == list(range(10))
    samples, label = corpus.valid[0]
    assert (samples.dtype, label) == (torch.float32, 0)
    assert 0.01 < samples.abs().max() <= 1
    assert 0.1 < len(samples) / corpus.rate < 2
    assert "1 held-out voice" in corpus.summary()


@needs_synthesizer
def test_unknown_voice_is_reported() -> None:
    with pytest.raises(espeak.SynthesizerError, match=r"there is no voice nobody\+f1"):
        espeak.say([espeak.Utterance("one", "nobody+f1", 160, 50)], 0)


def test_missing_synthesizer_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "espeak.py"  # the same program in a Python without the package
    program.write_text(
        f"import sys\nsys.modules['espeakng_loader'] = None\n{Path(espeak.__file__).read_text()}".replace(
            "from __future__ import annotations", ""
        )
    )
    monkeypatch.setattr(espeak, "__file__", str(program))
    with pytest.raises(DataError) as caught:
        load_spoken_words("spoken", count=6)
    assert "espeakng_loader" in str(caught.value)
    assert "Next: pip install 'unisono[recipes]', or" in str(caught.value)


def test_variants_of_a_voice_are_in_one_part() -> None:
    names = ["Mike", "mike2", "f1", "f2", "f3", "anika", "anikaRobot", "zac", "paul"]
    for count in range(4, 10):
        train, valid = split_voices(names, count)
        assert len(train) + len(valid) == count
        families = [
            {name.lower().strip("0123456789").removesuffix("robot") for name in side} for side in (train, valid)
        ]
        assert families[0] & families[1] == set()
    with pytest.raises(DataError, match="variants of one voice"):
        split_voices(["f1", "f2"], 2)


@pytest.mark.parametrize(("count", "draws", "do"), [(0, 4, "--set voices=8"), (4, 0, "--set draws=8")])
def test_zero_clips_are_refused(count: int, draws: int, do: str) -> None:
    with pytest.raises(DataError, match=do):
        load_spoken_words("spoken", count=count, draws=draws)


# -- recordings


@needs_recordings
def test_summary_of_recorded_digits_warns_about_validation() -> None:
    corpus = load_spoken_words("recorded", draws=1)
    assert "the SAME ten recordings" in corpus.summary()
    assert "CC-BY-SA 3.0" in corpus.summary()
    assert (len(corpus.train), len(corpus.valid)) == (256, 64)
    assert load_spoken_words("recorded", draws=1).digest == corpus.digest


def test_missing_recordings_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("unisono.recipes.datasets.spoken_words.RECORDED", tmp_path)
    with pytest.raises(DataError, match="apt-get install asterisk-core-sounds-en-wav"):
        load_spoken_words("recorded")
