"""Read treespecs of torch that another process has written.

A treespec names classes: the factory of a defaultdict, and enums. torch imports their modules, so a text could run the
code of any installed module. `load_treespec` accepts only classes of modules that this process has imported already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from typing import Any

from torch.utils._pytree import TreeSpec, treespec_loads

from unisono.json_forms import parse_value


def load_treespec(text: str) -> TreeSpec:
    """Return the treespec that `treespec_dumps` of torch has written.

    Raises:
        ValueError: the text is no JSON, or names a module that is not imported, or something that is no class.
        NotImplementedError: it names a type of container that is not registered with torch.
    """
    for module, name in _named(parse_value(text)):
        found = reduce(lambda at, part: getattr(at, part, None), name.split("."), sys.modules.get(module))
        if not isinstance(found, type):
            raise ValueError(f"a structure names {module}.{name}, which is no class of an imported module")
    return treespec_loads(text)


def _named(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each class in a JSON value, and in the JSON texts within it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(json.JSONDecodeError):  # a text that only looks like JSON
            yield from _named(parse_value(value))
    if isinstance(value, dict):
        if "__enum__" in value:
            module, _, name = str(value.get("fqn")).partition(":")
            yield module, name
        if "default_factory_module" in value:
            yield str(value["default_factory_module"]), str(value.get("default_factory_name"))
    if isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _named(inner)
