"""Divide the body of a loop over batches into what a step does once, and what each of its micro-batches does.

Variables that depend on the batch stay in the inner loop, with the forward pass and backward. What reads only the loss
follows the inner loop, where the loss of the whole step is known. What needs neither comes before the inner loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from unisono.convert.call_inlining import assigned_names
from unisono.convert.loop_search import TrainingLoop
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
    one,
    parts_of,
    statement,
    text,
    transform,
    walk,
    with_body,
)

DRAWS = re.compile(r"rand|normal|sample|beta|perm|noise|choice|mask")
"""Calls that probably draw random numbers, which each micro-batch draws for itself."""

LOCAL = (
    "each process sees only its own micro-batches here. For a sum over all: step.add(name, total, weight) here, and "
    "step.sum(name) or step.mean(name) after the inner loop."
)
REFUSED_STEP = "let backward and optimizer.step() follow each other in the loop, under no other condition."


@dataclass
class BatchBody:
    """The parts of a step, in order, and what the settings of the run get from them."""

    facts: Facts
    loop: TrainingLoop
    loss: str
    accumulated: int = 1
    divided: bool = False
    precision: str = ""
    autocast: bool = False
    before: list[Any] = field(default_factory=list)
    inner: list[Any] = field(default_factory=list)
    middle: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)
    steppers: list[str] = field(default_factory=list)
    clip: str = ""
    tainted: set[str] = field(default_factory=set)
    _seen: bool = False
    _stepped: bool = False

    def read(self) -> BatchBody:
        """Divide the body of the loop."""
        self.tainted = {dotted(part) for part in parts_of(self.loop.target)}
        self._read_accumulation()
        self._visit(body_of(self.loop.batches))
        if not any(self.facts.kind(expression(name)) != "scheduler" for name in self.steppers):
            do = f"call optimizer.step() after backward, in the loop on line {self.facts.lines.of(self.loop.batches)}."
            raise self.facts.refuse(self.loop.batches, "the loop that calls backward steps no optimizer.", do)
        return self

    def _read_accumulation(self) -> None:
        """Set the number of batches of a step: of `if (i + 1) % k == 0: optimizer.step()`, or of Accelerate."""
        for each in walk(self.loop.batches):
            if isinstance(each, cst.If) and "%" in text(each.test) and self._steps(cst.Module(body_of(each))):
                divisor = next(part.right for part in walk(each.test) if _is_modulo(part))
                count = self.facts.value(divisor)
                if not isinstance(count, int) or count < 1:
                    do = f"give {text(divisor)} a value in the script, or a default."
                    raise self.facts.refuse(
                        each, f"the number of accumulated batches, {text(divisor)}, is unknown.", do
                    )
                self.accumulated = count
            attr = each.func.attr.value if isinstance(each, cst.Call) and isinstance(each.func, cst.Attribute) else ""
            role = self.facts.role(each.func.value) if attr == "accumulate" else None
            if role is not None:
                given = argument(role.node, "gradient_accumulation_steps")
                self.accumulated = int(self.facts.value(given) or 1) if given is not None else 1

    def _steps(self, node: Any) -> bool:
        return any(self._stepper(call) for call in calls(node)) and not any(map(self._is_backward, calls(node)))

    def _visit(self, statements: list[Any]) -> None:
        for each in statements:
            if isinstance(each, cst.With):
                self._visit_with(each)
            elif isinstance(each, cst.If) and self._visit_if(each):
                continue
            elif isinstance(each, cst.SimpleStatementLine):
                self._visit_line(each)
            else:
                if self._trains(each):
                    raise self.facts.refuse(
                        each, "backward or optimizer.step() is in a nested statement.", REFUSED_STEP
                    )
                self._place(each)

    def _trains(self, node: Any) -> bool:
        return any(self._is_backward(call) or self._stepper(call) for call in calls(node))

    # -- compound statements

    def _visit_with(self, node: Any) -> None:
        casts = any(self._is_autocast(item.item) for item in node.items)
        if not casts and not self._trains(node) and not all(self._is_context(item.item) for item in node.items):
            self._place(node)
            return
        kept = []
        for item in node.items:
            if self._is_autocast(item.item):
                precision = self._precision(item.item)
                self.precision = precision if precision == "fp16" else self.precision
                self.autocast = self.autocast or precision == "bf16"
                if precision == "bf16":
                    kept.append(item)
                elif precision != "fp32":
                    kept.append(item.with_changes(item=expression("run.precision()"), asname=None))
            elif not self._is_context(item.item):
                kept.append(item)
        if not kept:
            self._visit(body_of(node))
            return
        outside, self.inner = self.inner, []
        self._visit(body_of(node))
        block = self.inner
        self.inner = outside
        if block:
            last = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            self.inner.append(with_body(node.with_changes(items=[*kept[:-1], last]), block))

    def _is_autocast(self, item: Any) -> bool:
        return self._precision(item) is not None

    def _precision(self, item: Any) -> str | None:
        """Return the precision of a context of autocast, "" for that of Accelerate; None for another context."""
        found = item if isinstance(item, cst.Call) else next(iter(self.facts.values.get(dotted(item), [])), None)
        branches = [found.body, found.orelse] if isinstance(found, cst.IfExp) else [found]
        for each in branches:
            if isinstance(each, cst.Call):
                full = self.facts.full_name(each.func)
                if full in AUTOCAST:
                    return precision_of(self.facts, each)
                if full.endswith(".autocast") and self.facts.kind(each.func.value) == "accelerator":
                    return ""
        return None

    def _is_context(self, item: Any) -> bool:
        if self.facts.kind(item) == "context":
            return True
        attr = item.func.attr.value if isinstance(item, cst.Call) and isinstance(item.func, cst.Attribute) else ""
        return attr in ("no_sync", "accumulate", "join") or (
            isinstance(item, cst.Call) and self.facts.full_name(item.func).endswith((".Join", "nullcontext"))
        )

    def _visit_if(self, node: Any) -> bool:
        """Remove a condition around the step. Return whether there was one."""
        inside = cst.Module(body_of(node))
        test = text(node.test)
        if test.endswith(".sync_gradients"):
            self._visit(body_of(node))
            return True
        if (clip := self._clip_in(inside.body)) and len(inside.body) == 1 and node.orelse is None:
            self.clip = f"{clip} if {test} else None"
            return True
        if not self._trains(inside):
            if node.orelse is not None and self._trains(node.orelse):
                raise self.facts.refuse(node, "backward or optimizer.step() is in one branch.", REFUSED_STEP)
            return False
        if "%" not in test or any(self._is_backward(call) for call in calls(inside)) or node.orelse is not None:
            do = f"{REFUSED_STEP} Accumulation: if (i + 1) % k == 0: optimizer.step()"
            raise self.facts.refuse(node, "backward or optimizer.step() is called under a condition.", do)
        self._visit(body_of(node))
        return True

    # -- lines

    def _visit_line(self, node: Any) -> None:
        call, facts = called(node), self.facts
        if call is not None:
            attr = dotted(call.func).rpartition(".")[2]
            owner = call.func.value if isinstance(call.func, cst.Attribute) else None
            if self._is_backward(call):
                self._seen = True
                self.inner.append(node)
                return
            if stepper := self._stepper(call):
                if facts.kind(expression(stepper)) == "scheduler" and call.args:
                    self._place(node)
                else:
                    self.steppers += [] if stepper in self.steppers else [stepper]
                    self._stepped = True
                return
            if (
                attr in ("zero_grad", "unscale_")
                or (owner is not None and dotted(owner) == self.loop.progress)
                or (attr == "update" and facts.kind(owner) == "scaler")
            ):
                return
        if clip := self._clip_in([node]):
            self.clip = clip
            if (found := assigned(node)) is not None:
                self._stepped = True
                self.after.append(statement(f"{text(found[0][0])} = step.grad_norm"))
            return
        if self._is_move(node) or self._divides_loss(node):
            return
        self._place(node)

    def _is_backward(self, call: Any) -> bool:
        return isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"

    def _stepper(self, call: Any) -> str:
        """Return the optimizer or schedule that a call steps; "" for another call."""
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "step":
            return ""
        owner = call.func.value
        if self.facts.kind(owner) == "scaler" and call.args:
            return text(call.args[0].value)
        known = self.facts.kind(owner) in ("optimizer", "scheduler")
        return dotted(owner) if known or re.search(r"opt|sched", text(owner)) else ""

    def _clip_in(self, statements: list[Any]) -> str:
        """Return the largest norm if the first statement clips the norm of all gradients; "" otherwise."""
        small = one(statements[0]) if statements else None
        call = getattr(small, "value", None)
        if isinstance(call, cst.Call) and dotted(call.func).endswith("clip_grad_norm_"):
            limit, kind = argument(call, "max_norm", 1), argument(call, "norm_type", 2)
            if limit is not None and (kind is None or self.facts.value(kind) in (2, 2.0)):
                return text(limit)
        return ""

    def _is_move(self, node: Any) -> bool:
        """Return whether a line only moves the batch to a device, where it is already."""
        found = assigned(node)
        if found is None:
            return False
        values = [each.value for each in found[1].elements] if isinstance(found[1], cst.Tuple) else [found[1]]
        return len(values) == len(found[0]) and all(
            isinstance(value, cst.Call)
            and isinstance(value.func, cst.Attribute)
            and value.func.attr.value in ("to", "cuda")
            and dotted(value.func.value) == dotted(target)
            and dotted(target) in self.tainted
            and not any("dtype" in text(arg) or "float" in text(arg) for arg in value.args)
            for target, value in zip(found[0], values, strict=True)
        )

    def _divides_loss(self, node: Any) -> bool:
        """Return whether a line divides the loss by the number of accumulated batches, as the step does itself."""
        small = one(node)
        if isinstance(small, cst.AugAssign) and isinstance(small.operator, cst.DivideAssign):
            found, divisor = dotted(small.target) == self.loss, small.value
        elif isinstance(small, cst.Assign) and isinstance(small.value, cst.BinaryOperation):
            value = small.value
            found = isinstance(value.operator, cst.Divide) and dotted(value.left) == self.loss
            found, divisor = found and dotted(small.targets[0].target) == self.loss, value.right
        else:
            return False
        self.divided = self.divided or found
        return found and self.facts.value(divisor) not in (None, 0) and self._accumulates(divisor)

    def _undivided(self, node: Any) -> Any:
        """Return the line that computes the loss without a division by the number of accumulated batches."""
        small = one(node)
        value = small.value
        if (
            isinstance(value, cst.BinaryOperation)
            and isinstance(value.operator, cst.Divide)
            and self._accumulates(value.right)
        ):
            self.divided = True
            left = value.left.with_changes(lpar=[], rpar=[]) if value.left.lpar else value.left
            return node.with_changes(body=[small.with_changes(value=left)])
        return node

    def _accumulates(self, divisor: Any) -> bool:
        return any(_is_modulo(each) and text(each.right) == text(divisor) for each in walk(self.loop.batches))

    # -- everything else

    def _place(self, node: Any) -> None:
        """Add a statement to the part of the step that it belongs to."""
        changed = self.with_step_values(node, bare=self._seen)
        used = names(changed)
        depends = bool(used & self.tainted)
        if self._makes_loss(node):
            self.inner.append(self._undivided(node))
            self.tainted |= {self.loss} if self.loss else set()
        elif self.loss in names(node) and not (used & self.tainted - {self.loss}) and changed is not node:
            (self.after if self._stepped else self.middle).append(changed)
        elif depends and self._add_to_sum(changed):
            return
        elif depends or (not self._seen and self._draws(node)):
            self._keep_inside(changed if self._seen else node)
        elif not self._seen:
            self.before.append(changed)
        else:
            (self.after if self._stepped else self.middle).append(changed)

    def _makes_loss(self, node: Any) -> bool:
        found = assigned(node) if isinstance(node, cst.SimpleStatementLine) else None
        return found is not None and self.loss in {dotted(target) for target in found[0]}

    def _draws(self, node: Any) -> bool:
        models = self.facts.of_kind("model")
        return any(DRAWS.search(text(call.func)) or dotted(call.func) in models for call in calls(node))

    def _keep_inside(self, node: Any) -> None:
        new = assigned_names(node) if assigned(node) is not None or not self._seen else set()
        self.tainted |= new
        self.inner.append(node if new or not self._seen else noted(node, LOCAL))

    def _add_to_sum(self, node: Any) -> bool:
        """Turn `total += x` of a batch into a sum over all processes; return whether this was done."""
        small = one(node)
        if not isinstance(small, cst.AugAssign) or not isinstance(small.operator, cst.AddAssign):
            return False
        target = text(small.target)
        name = re.sub(r"\W+", "_", target.removeprefix("self.")).strip("_")
        total = f'step.sum("{name}")'
        counts = ".sum()" in text(small.value) and ("==" in text(small.value) or ".eq(" in text(small.value))
        value = re.sub(r"\.item\(\)$", "", text(small.value))
        self.inner.append(statement(f'step.add("{name}", {value})'))
        self.after.append(statement(f"{target} += {f'int({total})' if counts else total}"))
        return True

    def with_step_values(self, node: Any, *, bare: bool) -> Any:
        """Return a statement in which the loss and the size of the batch are those of the step.

        Args:
            node: the statement.
            bare: whether the variable of the loss alone is replaced, too.
        """
        if self._makes_loss(node):
            return node
        small = one(node)
        is_sum = isinstance(small, cst.AugAssign)
        several = self.accumulated > 1 and not self.divided and is_sum

        skipped = {each.attr for each in walk(node) if isinstance(each, cst.Attribute)}
        skipped |= {each.keyword for each in walk(node) if isinstance(each, cst.Arg)}

        def change(original: Any, updated: Any) -> Any:
            is_name = isinstance(original, cst.Name) and original not in skipped
            is_loss = is_name and bare and original.value == self.loss
            if (isinstance(original, cst.Call) and self._reads_loss(original)) or is_loss:
                is_number = re.search(r"(\.item\(\)|\.tolist\(\))$|^float\(", text(original))
                value = "step.loss" if is_number else "torch.tensor(step.loss)"
                return expression(f"({self.accumulated} * {value})" if several else value)
            if isinstance(original, cst.Subscript | cst.Call) and self._is_size(original):
                return expression("step.samples")
            if isinstance(updated, cst.BinaryOperation) and not is_sum and self.divided and _undoes(original, self):
                return updated.left
            return updated

        return transform(node, change)

    def _reads_loss(self, call: Any) -> bool:
        """Return whether a call reads the value of the loss: loss.item(), loss.detach().item(), float(loss)."""
        code = re.sub(r"\s", "", text(call))
        loss = re.escape(self.loss)
        one_ = r"(\.data|\.(detach|clone|cpu|mean|item|float|double|numpy|tolist)\(\))"
        ends = r"\.(item|detach|clone|cpu|float|double|numpy|tolist)\(\)"
        return bool(re.fullmatch(rf"{loss}{one_}*{ends}|float\({loss}{one_}*\)", code))

    def _is_size(self, node: Any) -> bool:
        """Return whether an expression is the number of samples of the batch: len(x), x.size(0), x.shape[0]."""
        code = re.sub(r"\s", "", text(node))
        match = re.fullmatch(r"len\(([\w.]+)\)|([\w.]+)\.size\(0\)|([\w.]+)\.shape\[0\]", code)
        return match is not None and next(filter(None, match.groups())) in self.tainted - {self.loss} and self._seen


def _undoes(node: Any, body: BatchBody) -> bool:
    """Return whether an expression multiplies the divided loss by the number of accumulated batches again."""
    if not isinstance(node, cst.BinaryOperation) or not isinstance(node.operator, cst.Multiply):
        return False
    return body.loss in names(node.left) and body.facts.value(node.right) == body.facts.value(_divisor(body))


def _divisor(body: BatchBody) -> Any:
    found = [each.right for each in walk(body.loop.batches) if _is_modulo(each)]
    return found[0] if found else None


def _is_modulo(node: Any) -> bool:
    return isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Modulo)


def precision_of(facts: Facts, call: Any) -> str:
    """Return the setting `precision` for a call of autocast."""
    enabled = argument(call, "enabled")
    if enabled is not None and facts.value(enabled) is False:
        return "fp32"
    dtype = argument(call, "dtype", 1)
    known = facts.values.get(dotted(dtype), [dtype]) if dtype is not None else []
    words = " ".join(text(each) for each in known)
    if dtype is None:
        cpu = "cpu" in (text(call.args[0].value) if call.args else "") or ".cpu." in facts.full_name(call.func)
        return "bf16" if cpu else "fp16"
    return "bf16" if "bfloat16" in words else "fp16"
