"""The mesh: coordinates of processes, groups along its axes, and sizes that are filled in or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_config import Settings
from unisono.config import CommandLine, ParallelSettings
from unisono.config.mesh_shape import FILL, MeshShape, fill, fitting, wanted
from unisono.config.validate import check
from unisono.config.validate_sizes import choose_mesh

small = st.integers(1, 6)


@given(small, small)
def test_every_rank_has_its_own_coordinates(replicate: int, shard: int) -> None:
    axes = MeshShape(replicate=replicate, shard=shard, tensor=2)
    places = [tuple(axes.coordinates(rank).values()) for rank in range(axes.size)]
    assert len(set(places)) == axes.size == 2 * replicate * shard
    assert places == sorted(places), "ranks count through the last axis first"


@given(small, small, st.sampled_from([("replicate",), ("shard",), ("replicate", "shard")]))
def test_the_groups_of_an_axis_cover_every_rank_once(replicate: int, shard: int, names: tuple[str, ...]) -> None:
    axes = MeshShape(replicate=replicate, shard=shard, tensor=2)
    lines = axes.lines(*names)
    assert sorted(rank for line in lines for rank in line) == list(range(axes.size))
    for line in lines:
        assert list(line) == sorted(line)
        others = [{n: c for n, c in axes.coordinates(rank).items() if n not in names} for rank in line]
        assert all(other == others[0] for other in others)


@given(st.integers(1, 64), small)
def test_a_missing_size_is_filled_in(processes: int, shard: int) -> None:
    axes = fill({"replicate": FILL, "shard": shard}, processes)
    assert (axes is None) == bool(processes % shard)
    assert axes is None or axes.size == processes
    for fits in fitting({"replicate": FILL, "shard": shard}, processes):
        assert fill({"replicate": FILL, "shard": shard}, fits) is not None


def test_the_settings_know_every_axis() -> None:
    assert wanted(ParallelSettings()) == {name: FILL if name == "replicate" else 1 for name in MeshShape._fields}


LINE = CommandLine(("unisono", "run", "text", "--ranks", "4"))


@pytest.mark.parametrize(
    ("parallel", "error", "true", "do"),
    [
        (
            {"shard": 3},
            "4 processes cannot form the mesh.",
            "parallel.shard=3 needs a multiple of 3.",
            "--ranks 3, or: unisono run text",
        ),
        (
            {"shard": 3, "replicate": 1},
            "4 processes cannot form the mesh.",
            "parallel.shard=3 needs 3.",
            "unisono run text --ranks 3",
        ),
        (
            {"shard": 2, "replicate": 1},
            "4 processes cannot form the mesh.",
            "parallel.shard=2 needs 2.",
            "--set parallel.replicate=-1",
        ),
        ({"shard": 0}, "parallel.shard = 0 is out of range.", "It must be at least 1, or -1", "--set parallel.shard=1"),
        (
            {"shard": -1},
            "parallel.replicate = -1 and parallel.shard = -1 cannot be combined.",
            "Only one axis",
            "--set parallel.replicate=1",
        ),
        (
            {"pipeline": 2, "shard": 2},
            "parallel.pipeline = 2 cannot be combined with parallel.shard = 2.",
            "its whole stage",
            "--set parallel.shard=1",
        ),
        (
            {"pipeline": 4, "virtual_ranks": 1},
            "parallel.pipeline = 4 cannot be combined with virtual_ranks = 1.",
            "one stream",
            "--set virtual_ranks=2",
        ),
        (
            {"pipeline": 2, "schedule": "DualPipeV", "stages_per_rank": 3},
            "parallel.schedule = DualPipeV cannot be combined with parallel.stages_per_rank = 3.",
            "2 stages per process",
            "--set parallel.schedule=Interleaved1F1B",
        ),
        (
            {"pipeline": 2, "schedule": "ZBVZeroBubble", "activation_checkpoint": "selective"},
            "parallel.schedule = ZBVZeroBubble cannot be combined with parallel.activation_checkpoint = selective.",
            "runs backward through a layer twice",
            "--set parallel.activation_checkpoint=full, or: ",
        ),
        (
            {"pipeline": 2, "schedule": "LoopedBFS", "split_points": ["a"]},
            'parallel.split_points = ["a"] has the wrong length.',
            "4 stages need 3 split points.",
            "parallel.split_points=[]",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_a_valid_one(
    parallel: dict[str, Any], error: str, true: str, do: str
) -> None:
    ranks = parallel.pop("virtual_ranks", 8)
    (problem,) = check(Settings(steps=1, virtual_ranks=ranks, parallel=ParallelSettings(**parallel)), 4, LINE)
    assert problem.error == error
    assert true in problem.facts
    assert do in problem.remedy


def test_axes_without_a_value_count_as_one() -> None:
    _, (problem,) = choose_mesh({"parallel.shard": 2}, 3, LINE)
    assert problem.facts == "parallel.shard=2 needs a multiple of 2."
