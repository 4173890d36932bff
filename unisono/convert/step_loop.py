"""The loop over steps in place of the loops over epochs and batches."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from unisono.convert.batch_body import BatchBody
from unisono.convert.call_inlining import assigned_names
from unisono.convert.data_sets import TrainingData, is_reset, is_set_epoch
from unisono.convert.loop_search import TrainingLoop, find_backward
from unisono.convert.script_facts import Facts
from unisono.convert.syntax import (
    argument,
    assigned,
    body_of,
    called,
    calls,
    dotted,
    names,
    noted,
    parts_of,
    statement,
    text,
    transform,
    walk,
    with_body,
)

MEAN = (
    "the loss is taken for a mean over the samples of the batch. If it is a sum: leave mean=True out. If it is a mean "
    "over other items, such as tokens that are not masked: weight=their number."
)
SCHEDULE = (
    "Accelerate stepped the prepared schedule {n} times for each step of the optimizer; here it steps once. Divide its "
    "lengths by {n}."
)
RESUME = (
    "a resume restores what is tracked, and nothing else. Keep {names} in a dict, and pass it to run.track "
    "(docs/guide/resume.md#what-a-resume-restores)."
)

RESTARTED = (
    "a resume in the middle of an epoch resets {names}. To keep such a value, put it in a dict, and pass the "
    "dict to run.track (docs/guide/resume.md#what-a-resume-restores)."
)


@dataclass
class StepLoop:
    """The statements of the new loop, and what the settings get from it.

    Attributes:
        facts: The facts of the script.
        loop: Its loops.
        data: Its training data.
        body: What the loop over batches does.
        epochs: The number of epochs; None if the script does not show it.
        epochs_name: What the script calls it, as in args.epochs; "" if it has no name.
        first_epoch: The number of the first one.
        notes: Notes for the settings.
    """

    facts: Facts
    loop: TrainingLoop
    data: TrainingData
    body: BatchBody
    epochs: int | None = 1
    epochs_name: str = ""
    first_epoch: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, facts: Facts, loop: TrainingLoop, data: TrainingData) -> StepLoop:
        """Read the loops."""
        backward = find_backward(facts)
        body = BatchBody(facts, loop, _root(_loss_of(facts, backward, 1))).read()
        whole = _loss_of(facts, backward, 1)
        body.divided = body.divided or _loss_of(facts, backward, body.accumulated) is not whole
        made = cls(facts, loop, data, body)
        made._read_epochs()
        prepared = any(call.func.attr.value == "prepare" for call in _methods(facts, "accelerator"))
        if prepared and facts.processes > 1 and any(facts.kind(_parsed(each)) == "scheduler" for each in body.steppers):
            made.notes.append(SCHEDULE.format(n=facts.processes))
        return made

    def _read_epochs(self) -> None:
        if self.loop.epochs is None:
            return
        call = self.loop.epochs.iter
        while isinstance(call, cst.Call) and dotted(call.func).rpartition(".")[2] == "tqdm" and call.args:
            call = call.args[0].value
        known = isinstance(call, cst.Call) and dotted(call.func).rpartition(".")[2] in ("range", "trange")
        if not known or not isinstance(self.loop.epochs.target, cst.Name):
            do = "for epoch in range(10):"
            raise self.facts.refuse(self.loop.epochs, "the loop over epochs does not iterate over a range.", do)
        ends = [arg.value for arg in call.args if arg.keyword is None][:2]
        stop, start = self.facts.value(ends[-1]), self.facts.value(ends[0]) if len(ends) > 1 else 0
        self.first_epoch = start if isinstance(start, int) else 0
        self.epochs = stop - self.first_epoch if isinstance(stop, int) else None
        count = ends[-1]
        if self.first_epoch == 1:  # range(1, epochs + 1)
            count = count.left if isinstance(count, cst.BinaryOperation) and text(count).endswith("+ 1") else None
        self.epochs_name = dotted(count) if self.first_epoch in (0, 1) and self.epochs is not None else ""
        if isinstance(ends[0], cst.Name | cst.Attribute) and len(ends) > 1:
            note = (
                f"the loop began at {text(ends[0])}. A run begins at epoch {self.first_epoch}; --resume continues it."
            )
            self.notes.append(note)

    # -- the new statements

    def statements(self) -> list[Any]:
        """Return the statements that replace the outermost loop."""
        loop, body = self.loop, self.body
        starts, ends = self._around()
        index, epoch = loop.index, self._epoch()
        ours = [*body.before, *body.inner, *body.middle, *body.after, *ends, *starts]
        used = {name for each in ours for name in names(each)}
        resets = [each for each in starts if is_reset(each, epoch)]
        head = [statement(f"{epoch} = {_plus('step.epoch', self.first_epoch)}")] if epoch and epoch in used else []
        place = "step.number % steps_per_epoch"
        if index and index in used:
            head.append(statement(f"{index} = {_plus(place, loop.first)}"))
        if starts and loop.epochs is not None:
            first = with_body(statement(f"if {place} == 0:\n    pass"), [_first(starts[0]), *starts[1:]])
            sums = set().union(*map(assigned_names, resets)) & {name for each in ends for name in names(each)}
            head.append(noted(first, RESTARTED.format(names=", ".join(sorted(sums)))) if sums else first)
        inner = with_body(statement(f"for {_bare(loop.target)} in step:\n    pass"), self._inner())
        clip = [f"clip={body.clip}"] if body.clip else []
        update = statement(f"step.update({', '.join([*body.steppers, *clip])})")
        after = [self._after(each) for each in body.after]
        log = [] if any("run.log(" in text(each) for each in after) else [statement("run.log(loss=step.loss)")]
        steps = [*head, *body.before, inner, *map(self._after, body.middle), update, *log, *after]
        if ends:
            last = [self._after(each) for each in ends]
            steps.append(with_body(statement("if step.ends_epoch:\n    pass"), [_first(last[0]), *last[1:]]))
        given = ", ".join([self.data.data, *self.data.steps])
        whole = with_body(statement(f"for step in run.steps({given}):\n    pass"), steps)
        new = [*(resets if loop.epochs is not None else starts)]
        counts = any("steps_per_epoch" in names(each) or self.data.loaders & _lengths(each) for each in [*head, *steps])
        if counts and not self.data.counted:
            new.append(self.data.steps_per_epoch())
        new += [self._track(), whole]
        new[0] = new[0].with_changes(leading_lines=[*loop.outer.leading_lines, *new[0].leading_lines])
        return new

    def _epoch(self) -> str:
        return dotted(self.loop.epochs.target) if self.loop.epochs is not None else ""

    def _around(self) -> tuple[list[Any], list[Any]]:
        """Return the statements of an epoch before and after its batches."""
        if self.loop.epochs is None:
            return [], []
        statements = body_of(self.loop.epochs)
        place = statements.index(self.loop.batches)
        before, after = statements[:place], statements[place + 1 :]
        before = [each for each in before if not is_set_epoch(each) and not self._clears(each)]
        if self.loop.progress:
            before = [each for each in before if not self._shows_progress(each)]
            after = [each for each in after if not self._shows_progress(each)]
        return before, [each for each in after if not self._clears(each)]

    def _shows_progress(self, node: Any) -> bool:
        """Return whether a statement makes or uses the progress bar around the loader."""
        found, call = assigned(node), called(node)
        made = found is not None and dotted(found[0][0]) == self.loop.progress
        return made or (call is not None and dotted(call.func).startswith(f"{self.loop.progress}."))

    def _clears(self, node: Any) -> bool:
        call = called(node)
        return call is not None and dotted(call.func).endswith(".zero_grad")

    def _after(self, node: Any) -> Any:
        """Return a statement after the inner loop, in which the loss is that of the step."""
        loss = self.body.loss
        changed = self.body.with_step_values(node, bare=True) if loss else node
        own = self.body.tainted - {loss} - _assigned_in(changed) - assigned_names(changed)
        if lost := sorted(name for name in names(changed) & own if "." not in name and name != "_"):
            note = f"{', '.join(lost)}: of the last micro-batch of this process. Use step.add and step.mean instead."
            return noted(changed, note)
        return changed

    def _inner(self) -> list[Any]:
        """Return the inner loop, in which backward is that of the step."""
        backward = find_backward(self.facts)
        mean, note = _is_mean(self.facts, self.body)
        weight = self._weight()
        loss = text(_loss_of(self.facts, backward, self.body.accumulated))
        if not mean:
            share = "step.samples" if self.facts.processes == 1 else f"(step.samples / {self.facts.processes})"
            new = f"step.backward({loss} * {share}, weight={weight})"
            note = "the loss is a sum, so the gradient grows with the batch, as in the script. For a mean: leave out "
            note += f"* {share}."
        else:
            undone = self.body.accumulated > 1 and not self.body.divided and not _by_accelerate(self.facts, backward)
            factor = f" * {self.body.accumulated}" if undone else ""
            new = f"step.backward({loss}{factor}, weight={weight}, mean=True)"
            if undone:
                note = f"the script added the gradients of {self.body.accumulated} batches and did not divide the sum."

        def change(original: Any, updated: Any) -> Any:
            if isinstance(original, cst.SimpleStatementLine) and called(original) is backward:
                made = statement(new).with_changes(leading_lines=original.leading_lines)
                return noted(made, note) if note else made
            return updated

        return [transform(each, change) for each in self.body.inner]

    def _weight(self) -> str:
        """Return the expression for the number of samples in a micro-batch."""
        target = self.loop.target
        if isinstance(target, cst.Tuple | cst.List):
            plain = [dotted(part) for part in parts_of(target) if dotted(part) not in ("", "_")]
            return f"len({plain[-1]})"
        name, code = dotted(target), " ".join(text(each) for each in self.body.inner)
        for each in self.body.inner:
            found = assigned(each)
            if found is not None and dotted(found[1]) == name and len(found[0]) > 1:
                return f"len({text(found[0][-1])})"
        if key := re.search(rf"\b{re.escape(name)}\[(['\"]\w+['\"]|\d+)\]", code):
            return f"len({name}[{key[1]}])"
        if re.search(rf"\*\*{re.escape(name)}\b|{re.escape(name)}\.items\(\)", code):
            return f"len(next(iter({name}.values())))"
        return f"len({name})"

    def _track(self) -> Any:
        """Return the call of run.track: the models that the step calls, its optimizers, and all schedules."""
        facts, body = self.facts, self.body
        inner = {name for each in body.inner for name in names(each)}
        models = sorted(inner & facts.of_kind("model")) or sorted(facts.of_kind("model"))[:1]
        host = names(self.loop.host)
        schedules = sorted(name for name in facts.of_kind("scheduler") & host if name not in body.steppers)
        averages = sorted(facts.of_kind("average") & host)
        tracked = dict.fromkeys([*models, *averages, *body.steppers, *schedules])
        words = [f"{name.rpartition('.')[2].strip('_')}={name}" for name in tracked]
        call = statement(f"run.track({', '.join(words)})")
        kept = self._kept_values()
        return noted(call, RESUME.format(names=", ".join(kept))) if kept else call

    def _kept_values(self) -> list[str]:
        """Return the variables that an epoch changes and the next one reads, such as a best loss."""
        starts, ends = self._around()
        written = {name for each in ends for name in _assigned_in(each) if "." not in name}
        reset = {name for each in starts for name in _assigned_in(each)}
        outside = transform(self.loop.host, lambda old, new: _empty(old, new, self.loop.outer))
        before = {
            name for each in walk(outside) if isinstance(each, cst.SimpleStatementLine) for name in _assigned_in(each)
        }
        return sorted((written & before) - reset)


def _methods(facts: Facts, kind: str) -> list[Any]:
    """Return the calls of methods of the objects of one kind."""
    found = [call for call in calls(facts.module) if isinstance(call.func, cst.Attribute)]
    return [call for call in found if facts.kind(call.func.value) == kind]


def _parsed(code: str) -> Any:
    return cst.parse_expression(code)


def _lengths(node: Any) -> set[str]:
    """Return what a node takes the length of."""
    return {text(call.args[0].value) for call in calls(node) if dotted(call.func) == "len" and len(call.args) == 1}


def _bare(target: Any) -> str:
    return text(target.with_changes(lpar=[], rpar=[]) if isinstance(target, cst.Tuple) else target)


def _first(node: Any) -> Any:
    """Return a statement without blank lines above it."""
    return node.with_changes(leading_lines=[each for each in node.leading_lines if each.comment is not None])


def _empty(old: Any, new: Any, loop: Any) -> Any:
    return statement("pass") if old is loop else new


def _assigned_in(node: Any) -> set[str]:
    found: set[str] = set()
    for each in walk(node):
        if isinstance(each, cst.AssignTarget | cst.AugAssign):
            found |= {dotted(part) for part in parts_of(each.target)}
    return found


def _plus(code: str, number: int) -> str:
    return f"{code} + {number}" if number else code


def _root(node: Any) -> str:
    """Return the variable of a loss, also of `loss.mean()` and `loss / 4`."""
    return next((each.value for each in walk(node) if isinstance(each, cst.Name)), "")


def _by_accelerate(facts: Facts, backward: Any) -> bool:
    return facts.kind(backward.func.value) == "accelerator"


def _loss_of(facts: Facts, backward: Any, accumulated: int) -> Any:
    """Return the loss: of loss.backward(), scaler.scale(loss).backward() or accelerator.backward(loss).

    With accumulation, a division by the number of batches is taken away.
    """
    owner = backward.func.value
    if _by_accelerate(facts, backward) and backward.args:
        owner = backward.args[0].value
    elif isinstance(owner, cst.Call) and facts.kind(getattr(owner.func, "value", owner)) == "scaler":
        owner = owner.args[0].value
    if (
        isinstance(owner, cst.BinaryOperation)
        and isinstance(owner.operator, cst.Divide)
        and accumulated > 1
        and facts.value(owner.right) == accumulated
    ):
        return owner.left
    return owner


def _is_mean(facts: Facts, body: BatchBody) -> tuple[bool, str]:
    """Return whether the loss is a mean, and a note where the script does not show it."""
    made = [found[1] for each in walk(cst.Module(body.inner)) if _makes(each, body.loss) and (found := assigned(each))]
    for value in made:
        for call in [value, *calls(value)]:
            if not isinstance(call, cst.Call):
                continue
            full, role = facts.full_name(call.func), facts.role(call.func)
            maker = call if full.startswith("torch.nn.functional.") else None
            maker = role.node if role is not None and role.kind == "criterion" else maker
            if maker is None:
                continue
            reduction = argument(maker, "reduction")
            uneven = any(argument(maker, name) is not None for name in ("weight", "ignore_index"))
            if reduction is not None and "sum" in text(reduction):
                return call is not value, MEAN if call is not value else ""
            return True, MEAN if uneven or call is not value else ""
        if dotted(getattr(value, "func", None)).endswith(".mean") or text(value).endswith(".mean()"):
            return True, ""
    return True, MEAN


def _makes(node: Any, loss: str) -> bool:
    found = assigned(node) if isinstance(node, cst.SimpleStatementLine) else None
    return found is not None and loss in {dotted(target) for target in found[0]}
