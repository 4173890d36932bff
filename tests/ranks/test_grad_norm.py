"""Gradient norms: equal to torch's up to rounding, and bit-identical for any division of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.distributed.init import join_process_group as join
from unisono.distributed.mesh import Mesh
from unisono.environment import World
from unisono.testing import run_ranks
from unisono.train.optimization.grad_norm import clip_, total_norm

SHAPES = [(7, 5), (3,), (1, 40), (12, 3, 2), (2, 1000), (5,)]


def gradients() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=g) * 10.0**i for i, shape in enumerate(SHAPES)]


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4), st.integers(0, 99))
def test_norm_matches_torch(shapes: list[list[int]], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    grads = [torch.randn(shape, generator=g) for shape in shapes]
    assert total_norm(grads, Mesh()) == pytest.approx(float(torch.nn.utils.get_total_norm(grads)), rel=1e-5)


def test_clipping_matches_torch() -> None:
    ours, theirs = gradients(), [torch.nn.Parameter(grad.clone()) for grad in gradients()]
    for p in theirs:
        p.grad = p.detach().clone()
    norm = total_norm(ours, Mesh())
    clip_(ours, 0.5, norm)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    for mine, p in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, p.grad)
    before = [grad.clone() for grad in ours]
    clip_(ours, 2 * norm, norm)
    assert all(map(torch.equal, ours, before)), "within the limit nothing changes"


def norm_of_rows(world: World) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with join(world) as group:
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("shard",))
        return total_norm([distribute_tensor(grad, mesh, [Shard(0)]) for grad in gradients()], Mesh(shard=group))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_norm_does_not_depend_on_the_division(size: int) -> None:
    assert set(run_ranks(norm_of_rows, size)) == {total_norm(gradients(), Mesh())}
