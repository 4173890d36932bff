"""Rewrite what a script does for its processes into what one process does.

All processes of a run execute the same lines, and only run.steps divides work. So a rank becomes 0, the number of
processes 1, and a collective its own input. What only one process may do goes below `if run.is_main:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from unisono.convert.loop_search import is_spawn
from unisono.convert.script_facts import AUTOCAST, Facts
from unisono.convert.syntax import (
    argument,
    assigned,
    body_of,
    called,
    calls,
    dotted,
    expression,
    names,
    noted,
    parts_of,
    statement,
    text,
    transform,
    walk,
    with_body,
)

DROPPED = {
    *(f"torch.distributed.{name}" for name in ("init_process_group", "destroy_process_group", "barrier", "all_reduce")),
    *(f"torch.distributed.{name}" for name in ("reduce", "broadcast", "broadcast_object_list", "monitored_barrier")),
    *("torch.cuda.set_device", "torch.multiprocessing.set_start_method", "torch.multiprocessing.freeze_support"),
}
GATHERED = {
    "torch.distributed.all_gather": "{0}[0] = {1}",
    "torch.distributed.all_gather_object": "{0}[0] = {1}",
    "torch.distributed.all_gather_into_tensor": "{0}.copy_({1})",
    "torch.distributed.gather": "{1}[0] = {0}",
}
OF_ACCELERATOR = {
    **dict.fromkeys(["gather", "gather_for_metrics", "reduce", "pad_across_processes", "unwrap_model"], "{0}"),
    **dict.fromkeys(["prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader"], "{0}"),
    "print": "run.print({*})",
    "log": "run.log({0})",
    "autocast": "run.precision()",
    "save": "torch.save({0}, {1})",
    "get_state_dict": "{0}.state_dict()",
}
DROPPED_OF_ACCELERATOR = {
    *("wait_for_everyone", "end_training", "free_memory", "init_trackers", "prepare", "register_for_checkpointing"),
    *("save_state", "load_state", "clear", "skip_first_batches"),
}
VARIABLES = re.compile("MASTER|RANK|WORLD|CUDA_VISIBLE|GLOO|NCCL")
"""Variables of the environment by which processes find each other and their devices."""

MAIN = {"is_main_process", "is_local_main_process"}
SAVED = (
    "{name} is left out: a run saves what run.track names, at its end and every checkpoint.every steps. "
    "--resume continues a run."
)
TRACKED = "trackers: --set track=tensorboard, wandb, mlflow or trackio (docs/guide/trackers.md)."
EVERY_PROCESS = (
    "every process computes this loop, on all samples. To divide them: run.evaluate(model, data, measure) "
    "(docs/guide/evaluation.md)."
)
GONE = {"rank", "world", "scaler", "sampler", "accelerator", "context"}


@dataclass
class SingleProcess:
    """The rules, with the facts of the script before its loop was converted.

    Attributes:
        facts: the facts.
        precision: the setting that replaces autocast; "": autocast stays.
        notes: notes for the settings.
    """

    facts: Facts
    precision: str = ""
    notes: list[str] = field(default_factory=list)
    _in_text: set[Any] = field(default_factory=set)
    _stored: set[Any] = field(default_factory=set)

    def rewrite(self, module: Any) -> Any:
        """Return the module as the script of one process."""
        in_text = {each for text_ in walk(module) if isinstance(text_, cst.FormattedString) for each in walk(text_)}
        self._in_text, self._stored = in_text, set(_stored(module))
        module = transform(module, self._change)
        module = transform(module, _fold)
        module = transform(_with_constants(module, self.facts.module), _fold)
        module = transform(module, lambda _, new: self._open_guard(new))
        guards = [each for each in walk(module) if isinstance(each, cst.If) and "run.is_main" in text(each.test)]
        inside = {each for guard in guards for each in walk(guard)}
        module = transform(module, lambda old, new: new if old in inside else self._guard_saves(new))
        return transform(module, lambda _, new: self._note_evaluation(new))

    def _change(self, original: Any, updated: Any) -> Any:
        if isinstance(original, cst.SimpleStatementLine):
            return self._line(original, updated)
        if isinstance(original, cst.FunctionDef):
            return self._without_params(updated)
        if isinstance(original, cst.Call):
            return self._call(original, updated)
        if isinstance(original, cst.Comparison):
            return self._comparison(original, updated)
        if isinstance(original, cst.UnaryOperation) and isinstance(original.operator, cst.Not):
            return expression("run.is_main") if self.facts.kind(original.expression) == "rank" else updated
        if (
            isinstance(original, cst.Attribute)
            and original.attr.value == "module"
            and self.facts.kind(original.value) == "model"
        ):
            return updated.value
        if isinstance(original, cst.Name | cst.Attribute | cst.Subscript):
            return self._name(original, updated)
        if isinstance(original, cst.DictElement) and self._of_scaler(original.value):
            return cst.RemoveFromParent()
        return updated

    def _of_scaler(self, node: Any) -> bool:
        return any(self.facts.kind(expression(name)) == "scaler" for name in names(node))

    # -- expressions

    def _name(self, original: Any, updated: Any) -> Any:
        if isinstance(original, cst.Attribute) and self.facts.kind(original.value) == "accelerator":
            if original.attr.value in MAIN:
                return expression("run.is_main")
            if original.attr.value == "device":
                return expression("run.device")
        role = None if original in self._stored else self.facts.role(original)
        if role is None:
            return updated
        if role.kind == "rank":
            return expression("run.rank" if original in self._in_text else "0")
        if role.kind == "world":
            return expression("1")
        return updated

    def _call(self, original: Any, updated: Any) -> Any:
        facts, full = self.facts, self.facts.full_name(original.func)
        attr = original.func.attr.value if isinstance(original.func, cst.Attribute) else ""
        if is_spawn(facts, original):
            rest = argument(updated, "args", 1)
            given = [text(each) for each in parts_of(rest)] if rest is not None else []
            kept = self._kept(facts.functions.get(dotted(original.args[0].value)), given, skipped=1)
            return expression(f"{text(original.args[0].value)}({', '.join(kept)})")
        if full in ("torch.distributed.is_initialized", "torch.distributed.is_available"):
            return expression("False")
        if full == "accelerate.utils.set_seed":
            return expression(f"torch.manual_seed({text(updated.args[0].value)})")
        if full in AUTOCAST:
            pairs = zip(original.args, updated.args, strict=True)
            args = [new.with_changes(value=self._type_of(old.value, new.value)) for old, new in pairs]
            return updated.with_changes(args=args)
        if full == "torch.device" or (attr == "to" and facts.kind(original) == "device"):
            return expression("run.device")
        if facts.kind(original) in ("rank", "world") and facts.target(original) is None:
            return expression("0" if facts.kind(original) == "rank" else "1")
        if attr in OF_ACCELERATOR and facts.kind(original.func.value) == "accelerator":
            return self._of_accelerator(OF_ACCELERATOR[attr], updated)
        if attr == "cuda" or (attr == "to" and original.args and facts.kind(original.args[0].value) == "rank"):
            return updated.with_changes(func=expression(f"{text(updated.func.value)}.to"), args=[_arg("run.device")])
        if facts.kind(original) == "loader":
            return self._without_sampler(original, updated)
        if (function := facts.target(original)) is not None:
            gone = {name for name in function.params if facts.kind(expression(name)) in ("rank", "world")}
            bound = [arg for arg in original.args if arg.keyword is None and arg.star == ""]
            drop = {arg for arg, name in zip(bound, function.params, strict=False) if name in gone}
            drop |= {arg for arg in original.args if arg.keyword is not None and arg.keyword.value in gone}
            return _with_args(
                updated, [new for old, new in zip(original.args, updated.args, strict=True) if old not in drop]
            )
        return updated

    def _type_of(self, original: Any, updated: Any) -> Any:
        """Return the type of a device for the device; another expression as it is."""
        is_device = self.facts.kind(original) == "device" and dotted(original) != ""
        return expression(f"{text(updated)}.type") if is_device else updated

    def _kept(self, function: Any, given: list[str], skipped: int) -> list[str]:
        """Return the arguments of a function without those for ranks and numbers of processes."""
        params = function.params[skipped:] if function is not None else []
        gone = [self.facts.kind(expression(name)) in ("rank", "world") for name in params]
        return [each for i, each in enumerate(given) if not (i < len(gone) and gone[i])]

    def _of_accelerator(self, form: str, call: Any) -> Any:
        args = [text(arg.value) for arg in call.args if arg.keyword is None]
        code = form.replace("{*}", "\0")
        for i, each in enumerate(args):
            code = code.replace(f"{{{i}}}", each)
        return expression(code.replace("\0", ", ".join(args)))

    def _without_sampler(self, original: Any, updated: Any) -> Any:
        kept = []
        for old, new in zip(original.args, updated.args, strict=True):
            name = old.keyword.value if old.keyword is not None else ""
            known = any(self.facts.kind(expression(each)) == "sampler" for each in names(old.value))
            if not (name in ("sampler", "shuffle") and known) and self.facts.kind(old.value) != "sampler":
                kept.append(new)
        return _with_args(updated, kept)

    def _comparison(self, original: Any, updated: Any) -> Any:
        kind = self.facts.kind(original.left)
        if kind == "device" and isinstance(original.comparisons[0].comparator, cst.SimpleString):
            return updated.with_changes(left=self._type_of(original.left, updated.left))
        if kind not in ("rank", "world") or len(original.comparisons) != 1:
            return updated
        right = re.sub(r"\s", "", text(original.comparisons[0].comparator))
        operator = type(original.comparisons[0].operator).__name__
        if kind == "rank":
            if (operator, right) in {("Equal", "0"), ("LessThanEqual", "0"), ("LessThan", "1")} or operator == "In":
                return expression("run.is_main")
            if (operator, right) in {("NotEqual", "0"), ("GreaterThan", "0")}:
                return expression("(not run.is_main)")
            if right == "-1":
                return expression("False" if operator == "NotEqual" else "True")
        if kind == "world" and right.isdigit():
            table = {"GreaterThan": int(right) < 1, "Equal": int(right) == 1, "NotEqual": int(right) != 1}
            table |= {"GreaterThanEqual": int(right) <= 1, "LessThan": int(right) > 1, "LessThanEqual": int(right) >= 1}
            return expression(str(table[operator])) if operator in table else updated
        return updated

    # -- statements

    def _line(self, original: Any, updated: Any) -> Any:
        call = called(original)
        if call is not None:
            full, owner = self.facts.full_name(call.func), getattr(call.func, "value", None)
            attr = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
            if full in DROPPED or attr == "set_epoch" or text(call.func) == "os.environ.setdefault":
                return cst.RemoveFromParent()
            if text(call.func) == "os.environ.update" and all(map(_names_processes, call.args)):
                return cst.RemoveFromParent()
            if self.facts.kind(owner) == "scaler":
                return cst.RemoveFromParent()
            if full in GATHERED:
                args = [text(arg.value) for arg in called(updated).args]
                return statement(GATHERED[full].format(*args)).with_changes(leading_lines=updated.leading_lines)
            if attr in DROPPED_OF_ACCELERATOR and self.facts.kind(owner) == "accelerator":
                self._note_dropped(attr)
                return cst.RemoveFromParent()
        found = assigned(original)
        return self._assignment(original, updated, *found) if found is not None else updated

    def _note_dropped(self, attr: str) -> None:
        note = SAVED.format(name=attr) if attr in ("save_state", "load_state") else ""
        note = TRACKED if attr == "init_trackers" else note
        if note and note not in self.notes:
            self.notes.append(note)

    def _assignment(self, original: Any, updated: Any, targets: list[Any], value: Any) -> Any:
        kinds = [self.facts.kind(target) for target in targets]
        if (
            isinstance(value, cst.Call)
            and dotted(value.func).endswith(".prepare")
            and self.facts.kind(value.func.value) == "accelerator"
        ):
            return cst.RemoveFromParent()
        is_variable = isinstance(targets[0], cst.Subscript) and text(targets[0].value) == "os.environ"
        if is_variable and VARIABLES.search(text(targets[0])):
            return cst.RemoveFromParent()
        if any(self.facts.full_name(call.func) in AUTOCAST for call in calls(value)) and len(targets) == 1:
            return cst.RemoveFromParent() if self.precision else updated
        if all(kind in GONE or kind == "device" for kind in kinds):
            if (
                dotted(value)
                and len(targets) == 1
                and kinds == ["device"]
                and self.facts.kind(value) == "device"
                and not isinstance(value, cst.Attribute)
            ):
                return updated
            devices = [target for target, kind in zip(targets, kinds, strict=True) if kind == "device"]
            if not devices:
                return cst.RemoveFromParent()
            return statement(f"{text(devices[0])} = run.device").with_changes(leading_lines=updated.leading_lines)
        if isinstance(value, cst.Tuple) and len(value.elements) == len(targets) and any(k in GONE for k in kinds):
            new = zip(targets, updated.body[0].value.elements, kinds, strict=True)
            kept = [(text(target), text(each.value)) for target, each, kind in new if kind not in GONE]
            code = f"{', '.join(name for name, _ in kept)} = {', '.join(each for _, each in kept)}"
            return statement(code).with_changes(leading_lines=updated.leading_lines)
        return updated

    def _without_params(self, node: Any) -> Any:
        kept = [p for p in node.params.params if self.facts.kind(p.name) not in ("rank", "world")]
        if len(kept) == len(node.params.params):
            return node
        if kept:
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(params=node.params.with_changes(params=kept))

    # -- what one process does

    def _open_guard(self, node: Any) -> Any:
        """Replace `if run.is_main:` around prints by run.print, and remove it around evaluation."""
        if not isinstance(node, cst.If) or text(node.test) != "run.is_main" or node.orelse is not None:
            return node
        body = body_of(node)
        evaluates = any(self._evaluates(call) for call in calls(cst.Module(body)))
        if not evaluates and not all(called(each) is not None and _prints(each) for each in body):
            return with_body(node, body)
        new = [_printed(each) for each in body]
        if new and node.leading_lines:
            new[0] = new[0].with_changes(leading_lines=[*node.leading_lines, *new[0].leading_lines])
        return cst.FlattenSentinel(new)

    def _evaluates(self, call: Any) -> bool:
        function = self.facts.target(call)
        return text(call.func).endswith(".eval") or (function is not None and ".eval()" in text(function.node))

    def _guard_saves(self, node: Any) -> Any:
        """Put torch.save of all processes below `if run.is_main:`."""
        if _is_save(node):
            guard = with_body(statement("if run.is_main:\n    pass"), [node.with_changes(leading_lines=[])])
            return guard.with_changes(leading_lines=node.leading_lines)
        return node

    def _note_evaluation(self, node: Any) -> Any:
        """Add a note above a loop over a DataLoader that is not the training loop."""
        if isinstance(node, cst.For) and "run.steps" not in text(node.iter):
            read = {name for name in names(node.iter) if self.facts.kind(expression(name)) == "loader"}
            if read and EVERY_PROCESS[:20] not in text(node):
                return noted(node, EVERY_PROCESS)
        return node


def _stored(module: Any) -> Iterator[Any]:
    """Yield the names that are not values: targets, parameters, keywords, attributes, names of definitions."""
    for each in walk(module):
        if isinstance(each, cst.Attribute):
            yield each.attr
        elif isinstance(each, cst.Arg) and each.keyword is not None:
            yield each.keyword
        elif isinstance(each, cst.Param | cst.FunctionDef | cst.ClassDef):
            yield each.name
        elif isinstance(each, cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.For | cst.CompFor):
            yield from parts_of(each.target)
        elif isinstance(each, cst.ImportAlias | cst.NameItem | cst.AsName | cst.ImportFrom):
            yield from (part for part in walk(each) if isinstance(part, cst.Name | cst.Attribute))


def _names_processes(arg: Any) -> bool:
    """Return whether an argument of os.environ.update only sets variables of processes."""
    items = arg.value.elements if isinstance(arg.value, cst.Dict) else ()
    given = [text(each.key) if isinstance(each, cst.DictElement) else "**" for each in items]
    found = [arg.keyword.value] if arg.keyword is not None else given
    return bool(found) and all(VARIABLES.search(name) for name in found)


def _arg(code: str) -> Any:
    return cst.Arg(expression(code))


def _with_args(call: Any, args: list[Any]) -> Any:
    if len(args) == len(call.args):
        return call
    if args:
        args = [*args[:-1], args[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)]
    return call.with_changes(args=args)


def _prints(node: Any) -> bool:
    return _is_plain_print(called(node), ("print", "run.print"))


def _is_plain_print(call: Any, names: tuple[str, ...]) -> bool:
    """Return whether a call prints values without keywords other than `flush`; run.print always flushes."""
    return dotted(call.func) in names and all(arg.keyword is None or arg.keyword.value == "flush" for arg in call.args)


def _printed(node: Any) -> Any:
    """Return a statement with run.print in place of print."""

    def change(original: Any, updated: Any) -> Any:
        if isinstance(updated, cst.Call) and _is_plain_print(updated, ("print",)):
            values = [arg for arg in updated.args if arg.keyword is None]
            if values:
                values[-1] = values[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated.with_changes(func=expression("run.print"), args=values)
        return updated

    return transform(node, change)


def _is_save(node: Any) -> bool:
    call = called(node)
    return call is not None and dotted(call.func) == "torch.save"


def _with_constants(module: Any, before: Any) -> Any:
    """Return the module with what is now a constant in place of variables, and of functions that only return it."""
    constants = ("True", "False", "run.is_main", "(not run.is_main)")
    written: dict[str, list[str]] = {}
    for each in walk(module):
        if isinstance(each, cst.SimpleStatementLine) and (found := assigned(each)) is not None:
            for target in found[0]:
                written.setdefault(dotted(target), []).append(text(found[1]))
    original = {text(each) for each in walk(before) if isinstance(each, cst.Assign)}
    values = {name: codes[0] for name, codes in written.items() if len(codes) == 1 and codes[0] in constants}
    values = {name: code for name, code in values.items() if name and f"{name} = {code}" not in original}
    returned: dict[str, str] = {}
    for each in module.body:
        if isinstance(each, cst.FunctionDef) and len(body_of(each)) == 1:
            code = text(body_of(each)[0]).removeprefix("return ")
            if code in constants:
                returned[each.name.value] = code
    stored = set(_stored(module))

    def change(old: Any, new: Any) -> Any:
        if isinstance(old, cst.Call) and dotted(old.func) in returned:
            return expression(returned[dotted(old.func)])
        if isinstance(old, cst.Name | cst.Attribute) and old not in stored and dotted(old) in values:
            return expression(values[dotted(old)])
        return new

    return transform(module, change)


def _fold(_: Any, node: Any) -> Any:
    """Simplify what the rules leave: x / 1, seed + 0, if False."""
    if isinstance(node, cst.BinaryOperation):
        right = text(node.right)
        if right == "1" and isinstance(node.operator, cst.Divide | cst.FloorDivide | cst.Multiply):
            return node.left
        if right == "0" and isinstance(node.operator, cst.Add | cst.Subtract | cst.BitOr | cst.BitXor):
            return node.left
        if "0" in (right, text(node.left)) and isinstance(node.operator, cst.Multiply):
            return expression("0")
    if (
        isinstance(node, cst.AugAssign)
        and text(node.value) == "1"
        and isinstance(node.operator, cst.DivideAssign | cst.MultiplyAssign)
    ):
        return cst.RemoveFromParent()
    if isinstance(node, cst.BooleanOperation):
        left, right = text(node.left), text(node.right)
        is_and = isinstance(node.operator, cst.And)
        if left in ("True", "False"):
            return node.right if (left == "True") == is_and else node.left
        if right in ("True", "False"):
            return node.left if (right == "True") == is_and else node.right
    if isinstance(node, cst.IfExp) and text(node.test) in ("True", "False"):
        return node.body if text(node.test) == "True" else node.orelse
    if isinstance(node, cst.If):
        return _fold_if(node)
    if isinstance(node, cst.Else) and not body_of(node):
        return cst.RemoveFromParent()
    if isinstance(node, cst.Try) and node.finalbody is not None and not body_of(node.finalbody):
        return cst.FlattenSentinel(body_of(node)) if not node.handlers else node.with_changes(finalbody=None)
    return node


def _fold_if(node: Any) -> Any:
    test = text(node.test)
    if not body_of(node) and node.orelse is None:
        return cst.RemoveFromParent()
    if not body_of(node) and isinstance(node.orelse, cst.Else):
        return cst.FlattenSentinel(body_of(node.orelse))
    if test == "True":
        return cst.FlattenSentinel(body_of(node))
    if test == "False" and node.orelse is None:
        return cst.RemoveFromParent()
    if test == "False" and isinstance(node.orelse, cst.Else):
        return cst.FlattenSentinel(body_of(node.orelse))
    return node
