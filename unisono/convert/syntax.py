"""Small tools for libcst's trees: text, names, statements, replacements and notes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

NOTE = "# unisono: "
"""The beginning of a note, in the converted script."""

_MORE = "#   "
_EMPTY = cst.Module([])


def text(node: Any) -> str:
    """Return the source of a node, without blanks around it."""
    code: str = _EMPTY.code_for_node(node)
    return code.strip()


def expression(code: str) -> Any:
    """Parse an expression."""
    return cst.parse_expression(code)


def statement(code: str) -> Any:
    """Parse a statement."""
    return cst.parse_statement(textwrap.dedent(code).strip() + "\n")


def statements(code: str) -> list[Any]:
    """Parse several statements."""
    return list(cst.parse_module(textwrap.dedent(code).strip() + "\n").body)


_BLANK = {cst.SimpleWhitespace, cst.ParenthesizedWhitespace, cst.TrailingWhitespace, cst.Newline, cst.EmptyLine}


_FIELDS: dict[Any, tuple[str, ...]] = {}
_IS_CODE: dict[Any, bool] = {}


def _fields(node: Any) -> tuple[str, ...]:
    """Return the names of the fields of a node."""
    kind = type(node)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(kind.__dataclass_fields__)
    return _FIELDS[kind]


def _is_code(value: Any) -> bool:
    """Return whether an object is a node, and no blank. isinstance is slow with abstract classes."""
    kind = type(value)
    if kind not in _IS_CODE:
        _IS_CODE[kind] = issubclass(kind, cst.CSTNode) and kind not in _BLANK
    return _IS_CODE[kind]


def children(node: Any) -> Iterator[Any]:
    """Yield the nodes directly below a node, without blanks. libcst's own `children` takes ten times as long."""
    for name in _fields(node):
        value = getattr(node, name)
        if type(value) in (list, tuple):
            yield from (each for each in value if _is_code(each))
        elif _is_code(value):
            yield value


def walk(node: Any) -> Iterator[Any]:
    """Yield a node and everything below it, without blanks."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += reversed(list(children(each)))


def _same_below(one_: Any, other: Any) -> bool:
    """Return whether two nodes of one kind have the same objects below them."""
    for name in _fields(one_):
        value, found = getattr(one_, name), getattr(other, name)
        if type(value) in (list, tuple):
            if len(value) != len(found) or any(a is not b for a, b in zip(value, found, strict=True)):
                return False
        elif value is not found:
            return False
    return True


def calls(node: Any) -> Iterator[Any]:
    """Yield the calls in a node."""
    return (each for each in walk(node) if isinstance(each, cst.Call))


def dotted(node: Any) -> str:
    """Return the text of a name or a chain of attributes, as in self.model; "" for anything else."""
    if isinstance(node, cst.Name):
        return str(node.value)
    if isinstance(node, cst.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr.value}"
    return ""


def names(node: Any) -> set[str]:
    """Return the names and the chains of attributes in a node; keywords and attributes alone are no names."""
    found: set[str] = set()

    def visit(each: Any) -> None:
        if (chain := dotted(each)) != "":
            parts = chain.split(".")
            found.update(".".join(parts[: i + 1]) for i in range(len(parts)))
        elif isinstance(each, (cst.Attribute, cst.Arg)):
            visit(each.value)
        else:
            for child in children(each):
                visit(child)

    visit(node)
    return found


def one(node: Any) -> Any:
    """Return the single small statement of a line; None for a compound statement."""
    return node.body[0] if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 else None


def called(node: Any) -> Any:
    """Return the call that a statement consists of, without its result; None for other statements."""
    small = one(node)
    return small.value if isinstance(small, cst.Expr) and isinstance(small.value, cst.Call) else None


def assigned(node: Any) -> tuple[list[Any], Any] | None:
    """Return the targets and the value of an assignment, tuples of targets flattened; None for other statements."""
    small = one(node)
    if isinstance(small, cst.Assign):
        return [part for target in small.targets for part in parts_of(target.target)], small.value
    if isinstance(small, cst.AnnAssign) and small.value is not None:
        return [small.target], small.value
    return None


def parts_of(target: Any) -> list[Any]:
    """Return the elements of a tuple or list, nested ones flattened; another expression is its own only part."""
    if isinstance(target, cst.Tuple | cst.List):
        return [part for element in target.elements for part in parts_of(element.value)]
    return [target]


def argument(call: Any, name: str, place: int = -1) -> Any:
    """Return the value of an argument, by its name or its place; None if it is missing."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg.value
    plain = [arg.value for arg in call.args if arg.keyword is None and arg.star == ""]
    return plain[place] if 0 <= place < len(plain) else None


