"""Convert a script: read it, find its loop, write the loop over steps, and take away what its processes did."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst

from unisono.convert.cleanup import cleaned
from unisono.convert.data_sets import DATA, TrainingData, without_loader
from unisono.convert.entry_point import ARGUMENTS, EntryPoint, with_run
from unisono.convert.loop_search import gathered, merged_no_sync
from unisono.convert.model_placing import placed
from unisono.convert.script_facts import SPAWN, Facts, is_docstring, is_import
from unisono.convert.single_process import SingleProcess
from unisono.convert.step_loop import StepLoop
from unisono.convert.syntax import (
    Lines,
    argument,
    calls,
    dotted,
    names,
    normalized,
    noted,
    notes_in,
    parts_of,
    replace_chains,
    replace_node,
    statement,
    statements,
    text,
    transform,
    walk,
    with_body,
)
from unisono.errors import SettingsError

OTHERS = ("deepspeed", "horovod", "lightning", "pytorch_lightning", "lightning_fabric", "ignite", "colossalai", "ray")
RANKS = (
    "this is the batch of one process. If the script was started with N processes: --set batch={n}, or convert it "
    "again with --ranks N."
)
TRACKERS = ("torch.utils.tensorboard", "tensorboardX", "wandb", "mlflow", "trackio", "comet_ml", "aim")
TRACKER = (
    "every process writes to the tracker. Take it out, and type: --set track=tensorboard, wandb, mlflow or trackio "
    "(docs/guide/trackers.md). run.log gives it values."
)
AUTOCAST_STAYS = (
    "autocast stays as it is. To compute the whole model in bfloat16, in evaluation too, take it out: "
    "--set precision=bf16 (docs/guide/precision.md)."
)
NORM = (
    "batch norm normalizes each micro-batch, here batch / virtual_ranks samples. For the batches of the script: "
    "--set virtual_ranks={v}."
)


@dataclass(frozen=True)
class ConvertedScript:
    """A converted script.

    Attributes:
        code: its source.
        notes: (line, text) of what the user has to decide.
        diff: the difference, as `diff -u` writes it.
    """

    code: str
    notes: list[tuple[int, str]]
    diff: str


def convert(source: str, name: str, new_name: str, processes: int | None = None) -> ConvertedScript:
    """Convert the source of a script.

    Args:
        source: the script.
        name: its file, for messages and the difference.
        new_name: the file of the converted script.
        processes: the number of processes that the script was started with; None: what the script says, or 1.

    Raises:
        SettingsError: the script has a part that is not understood. The message names the line.
    """
    try:
        module = normalized(cst.parse_module(source))
    except cst.ParserSyntaxError as error:
        facts = f"{error.message} It is: {(source.splitlines() or [''])[error.raw_line - 1].strip()[:80]}"
        raise SettingsError(
            f"Line {error.raw_line}: this is not valid Python.", facts, f"python -m py_compile {name}"
        ) from None
    lines = Lines(module)
    first = Facts.of(module, lines)
    _refuse_others(first, name)
    _refuse_processes(first)
    count = processes if processes is not None else _spawned(first)
    code = _Conversion(_without_conflicts(module), lines, count, new_name).code()
    changes = difflib.unified_diff(source.splitlines(True), code.splitlines(True), name, new_name)
    return ConvertedScript(code, notes_in(code), "".join(changes))


def _refuse_others(facts: Facts, name: str) -> None:
    roots = {full.partition(".")[0] for full in facts.imports.values()}
    if "unisono" in roots:
        raise SettingsError(f"{name} is a script of Unisono already.", "It imports unisono.", f"unisono check {name}")
    if found := sorted(roots & set(OTHERS)):
        node = next(each for each in walk(facts.module) if is_import(each) and found[0] in text(each))
        raise facts.refuse(
            node, f"scripts for {found[0]} are not converted.", "see docs/start/words.md#other-libraries."
        )


def _refuse_processes(facts: Facts) -> None:
    """Raise SettingsError if the script starts processes with multiprocessing.Process."""
    for call in calls(facts.module):
        if facts.full_name(call.func) in ("torch.multiprocessing.Process", "multiprocessing.Process"):
            target = argument(call, "target", 1)
            if target is not None and dotted(target) in facts.functions:
                do = f"call {dotted(target)} once, without processes; unisono run starts them. Then convert it again."
                raise facts.refuse(call, "the script starts processes itself.", do)


def _spawned(facts: Facts) -> int | None:
    """Return the number of processes that mp.spawn starts, if the script says it."""
    for call in calls(facts.module):
        if facts.full_name(call.func) in SPAWN and (given := argument(call, "nprocs", 2)) is not None:
            known = [given, *facts.values.get(dotted(given), [])]
            return next((int(text(each)) for each in known if isinstance(each, cst.Integer)), None)
    return None


def _without_conflicts(module: Any) -> Any:
    """Return the module in which the script's own `step` and `run` have other names."""
    taken = names(module)
    for name, other in (("step", "step_index"), ("run", "run_script")):
        if name in taken or name in {each.name.value for each in walk(module) if isinstance(each, cst.FunctionDef)}:
            module = _renamed(module, name, other if other not in taken else f"{other}_")
    return module


