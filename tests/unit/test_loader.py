"""What torch raises when a loader worker is gone, and what is the data set's own."""

from __future__ import annotations

import pytest

from unisono.data.loader import _tells_of_a_death

DEATHS = [
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."),
    EOFError(),  # the socket on which it would have sent a tensor's memory
    ConnectionResetError(104, "Connection reset by peer"),
    ConnectionRefusedError(111, "Connection refused"),
    FileNotFoundError(2, "No such file or directory"),
]
OWN = [
    RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nsize mismatch"),
    RuntimeError("size mismatch"),
    EOFError("Caught EOFError in DataLoader worker process 0.\nno more input"),
    FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.\n7.png"),
    ValueError("bad"),
]


@pytest.mark.parametrize("error", DEATHS, ids=repr)
def test_a_worker_that_is_gone_is_told_from_an_error_of_the_data(error: Exception) -> None:
    assert _tells_of_a_death(error)


@pytest.mark.parametrize("error", OWN, ids=repr)
def test_the_data_sets_own_errors_stay_its_own(error: Exception) -> None:
    assert not _tells_of_a_death(error)
