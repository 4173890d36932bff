"""Find the training loop of a script: the loop over batches that calls backward, and the loop over epochs around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import libcst as cst

from unisono.convert.call_inlining import function_around, inlined, path_to
from unisono.convert.script_facts import SPAWN, Facts, Function
from unisono.convert.syntax import Lines, argument, body_of, calls, dotted, replace_node, text, walk
from unisono.errors import SettingsError

PASSES = "write the steps by hand, with a pass for each optimizer (docs/guide/passes.md)."
BY_HAND = (
    "write the loop by hand (docs/start/from-ddp.md), or bring it into this shape: for epoch in range(n): for x, y "
)
BY_HAND += "in loader: ..."


@dataclass(frozen=True)
class TrainingLoop:
    """The loops of a script.

    Attributes:
        host: the function with the loops; the module if there is none.
        epochs: the loop over epochs; None if there is one epoch.
        batches: the loop over batches.
        loader: what it iterates over, without enumerate and tqdm.
        target: the variables of a batch.
        index: the variable of enumerate; "" without it.
        first: the first value of `index`.
        progress: the variable of a progress bar around the loader; "" without it.
    """

    host: Any
    epochs: Any
    batches: Any
    loader: Any
    target: Any
    index: str
    first: int
    progress: str = ""

    @property
    def outer(self) -> Any:
        """The outermost loop, which the loop over steps replaces."""
        return self.epochs if self.epochs is not None else self.batches


def unwrapped(facts: Facts, loop: Any) -> tuple[Any, Any, str, int]:
    """Return (iterable, target, index, first index) of a loop without enumerate and tqdm."""
    iterable, target, index, first = loop.iter, loop.target, "", 0
    while isinstance(iterable, cst.Call) and iterable.args:
        full = facts.full_name(iterable.func)
        if full == "enumerate" and isinstance(target, cst.Tuple) and len(target.elements) == 2:
            start = argument(iterable, "start", 1)
            index, first = dotted(target.elements[0].value), 0 if start is None else int(facts.value(start) or 0)
            target = target.elements[1].value
        elif full.rpartition(".")[2] not in ("tqdm", "MpDeviceLoader"):
            break
        iterable = iterable.args[0].value
    role = facts.roles.get(dotted(iterable))
    if role is not None and role.kind == "loader":
        return iterable, target, index, first
    if (bar := _progress_bar(facts, dotted(iterable))) is not None:
        return bar.args[0].value, target, index, first
    return iterable, target, index, first


def is_batch_loop(facts: Facts, loop: Any) -> bool:
    """Return whether a loop iterates over a DataLoader."""
    return isinstance(loop, cst.For) and facts.kind(unwrapped(facts, loop)[0]) == "loader"


def find_backward(facts: Facts) -> Any:
    """Return the only call of backward in a script. Raises SettingsError."""
    found = [
        call
        for call in calls(facts.module)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward" and _is_loss(facts, call)
    ]
    if not found:
        do = "give the file that has the training loop; helpers that it imports are not converted."
        raise SettingsError("The script does not train: it calls no backward.", "There is no loop to convert.", do)
    if len(found) > 1:
        raise facts.refuse(
            _line(facts, found[1]),
            f"a second call of backward, after that on line {facts.lines.of(found[0])}. One step has one.",
            PASSES,
        )
    return found[0]


def _is_loss(facts: Facts, call: Any) -> bool:
    return not dotted(call.func).startswith(("torch.autograd", "super"))


def _line(facts: Facts, node: Any) -> Any:
    path = path_to(facts.module, node)
    return next((each for each in reversed(path) if isinstance(each, cst.SimpleStatementLine)), node)


def gathered(module: Any, lines: Lines, processes: int) -> tuple[Facts, TrainingLoop]:
    """Return the script with both loops and backward in one function, and the loops.

    Raises:
        SettingsError: the shape of the loop is not understood. The message names the line.
    """
    while True:
        facts = Facts.of(module, lines, processes)
        backward = find_backward(facts)
        path = path_to(module, backward)
        host = function_around(path)
        inside = path[path.index(host) if host is not None else 0 :]
        loops = [each for each in inside if isinstance(each, cst.For | cst.While)]
        batches = next((each for each in reversed(loops) if is_batch_loop(facts, each)), None)
        if batches is not None and loops[-1] is not batches:
            do = "convert it by hand: a step computes one loss (docs/guide/loop.md)."
            raise facts.refuse(loops[-1], "a loop inside the loop over batches calls backward.", do)
        if host is None or (batches is not None and loops[0] is not batches):
            break
        function = next((each for each in facts.functions.values() if each.node is host), None)
        if function is None:
            raise facts.refuse(_line(facts, backward), "backward is called in a nested function.", BY_HAND)
        sites = _call_sites(facts, function)
        if batches is not None and not _runs_in_loop(facts, function):
            break
        if not sites:
            break
        if len(sites) > 1:
            do = f"call {function.name} in one place, in the loop over epochs."
            raise facts.refuse(_line(facts, sites[1]), f"{function.name}, which trains, is called a second time.", do)
        module = inlined(facts, function, sites[0])
    if batches is None:
        where = loops[-1] if loops else _line(facts, backward)
        raise facts.refuse(where, "the loop around backward does not iterate over a DataLoader.", BY_HAND)
    return facts, _training_loop(facts, host if host is not None else module, loops, batches)


def _call_sites(facts: Facts, function: Function) -> list[Any]:
    return [call for call in calls(facts.module) if facts.target(call) is function]


def _runs_in_loop(facts: Facts, function: Function, depth: int = 0) -> bool:
    """Return whether a function is called in a loop, perhaps by a function that is."""
    for call in _call_sites(facts, function):
        path = path_to(facts.module, call)
        host = function_around(path)
        inside = path[path.index(host) if host is not None else 0 :]
        if any(isinstance(each, cst.For | cst.While) for each in inside):
            return True
        caller = next((each for each in facts.functions.values() if each.node is host), None)
        if caller is not None and depth < 5 and _runs_in_loop(facts, caller, depth + 1):
            return True
    return False


def _training_loop(facts: Facts, host: Any, loops: list[Any], batches: Any) -> TrainingLoop:
    around = loops[: loops.index(batches)]
    if len(around) > 1:
        do = "convert it by hand: a run is one sequence of steps. unisono tune searches settings."
        raise facts.refuse(around[0], "the loop over epochs is in another loop.", do)
    epochs = around[0] if around else None
    if isinstance(epochs, cst.While):
        raise facts.refuse(epochs, "the loop over epochs is a while loop.", BY_HAND)
    if epochs is not None and batches not in body_of(epochs):
        raise facts.refuse(batches, "the loop over batches is not directly in the loop over epochs.", BY_HAND)
    for loop in (epochs, batches):
        if loop is not None and loop.orelse is not None:
            raise facts.refuse(loop.orelse, "a loop has an else.", "move these lines after the loop.")
    for each in walk(batches):
        if isinstance(each, cst.Break | cst.Return):
            do = "leave it out: --set steps=N ends a run after N steps, and run.stop() after the current one."
            raise facts.refuse(_line(facts, each), "the loop over batches is left before its end.", do)
    loader, target, index, first = unwrapped(facts, batches)
    progress = dotted(_iterated(batches))
    progress = progress if _progress_bar(facts, progress) is not None else ""
    return TrainingLoop(host, epochs, batches, loader, target, index, first, progress)


def _iterated(loop: Any) -> Any:
    """Return what a loop iterates over, without enumerate."""
    call = loop.iter
    return call.args[0].value if isinstance(call, cst.Call) and dotted(call.func) == "enumerate" else call


def _progress_bar(facts: Facts, name: str) -> Any:
    """Return the call of tqdm that a variable is assigned; None if it is none."""
    call = facts.values.get(name, [None])[0]
    is_bar = isinstance(call, cst.Call) and facts.full_name(call.func).rpartition(".")[2] == "tqdm" and call.args
    return call if is_bar else None


def merged_no_sync(facts: Facts) -> Any:
    """Return the module in which `if a: with no_sync(): forward` and `else: forward; step` are one branch.

    The condition stays, around what only the second branch has.
    """
    for node in walk(facts.module):
        if not isinstance(node, cst.If) or not isinstance(node.orelse, cst.Else):
            continue
        short, whole = body_of(node), body_of(node.orelse)
        if len(short) == 1 and isinstance(short[0], cst.With):
            short = body_of(short[0])
        if not any("backward(" in text(each) for each in short) or len(short) > len(whole):
            continue
        if [text(each) for each in short] == [text(each) for each in whole[: len(short)]]:
            rest = whole[len(short) :]
            inside = node.body.with_changes(body=rest)
            test = cst.UnaryOperation(
                cst.Not(), node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
            )
            only = [cst.If(test=test, body=inside)] if rest else []
            return replace_node(facts.module, node, [*whole[: len(short)], *only])
    return facts.module


def is_spawn(facts: Facts, call: Any) -> bool:
    """Return whether a call is mp.spawn."""
    return facts.full_name(call.func) in SPAWN
