"""A script's settings class, without running the script: so that a wrong request is told before any process starts.

Only what a settings class is made of is executed: its dataclasses and enums, without methods but for a `__post_init__`
that merely looks at values and refuses them, the constants they use, and the imports from the standard library that
these need. The rest of the script, torch above all, is not touched. A script that gets its class in another way
(imports it from a module of its own, computes it) is not understood here; then its own processes check the request.
"""

from __future__ import annotations
import __future__

import ast
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import unisono
from unisono.errors import SettingsError

MODULES = {"__future__", "collections.abc", "dataclasses", "enum", "math", "pathlib", "typing", "unisono.config"}
OURS = {"Settings", "CheckpointSettings", "LoaderSettings"}  # other names of `unisono` would load torch
CHECK = "__post_init__"
LOOKS = {
    "getattr",
    "isinstance",
    "any",
    "all",
    "sum",
    "abs",
    "round",
    "sorted",
    "set",
    "dict",
    "zip",
    "enumerate",
    "items",
}
"""What a check of values may call beside that."""
CALLS = {"dataclass", "field", "auto", "Path", "tuple", "list", "int", "float", "str", "range", "len", "min", "max"}


def settings_of(script: Path) -> type | None:
    """The class that the script hands to `unisono.main`, made without running the script; None: not understood."""
    tree = parsed(script)
    call = _call_of_main(tree) if tree is not None else None
    if tree is None or call is None:
        return None
    handed = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "settings")]
    if not handed:
        return unisono.Settings
    wanted = handed[0]
    if not isinstance(wanted, ast.Name | ast.Attribute):
        return None
    module = types.ModuleType(f"settings of {script.stem}")
    module.__file__ = str(script)
    sys.modules[module.__name__] = module  # dataclasses and typing look the names in annotations up there
    late = any(isinstance(s, ast.ImportFrom) and s.module == "__future__" for s in tree.body)
    flags = __future__.annotations.compiler_flag if late else 0
    try:
        for statement in tree.body:
            kept = _harmless(statement)
            try:
                if kept is None:
                    raise NotImplementedError
                code = compile(ast.Module([kept], []), str(script), "exec", flags, dont_inherit=True)
                exec(code, module.__dict__)
            except Exception:
                # Not for us, or made from something that was not for us. What it binds is unknown from here on.
                for name in _bound(statement):
                    module.__dict__.pop(name, None)
        found = eval(compile(ast.Expression(wanted), str(script), "eval", dont_inherit=True), module.__dict__)
        typing.get_type_hints(found)  # an annotation may name what is not there
    except Exception:
        return None
    for made in [value for value in module.__dict__.values() if isinstance(value, type) and CHECK in value.__dict__]:
        if made.__module__ == module.__name__:
            setattr(made, CHECK, _as_far_as_known(made.__dict__[CHECK]))
    return found if isinstance(found, type) else None


def calls_main(script: Path) -> bool:
    """Does this script itself call `unisono.main`, and once?"""
    tree = parsed(script)
    return tree is not None and _call_of_main(tree) is not None


def unfit_main(script: Path) -> str:
    """The function that the script hands to `unisono.main`, as in `main()`, if it cannot be called with a run alone;
    "": it can, or that is not known without running the script."""
    tree = parsed(script)
    call = _call_of_main(tree) if tree is not None else None
    if tree is None or call is None or not call.args or not isinstance(call.args[0], ast.Name):
        return ""
    name, nodes = call.args[0].id, list(ast.walk(tree))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    others = [node for node in nodes if isinstance(node, ast.stmt) and node not in functions and name in _bound(node)]
    if others or len(functions) != 1 or functions[0].decorator_list:
        return ""
    if any(isinstance(node, ast.arg) and node.arg == name for node in nodes):
        return ""
    takes = functions[0].args
    count = len(takes.posonlyargs) + len(takes.args)
    fits = count - len(takes.defaults) <= 1 and (count or takes.vararg) and None not in takes.kw_defaults
    return "" if fits else f"{name}({ast.unparse(takes)})"


