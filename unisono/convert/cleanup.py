"""Remove what a conversion left without use: imports, empty functions, functions and variables that are not read."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unisono.convert.script_facts import is_docstring, is_import
from unisono.convert.syntax import assigned, body_of, called, children, dotted, one, parts_of, text, transform, walk


def cleaned(module: Any, before: Any) -> Any:
    """Return the module without what was used in `before`, and is not used now."""
    were_used = _read_names(before)
    while True:
        smaller = _without_empty(module, before)
        smaller = _without_unread(smaller, were_used)
        if text(smaller) == text(module):
            return _without_imports(smaller, were_used)
        module = smaller


def _read_names(module: Any) -> set[str]:
    """Return the names that are read anywhere, outside of imports."""
    stored = {
        id(part)
        for each in walk(module)
        if isinstance(each, cst.AssignTarget | cst.AnnAssign)
        for part in parts_of(each.target)
    }
    found: set[str] = set()

    def visit(node: Any) -> None:
        if is_import(node):
            return
        if isinstance(node, cst.Name) and id(node) not in stored:
            found.add(node.value)
        for child in children(node):
            if isinstance(node, cst.Attribute) and child is node.attr:
                continue
            if isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Param) and child is node.name:
                continue
            if isinstance(node, cst.Arg) and child is node.keyword:
                continue
            visit(child)

    visit(module)
    return found


def _is_empty(node: Any) -> bool:
    rest = [each for each in body_of(node) if not is_docstring(each)]
    return all(isinstance(one(each), cst.Pass | cst.Return) and text(each) in ("pass", "return") for each in rest)


def _without_empty(module: Any, before: Any) -> Any:
    """Return the module without the functions that are empty now, and without their calls."""
    full = {each.name.value for each in walk(before) if isinstance(each, cst.FunctionDef) and not _is_empty(each)}
    gone = {each.name.value for each in module.body if isinstance(each, cst.FunctionDef) and _is_empty(each)} & full

    def change(original: Any, updated: Any) -> Any:
        if isinstance(original, cst.FunctionDef) and original.name.value in gone:
            return cst.RemoveFromParent()
        call = called(original)
        if call is not None and dotted(call.func) in gone:
            return cst.RemoveFromParent()
        if isinstance(updated, cst.Try) and updated.finalbody is not None and not body_of(updated.finalbody):
            return (
                cst.FlattenSentinel(body_of(updated)) if not updated.handlers else updated.with_changes(finalbody=None)
            )
        return updated

    return transform(module, change) if gone else module


def _without_unread(module: Any, were_used: set[str]) -> Any:
    """Return the module without functions, and plain variables, that were read before and are not now."""
    dead = were_used - _read_names(module)
    fields = {line for each in walk(module) if isinstance(each, cst.ClassDef) for line in body_of(each)}

    def change(original: Any, updated: Any) -> Any:
        if isinstance(original, cst.FunctionDef) and original in module.body and original.name.value in dead:
            return cst.RemoveFromParent()
        found = assigned(original) if isinstance(original, cst.SimpleStatementLine) and original not in fields else None
        if (
            found is not None
            and all(isinstance(target, cst.Name) and target.value in dead for target in found[0])
            and not any(isinstance(each, cst.Call | cst.Await | cst.Yield) for each in walk(found[1]))
        ):
            return cst.RemoveFromParent()
        return updated

    return transform(module, change) if dead else module


def _without_imports(module: Any, were_used: set[str]) -> Any:
    used = _read_names(module)

    def change(original: Any, updated: Any) -> Any:
        if not isinstance(original, cst.Import | cst.ImportFrom) or isinstance(original.names, cst.ImportStar):
            return updated
        if isinstance(original, cst.ImportFrom) and dotted(original.module) == "__future__":
            return updated
        kept = [alias for alias in updated.names if _bound(alias) in used or _bound(alias) not in were_used]
        if not kept:
            return cst.RemoveFromParent()
        if len(kept) == len(updated.names):
            return updated
        return updated.with_changes(names=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])

    return transform(module, change)


def _bound(alias: Any) -> str:
    return str(alias.asname.name.value) if alias.asname is not None else dotted(alias.name).partition(".")[0]
