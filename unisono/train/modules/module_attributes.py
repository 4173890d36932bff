"""Attributes of modules that a forward pass changes: the longest text seen so far, a counter, a cached mask.

With several virtual ranks, each one begins with the attributes as they were when the pass began, as with buffers. After
the pass every process has the values of the first virtual rank with work:

    virtual rank   reads   writes                      after the pass, on every process
    0              16      20                          20
    1              16      31  (set back to 16)
    2              16      18  (set back to 16)

An attribute that a forward pass writes before it reads it is an output (an auxiliary loss, attention weights for a
plot). No state passes from one micro-batch to the next through it, so it is neither restored nor sent. The use of an
attribute is observed in one virtual rank after its first change, and that of an output in all later ones: an output
that is read later lowers the promise.

With one virtual rank attributes change as in plain torch; a checkpoint holds those that changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from unisono.distributed.process_group import ProcessGroup
from unisono.distributed.value_transfer import broadcast_tensors
from unisono.errors import CheckpointError, LoopError
from unisono.tensors.codec import TensorTable, decode, encode
from unisono.train.modules.attribute_reads import AttributeReads
from unisono.train.modules.attribute_snapshot import ABSENT, AttributeSnapshot
from unisono.train.state.portable_values import copied, is_portable

Key = tuple[str, str]
"""The module's name, beginning with the number of its model ("0/encoder.0"), and the attribute's."""


class AttributeValue(NamedTuple):
    """The value of an attribute after a virtual rank. `same`: the existing object was changed in place."""

    value: Any
    same: bool


Gathered = tuple[dict[Key, AttributeValue], list[str]]
"""The values of the first virtual rank, and descriptions of attributes that cannot be sent."""

INTERNAL = frozenset(vars(torch.nn.Module()))
"""The attributes of every module that belong to torch: hooks, parameters, buffers, the training flag."""

LARGE = 2**20
"""Largest number of elements of a tensor that is saved without being known as state."""


class ModuleAttributes:
    """Restore and synchronize the attributes of all placed models, pass after pass.

    enabled  False: nothing is restored, sent, or saved
    say      prints a line on the main process
    outputs  attributes that are written before they are read, as far as this is known
    opaque   descriptions of attributes that change and cannot be sent: equal bits are not promised with them
    divided  whether several processes compute the micro-batches of one virtual rank, so that none has all its state
    """

    enabled = True
    divided = False

    def __init__(self, device: torch.device, virtual_ranks: int) -> None:
        self.device, self.virtual_ranks = device, virtual_ranks
        self.say: Callable[[str], None] = lambda text: None
        self.grew: Callable[[], bool] = lambda: False
        self.opaque: list[str] = []
        self._modules: dict[str, torch.nn.Module] = {}
        self._children: dict[str, dict[str, Any]] = {}
        self._now: AttributeSnapshot | None = None
        self._origin: AttributeSnapshot | None = None
        self._reads = AttributeReads()
        self.outputs: set[Key] = set()
        self._state: set[Key] = set()  # read before they are written: state from one micro-batch to the next
        self._moved: set[Key] = set()  # changed since the loop began
        self._made: dict[Key, AttributeValue] = {}  # values of the first virtual rank
        self._left: list[str] = []  # descriptions of changed attributes that cannot be sent
        self._unclear: dict[Key, str] = {}  # changed while divided; not known yet whether they are read first
        self._swapped: str = ""  # a module that a forward pass has replaced
        self._waiting: Mapping[str, Any] = {}  # saved values whose modules are not known yet

    @property
    def _watches(self) -> bool:
        return self.enabled and self.virtual_ranks > 1 and self._now is not None

    def look_at(self, models: Iterable[torch.nn.Module]) -> None:
        """Set the current models."""
        if not self.enabled:
            return
        found = modules_of(models)
        fresh = found.keys() - self._modules.keys()
        known = len(found) == len(self._modules) and all(found[n] is m for n, m in self._modules.items() if n in found)
        if known and not fresh:
            return
        self._modules = found
        self._children = {name: dict(module._modules) for name, module in found.items()}
        self._take_up()
        if self.virtual_ranks > 1:
            self._now = AttributeSnapshot(found, INTERNAL)
        if self._origin is None:
            self._origin = AttributeSnapshot(found, INTERNAL, copies=False)
        else:
            self._origin.add({name: found[name] for name in fresh})

    # -- a pass

    def begin(self) -> None:
        """Begin a pass: accept the changes that the script has made since the last one."""
        self._made, self._left, self._swapped = {}, [], ""
        if not self._watches:
            return
        assert self._now is not None
        for key in self._now.changed():
            self._now.remember(key)
            self._moved |= {key} - self.outputs

    def enter(self) -> None:
        """Begin a micro-batch of another virtual rank."""
        if self._watches:
            self._observe(self.outputs)
            self._reads.begin(self._modules)

    def leave(self, *, first: bool) -> None:
        """End a virtual rank: restore what it has changed. `first`: every process gets its values after the pass."""
        if not self._watches:
            return
        assert self._now is not None
        self._learn()
        if self.grew():
            self._undo_swaps()
        for key in self._now.changed():
            if key in self.outputs:
                self._now.forget(key)
                continue
            self._observe({key} - self._state)
            now = self._now.value(key)
            if self.divided:
                self._unclear[key] = f"{self._words(key, now)}, {DIVIDED}"
            if not (is_portable(now) and self._now.can_put_back(key)):
                if key in self._state and self._now.before(key) is not None:  # otherwise it was created lazily
                    self._left.append(self._words(key, now))
                self._now.remember(key)
                continue
            if first and now is not ABSENT:
                self._made[key] = AttributeValue(copied(now), now is self._now.before(key))
            self._now.put_back(key)
        self._left += [self._unclear.pop(key) for key in [*self._unclear] if key in self._state]

    def keep(self, first: bool) -> None:
        """Prepare to repeat a part of the pass. `first`: whether the values of the first virtual rank are kept."""
        if not first:
            self._made, self._left = {}, []

    @property
    def flags(self) -> dict[str, bool]:
        """The kinds of changes that processes have to exchange, by name."""
        return {"attributes": bool(self._made or self._left or self._swapped)}

    def gather(self, group: ProcessGroup) -> Gathered:
        """Return the values of the first virtual rank. Every process calls this. No attribute changes.

        Raises:
            LoopError: a forward pass has replaced a module. All processes raise the error.
        """
        tensors = TensorTable()
        plain = encode([[*key, *made] for key, made in self._made.items()], "attributes", tensors)
        on_cpu = [name for name, tensor in tensors.items() if tensor.is_cpu]
        said = group.all_gather_object([plain, on_cpu, self._left, self._swapped])
        if swapped := next((each[-1] for each in said if each[-1]), ""):
            raise _replaced(swapped)
        left = list(dict.fromkeys(words for each in said for words in each[2]))
        owner = next((rank for rank, each in enumerate(said) if each[0]), None)
        if owner is None:
            return {}, left
        plain, on_cpu, *_ = said[owner]
        here = broadcast_tensors(group, plain, tensors, owner)
        received = {name: t.to("cpu") if name in on_cpu else t for name, t in here.items()}
        return {(module, key): AttributeValue(*made) for module, key, *made in decode(plain, received)}, left

    def settle(self, gathered: Gathered) -> None:
        """Set the attributes to the gathered values."""
        assert self._now is not None
        values, left = gathered
        for key, made in values.items():
            self._now.become(key, made.value, same=made.same)
            self._moved.add(key)
        for words in left:
            if words not in self.opaque:
                self.opaque.append(words)
                self.say(f"The promise is lowered to tolerance: {words}. {CURE}")

    def _words(self, key: Key, value: Any) -> str:
        module, attribute = key
        layer = module.partition("/")[2] or "the model"
        kind = type(self._modules[module]).__name__.removeprefix("FSDP")  # fully_shard derives a class of that name
        return f"forward of {layer} ({kind}) changes its attribute {attribute}, a {type(value).__name__}, and reads it"

    # -- how an attribute is used

    def _observe(self, keys: Collection[Key]) -> None:
        """Observe in the next virtual rank whether these attributes are read before they are written."""
        for module, attribute in keys:
            self._reads.observe(module, attribute)

    def _learn(self) -> None:
        for key, read in self._reads.end().items():
            if read and key in self.outputs:  # it has read the value that another virtual rank of this process left
                self._left.append(
                    f"{self._words(key, vars(self._modules[key[0]]).get(key[1]))}, later than it wrote it"
                )
            (self._state if read else self.outputs).add(key)
            (self.outputs if read else self._state).discard(key)
            if not read:
                self._unclear.pop(key, None)

    def _undo_swaps(self) -> None:
        """Restore replaced modules, so that the next virtual rank begins with the same modules as this one."""
        for name, children in self._children.items():
            now = self._modules[name]._modules
            for key, child in children.items():
                if now.get(key) is not child:
                    kind = type(self._modules[name]).__name__
                    words = f"{name.partition('/')[2] or 'the model'} ({kind}) replaced its module {key}"
                    self._swapped = self._swapped or words
                    now[key] = child

    # -- a checkpoint, and a process that joins

    def state_dict(self) -> dict[str, Any]:
        """Return the values that have changed since the loop began, by module and name."""
        if not self.enabled or self._origin is None:
            return dict(self._waiting)
        keys = self._moved if self.virtual_ranks > 1 else self._moved | set(self._origin.changed())
        found: dict[str, dict[str, Any]] = {}
        for module, attribute in sorted(keys - self.outputs):
            value = vars(self._modules[module]).get(attribute, ABSENT) if module in self._modules else ABSENT
            known = (module, attribute) in self._state
            if value is not ABSENT and is_portable(value) and (known or not _is_output(value)):
                found.setdefault(module, {})[attribute] = copied(value)
        buffers: dict[str, dict[str, Any]] = {}
        for module, key, tensor in self._origin.changed_buffers():
            buffers.setdefault(module, {})[key] = tensor.detach().clone()
        return {"attributes": found, "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. Values of models that are not placed yet are kept for them."""
        for part in (state.get("attributes", {}), state.get("buffers", {})):
            if not isinstance(part, Mapping) or not all(isinstance(values, Mapping) for values in part.values()):
                raise TypeError("attributes and buffers are dicts of dicts")
        self._waiting = state
        if self._modules:
            self._take_up()
            self._now = AttributeSnapshot(self._modules, INTERNAL) if self.virtual_ranks > 1 else None

    def _take_up(self) -> None:
        """Load the saved values of the modules that are placed."""
        waiting, self._waiting = self._waiting, {}
        for module, values in waiting.get("attributes", {}).items():
            if module in self._modules:
                holder = vars(self._modules[module])
                for attribute, value in values.items():
                    _refuse_method(self._modules[module], attribute)
                    holder[attribute] = _at_home(value, holder.get(attribute), self.device)
                    self._moved.add((module, attribute))
        for module, tensors in waiting.get("buffers", {}).items():
            if module in self._modules:
                self._modules[module]._buffers.update({key: t.to(self.device) for key, t in tensors.items()})


