"""Spoken words: what wave files must be, who is kept for validation, and a synthesizer that says the same twice."""

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
from unisono.recipes.datasets.spoken_words import DIGITS, RECORDED, split_voices, voices
from unisono.recipes.datasets.wav import check_waves, labelled_waves, read_wave


def speaks() -> bool:
    try:
        return bool(espeak.variants())
    except espeak.NoSpeech:
        return False


needs_synthesizer = pytest.mark.skipif(not speaks(), reason="no synthesizer: pip install 'unisono[recipes]'")
needs_recordings = pytest.mark.skipif(
    not RECORDED.is_dir(), reason="no recorded digits: apt-get install asterisk-core-sounds-en-wav"
)


# -- wave files


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_every_width_are_read(tmp_path: Path, width: int) -> None:
    clip = read_wave(write_wave(tmp_path / "a.wav", hertz=250, seconds=0.1, width=width))
    assert (clip.dtype, clip.shape) == (torch.float32, (1600,))
    expected = 0.5 * np.sin(2 * np.pi * 250 * np.arange(1600) / 16_000)
    np.testing.assert_allclose(clip.numpy(), expected, atol=1.1 / 2 ** (8 * width - 1) + 1e-6)


def told(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        voices(data=folder)
    return str(caught.value)


def test_a_stereo_file_is_named_with_the_line_that_repairs_it(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "my words")
    path = write_wave(folder / "word1" / "voice9_1.wav", channels=2)
    message = told(folder)
    assert f"Train on {path}." in message
    assert "It has 2 channels at 16,000 samples a second; one channel at 16,000" in message
    assert f"Next: sox {shlex.quote(str(path))} -r 16000 -c 1 -b 16 fixed.wav && mv fixed.wav" in message


def test_files_of_another_rate_are_named_together(tmp_path: Path) -> None:
    folder = write_words(tmp_path)
    paths = [write_wave(folder / "word2" / f"loud{i}_2.wav", rate=44_100) for i in range(7)]
    message = told(folder)
    assert "It has 1 channel at 44,100 samples a second; one channel at 16,000 is needed" in message
    assert "is needed, as most files have. 7 of 22 files do not fit." in message
    assert [str(path) in message for path in paths] == [True] + [False] * 6
    files = shlex.quote(str(folder / "word2")) + "/*.wav"
    assert f'Next: for f in {files}; do sox "$f" -r 16000 -c 1 -b 16 fixed.wav' in message


def test_where_no_file_fits_none_is_said_to(tmp_path: Path) -> None:
    for word in ("yes", "no"):
        for i in range(3):
            write_wave(tmp_path / word / f"voice{i}_1.wav", channels=2)
    message = told(tmp_path)
    assert "one channel at 16,000 is needed. 6 of 6 files do not fit." in message
    assert f"{tmp_path}/no/*.wav {tmp_path}/yes/*.wav; do sox" in message


@pytest.mark.parametrize(
    ("size", "true"),
    [
        (1000, "Its header tells of 2,400 samples, but it ends after 1,000 bytes."),
        (4843, "Its header tells of 2,400 samples, but it ends after 4,843 bytes."),  # by one byte
        (20, "It ends inside its header, after 20 bytes."),
        (0, "It ends inside its header, after 0 bytes."),
        (44, "Its header tells of 2,400 samples, but it ends after 44 bytes."),
    ],
)
def test_a_truncated_file_is_named(tmp_path: Path, size: int, true: str) -> None:
    folder = write_words(tmp_path)
    path = cut_short(folder / "word0" / "voice0_0.wav", size)
    message = told(folder)
    assert str(path) in message
    assert true in message
    assert f"Next: Get it anew, or: rm {path}" in message


def test_what_is_no_wave_file_or_has_no_samples_is_named(tmp_path: Path) -> None:
    folder = write_words(tmp_path)
    (folder / "word0" / "text.wav").write_text("This is no sound at all, whatever its name says.")
    write_wave(folder / "word1" / "empty.wav", seconds=0)
    message = told(folder)
    assert "text.wav.\n  It cannot be read: file does not start with RIFF id." in message
    assert "empty.wav.\n  It has no samples." in message


def test_a_file_that_was_whole_at_first_is_told_when_it_is_read(tmp_path: Path) -> None:
    corpus = voices(data=write_words(tmp_path))
    path = corpus.train.clips[3]
    assert isinstance(path, Path)
    cut_short(path, 500)
    with pytest.raises(DataError, match=path.name):
        corpus.train[3]


# -- folders


def test_a_folder_needs_two_words_with_two_files_each(tmp_path: Path) -> None:
    assert "There is no such folder." in told(tmp_path / "nowhere")
    assert "it has none" in told(tmp_path)
    folder = write_words(tmp_path, words=1)
    assert "the only one is word0" in told(folder)
    empty = folder / "word1"
    empty.mkdir()
    assert f"{empty} has 0 wave files: two are needed" in told(folder)
    assert f"Next: rmdir {empty}" in told(folder)
    write_wave(empty / "voice0.wav")
    assert f"{empty} has 1 wave files" in told(folder)
    write_wave(empty / "voice1.wav")
    assert len(voices(data=folder).valid) == 2


def test_what_is_not_a_word_is_passed_over(tmp_path: Path) -> None:
    folder = write_words(tmp_path)
    write_wave(folder / "_background_noise_" / "rain.wav", rate=44_100)
    write_wave(folder / ".old" / "a.wav", channels=2)
    (folder / "word0" / "notes.txt").write_text("none")
    (folder / "licence").write_text("CC0")
    files = labelled_waves(folder)
    assert [(word, len(paths)) for word, paths in files.items()] == [("word0", 5), ("word1", 5), ("word2", 5)]
    assert check_waves(files)[0] == 16_000


def test_voices_are_kept_apart_where_file_names_tell_them(tmp_path: Path) -> None:
    corpus = voices(data=write_words(tmp_path))
    sides = [{Path(str(clip)).name[:6] for clip in part.clips} for part in (corpus.train, corpus.valid)]
    assert sides[0] & sides[1] == set()
    assert len(sides[1]) == 1
    assert "1 voice kept apart" in corpus.line()
    assert corpus.words == ("word0", "word1", "word2")
    assert "\n" not in corpus.line()


def test_else_some_files_of_every_word_are(tmp_path: Path) -> None:
    for word in ("yes", "no"):
        for i in range(10):  # the name up to the first _ is the word: no voice that says both
            write_wave(tmp_path / word / f"{word}_{i}.wav", seconds=0.05)
    corpus = voices(data=tmp_path)
    assert sorted(corpus.valid.labels) == [0, 0, 1, 1]
    assert sorted(corpus.train.labels) == [0] * 8 + [1] * 8
    assert "their names do not say" in corpus.line()


def test_it_depends_on_what_lies_in_the_folder_and_not_on_where(tmp_path: Path) -> None:
    here = write_words(tmp_path / "here")
    there = tmp_path / "quite" / "elsewhere"
    shutil.copytree(here, there)
    assert voices(data=here).digest == voices(data=there).digest
    write_wave(there / "word0" / "voice0_0.wav", seconds=0.5)
    assert voices(data=here).digest != voices(data=there).digest


# -- the synthesizer

SAY = """
from unisono.recipes.datasets.spoken_words import voices
print(voices("spoken", count=6, draws=2, seed=3).digest)
"""


@needs_synthesizer
def test_it_says_the_same_bytes_twice_and_in_another_process() -> None:
    """Whispering voices are made of noise, which the synthesizer draws from a clock's seed unless it is told one."""
    words = [espeak.Utterance("three", f"en+{voice}", 160, 50) for voice in ("f1", "whisper", "Mike", "whisperf")]
    once = espeak.say(words, 1)
    assert [len(sound) > 5000 for sound in once] == [True] * 4
    assert espeak.say(words, 1) == once
    first = voices("spoken", count=6, draws=2, seed=3)
    torch.rand(7)
    np.random.rand(7)
    other = subprocess.run([sys.executable, "-c", SAY], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert other.stdout.strip() == first.digest, other.stderr
    assert voices("spoken", count=6, draws=2, seed=4).digest != first.digest


@needs_synthesizer
def test_voices_to_validate_on_say_everything_and_are_in_no_training_clip() -> None:
    corpus = voices("spoken", count=6, draws=2)
    assert corpus.words == DIGITS
    assert (len(corpus.train), len(corpus.valid)) == (100, 20)
    assert sorted(set(corpus.valid.labels)) == list(range(10))
    samples, label = corpus.valid[0]
    assert (samples.dtype, label) == (torch.float32, 0)
    assert 0.01 < samples.abs().max() <= 1
    assert 0.1 < len(samples) / corpus.rate < 2
    assert "1 voice kept apart" in corpus.line()


@needs_synthesizer
def test_a_voice_that_there_is_not_is_told() -> None:
    with pytest.raises(espeak.NoSpeech, match=r"there is no voice nobody\+f1"):
        espeak.say([espeak.Utterance("one", "nobody+f1", 160, 50)], 0)


def test_a_synthesizer_that_lacks_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "espeak.py"  # the same program in a Python without the package
    program.write_text(
        f"import sys\nsys.modules['espeakng_loader'] = None\n{Path(espeak.__file__).read_text()}".replace(
            "from __future__ import annotations", ""
        )
    )
    monkeypatch.setattr(espeak, "__file__", str(program))
    with pytest.raises(DataError) as caught:
        voices("spoken", count=6)
    assert "espeakng_loader" in str(caught.value)
    assert "Next: pip install 'unisono[recipes]', or" in str(caught.value)


def test_a_family_of_voices_is_wholly_on_one_side() -> None:
    names = ["Mike", "mike2", "f1", "f2", "f3", "anika", "anikaRobot", "zac", "paul"]
    for count in range(4, 10):
        train, valid = split_voices(names, count)
        assert len(train) + len(valid) == count
        families = [
            {name.lower().strip("0123456789").removesuffix("robot") for name in side} for side in (train, valid)
        ]
        assert families[0] & families[1] == set()
    with pytest.raises(DataError, match="all of one family"):
        split_voices(["f1", "f2"], 2)


@pytest.mark.parametrize(("count", "draws", "do"), [(0, 4, "--set voices=8"), (4, 0, "--set draws=8")])
def test_nothing_to_say_is_told(count: int, draws: int, do: str) -> None:
    with pytest.raises(DataError, match=do):
        voices("spoken", count=count, draws=draws)


# -- a person


@needs_recordings
def test_recorded_digits_say_what_their_validation_is_worth() -> None:
    corpus = voices("recorded", draws=1)
    assert "the SAME ten recordings" in corpus.line()
    assert "CC-BY-SA 3.0" in corpus.line()
    assert (len(corpus.train), len(corpus.valid)) == (256, 64)
    assert voices("recorded", draws=1).digest == corpus.digest


def test_recordings_that_lack_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("unisono.recipes.datasets.spoken_words.RECORDED", tmp_path)
    with pytest.raises(DataError, match="apt-get install asterisk-core-sounds-en-wav"):
        voices("recorded")