def _renamed(module: Any, name: str, other: str) -> Any:
    tops = {each.name for each in module.body if isinstance(each, cst.FunctionDef)}
    skipped: set[Any] = set()
    for each in walk(module):
        if isinstance(each, cst.Attribute):
            skipped.add(each.attr)
        elif isinstance(each, cst.Arg) and each.keyword is not None:
            skipped.add(each.keyword)
        elif isinstance(each, cst.FunctionDef) and each.name not in tops:
            skipped.add(each.name)

    def change(original: Any, updated: Any) -> Any:
        if isinstance(original, cst.Name) and original.value == name and original not in skipped:
            return updated.with_changes(value=other)
        return updated

    return transform(module, change)


class _Conversion:
    """The steps of one conversion."""

    def __init__(self, module: Any, lines: Lines, processes: int | None, new_name: str) -> None:
        self.before, self.lines, self.new_name = module, lines, new_name
        self.known, self.processes = processes is not None, processes or 1
        self.notes: list[str] = []

    def code(self) -> str:
        module = merged_no_sync(Facts.of(self.before, self.lines, self.processes))
        facts, loop = gathered(module, self.lines, self.processes)
        data = TrainingData.of(facts, loop)
        in_function = isinstance(loop.host, cst.FunctionDef)
        # The loader is replaced first: the loop's own statements then name the data set.
        facts.module = data.placed_in(facts, loop)
        steps = StepLoop.of(facts, loop, data)
        new = steps.statements()
        if not data.counted:
            new = [without_loader(facts, each, data, steps.body.accumulated, near=True) for each in new]
        module = replace_node(facts.module, loop.outer, new)
        module = self._with_lengths(facts, module, data, steps.body.accumulated)
        module = replace_chains(module, {DATA: data.data})
        module = _with_epochs(module, steps.epochs_name)
        facts.module = module
        module = placed(facts, self.notes)
        single = SingleProcess(facts, steps.body.precision)
        module = single.rewrite(module)
        self.notes += [*data.notes, *steps.notes, *single.notes]
        self.notes += [AUTOCAST_STAYS] if steps.body.autocast else []
        if any(full.startswith(TRACKERS) for full in facts.imports.values()):
            self.notes.append(TRACKER)
        module = cleaned(module, self.before)
        name = "RunSettings" if "Settings" in names(module) else "Settings"
        module = self._with_imports(module)
        module = with_run(module, self.lines, name) if in_function else module
        settings = self._settings(facts, name, data, steps)
        arguments = ARGUMENTS.format(file=self.new_name, batch=self._batch(data, steps), epochs=steps.epochs or 1)
        module = EntryPoint(module, loop_in_function=in_function).build(settings, arguments)
        module = cleaned(module, self.before)
        self._refuse_rest(facts, module)
        return str(module.code)

    def _with_lengths(self, facts: Facts, module: Any, data: TrainingData, accumulated: int) -> Any:
        """Replace the loader's length: by `steps_per_epoch` where that is defined, by an expression elsewhere."""
        hosts = [each for each in walk(module) if isinstance(each, cst.FunctionDef) and _has_loop(each)]
        host = hosts[-1] if hosts else None

        def change(old: Any, new: Any, *, near: bool) -> Any:
            is_host = old is host or (host is None and old in module.body and not isinstance(old, _DEFINITIONS))
            return without_loader(facts, new, data, accumulated, near=near) if is_host else new

        if data.counted:
            module = transform(module, lambda old, new: change(old, new, near=True))
        if data.kept and not any("." in name for name in data.loaders):
            return transform(module, lambda old, new: change(old, new, near=False))
        return without_loader(facts, module, data, accumulated, near=False)

    def _with_imports(self, module: Any) -> Any:
        """Return the module with the imports of the new script."""
        known = {name for each in module.body if is_import(each) for name in _imported(each)}
        place = next(
            (i for i, each in enumerate(module.body) if is_import(each) and "__future__" not in text(each)), None
        )
        if place is None:
            place = 1 if module.body and is_docstring(module.body[0]) else 0
        last = max((i for i, each in enumerate(module.body) if is_import(each)), default=place - 1)
        body = list(module.body)
        body.insert(last + 1, statement("import unisono"))
        if "torch" not in known and "torch." in text(module):
            body.insert(place, statement("import torch"))
        if "dataclass" not in known:
            new = statement("from dataclasses import dataclass")
            if place < len(body) and is_import(body[place]):
                new = new.with_changes(leading_lines=body[place].leading_lines)
                body[place] = body[place].with_changes(leading_lines=[])
            after = body[place] if place < len(body) else None
            if after is not None and is_import(after) and not _is_standard(after):
                body[place] = after.with_changes(leading_lines=[cst.EmptyLine()])
            body.insert(place, new)
        return with_body(module, body)

    def _batch(self, data: TrainingData, steps: StepLoop) -> int:
        return (data.batch or 1) * steps.body.accumulated * self.processes

    def _settings(self, facts: Facts, name: str, data: TrainingData, steps: StepLoop) -> Any:
        """Return the class of settings, with notes."""
        body, batch = steps.body, self._batch(data, steps)
        fields: list[Any] = []
        if (seed := _seed(facts)) is not None:
            fields.append(statement(f"seed: int = {seed}"))
        fields.append(statement(f"batch: int = {batch}"))
        if data.batch is None:
            fields[-1] = noted(fields[-1], "the script does not show its batch size. --set batch=64")
        elif not self.known and _has_processes(facts):
            fields[-1] = noted(fields[-1], RANKS.format(n=f"{batch}*N"))
        if body.accumulated > 1:
            fields.append(statement(f"micro_batch: int | None = {data.batch or 1}"))
        epochs = statement(f"epochs: int | None = {steps.epochs if steps.epochs is not None else 1}")
        unknown = steps.epochs is None
        fields.append(
            noted(epochs, "the script does not show its number of epochs. --set epochs=10") if unknown else epochs
        )
        if (precision := body.precision or _mixed_precision(facts)) not in ("", "no", "fp32"):
            fields.append(statement(f'precision: str = "{precision}"'))
        if re.search(r"BatchNorm\d?d?\(|resnet\d+\(", text(self.before)):
            if self.processes > 1:
                fields.append(statement(f"virtual_ranks: int = {self.processes}"))
            else:
                self.notes.append(NORM.format(v=self.processes))
        made = statements(f"@dataclass(frozen=True, kw_only=True)\nclass {name}(unisono.Settings):\n    pass")[0]
        for note in dict.fromkeys(self.notes):
            made = noted(made, note)
        return with_body(made, fields)

    def _refuse_rest(self, facts: Facts, module: Any) -> None:
        """Raise SettingsError if something of the processes is left."""
        wanted = {name for name, role in facts.roles.items() if role.kind in ("accelerator", "scaler")}
        for each in walk(module):
            chain = dotted(each)
            full = facts.full_name(each) if chain else ""
            gone = full.startswith(("torch.distributed.", "accelerate.")) and full.partition(".")[2]
            if ((gone and isinstance(each, cst.Attribute | cst.Name) and not is_import(each)) or chain in wanted) and (
                facts.lines.of(each) > 1 or chain in wanted
            ):
                do = "docs/start/words.md says what to write instead. Replace it, or take it out, and convert again."
                raise facts.refuse(each, f"the converter does not know {full or chain} here.", do)


