"""Put the body of a function in place of its call.

The loop of a run yields the steps of all epochs. So a function that trains one epoch, or one batch, becomes part of the
function with the loop over epochs.
"""

from __future__ import annotations

from typing import Any

import libcst as cst

from unisono.convert.script_facts import Facts, Function, is_docstring
from unisono.convert.syntax import (
    assigned,
    body_of,
    called,
    children,
    dotted,
    names,
    one,
    parts_of,
    replace_chains,
    replace_node,
    statement,
    text,
    transform,
    walk,
    with_body,
)


def path_to(root: Any, node: Any) -> list[Any]:
    """Return the nodes from the root to a node, both included; empty if it is not in the tree."""
    if root is node:
        return [root]
    for child in children(root):
        if below := path_to(child, node):
            return [root, *below]
    return []


def function_around(path: list[Any]) -> Any:
    """Return the innermost function on a path; None at the level of the module."""
    return next((each for each in reversed(path[:-1]) if isinstance(each, cst.FunctionDef)), None)


def assigned_names(node: Any) -> set[str]:
    """Return the plain names that a node assigns, loops over or binds by `with` and `as`."""
    found: set[str] = set()
    for each in walk(node):
        targets: list[Any] = []
        if isinstance(each, cst.AssignTarget | cst.AugAssign | cst.AnnAssign | cst.For | cst.NamedExpr | cst.CompFor):
            targets = [each.target]
        elif isinstance(each, cst.AsName):
            targets = [each.name]
        found |= {part.value for target in targets for part in parts_of(target) if isinstance(part, cst.Name)}
    return found


def inlined(facts: Facts, function: Function, call: Any) -> Any:
    """Return the module in which a call is replaced by the body of its function, which is removed.

    Raises:
        SettingsError: the call is a part of an expression, or the function returns in several places.
    """
    path = path_to(facts.module, call)
    site = next(each for each in reversed(path) if isinstance(each, cst.SimpleStatementLine))
    results = assigned(site)
    if called(site) is not call and (results is None or results[1] is not call):
        raise facts.refuse(
            site,
            "the call of the function that trains is a part of an expression.",
            f"assign its result first: result = {text(call)[:60]}",
        )
    body = [each for each in body_of(function.node) if not is_docstring(each)]
    last = one(body[-1]) if body else None
    inside = walk(cst.Module(list(body[:-1]) if isinstance(last, cst.Return) else body))
    if extra := next((each for each in inside if isinstance(each, cst.Return | cst.Yield)), None):
        do = f"let {function.name} return only at its end."
        raise facts.refuse(extra, f"{function.name}, which trains, returns before its end.", do)
    block = cst.Module(body[:-1] if isinstance(last, cst.Return) else body)
    caller = function_around(path) or facts.module
    block, bindings, renames = _bind(facts, function, call, caller, block, results)
    new = [*bindings, *block.body]
    if isinstance(last, cst.Return) and last.value is not None and results is not None:
        value = replace_chains(last.value, renames)
        small = site.body[0].with_changes(value=value)
        new.append(site.with_changes(body=[small], leading_lines=[]))
    if new and site.leading_lines:
        new[0] = new[0].with_changes(leading_lines=[*site.leading_lines, *new[0].leading_lines])
    return _without(replace_node(facts.module, site, new), function)


def _bind(
    facts: Facts, function: Function, call: Any, caller: Any, block: Any, results: Any
) -> tuple[Any, list[Any], dict[str, str]]:
    """Return the body with arguments for parameters, the assignments it needs before it, and what was replaced."""
    given = dict(facts.bound(call, function))
    params = [*function.node.params.posonly_params, *function.node.params.params, *function.node.params.kwonly_params]
    defaults = {each.name.value: each.default for each in params if each.default is not None}
    own = assigned_names(block)
    kept = {dotted(part) for part in results[0]} if results is not None else set()
    taken = (assigned_names(_body_without(caller, function)) - kept) | {
        root for value in given.values() for root in names(value)
    }
    replaced: dict[str, str] = {}
    bindings: list[Any] = []
    if function.owner and isinstance(call.func, cst.Attribute):
        replaced[params[0].name.value] = text(call.func.value)
    for name in function.params + [each.name.value for each in function.node.params.kwonly_params]:
        value = given.get(name, defaults.get(name))
        if value is None:
            raise facts.refuse(call, f"the call of {function.name} has no argument {name}.", "pass it by name.")
        simple = dotted(value) or isinstance(value, cst.BaseNumber | cst.SimpleString)
        if simple and name not in own:
            if text(value) != name:
                replaced[name] = text(value)
        elif text(value) != name:
            own.add(name)
            bindings.append(statement(f"{_free(name, taken)} = {text(value)}"))
    for name in own & taken - {text(value) for key, value in given.items() if key == text(value)}:
        replaced.setdefault(name, _free(name, taken))
    return replace_chains(block, replaced), bindings, replaced


def _body_without(caller: Any, function: Function) -> Any:
    return transform(caller, lambda old, new: cst.RemoveFromParent() if old is function.node else new)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _without(module: Any, function: Function) -> Any:
    """Return the module without a function, by its name."""

    def change(original: Any, updated: Any) -> Any:
        if function.owner == "" and isinstance(updated, cst.Module):
            return with_body(updated, [each for each in updated.body if not _is(each, function)])
        if isinstance(updated, cst.ClassDef) and updated.name.value == function.owner:
            return with_body(updated, [each for each in body_of(updated) if not _is(each, function)])
        return updated

    return transform(module, change)


def _is(node: Any, function: Function) -> bool:
    return isinstance(node, cst.FunctionDef) and node.name.value == function.name
