"""What a script says about its names: their imports, their values, and their roles in training.

Roles spread from calls of torch and Accelerate over assignments, parameters and results of the script's functions. They
belong to a name in the whole script, not in one function, because scripts use one name for one thing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import libcst as cst

from unisono.convert.syntax import Lines, argument, assigned, body_of, called, calls, dotted, names, one, text, walk
from unisono.errors import SettingsError


class Role(NamedTuple):
    """What a name is: a kind of KINDS, and the expression that it comes from."""

    kind: str
    node: Any


KINDS = {
    "torch.distributed.get_rank": "rank",
    "torch.distributed.get_node_local_rank": "rank",
    "torch.distributed.get_world_size": "world",
    "torch.cuda.device_count": "world",
    "torch.device": "device",
    "torch.nn.parallel.DistributedDataParallel": "model",
    "torch.nn.parallel.distributed.DistributedDataParallel": "model",
    "torch.nn.DataParallel": "model",
    "torch.nn.parallel.DataParallel": "model",
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm": "model",
    "torch.utils.data.DataLoader": "loader",
    "torch.utils.data.dataloader.DataLoader": "loader",
    "torch.utils.data.DistributedSampler": "sampler",
    "torch.utils.data.distributed.DistributedSampler": "sampler",
    "torch.cuda.amp.GradScaler": "scaler",
    "torch.amp.GradScaler": "scaler",
    "torch.GradScaler": "scaler",
    "accelerate.Accelerator": "accelerator",
    "contextlib.nullcontext": "context",
    "torch.optim.swa_utils.AveragedModel": "average",
}
WRAPPERS = {name for name, kind in KINDS.items() if kind == "model"}
AUTOCAST = {"torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast"}
GROUP_ARGUMENTS = {
    "torch.distributed.init_process_group": {"rank": ("rank", 4), "world": ("world_size", 3)},
    "torch.utils.data.DistributedSampler": {"rank": ("rank", 2), "world": ("num_replicas", 1)},
    "torch.utils.data.distributed.DistributedSampler": {"rank": ("rank", 2), "world": ("num_replicas", 1)},
}
"""The arguments (name, place) that are a rank and a number of processes."""

RANK_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID"}
WORLD_VARIABLES = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"}
ACCELERATOR = {
    "process_index": "rank",
    "local_process_index": "rank",
    "num_processes": "world",
    "device": "device",
}


@dataclass
class Function:
    """A function or method of the script; `owner` is the name of its class."""

    node: Any
    owner: str = ""

    @property
    def name(self) -> str:
        """The name in its module or class."""
        return str(self.node.name.value)

    @property
    def params(self) -> list[str]:
        """The names of the parameters that take positions, without `self`."""
        found = [each.name.value for each in (*self.node.params.posonly_params, *self.node.params.params)]
        return found[1:] if self.owner and found else found


@dataclass
class Facts:
    """The facts of one state of a script. `processes` is the number of processes that the script was started with."""

    module: Any
    lines: Lines
    processes: int = 1
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)
    roles: dict[str, Role] = field(default_factory=dict)
    values: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Any, lines: Lines, processes: int = 1) -> Facts:
        """Collect the facts of a script."""
        facts = cls(module, lines, processes)
        facts.imports = dict(_imports(module))
        for node in module.body:
            if isinstance(node, cst.FunctionDef):
                facts.functions[node.name.value] = Function(node)
            elif isinstance(node, cst.ClassDef):
                facts.classes.add(node.name.value)
                for each in body_of(node):
                    if isinstance(each, cst.FunctionDef):
                        facts.functions[f"{node.name.value}.{each.name.value}"] = Function(each, node.name.value)
        facts._collect_values()
        while facts._spread():
            pass
        return facts

    def refuse(self, node: Any, error: str, do: str) -> SettingsError:
        """Return the error for a statement that cannot be converted."""
        line = self.lines.of(node)
        shown = next((each for each in text(node).splitlines() if not each.strip().startswith("#")), "")
        return SettingsError(f"Line {line}: {error}", f"It is: {shown.strip()[:100]}", do)

    # -- names

    def full_name(self, node: Any) -> str:
        """Return the name of what an expression refers to, by the imports of the script; "" if it is no name."""
        chain = dotted(node)
        root, _, rest = chain.partition(".")
        if root in self.imports:
            return f"{self.imports[root]}.{rest}" if rest else self.imports[root]
        return chain

    def target(self, call: Any) -> Function | None:
        """Return the function of the script that a call calls."""
        chain = dotted(call.func)
        if chain in self.functions:
            return self.functions[chain]
        if chain in self.classes:
            return self.functions.get(f"{chain}.__init__")
        if "." in chain and chain.rpartition(".")[0] not in self.imports:
            found = [f for f in self.functions.values() if f.owner and f.name == chain.rpartition(".")[2]]
            return found[0] if len(found) == 1 else None
        return None

    def bound(self, call: Any, function: Function) -> Iterator[tuple[str, Any]]:
        """Yield (parameter, argument) of a call."""
        place = 0
        for arg in call.args:
            if arg.keyword is not None:
                yield arg.keyword.value, arg.value
            elif arg.star == "" and place < len(function.params):
                yield function.params[place], arg.value
                place += 1

    # -- roles

    def kind(self, node: Any) -> str:
        """Return the kind of an expression; "" if it has no role."""
        role = self.role(node)
        return role.kind if role is not None else ""

    def role(self, node: Any) -> Role | None:
        """Return the role of an expression."""
        chain = dotted(node)
        if chain in self.roles:
            return self.roles[chain]
        if isinstance(node, cst.Attribute):
            if self.kind(node.value) == "accelerator" and node.attr.value in ACCELERATOR:
                return Role(ACCELERATOR[node.attr.value], node)
            of_object = self.roles.get(f"self.{node.attr.value}")
            if of_object is not None and of_object.kind in ("rank", "world") and dotted(node):
                return of_object
            return Role("rank", node) if node.attr.value == "local_rank" else None
        if isinstance(node, cst.Subscript) and text(node.value) == "os.environ":
            return self._variable(node, text(node.slice[0]))
        if isinstance(node, cst.IfExp):
            return self.role(node.body) or self.role(node.orelse)
        if isinstance(node, cst.Call):
            return self._role_of_call(node)
        return None

    def _variable(self, node: Any, key: str) -> Role | None:
        name = key.strip("\"'")
        kind = "rank" if name in RANK_VARIABLES else "world" if name in WORLD_VARIABLES else ""
        return Role(kind, node) if kind else None

    def _role_of_call(self, node: Any) -> Role | None:
        full, attr = self.full_name(node.func), node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if full in KINDS:
            return Role(KINDS[full], node)
        if full in ("os.getenv", "os.environ.get") and node.args:
            return self._variable(node, text(node.args[0].value))
        if full == "copy.deepcopy" and node.args and self.kind(node.args[0].value) == "model":
            return Role("average", node)
        if full in ("int", "torch.compile") and node.args:
            return self.role(node.args[0].value)
        if full.startswith("torch.optim.lr_scheduler.") or (full.startswith("transformers.") and "schedule" in full):
            return Role("scheduler", node)
        if full.startswith(("torch.optim.", "torch.distributed.optim.")):
            return Role("optimizer", node)
        if full.startswith("torch.nn.") and full.endswith("Loss"):
            return Role("criterion", node)
        if attr == "no_sync":
            return Role("context", node)
        if attr in ("to", "cuda", "cpu", "train") and isinstance(node.func, cst.Attribute):
            return self.role(node.func.value)
        function = self.target(node)
        if function is not None and not function.name.startswith("__"):
            return next((self.role(value) for value in self._returns(function) if self.role(value)), None)
        return None

    def _returns(self, function: Function) -> list[Any]:
        found = [each.value for each in walk(function.node) if isinstance(each, cst.Return) and each.value is not None]
        return [value for value in found if not isinstance(value, cst.Tuple)]

    def _spread(self) -> bool:
        """Give names the roles of what is assigned to them, once; return whether that found anything."""
        before = len(self.roles)
        for node in walk(self.module):
            if isinstance(node, cst.SimpleStatementLine):
                self._spread_assignment(node)
            elif isinstance(node, cst.Call):
                self._spread_call(node)
        return len(self.roles) > before

    def _spread_assignment(self, node: Any) -> None:
        found = assigned(node)
        if found is None:
            return
        targets, value = found
        values = parts_of_value(value)
        if len(values) != len(targets):
            function = self.target(value) if isinstance(value, cst.Call) else None
            results = (
                []
                if function is None
                else [
                    parts_of_value(each.value)
                    for each in walk(function.node)
                    if isinstance(each, cst.Return) and each.value
                ]
            )
            values = next((each for each in results if len(each) == len(targets)), [value] if len(targets) == 1 else [])
        if (
            isinstance(value, cst.Call)
            and dotted(value.func).endswith(".prepare")
            and self.kind(value.func.value) == "accelerator"
        ):
            values = [arg.value for arg in value.args]
            if len(values) != len(targets):
                values = []
        for target, each in zip(targets, values, strict=False):
            role, chain = self.role(each), dotted(target)
            named = chain.rpartition(".")[2].rpartition("_")[2] in ("device", "dev") and role is None
            is_device = named and re.search(r"cuda|cpu|mps|device", text(each)) is not None
            self._give(chain, Role("device", each) if is_device else role)

    def _spread_call(self, node: Any) -> None:
        full = self.full_name(node.func)
        function = self.target(node)
        if function is not None:
            for name, value in self.bound(node, function):
                self._give(name, self.role(value))
        if full in SPAWN and node.args:
            spawned = self.functions.get(dotted(node.args[0].value))
            self._give(dotted(argument(node, "nprocs", 2)), Role("world", node))
            if spawned is not None and spawned.params:
                self._give(spawned.params[0], Role("rank", node))
                rest = parts_of_value(argument(node, "args") or cst.Tuple([]))
                for name, value in zip(spawned.params[1:], rest, strict=False):
                    self._give(name, self.role(value))
        if full in GROUP_ARGUMENTS:
            for kind, (name, place) in GROUP_ARGUMENTS[full].items():
                self._give(dotted(argument(node, name, place)), Role(kind, node))
        if full in WRAPPERS and node.args:
            self._give(dotted(node.args[0].value), Role("model", node.args[0].value))
        if full.startswith("torch.optim.") and "lr_scheduler" not in full and node.args:
            for chain in self._parameters_of(node):
                self._give(chain, Role("model", node))

    def _parameters_of(self, optimizer: Any) -> Iterator[str]:
        """Yield the models whose parameters an optimizer gets."""
        places = [optimizer, *(value for name in names(optimizer.args[0].value) for value in self.values.get(name, []))]
        for call in (call for place in places for call in calls(place)):
            chain = dotted(call.func)
            if chain.endswith((".parameters", ".named_parameters")):
                parts = chain.split(".")
                yield ".".join(parts[:2]) if parts[0] == "self" else parts[0]

    def _give(self, chain: str, role: Role | None) -> None:
        if chain and role is not None and chain not in self.roles:
            self.roles[chain] = role

    def of_kind(self, kind: str) -> set[str]:
        """Return the names of one kind."""
        return {name for name, role in self.roles.items() if role.kind == kind}

    # -- values

    def _collect_values(self) -> None:
        for node in walk(self.module):
            if isinstance(node, cst.SimpleStatementLine) and (found := assigned(node)) is not None:
                targets, value = found
                values = parts_of_value(value)
                for target, each in zip(targets, values if len(values) == len(targets) else [], strict=False):
                    self.values.setdefault(dotted(target), []).append(each)
            elif isinstance(node, cst.Param) and node.default is not None:
                self.values.setdefault(node.name.value, []).append(node.default)
            elif isinstance(node, cst.Call):
                self._collect_of_call(node)

    def _collect_of_call(self, node: Any) -> None:
        function = self.target(node)
        for name, value in self.bound(node, function) if function is not None else ():
            if dotted(value) != name:
                self.values.setdefault(name, []).insert(0, value)
        if self.full_name(node.func) in SPAWN and node.args:
            spawned = self.functions.get(dotted(node.args[0].value))
            rest = parts_of_value(argument(node, "args") or cst.Tuple([]))
            for name, value in zip(spawned.params[1:] if spawned else [], rest, strict=False):
                if dotted(value) != name:
                    self.values.setdefault(name, []).insert(0, value)
        if dotted(node.func).endswith(".add_argument") and (default := argument(node, "default")) is not None:
            flags = [text(arg.value).strip("\"'") for arg in node.args if arg.keyword is None]
            long = next((flag for flag in flags if flag.startswith("--")), flags[0] if flags else "")
            self.values.setdefault(f"--{long.lstrip('-').replace('-', '_')}", []).append(default)

    def value(self, node: Any, depth: int = 0) -> Any:
        """Return the value of an expression if the script shows it (literals, defaults of argparse); else None."""
        if node is None or depth > 8:
            return None
        if self.kind(node) == "world":
            return self.processes
        try:
            return ast.literal_eval(text(node))
        except (ValueError, SyntaxError):
            pass
        if isinstance(node, cst.BinaryOperation):
            left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
            return _computed(type(node.operator).__name__, left, right)
        if isinstance(node, cst.Call) and text(node.func) in ("int", "max", "float") and node.args:
            return self.value(node.args[-1 if text(node.func) == "max" else 0].value, depth + 1)
        if isinstance(node, cst.Subscript):
            for each in self.values.get(dotted(node.value), []):
                table = self.value(each, depth + 1)
                if isinstance(table, dict):
                    return table.get(text(node.slice[0]).strip("\"'"))
        chain = dotted(node)
        keys = [chain, f"--{chain.rpartition('.')[2]}"] if "." in chain else [chain]
        for key in [*keys, chain.rpartition(".")[2]]:
            for each in self.values.get(key, []):
                if (known := self.value(each, depth + 1)) is not None:
                    return known
        return None


SPAWN = {"torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn", "torch.multiprocessing.start_processes"}


def parts_of_value(node: Any) -> list[Any]:
    """Return the elements of a tuple; another expression is its own only part."""
    return [each.value for each in node.elements] if isinstance(node, cst.Tuple) else [node]


def _computed(operator: str, left: Any, right: Any) -> Any:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return None
    if operator in ("Divide", "FloorDivide", "Modulo") and right == 0:
        return None
    table = {"Add": left + right, "Subtract": left - right, "Multiply": left * right}
    if operator == "FloorDivide":
        return left // right
    if operator == "Divide":
        return left / right
    return table.get(operator)


def _imports(module: Any) -> Iterator[tuple[str, str]]:
    """Yield (name in the script, full name) of everything that the script imports."""
    for node in walk(module):
        if isinstance(node, cst.Import):
            for alias in node.names:
                full = dotted(alias.name)
                yield (alias.asname.name.value, full) if alias.asname else (full.partition(".")[0],) * 2
        elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar) and node.module:
            for alias in node.names:
                name = alias.asname.name.value if alias.asname else alias.name.value
                yield name, f"{dotted(node.module)}.{alias.name.value}"


def is_guard(node: Any) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, cst.If) and "__name__" in names(node.test) and "__main__" in text(node.test)


def is_docstring(node: Any) -> bool:
    """Return whether a statement is a string alone."""
    small = one(node)
    return isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString | cst.ConcatenatedString)


def is_import(node: Any) -> bool:
    """Return whether a statement imports something."""
    return isinstance(one(node), cst.Import | cst.ImportFrom)


def is_call_to(node: Any, attr: str) -> bool:
    """Return whether a statement is a call of a method or function of this name."""
    call = called(node)
    return call is not None and dotted(call.func).rpartition(".")[2] == attr
