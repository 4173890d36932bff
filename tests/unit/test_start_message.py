"""Messages at the start of a run."""

from __future__ import annotations

import pytest

from unisono.cli.start.start_message import about_cores, about_small_shares


@pytest.mark.parametrize(
    ("batch", "virtual_ranks", "processes", "ending"),
    [
        (8, 8, 1, "--set virtual_ranks=2 is faster, on 1 to 2 processes, with other bits"),
        (16, 8, 4, "--set virtual_ranks=4 is faster, on 1 to 4 processes, with other bits"),
        (17, 8, 1, ""),
        (8, 8, 8, ""),  # each process has one
        (2, 2, 1, ""),
        (64, 8, 1, ""),
    ],
)
def test_a_small_share_per_virtual_rank_is_reported_with_the_setting(
    batch: int, virtual_ranks: int, processes: int, ending: str
) -> None:
    line = about_small_shares(batch, virtual_ranks, processes)
    assert line.endswith(ending)
    assert bool(line) is bool(ending)


@pytest.mark.parametrize(
    ("processes", "threads", "cores", "line"),
    [
        (2, 1, 2, ""),
        (1, 2, 2, ""),
        (4, 1, 2, "4 processes with 1 thread each on 2 cores of this host: more threads than cores add no speed"),
        (1, 2, 1, "1 process with 2 threads each on 1 core of this host: more threads than cores add no speed"),
    ],
)
def test_more_threads_than_cores_are_reported(processes: int, threads: int, cores: int, line: str) -> None:
    assert about_cores(processes, threads, cores) == line