def body_of(node: Any) -> list[Any]:
    """Return the statements of a compound statement, or of a module."""
    return list(node.body if isinstance(node, cst.Module) else node.body.body)


def with_body(node: Any, body: Sequence[Any]) -> Any:
    """Return a compound statement, or a module, with another body."""
    kept = list(body) or [statement("pass")]
    if isinstance(node, cst.Module):
        return node.with_changes(body=kept)
    return node.with_changes(body=node.body.with_changes(body=kept))


class _Replacer(cst.CSTTransformer):
    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def on_visit(self, node: Any) -> bool:
        """Return whether to look below a node."""
        return type(node) not in _BLANK

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        """Return the replacement of a node, after those of its children. Unchanged nodes stay the same objects."""
        same = updated_node is original_node or _same_below(original_node, updated_node)
        return self._change(original_node, original_node if same else updated_node)


def transform(node: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a node in which `change(original, updated)` has replaced every node, children first."""
    return node.visit(_Replacer(change))


def replace_node(root: Any, old: Any, new: Any) -> Any:
    """Return a tree in which one node is another one, or several statements (a list)."""
    put = cst.FlattenSentinel(new) if isinstance(new, list) else new
    return transform(root, lambda original, updated: put if original is old else updated)


def replace_chains(node: Any, chains: Mapping[str, str], kept: Collection[Any] = ()) -> Any:
    """Return a node in which names, or chains of attributes, are replaced by expressions.

    Keywords and the nodes in `kept` stay.
    """
    if not chains:
        return node
    skipped: set[Any] = {*kept}
    for each in walk(node):
        if isinstance(each, cst.Attribute):
            skipped.add(each.attr)
        if isinstance(each, cst.Arg) and each.keyword is not None:
            skipped.add(each.keyword)

    def change(original: Any, updated: Any) -> Any:
        if original not in skipped and isinstance(original, cst.Name | cst.Attribute):
            found = chains.get(dotted(original))
            if found is not None:
                return expression(found)
        return updated

    return transform(node, change)


def normalized(module: Any) -> Any:
    """Return the module with one statement a line: no `a; b`, and no `if a: b`."""

    def change(original: Any, updated: Any) -> Any:
        if isinstance(updated, cst.SimpleStatementSuite):
            return cst.IndentedBlock([cst.SimpleStatementLine([_bare(small)]) for small in updated.body])
        if isinstance(updated, cst.SimpleStatementLine) and len(updated.body) > 1:
            first, *rest = [cst.SimpleStatementLine([_bare(small)]) for small in updated.body]
            return cst.FlattenSentinel([first.with_changes(leading_lines=updated.leading_lines), *rest])
        return updated

    return transform(module, change)


def _bare(small: Any) -> Any:
    return small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)


def noted(node: Any, note: str) -> Any:
    """Return a statement with a note above it."""
    lines = textwrap.wrap(note, 96, break_long_words=False, break_on_hyphens=False)
    comments = [f"{NOTE if i == 0 else _MORE}{line}" for i, line in enumerate(lines)]
    above = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in comments]
    return node.with_changes(leading_lines=[*node.leading_lines, *above])


def notes_in(code: str) -> list[tuple[int, str]]:
    """Return (line, text) of every note in a converted script."""
    found: list[tuple[int, str]] = []
    open_ = False
    for number, line in enumerate(code.splitlines(), 1):
        bare = line.strip()
        if bare.startswith(NOTE):
            found.append((number, bare.removeprefix(NOTE)))
        elif open_ and bare.startswith(_MORE):
            found[-1] = (found[-1][0], f"{found[-1][1]} {bare.removeprefix(_MORE)}")
        open_ = bare.startswith(NOTE) or (open_ and bare.startswith(_MORE))
    return found


class Lines:
    """The lines of the nodes of a script, also of changed nodes that still hold original ones."""

    def __init__(self, module: Any) -> None:
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self._positions = {
            node: where.start.line for node, where in wrapper.resolve(PositionProvider).items() if not _is_blank(node)
        }

    def of(self, node: Any) -> int:
        """Return the line of a node in the original script; 1 if nothing of it is original."""
        return next((self._positions[each] for each in walk(node) if each in self._positions), 1)


def _is_blank(node: Any) -> bool:
    return isinstance(node, cst.EmptyLine | cst.Comment | cst.BaseParenthesizableWhitespace | cst.Newline | cst.Module)
