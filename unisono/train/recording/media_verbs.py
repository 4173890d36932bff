"""The verbs of `run` that record images, figures, texts, histograms and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unisono.train.recording.media_recorder import MediaRecorder


class MediaVerbs:
    """The verbs of a run for what is no number.

    The main process writes to `RUN/media/`, and trackers get it; other processes do nothing. All values are only read.
    A name is recorded once a step: the last call counts.
    """

    _media: MediaRecorder

    def log_image(self, name: str, image: Any) -> None:
        """Record an image.

        Args:
            name: its name.
            image: an array or tensor [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels; uint8, bool, or floating
                point from 0 to 1.
        """
        self._media.image(name, image)

    def log_figure(self, name: str, figure: Any) -> None:
        """Record a figure of Matplotlib, as an image. Close it yourself: matplotlib.pyplot.close(figure)."""
        self._media.figure(name, figure)

    def log_text(self, name: str, text: str) -> None:
        """Record a text."""
        self._media.text(name, text)

    def log_histogram(self, name: str, values: Any, *, bins: int = 64) -> None:
        """Record a histogram of an array or tensor of any shape: equal bins from its least to its greatest value."""
        self._media.histogram(name, values, bins)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Record a table. A row has a value (a number, a text or None) for each column."""
        self._media.table(name, columns, rows)