_DEFINITIONS = (cst.FunctionDef, cst.ClassDef)


def _with_epochs(module: Any, name: str) -> Any:
    """Return the module in which the code around the loop reads the number of epochs from the settings."""
    hosts = [each for each in walk(module) if isinstance(each, cst.FunctionDef) and _has_loop(each)]
    around = hosts[-1:] or [each for each in module.body if not isinstance(each, _DEFINITIONS)]
    stored = [part for each in walk(module) for part in _targets(each)]
    if not name or any(isinstance(each, cst.AugAssign) and dotted(each.target) == name for each in walk(module)):
        return module
    for each in around:
        kept = {*stored, *_other_scopes(each, name)}
        module = replace_node(module, each, replace_chains(each, {name: "run.settings.epochs"}, kept=kept))
    return module


def _other_scopes(host: Any, name: str) -> Iterator[Any]:
    """Yield the nodes of a statement or function in which a name is another variable, or is declared."""
    if isinstance(host, cst.FunctionDef):
        yield from walk(host.params)  # their defaults are values of the scope around it
    for each in walk(host):
        if isinstance(each, cst.NameItem):  # global, nonlocal
            yield each.name
        elif each is not host and isinstance(each, cst.FunctionDef | cst.Lambda):
            defined = [dotted(part) for inner in walk(each) for part in _targets(inner)]
            if name in defined:
                yield from walk(each)


