"""A hang report names the rank that hangs, the object of its wait, and the line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks import hangs
from unisono.launcher.hang_watcher import HangWatcher
from unisono.testing import run_ranks

slow = pytest.mark.slow

ROUNDS = r"at hangs\.py:\d+ in train_here \(for x, y in step:\)"

EXPECTED = {
    "a rank sleeps": (1, r"Ranks 0 and 2 wait for rank 1: it sleeps at hangs\.py:\d+ in sleeps \(time\.sleep\(1e6\)\)"),
    "a rank is in another collective": (
        1,
        r"The ranks wait for each other in different places: "
        rf"rank 0 waits in all_reduce #\d+ of float64\[\d+\] {ROUNDS}; "
        r"rank 1 waits for a message at hangs\.py:\d+ in in_another_collective",
    ),
    "a loader's worker blocks": (
        1,
        r"Ranks 0 and 2 wait for rank 1: it waits for its loader's workers at .*, process \d+ is at hangs\.py:\d+ in "
        "__getitem__",
    ),
    "an uneven loop": (
        0,
        r"rank 0 waits in all_reduce .*; rank 1 waits in barrier #\d+ at hangs\.py:\d+ in uneven_loop",
    ),
    "a dead store": (0, "All other ranks wait for rank 0 to call unisono.main"),
    "a lock is taken twice": (
        1,
        r"Rank 0 waits for ranks 1 and 2: each sleeps at hangs\.py:\d+ in locked_twice \(lock\.acquire\(\)\)",
    ),
    "a file never comes": (1, r"wait for rank 1: it sleeps at hangs\.py:\d+ in waits_for_a_file"),
    "all are elsewhere": (0, "All ranks wait in the same place: no process sends the message, or it does not arrive"),
    "the system stops it": (1, "Ranks 0 and 2 wait for rank 1: it is stopped"),
    "compiled code holds the interpreter": (
        1,
        r"wait for rank 1: it does not respond \(.*interpreter lock\) at hangs\.py:",
    ),
    "packets are lost": (0, "All ranks wait in the same place: .*, or it does not arrive"),
    "the checkpoint": (1, r"wait for rank 1: it sleeps at .* \(for step in run\.steps\(data\):\)"),
    "before the first step": (
        1,
        r"Ranks 0 and 2 wait for rank 1: it sleeps at hangs\.py:\d+ in train_here \(sleep\(\)\)",
    ),
}
QUICK = ("a rank sleeps", "a rank is in another collective")


@slow
@pytest.mark.parametrize("name", hangs.SLOW)
def test_a_slow_run_is_not_ended(tmp_path: Path, name: str) -> None:
    with HangWatcher(tmp_path, verbose=False):
        run_ranks(hangs.train, 2, str(tmp_path), name, 2)
    assert not list(tmp_path.glob("rank-*.json"))


@slow
def test_under_another_launcher_the_first_process_reports(tmp_path: Path) -> None:
    """Statuses are exchanged through the rendezvous store, and each process ends itself."""
    with pytest.raises(AssertionError, match="died with exit code 1"):
        run_ranks(hangs.train_alone, 2, str(tmp_path), "a rank sleeps")
    output = (tmp_path / "said-0").read_text()
    assert re.search("Rank 0 waits for rank 1: it sleeps at", output), output
    assert not (tmp_path / "said-1").read_text()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else [slow]) for name in hangs.HANGS])
def test_the_guilty_rank_is_named(tmp_path: Path, name: str) -> None:
    message, rank = hangs.play(tmp_path, name)
    blamed, pattern = EXPECTED[name]
    assert re.search(pattern, message), message
    assert rank == blamed
