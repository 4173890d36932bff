"""Treespecs from other processes: the same structures, and no module is imported for them."""

from __future__ import annotations

import enum
import json
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import pytest
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps

from unisono.torch_compat.tree_specs import load_treespec


class Color(enum.Enum):
    RED = 1


TREES: list[Any] = [
    1,
    (1, [2, {"a": 3, "b": (4,)}], None),
    defaultdict(list, {"a": 1, "b": [2, 3]}),
    OrderedDict(a=1, b=deque([2, 3], maxlen=4)),
    {Color.RED: 1, "__enum__": 2, "[": 3},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_a_structure_is_read_as_it_was_written(tree: Any) -> None:
    leaves, spec = tree_flatten(tree)
    read = load_treespec(treespec_dumps(spec))
    assert read == spec
    assert tree_unflatten(leaves, read) == tree


def changed(tree: Any, old: str, new: str) -> str:
    text = treespec_dumps(tree_flatten(tree)[1])
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    "text",
    [
        changed(defaultdict(list), '"builtins"', '"antigravity"'),  # a module that opens a browser
        changed(defaultdict(list), '"list"', '"exec"'),  # no class
        changed({Color.RED: 1}, f"{__name__}:Color", "antigravity:Color"),
        changed({Color.RED: 1}, f"{__name__}:Color", "antigravity:Color").replace("__enum__", "\\\\u005f_enum__"),
        changed({Color.RED: 1}, "Color", "tree_flatten"),
        "[1, " + "[" * 500 + "]" * 500 + "]",
        "{",
    ],
)
def test_a_structure_that_names_other_code_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        load_treespec(text)
    assert "antigravity" not in sys.modules


def test_a_container_that_is_not_registered_is_refused() -> None:
    spec = treespec_dumps(tree_flatten([1])[1])
    protocol, schema = json.loads(spec)
    with pytest.raises(NotImplementedError):
        load_treespec(json.dumps([protocol, {**schema, "type": "os.system"}]))


Point = namedtuple("Point", "x y")


def test_a_named_tuple_is_one_of_those_that_torch_knows() -> None:
    from torch.utils._pytree import _register_namedtuple

    _register_namedtuple(Point, serialized_type_name=f"{__name__}.Point")
    leaves, spec = tree_flatten(Point(1, 2))
    assert tree_unflatten(leaves, load_treespec(treespec_dumps(spec))) == Point(1, 2)
