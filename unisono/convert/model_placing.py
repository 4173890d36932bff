"""Place the models of a script with run.place: where they are created, or where the script wraps them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libcst as cst

from unisono.convert.call_inlining import function_around, path_to
from unisono.convert.script_facts import WRAPPERS, Facts
from unisono.convert.syntax import (
    assigned,
    calls,
    dotted,
    expression,
    replace_node,
    statement,
    text,
    transform,
    walk,
)

COMPILED = "torch.compile changes the last bits; it is left out. For it: --set speed.compile_model=true"
SYNC = "SyncBatchNorm is left out: batch norm normalizes each micro-batch (docs/guide/buffers.md#batch-norm)."


def moved(facts: Facts, node: Any) -> Any:
    """Return the model that an expression moves, wraps or compiles; the expression itself if it does none of these."""
    while isinstance(node, cst.Call):
        full = facts.full_name(node.func)
        attr = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if (full in WRAPPERS or full == "torch.compile") and node.args:
            node = node.args[0].value
        elif attr in ("to", "cuda") and not any("dtype" in text(arg) or "float" in text(arg) for arg in node.args):
            node = node.func.value
        else:
            break
    return node


def placed(facts: Facts, notes: list[str]) -> Any:
    """Return the module in which run.place gets every trained model, and nothing else wraps or moves it."""
    models = list(_models(facts))
    for call in calls(facts.module):
        full = facts.full_name(call.func)
        notes += [COMPILED] if full == "torch.compile" and COMPILED not in notes else []
        notes += [SYNC] if full.endswith("convert_sync_batchnorm") and SYNC not in notes else []
    module = facts.module
    done: set[tuple[Any, str]] = set()
    changes: list[tuple[Any, Any]] = []
    for site, function, name in models:
        if (function, name) in done:
            continue
        done.add((function, name))
        created = _creations(facts, function, name) if name else []
        if len(created) == 1:
            value = moved(facts, created[0])
            changes.append((created[0], expression(f"run.place({text(value)})")))
        elif not name:
            changes.append((site, expression(f"run.place({text(moved(facts, site))})")))
        elif isinstance(site, cst.Call):
            changes.append((site, expression(f"run.place({name})")))
        else:
            new = statement(f"{name} = run.place({name})").with_changes(leading_lines=site.leading_lines)
            changes.append((site, [new, site.with_changes(leading_lines=[])]))
    for old, new in changes:
        module = replace_node(module, old, new)
    return _without_moves(facts, module)


def _models(facts: Facts) -> Iterator[tuple[Any, Any, str]]:
    """Yield (where it is wrapped or its optimizer is made, function, name) of every model; "" for no name."""
    wraps = [call for call in calls(facts.module) if facts.full_name(call.func) in WRAPPERS and call.args]
    outer = [call for call in wraps if not any(call is not other and path_to(other, call) for other in wraps)]
    for call in outer:
        yield call, function_around(path_to(facts.module, call)), dotted(moved(facts, call))
    if outer:
        return
    for name, role in facts.roles.items():
        if role.kind == "model" and facts.full_name(getattr(role.node, "func", None)).startswith("torch.optim."):
            path = path_to(facts.module, role.node)
            site = next((each for each in reversed(path) if isinstance(each, cst.SimpleStatementLine)), None)
            if site is not None:
                yield site, function_around(path), name


def _creations(facts: Facts, function: Any, name: str) -> list[Any]:
    """Return the values that a function assigns to a model, without those that move or wrap it."""
    found = []
    for each in walk(function if function is not None else facts.module):
        pair = assigned(each) if isinstance(each, cst.SimpleStatementLine) else None
        if pair is None or [dotted(target) for target in pair[0]] != [name]:
            continue
        if (
            (function is not None or function_around(path_to(facts.module, each)) is None)
            and dotted(moved(facts, pair[1])) != name
            and isinstance(pair[1], cst.Call)
        ):
            found.append(pair[1])
    return [each for each in found if not dotted(each.func).endswith(".prepare")]


def _without_moves(facts: Facts, module: Any) -> Any:
    """Return the module without the lines and calls that only move or wrap a model."""
    models = facts.of_kind("model")

    def change(original: Any, updated: Any) -> Any:
        if isinstance(original, cst.SimpleStatementLine):
            pair = assigned(original)
            small = original.body[0]
            value = pair[1] if pair is not None else getattr(small, "value", None)
            base = moved(facts, value) if isinstance(value, cst.Call) else None
            if (
                base is not None
                and base is not value
                and dotted(base) in models
                and ((pair is None or dotted(pair[0][0]) == dotted(base)) and "run.place" not in text(updated))
            ):
                return cst.RemoveFromParent()
        if (
            isinstance(original, cst.Call)
            and facts.full_name(original.func) in WRAPPERS
            and original.args
            and isinstance(updated, cst.Call)
            and dotted(updated.func) != "run.place"
        ):
            return updated.args[0].value
        return updated

    return transform(module, change)