def _refuse_method(module: torch.nn.Module, attribute: str) -> None:
    """Raise CheckpointError for an attribute that is no value of a module, which `state_dict` never returns."""
    if attribute in INTERNAL or callable(getattr(type(module), attribute, None)):
        raise CheckpointError(
            f"Cannot load the attributes of {type(module).__name__}.",
            f"{attribute!a} is no value, and a checkpoint of this library never has it.",
            "resume from another checkpoint.",
        )


def remembered(models: Iterable[torch.nn.Module]) -> AttributeSnapshot:
    """Return a snapshot of the attributes of these models."""
    return AttributeSnapshot(modules_of(models) if ModuleAttributes.enabled else {}, INTERNAL)


def modules_of(models: Iterable[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return each module of these models once, by name, without those of torch.jit.script.

    These keep their attributes outside of Python.
    """
    named = [(f"{i}/{name}", module) for i, model in enumerate(models) for name, module in model.named_modules()]
    first = {id(module): (name, module) for name, module in reversed(named)}
    return {name: m for name, m in reversed(first.values()) if not isinstance(m, torch.jit.ScriptModule)}


DIVIDED = (
    "and several processes compute the micro-batches of one virtual rank (not so with micro_batch=none or "
    "parallel.reshard=step)"
)
CURE = "Keep it in a buffer (register_buffer), compute it from the input, or draw from torch's default generator."


def _is_output(value: Any) -> bool:
    """Return whether a value is probably an output: a tensor that is part of a graph, or large."""
    return isinstance(value, torch.Tensor) and (value.requires_grad or value.numel() > LARGE)


def _at_home(value: Any, now: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(now.device if isinstance(now, torch.Tensor) else device)
    return value


def _replaced(what: str) -> LoopError:
    return LoopError(
        "A forward pass replaced a module of a placed model.",
        f"{what}, so what the next micro-batch computes depends on which process computed this one.",
        'replace it before run.place (a Hugging Face BigBird: attention_type="original_full" in its config), or '
        "--set virtual_ranks=1.",
    )
