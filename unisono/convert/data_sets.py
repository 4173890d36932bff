"""The data set behind the DataLoader of a training loop, and the settings that its arguments become."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from unisono.convert.call_inlining import function_around, path_to
from unisono.convert.loop_search import TrainingLoop, unwrapped
from unisono.convert.script_facts import Facts
from unisono.convert.syntax import (
    argument,
    assigned,
    called,
    calls,
    dotted,
    expression,
    names,
    one,
    replace_chains,
    replace_node,
    statement,
    text,
    transform,
    walk,
)

SAMPLERS = "give run.steps a data set that draws its samples (docs/guide/data.md#sampling-with-weights)."
STEPS_PER_EPOCH = "steps_per_epoch"
DATA = "_data_of_the_run"
"""Stands for the data set until the names of the loader are replaced."""


@dataclass
class TrainingData:
    """The data of the training loop.

    Attributes:
        origin: the call of DataLoader.
        call: the same with the arguments that the script keeps in a dict.
        loaders: the names of the loader in the script.
        data: the expression for the data set, in the function with the loop.
        batch: the samples of a batch of one process; None if the script does not show it.
        steps: further arguments of run.steps.
        notes: notes for the settings.
        counted: whether `steps_per_epoch` is assigned where the loader was.
        kept: whether the loader stays, because another loop reads it.
    """

    origin: Any
    call: Any
    loaders: set[str]
    data: str = ""
    batch: int | None = None
    steps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counted: bool = False
    kept: bool = False

    @classmethod
    def of(cls, facts: Facts, loop: TrainingLoop) -> TrainingData:
        """Read the call of DataLoader. Raises SettingsError for orders and data sets that run.steps does not have."""
        role = facts.role(loop.loader)
        assert role is not None
        call = _expanded(facts, role.node)
        loaders = {name for name, each in facts.roles.items() if each.node is role.node}
        found = cls(role.node, call, loaders | {text(loop.loader)})
        if (own := argument(call, "batch_sampler")) is not None and text(own) != "None":
            raise facts.refuse(call, "the DataLoader has a batch sampler.", SAMPLERS)
        size = argument(call, "batch_size", 1)
        hidden = any(arg.star != "" for arg in call.args)
        value = facts.value(size) if size is not None else None if hidden else 1
        found.batch = value if isinstance(value, int) and value > 0 else None
        found._read_order(facts)
        if (collate := argument(call, "collate_fn")) is not None:
            found.steps.append(f"collate_fn={text(collate)}")
        workers = facts.value(argument(call, "num_workers", 5))
        if isinstance(workers, int) and workers > 0:
            found.notes.append(f"the DataLoader had {workers} workers: --set loader.workers={workers}")
        if facts.value(argument(call, "drop_last")) is True:
            found.notes.append("drop_last: the last batch of an epoch is shorter here, and no sample is dropped.")
        return found

    def _read_order(self, facts: Facts) -> None:
        shuffle, sampler = argument(self.call, "shuffle", 2), argument(self.call, "sampler", 3)
        role = facts.role(sampler) if sampler is not None else None
        if role is not None and role.kind == "sampler":
            own = argument(role.node, "shuffle", 3)
            shuffled = True if own is None else facts.value(own)
        elif sampler is not None and text(sampler) != "None":
            raise facts.refuse(self.call, f"the DataLoader has a sampler of its own, {text(sampler)[:40]}.", SAMPLERS)
        else:
            shuffled = False if shuffle is None else facts.value(shuffle)
        if shuffled is False:
            self.steps.append("shuffle=False")
        elif shuffled is None:
            self.notes.append(f"the samples are shuffled, where the script had shuffle={text(shuffle)}.")

    def placed_in(self, facts: Facts, loop: TrainingLoop) -> Any:
        """Return the module with the data set in place of the loader, and set `data`."""
        if (data := argument(self.call, "dataset", 0)) is None:
            raise facts.refuse(self.call, "the DataLoader gets no data set by place or name.", "DataLoader(train_set)")
        self._refuse_iterable(facts, data)
        path = path_to(facts.module, self.origin)
        site = next((each for each in reversed(path) if isinstance(each, cst.SimpleStatementLine)), None)
        host = loop.host if isinstance(loop.host, cst.FunctionDef) else None
        target = assigned(site) if site is not None else None
        local = target is not None and function_around(path) is host
        alone = local and target is not None and target[1] is self.origin
        name = dotted(target[0][0]) if target is not None and len(target[0]) == 1 else ""
        simple = alone and name and "." not in name and not self._is_parameter(facts, name)
        if self._is_read_elsewhere(facts, loop) or self._is_shared(facts, path):
            self.data = dotted(data) if alone and dotted(data) else f"{text(loop.loader)}.dataset"
            self.loaders, self.kept = {text(loop.loader)}, True
            return facts.module
        if site is None or not simple:
            self.data = text(loop.loader)
            module = replace_node(facts.module, self.origin, data)
            names_it = local and target is not None and self.data in {dotted(each) for each in target[0]}
            if site is None or not names_it or not _counts_batches(facts.module, self.loaders):
                return module
            self.counted = True
            placed = replace_node(site, self.origin, data)
            return replace_node(facts.module, site, [placed, self.steps_per_epoch()])
        new: list[Any] = []
        if dotted(data):
            self.data = dotted(data)
        else:
            taken = names(facts.module)
            self.data = next(each for each in ("train_set", "train_data", f"{name}_data") if each not in taken)
            new.append(statement(f"{self.data} = {text(data)}").with_changes(leading_lines=site.leading_lines))
        if _counts_batches(facts.module, self.loaders):
            self.counted = True
            new.append(self.steps_per_epoch())
        return replace_node(facts.module, site, new)

    def _refuse_iterable(self, facts: Facts, data: Any) -> None:
        known = [data, *facts.values.get(dotted(data), [])]
        for call in (each for each in known if isinstance(each, cst.Call)):
            for node in facts.module.body:
                if isinstance(node, cst.ClassDef) and node.name.value == dotted(call.func):
                    bases = [facts.full_name(base.value) for base in node.bases]
                    if "torch.utils.data.IterableDataset" in bases:
                        do = "make it a unisono.Stream (docs/guide/streams.md), or a data set with an index."
                        raise facts.refuse(self.call, f"the data set {node.name.value} has no index.", do)

    def _is_shared(self, facts: Facts, path: list[Any]) -> bool:
        """Return whether the function that makes the loader makes others, too."""
        maker = function_around(path)
        function = next((each for each in facts.functions.values() if each.node is maker), None)
        return function is not None and sum(facts.target(call) is function for call in calls(facts.module)) > 1

    def _is_parameter(self, facts: Facts, name: str) -> bool:
        return any(name in function.params for function in facts.functions.values())

    def _is_read_elsewhere(self, facts: Facts, loop: TrainingLoop) -> bool:
        """Return whether another loop iterates over the same loader."""
        found = [each for each in walk(facts.module) if isinstance(each, cst.For) and each is not loop.batches]
        found = [each for each in found if each is not loop.epochs]
        roles = [facts.role(unwrapped(facts, each)[0]) for each in found]
        return any(role is not None and role.node is self.origin for role in roles)

    def steps_per_epoch(self) -> Any:
        """Return the statement that counts the steps of an epoch."""
        return statement(f"{STEPS_PER_EPOCH} = -(-len({DATA}) // run.settings.batch)  # optimizer steps")


def _counts_batches(node: Any, loaders: set[str]) -> bool:
    return any(isinstance(each, cst.Call) and _length_of(each) in loaders for each in walk(node))


def _length_of(call: Any) -> str:
    return text(call.args[0].value) if dotted(call.func) == "len" and len(call.args) == 1 else ""


def without_loader(facts: Facts, node: Any, data: TrainingData, accumulated: int, *, near: bool) -> Any:
    """Return a node in which the loader's length, data set and batch size are those of the run.

    Args:
        facts: what is known about the script.
        node: the node.
        data: the data of the training loop.
        accumulated: the number of batches for each update.
        near: whether `steps_per_epoch` is defined where the node is.
    """
    loaders = data.loaders
    count = STEPS_PER_EPOCH if near else f"(-(-len({DATA}) // run.settings.batch))"
    batches = count if accumulated == 1 else f"({accumulated} * {count})"

    def change(original: Any, updated: Any) -> Any:
        if isinstance(original, cst.BinaryOperation) and isinstance(original.operator, cst.FloorDivide):
            counted = isinstance(original.left, cst.Call) and _length_of(original.left) in loaders
            if counted and accumulated > 1 and facts.value(original.right) == accumulated:
                return expression(count)
        if isinstance(original, cst.Call):
            if _length_of(original) in loaders:
                return expression(batches)
            if text(original) in {f"next(iter({name}))" for name in loaders}:
                raise facts.refuse(
                    original, "a batch is taken from the DataLoader.", f"collate samples of {data.data}."
                )
        if isinstance(original, cst.Attribute) and text(original.value) in loaders:
            if original.attr.value == "dataset" and not data.kept:
                return expression(data.data)
            if original.attr.value == "batch_size" and not data.kept:
                return expression("run.settings.batch")
        return updated

    sizes = {f"len(next(iter({name}))[0])" for name in loaders}
    node = transform(node, lambda _, new: expression("run.settings.batch") if _is_call_in(new, sizes) else new)
    changed = transform(node, change)
    plain = {name: data.data for name in loaders if "." not in name and data.data not in loaders}
    return changed if data.kept else replace_chains(changed, plain)


def _is_call_in(node: Any, codes: set[str]) -> bool:
    return isinstance(node, cst.Call) and text(node) in codes


def _expanded(facts: Facts, call: Any) -> Any:
    """Return a call with the items of a dict of the script in place of `**name`."""
    args: list[Any] = []
    for arg in call.args:
        table = next((each for each in facts.values.get(dotted(arg.value), []) if isinstance(each, cst.Dict)), None)
        if arg.star != "**" or table is None:
            args.append(arg)
            continue
        for element in table.elements:
            if isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString):
                args.append(cst.Arg(element.value, keyword=cst.Name(text(element.key).strip("\"'"))))
    return call.with_changes(args=args)


def is_set_epoch(node: Any) -> bool:
    """Return whether a statement is sampler.set_epoch(epoch)."""
    call = called(node)
    return call is not None and isinstance(call.func, cst.Attribute) and call.func.attr.value == "set_epoch"


def is_reset(node: Any, epoch: str) -> bool:
    """Return whether a statement gives variables their first values of an epoch, as in `total = 0.0`."""
    small = one(node)
    return isinstance(small, cst.Assign) and epoch not in names(small.value)
