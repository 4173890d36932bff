"""Layers of a model, and the parameters that belong to each."""

from __future__ import annotations

import pytest
from torch import nn

from unisono.errors import LoopError
from unisono.parallel.fsdp.fsdp import layers_of, own_parameters, untied


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Sequential(nn.Linear(3, 3), nn.ReLU())


def test_modules_of_one_class_in_a_row_are_layers() -> None:
    net = Net()
    assert layers_of(net) == list(net.blocks)[::-1]
    assert layers_of(net, ["Linear"]) == [p for p in net.modules() if isinstance(p, nn.Linear)][::-1]
    assert layers_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []


class Containers(nn.Module):
    """Rows of containers that are not called, as in many U-Nets."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.ModuleDict({"block": Block(), "pool": nn.ReLU()}) for _ in range(2))
        self.up = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(3, 3), Block()]) for _ in range(2))


def test_modules_in_containers_without_a_forward_are_layers() -> None:
    net = Containers()
    found = layers_of(net)
    assert {type(layer) for layer in found} == {Block, nn.Linear}
    assert len(found) == len(set(found)) == 2 + 2 * 3


def test_an_unknown_class_is_refused() -> None:
    with pytest.raises(LoopError, match=r"(?s)no layer of class Bolck.*class Block, Linear"):
        layers_of(Net(), ["Bolck"])


def test_every_parameter_belongs_to_one_layer() -> None:
    net = Net()
    modules = [*layers_of(net), net]
    names = [own_parameters(m, [other for other in modules if other is not m]) for m in modules]
    assert names[0] == ["up.weight", "up.bias", "down.weight", "down.bias", "scale"], "submodules come first"
    assert sum(map(len, names)) == len(list(net.parameters()))


def test_tied_layers_are_not_gathered_by_themselves() -> None:
    net = Net()
    first, second, third = [part for part in net.modules() if isinstance(part, Block)]
    second.up.weight = first.up.weight
    assert untied(net, [*layers_of(net), net]) == [third, net]
    shared = third.up.weight
    assert isinstance(shared, nn.Parameter)
    third.scale = shared  # a tie within one layer does not matter
    assert third in untied(net, [*layers_of(net), net])
