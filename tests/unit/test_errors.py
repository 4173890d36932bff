"""errors: three parts, several problems at once, and the exit status."""

from __future__ import annotations

import pickle

import pytest

from unisono import errors
from unisono.errors import (
    CertificateError,
    CheckpointError,
    DataError,
    DivergenceError,
    LoopError,
    NotFiniteError,
    OutOfMemoryError,
    PeerLostError,
    Problem,
    PromiseBrokenError,
    RankFailedError,
    SettingsError,
    StuckError,
    StudyError,
    UnisonoError,
    UnreachableHostError,
    WorldError,
)

ALL = [
    *(
        UnisonoError,
        SettingsError,
        WorldError,
        UnreachableHostError,
        CertificateError,
        DataError,
        LoopError,
        NotFiniteError,
        CheckpointError,
        OutOfMemoryError,
        PeerLostError,
    ),
    *(DivergenceError, PromiseBrokenError, StuckError, StudyError, RankFailedError),
]


def test_a_message_has_three_parts() -> None:
    error = DataError("Cannot read a sample of the training set.", "It has length 0.", "check the path.")
    assert str(error) == "Cannot read a sample of the training set.\n  It has length 0.\n  Next: check the path."


def test_several_problems_are_reported_together() -> None:
    one, two = Problem("a", "b", "c"), Problem("d", "e", "f")
    error = SettingsError.of([one, two])
    assert isinstance(error, SettingsError)
    assert error.problems == (one, two)
    assert str(error) == "a\n  b\n  Next: c\nd\n  e\n  Next: f"


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_a_unisono_error_and_only_wrong_requests_exit_with_2(kind: type[UnisonoError]) -> None:
    assert issubclass(kind, UnisonoError)
    assert kind("a", "b", "c").exit_status == (2 if kind is SettingsError else 1)
    with pytest.raises(UnisonoError):
        raise kind("a", "b", "c")


def test_a_lost_peer_is_a_matter_of_the_world() -> None:
    assert issubclass(PeerLostError, WorldError)


def test_the_list_above_is_complete() -> None:
    defined = {k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)}
    assert defined == set(ALL)


@pytest.mark.parametrize("kind", ALL)
def test_an_error_travels_between_processes(kind: type[UnisonoError]) -> None:
    there = pickle.loads(pickle.dumps(kind.of([Problem("a", "b", "c"), Problem("d", "e", "f")])))
    assert type(there) is kind
    assert len(there.problems) == 2
    assert str(there) == "a\n  b\n  Next: c\nd\n  e\n  Next: f"


def test_a_message_without_facts_has_no_empty_lines() -> None:
    """torch raises the error of a loader worker again, with its whole text as the only argument."""
    assert str(DataError("An error.\n  Facts.\n  Next: a command")) == "An error.\n  Facts.\n  Next: a command"
    assert str(DataError("An error.", remedy="a command")) == "An error.\n  Next: a command"