def parsed(script: Path) -> ast.Module | None:
    """The script's syntax tree; None: it cannot be read, or is not Python."""
    try:
        return ast.parse(script.read_text(encoding="utf-8"), str(script))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
        return None  # the script's own process says it best


def _as_far_as_known(check: Callable[[Any], None]) -> Callable[[Any], None]:
    """A check that has its say if it gets that far: what it needs of the script may not be here."""

    def checked(self: Any) -> None:
        try:
            check(self)
        except (SettingsError, ValueError, TypeError):
            raise
        except Exception:
            return

    return checked


def _call_of_main(tree: ast.Module) -> ast.Call | None:
    """The script's one call of `unisono.main(main, Settings)`."""
    modules, functions = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name == "unisono"}
        elif isinstance(node, ast.ImportFrom) and node.module == "unisono":
            functions |= {alias.asname or alias.name for alias in node.names if alias.name == "main"}
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func
            if (isinstance(called, ast.Name) and called.id in functions) or (
                isinstance(called, ast.Attribute)
                and called.attr == "main"
                and isinstance(called.value, ast.Name)
                and called.value.id in modules
            ):
                calls.append(node)
    return calls[0] if len(calls) == 1 else None


def _harmless(statement: ast.stmt) -> ast.stmt | None:
    """The part of a statement that only makes classes, constants and names; None: nothing of it."""
    if isinstance(statement, ast.Import):
        names = [alias for alias in statement.names if alias.name in MODULES or alias.name == "unisono"]
        return ast.copy_location(ast.Import(names), statement) if names else None
    if isinstance(statement, ast.ImportFrom):
        if statement.module == "unisono" and statement.level == 0:
            names = [alias for alias in statement.names if alias.name in OURS]
            kept = ast.ImportFrom("unisono", names, 0)
            return ast.copy_location(kept, statement) if names else None
        return statement if statement.module in MODULES and statement.level == 0 else None
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return statement if _quiet(statement) else None
    if isinstance(statement, ast.ClassDef):
        fields = [s for s in statement.body if not isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef) or _checks(s)]
        kept_class = ast.ClassDef(statement.name, statement.bases, [], fields or [ast.Pass()], statement.decorator_list)
        plain = [s for s in fields if not isinstance(s, ast.FunctionDef)]
        named = all(isinstance(s, ast.Assign | ast.AnnAssign | ast.Expr | ast.Pass) for s in plain)
        if named and not statement.keywords and _quiet(kept_class, CALLS | LOOKS):
            return ast.fix_missing_locations(ast.copy_location(kept_class, statement))
    return None


def _checks(method: ast.stmt) -> bool:
    """Is this a `__post_init__` that looks at values, and does nothing but refuse them?"""
    acts = ast.Import | ast.ImportFrom | ast.With | ast.While | ast.Global | ast.Nonlocal | ast.Delete | ast.FunctionDef
    return (
        isinstance(method, ast.FunctionDef)
        and method.name == CHECK
        and not method.decorator_list
        and _quiet(method, CALLS | LOOKS)
        and not any(isinstance(inner, acts) for inner in ast.walk(method) if inner is not method)
        and all(isinstance(s.ctx, ast.Load) for s in ast.walk(method) if isinstance(s, ast.Attribute | ast.Subscript))
    )


def _quiet(node: ast.AST, calls: Collection[str] = frozenset(CALLS)) -> bool:
    """Does it only make values? Calls are allowed by name: dataclasses, fields, paths, and the script's own classes."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            name = inner.func.id if isinstance(inner.func, ast.Name) else getattr(inner.func, "attr", "")
            if name not in calls and not name[:1].isupper():  # a class of the script: only a harmless one is there
                return False
        elif isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
            return False
    return True


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement may give another value."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
