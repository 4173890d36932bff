"""Compression without processes: the largest elements, the nodes of the tree and their owners, PowerSGD."""

from __future__ import annotations

import pytest
import torch

from unisono.exchange.compression.compressors import largest_elements
from unisono.exchange.compression.node_owners import NodeOwners, moves, tree_nodes
from unisono.exchange.compression.powersgd import first_q, next_q, orthogonalize, shape_of
from unisono.plan.assignment import assign_evenly
from unisono.plan.reduction_tree import Node, subtrees


def test_the_largest_elements_are_in_the_order_of_their_positions() -> None:
    positions, values = largest_elements(torch.tensor([0.5, -3.0, 0.0, 2.0, -1.0]), 3)
    assert (positions.tolist(), values.tolist()) == ([1, 3, 4], [-3.0, 2.0, -1.0])


# -- nodes


def test_nodes_are_a_level_of_the_tree() -> None:
    assert tree_nodes(8, None) == tree_nodes(8, 8) == tuple(Node(v, v + 1) for v in range(8))
    assert tree_nodes(6, 2) == (Node(0, 3), Node(3, 6))
    assert tree_nodes(5, 4) == (Node(0, 1), Node(1, 2), Node(2, 3), Node(3, 5))
    for leaves in range(2, 40):
        for count in (None, 2, 4, 8):
            nodes = tree_nodes(leaves, count if count and count <= leaves else None)
            assert [n.lo for n in nodes[1:]] == [n.hi for n in nodes[:-1]]
            assert all(subtrees(leaves, *node) == (node,) for node in nodes)


@pytest.mark.parametrize("leaves", [2, 5, 8, 12])
def test_every_leaf_of_a_node_is_computed_by_one_process(leaves: int) -> None:
    for count in (None, 2):
        nodes = tree_nodes(leaves, count)
        for size in range(1, leaves + 1):
            owners = NodeOwners(leaves, nodes, assign_evenly(leaves, size))
            for node in nodes:
                parts = [part for rank in range(size) for part in owners.parts(rank, node)]
                assert [v for part in parts for v in range(*part)] == list(range(*node))
                assert owners.parts(owners.owner(node), node)
            assert sorted(n for rank in range(size) for n in owners.owned(rank)) == list(range(len(nodes)))
            assert owners.plan.arrivals()[0].lo == 0
            assert sum(n.hi - n.lo for n in owners.plan.arrivals()) == leaves


def test_a_process_without_nodes_has_an_empty_span() -> None:
    owners = NodeOwners(8, tree_nodes(8, 2), ((0, 2), (2, 4), (4, 4), (4, 8)))
    assert owners.owners == (0, 3)
    assert owners.plan.spans == ((0, 4), (4, 4), (4, 4), (4, 8))


def test_a_node_moves_if_its_owner_changes() -> None:
    assert moves((0, 0, 1, 1), (0, 1, 1, 2)) == [(1, 0, 1), (3, 1, 2)]


# -- PowerSGD


def test_columns_become_orthogonal_and_dependent_ones_zero() -> None:
    g = torch.Generator().manual_seed(0)
    matrix = torch.randn(20, 4, generator=g)
    matrix[:, 2] = matrix[:, 0] * 1e5 + matrix[:, 1]
    matrix[:, 3] = 0.0
    orthogonal = orthogonalize(matrix)
    expected = torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert torch.allclose(orthogonal.T @ orthogonal, expected, atol=1e-6)


def test_a_matrix_of_low_rank_is_approximated_exactly() -> None:
    g = torch.Generator().manual_seed(1)
    matrix = torch.randn(40, 3, generator=g) @ torch.randn(3, 30, generator=g)
    p = orthogonalize(matrix @ first_q(0, 30, 4, matrix.device))
    assert torch.allclose(p @ (matrix.T @ p).T, matrix, atol=1e-4)


def test_the_iteration_begins_from_a_fixed_key_and_keeps_q_without_a_gradient() -> None:
    q = first_q(7, 30, 4, torch.device("cpu"))
    assert torch.equal(q, first_q(7, 30, 4, torch.device("cpu")))
    assert not torch.equal(q, first_q(8, 30, 4, torch.device("cpu")))
    assert torch.equal(next_q(q, torch.zeros(30, 4)), q)
    found = torch.randn(30, 4) * 1e-20
    assert float(next_q(q, found).abs().max()) == 1.0


@pytest.mark.parametrize(
    ("shape", "found"),
    [((64, 96), (64, 96, 4)), ((8, 3, 5, 5), None), ((64, 32, 3, 3), (64, 288, 4)), ((700,), None), ((0, 5), None)],
)
def test_a_matrix_is_approximated_where_that_halves_it(shape: tuple[int, ...], found: tuple[int, ...] | None) -> None:
    assert shape_of(torch.empty(shape), 4) == found
