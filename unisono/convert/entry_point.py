"""The function that unisono.main calls: it gets what the script did when it was started, and `run`."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst

from unisono.convert.call_inlining import assigned_names
from unisono.convert.script_facts import Facts, Function, is_docstring, is_guard, is_import
from unisono.convert.syntax import (
    Lines,
    assigned,
    body_of,
    called,
    calls,
    dotted,
    names,
    noted,
    statement,
    text,
    transform,
    walk,
    with_body,
)

ARGUMENTS = (
    "arguments of the script come after --, as in: unisono run {file} -- --help. The loop takes batch and epochs "
    "from the settings, and not from arguments: --set batch={batch} --set epochs={epochs}"
)


def with_run(module: Any, lines: Lines, settings: str) -> Any:
    """Return the module in which every function that uses `run` gets it as its first argument.

    Raises:
        SettingsError: such a function is used as a value.
    """
    while True:
        facts = Facts.of(module, lines)
        needing = [f for f in facts.functions.values() if "run" not in _all_params(f) and _uses_run(facts, f)]
        if not needing:
            return module
        module = _threaded(facts, needing, settings)


def _all_params(function: Function) -> list[str]:
    return [each.name.value for each in function.node.params.params]


def _uses_run(facts: Facts, function: Function) -> bool:
    return "run" in names(function.node.body)


def _threaded(facts: Facts, needing: Sequence[Function], settings: str) -> Any:
    nodes = {function.node: function for function in needing}
    given = {call for call in calls(facts.module) if facts.target(call) in needing}
    heads = {call.func for call in given}
    tops = {function.name for function in needing if not function.owner}
    for each in walk(facts.module):
        is_value = isinstance(each, cst.Arg) and each.keyword is None and dotted(each.value) in tops
        if is_value and each.value not in heads:
            do = "call it by its name, or write the call in place of it."
            raise facts.refuse(each, f"{dotted(each.value)}, which needs the run, is passed to another function.", do)
    param = cst.Param(cst.Name("run"), annotation=cst.Annotation(cst.parse_expression(f"unisono.Run[{settings}]")))

    def change(original: Any, updated: Any) -> Any:
        if original in nodes:
            old = updated.params.params
            place = 1 if nodes[original].owner else 0
            return updated.with_changes(params=updated.params.with_changes(params=[*old[:place], param, *old[place:]]))
        if original in given:
            return updated.with_changes(args=[cst.Arg(cst.Name("run")), *updated.args])
        return updated

    return transform(facts.module, change)


class EntryPoint:
    """Make the entry function of a module whose loop is converted.

    Args:
        module: the module, with `run` passed to the functions that need it if the loop is in a function.
        loop_in_function: whether it is.
    """

    def __init__(self, module: Any, *, loop_in_function: bool) -> None:
        self.module, self.loop_in_function = module, loop_in_function
        self.guard = next((each for each in module.body if is_guard(each)), None)
        self.moved: list[Any] = []
        self.nested: list[Any] = []

    def build(self, settings: Any, arguments_note: str) -> Any:
        """Return the module with the entry function, the settings and the call of unisono.main."""
        self._move()
        self._nest()
        name = settings.name.value
        kept = [each for each in self.module.body if each not in self.moved + self.nested and each is not self.guard]
        inside = body_of(self.guard) if self.guard is not None else []
        entry, function = self._entry([*self.moved, *inside], kept, name, arguments_note)
        kept = [_with_note(each, arguments_note) for each in kept]
        last = max((i for i, each in enumerate(kept) if is_import(each) or is_docstring(each)), default=-1)
        before, after = kept[: last + 1], kept[last + 1 :]
        blank = [cst.EmptyLine(), cst.EmptyLine()]
        calls_main = statement(f'if __name__ == "__main__":\n    unisono.main({entry}, {name})')
        calls_main = calls_main.with_changes(leading_lines=blank)
        settings = settings.with_changes(leading_lines=[*blank, *settings.leading_lines])
        end = [function.with_changes(leading_lines=blank)] if function is not None else []
        if after:
            after[0] = after[0].with_changes(leading_lines=[*blank, *_comments(after[0])])
        whole = self.module.with_changes(body=[*before, settings, *after, *end, calls_main], footer=[])
        return transform(whole, _without_blanks)

    def _move(self) -> None:
        """Find the statements of the module that only a run can execute, and those that need their names."""
        found = [each for each in self.module.body if not _is_definition(each) and each is not self.guard]
        if not self.loop_in_function and (self.guard is None or _has_steps(cst.Module(found))):
            self.moved = [each for each in found if not _is_constant(each)]
            while True:
                changed = {name for each in self.moved for name in assigned_names(each)}
                more = [each for each in found if each not in self.moved and assigned_names(each) & changed]
                if not more:
                    break
                self.moved += more
            self.moved.sort(key=found.index)
            return
        taken: set[str] = set()
        for _ in found:
            for each in found:
                used = names(each)
                if each not in self.moved and ("run" in used or used & taken or _reads_arguments(each)):
                    self.moved.append(each)
                    taken |= assigned_names(each)
        self.moved.sort(key=found.index)

    def _nest(self) -> None:
        """Find the functions and classes that need names of the entry function."""
        inside = body_of(self.guard) if self.guard is not None else []
        needed = {name for each in [*self.moved, *inside] for name in assigned_names(each)}
        needed |= set() if self.loop_in_function else {"run"}
        found = [each for each in self.module.body if isinstance(each, cst.FunctionDef | cst.ClassDef)]
        for _ in found:
            for each in found:
                if each not in self.nested and _free_names(each) & needed:
                    self.nested.append(each)
                    needed.add(each.name.value)
        self.nested.sort(key=found.index)

    def _entry(self, body: list[Any], kept: list[Any], settings: str, note: str) -> tuple[str, Any]:
        """Return the name of the entry function, and its definition; None if it is a function of the script."""
        call = called(body[0]) if len(body) == 1 else None
        function = next((each for each in kept if isinstance(each, cst.FunctionDef) and _is_call_of(call, each)), None)
        if function is not None and call is not None and len(call.args) == 1 and text(call.args[0]) == "run":
            return function.name.value, None
        taken = {each.name.value for each in kept + self.nested if isinstance(each, cst.FunctionDef | cst.ClassDef)}
        name = next(each for each in ("main", "start", "start_run") if each not in taken)
        own = {each for node in body for each in assigned_names(node)}
        inner = [_nonlocal(each, own) for each in self.nested]
        inner = [each.with_changes(leading_lines=[cst.EmptyLine(), *_comments(each)]) for each in inner]
        body = [_with_note(each, note) for each in body]
        if inner and body:
            body[0] = body[0].with_changes(leading_lines=[cst.EmptyLine(), *_comments(body[0])])
        made = statement(f"def {name}(run: unisono.Run[{settings}]) -> None:\n    pass")
        whole = [*inner, *body]
        whole = [whole[0].with_changes(leading_lines=_comments(whole[0])), *map(_with_one_blank, whole[1:])]
        return name, with_body(made, whole)


def _without_blanks(_: Any, node: Any) -> Any:
    """Return a node without blanks on an empty line."""
    if isinstance(node, cst.EmptyLine) and node.comment is None:
        return cst.EmptyLine(indent=False)
    return node


def _with_one_blank(node: Any) -> Any:
    """Return a statement with at most one empty line above it and its comments."""
    lines = list(node.leading_lines)
    while len(lines) > 1 and lines[0].comment is None and lines[1].comment is None:
        lines.pop(0)
    return node.with_changes(leading_lines=lines)


def _comments(node: Any) -> list[Any]:
    return [each for each in node.leading_lines if each.comment is not None]


def _with_note(node: Any, note: str) -> Any:
    """Return a statement with a note above each call of parse_args in it."""
    done = False

    def change(_: Any, updated: Any) -> Any:
        nonlocal done
        if isinstance(updated, cst.SimpleStatementLine) and _reads_arguments(updated) and not done:
            done = True
            return noted(updated, note)
        return updated

    return transform(node, change)


def _reads_arguments(node: Any) -> bool:
    return any(dotted(call.func).endswith((".parse_args", ".parse_known_args")) for call in calls(node))


def _is_definition(node: Any) -> bool:
    return isinstance(node, cst.FunctionDef | cst.ClassDef) or is_import(node) or is_docstring(node)


def _is_constant(node: Any) -> bool:
    found = assigned(node)
    if found is None:
        return isinstance(node, cst.Try) or (isinstance(node, cst.If) and "TYPE_CHECKING" in text(node.test))
    try:
        ast.literal_eval(text(found[1]))
    except (ValueError, SyntaxError):
        return False
    return True


def _has_steps(node: Any) -> bool:
    return any(isinstance(each, cst.For) and "run.steps(" in text(each.iter) for each in walk(node))


def _free_names(node: Any) -> set[str]:
    """Return the names of a function or class that it neither has as parameters nor assigns, but for `global` ones."""
    own = assigned_names(node) if isinstance(node, cst.FunctionDef) else set()
    params = {each.name.value for each in walk(node) if isinstance(each, cst.Param)}
    shared = {each.name.value for each in walk(node) if isinstance(each, cst.NameItem)}
    return (names(node.body) - own - params) | shared


def _is_call_of(call: Any, function: Any) -> bool:
    return call is not None and dotted(call.func) == function.name.value


def _nonlocal(node: Any, own: set[str]) -> Any:
    def change(_: Any, updated: Any) -> Any:
        if isinstance(updated, cst.Global) and all(each.name.value in own for each in updated.names):
            return cst.Nonlocal(updated.names)
        return updated

    return transform(node, change)