def _targets(node: Any) -> list[Any]:
    """Return the names that a statement or a parameter defines."""
    if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.For | cst.CompFor):
        return parts_of(node.target)
    return [node.name] if isinstance(node, cst.Param | cst.FunctionDef) else []


def _has_loop(node: Any) -> bool:
    return any(isinstance(each, cst.For) and "run.steps(" in text(each.iter) for each in walk(node))


def _is_standard(node: Any) -> bool:
    """Return whether an import is of the standard library."""
    small = node.body[0]
    first = small.module if isinstance(small, cst.ImportFrom) else small.names[0].name
    return dotted(first).partition(".")[0] in sys.stdlib_module_names


def _imported(node: Any) -> list[str]:
    small = node.body[0]
    if isinstance(small.names, cst.ImportStar):
        return []
    return [
        alias.asname.name.value if alias.asname is not None else dotted(alias.name).partition(".")[0]
        for alias in small.names
    ]


def _seed(facts: Facts) -> int | None:
    """Return the seed that the script sets."""
    for call in calls(facts.module):
        full = facts.full_name(call.func)
        if full in ("torch.manual_seed", "accelerate.utils.set_seed", "torch.cuda.manual_seed_all") and call.args:
            value = facts.value(call.args[0].value)
            if value is None and isinstance(call.args[0].value, cst.BinaryOperation):
                value = facts.value(call.args[0].value.left)
            return value if isinstance(value, int) and value >= 0 else None
    return None


def _has_processes(facts: Facts) -> bool:
    """Return whether a script is written for several processes, each with its own batch."""
    return "accelerator" in {role.kind for role in facts.roles.values()} or any(
        facts.full_name(call.func).endswith(".DistributedDataParallel") for call in calls(facts.module)
    )


def _mixed_precision(facts: Facts) -> str:
    """Return the precision that Accelerator gets."""
    for role in facts.roles.values():
        if role.kind == "accelerator" and (given := argument(role.node, "mixed_precision")) is not None:
            return str(facts.value(given) or "")
    return ""
