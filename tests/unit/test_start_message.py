"""Messages at the start of a run."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from unisono.cli.start.start_message import ProcessPlace, about_cores, about_small_shares


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


def places(processes: int, cores: Collection[int], host: str = "a", quota: float | None = None) -> list[ProcessPlace]:
    return [ProcessPlace("cpu", host, [*cores], quota) for _ in range(processes)]


@pytest.mark.parametrize(
    ("found", "threads", "line"),
    [
        (places(2, {0, 1}), 1, ""),
        (places(1, {0, 1}), 2, ""),
        (places(4, {0, 1}), 1, "4 processes with 1 thread each on 2 cores of a"),
        (places(1, {3}), 2, "1 process with 2 threads each on 1 core of a"),
        (places(1, {0}) + places(1, {1}), 1, ""),  # mpirun binds each process to a core of its own
        (places(2, range(64), quota=1.5), 1, "2 processes with 1 thread each on 1.5 cores of a"),
        (places(2, {0, 1}) + places(4, {0, 1}, "b"), 1, "4 processes with 1 thread each on 2 cores of b"),
    ],
)
def test_more_threads_than_cores_are_reported(found: list[ProcessPlace], threads: int, line: str) -> None:
    assert about_cores(found, threads) == (line and f"{line}: more threads than cores add no speed")
