"""Partition a model that cannot be traced: each stage runs the whole forward, with shadows for other stages' results.

                 embedding   layer 0   layer 1   layer 2   head      calls of the model's forward, in this order
    stage 0      computes    computes  -> sends the arguments of the call, and leaves the forward
    stage 1      a shadow    a shadow  computes  computes  computes

So the model itself does everything between its modules, in every stage and for every micro-batch: masks, positions,
caches, keyword arguments, an output of a class of its own. This is how Hugging Face models run in a pipeline. A module
of an earlier stage returns a shadow of what it returned there (shadow_tensor.py); the shapes of that are sent with the
activations. When the first module of the stage is called, the shadows among its arguments are replaced by the tensors
that were received. From there on the forward is that of one process.

A sender finds the tensors to send in a rehearsal, once for each kind of batch: it runs the receiver's forward up to its
first module, with its own micro-batch, and looks which arguments are shadows there.

The links are the modules with parameters, in the order in which the model has them, or calls them for its own
`dummy_inputs`. Every run checks that the model calls them in this order. A later stage can use only those results of
earlier stages with which its first module is called; skip connections over stages need fx_partition.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_unflatten

from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper
from unisono.parallel.pipeline_parallel.metadata import (
    CallRecord,
    StageMetadata,
    decode,
    encode,
    record_call,
)
from unisono.parallel.pipeline_parallel.partition import (
    LocalStages,
    Partition,
    PartitionLink,
    StageInput,
    Tensors,
    called_alone_error,
    cost_of,
    unwrapped,
)
from unisono.parallel.pipeline_parallel.shadow_tensor import ShadowTensor, shadow_like
from unisono.tensors.spec import TensorSpec
from unisono.torch_compat.modules import buffer_slots, parameter_slots
from unisono.torch_compat.tree_specs import load_treespec


class StageDone(BaseException):
    """Leave a model's forward when the stage has computed its part.

    It is not an Exception, so that no code of the model catches it.
    """

    def __init__(self, link: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.link, self.arguments = link, (args, kwargs)


class ShadowPartition(Partition):
    """A partition whose stages run the whole forward.

    Args:
        model: The model.
        why: Why its forward could not be traced.

    Attributes:
        current: The call of a stage that is running now.
    """

    def __init__(self, model: nn.Module, why: str) -> None:
        self.name, self.why = type(model).__name__, why
        self.current: StageCall | None = None
        self.links: list[PartitionLink] = in_call_order(model, list(links_of(model)))
        self.stages: list[int] = []  # of each link
        self.own: Collection[int] = ()
        self.device = next(model.parameters()).device
        self._hidden: dict[int, list[tuple[str, str, ShadowTensor]]] = {}
        self._sent: dict[Any, list[int]] = {}
        rows = (model.get_submodule(link.name.rpartition(".")[0]) for link in self.links)
        in_row = [isinstance(row, nn.ModuleList | nn.Sequential) for row in rows]
        self._first_in_row = in_row.index(True) if True in in_row else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ShadowPartition:
        return self  # an average of the weights is partitioned in the same way, and runs when the model does not

    def _widths(self) -> list[int]:
        """Return 1 for links in a row. Between an embedding and the first layer, several tensors may be combined."""
        return [0, *(2 if i < self._first_in_row else 1 for i in range(1, len(self.links)))]

    # -- apply

    def apply(self, model: nn.Module, stages: LocalStages) -> None:
        """Replace the parameters and buffers of other stages by shadows. Modules stay in their places."""
        starts, own, kept, device = stages
        by_stage, stages_of = self.links_by_stage(starts), self.stages_of_params(model, starts)
        self.own, self.device = own, device
        self.stages = [stage for stage, links in enumerate(by_stage) for _ in links]
        for number, link in enumerate(self.links):
            part = model.get_submodule(link.name)
            part.forward = PartitionedModule(part, self, number)
            if self.stages[number] not in own:
                for inner in part.modules():
                    slots = buffer_slots(inner)
                    for key, buffer in slots.items():
                        if buffer is not None:
                            source = f"{link.name}'s {key}"
                            inner.__dict__[key] = self._shadow_of(buffer, source, self.stages[number])
                            slots[key] = None
        running = {stage for mine in own for stage in (mine, mine + 1)}  # a rehearsal runs the next stage
        self._hidden = {stage: [] for stage in running}
        for prefix, part in model.named_modules():
            params = parameter_slots(part)
            for key, p in params.items():
                if p is None:
                    continue
                shadow = self._shadow_of(p, f"{prefix}.{key}".lstrip("."), stages_of[id(p)][0])
                if id(p) not in kept:
                    params[key] = None
                    part.__dict__[key] = shadow
                    continue
                for stage in running.difference(stages_of[id(p)]):
                    self._hidden[stage].append((prefix, key, shadow))

    def _shadow_of(self, tensor: torch.Tensor, name: str, stage: int) -> ShadowTensor:
        return shadow_like(tensor.detach(), self.device, self, f"{name} of stage {stage}")

    @contextmanager
    def _hide_other_stages(self, model: nn.Module, stage: int) -> Iterator[None]:
        """Replace the parameters of this process's other stages by shadows, too, while a stage runs."""
        hidden = [(model.get_submodule(path).__dict__, key, shadow) for path, key, shadow in self._hidden[stage]]
        for attributes, key, shadow in hidden:
            attributes[key] = shadow  # found before the module's parameters
        try:
            yield
        finally:
            for attributes, key, _ in hidden:
                del attributes[key]

    # -- compute

    def compute(self, model: nn.Module, stage: int, call: StageInput, received: Tensors) -> tuple[Any, Tensors]:
        metadata = decode(received[-1]) if received else None
        current = StageCall(self, stage, metadata, received[:-1], call.begin)
        copy = call._replace(**tree_map(_identity, {"args": call.args, "kwargs": call.kwargs}))  # forward may pop keys
        try:
            output = self._run(model, current, call)
        except StageDone as done:
            sent = encode(StageMetadata(done.link, tuple(current.calls))).to(self.device)
            return None, [*self._tensors_to_send(model, current, copy, done), sent]
        if stage < self.stages[-1] or not current.begun:
            names = ", ".join(link.name for link, of in zip(self.links, self.stages, strict=True) if of > stage)
            raise self.order_error(
                f"It returned in stage {stage} before it called any of {names}."
                if current.begun
                else f"It returned without having called a module of stage {stage}."
            )
        return _replace_shadows(current.received_for, output), []

    def _run(self, model: nn.Module, stage_call: StageCall, call: StageInput) -> Any:
        before, self.current = self.current, stage_call
        try:
            with self._hide_other_stages(model, stage_call.stage):
                return call.forward(*call.args, **call.kwargs)
        finally:
            self.current = before

    def _tensors_to_send(
        self, model: nn.Module, current: StageCall, call: StageInput, done: StageDone
    ) -> list[torch.Tensor]:
        """Return those arguments of the next stage's first module that the next stage cannot compute."""
        if self.stages[done.link] != current.stage + 1:
            raise self.order_error(f"After stage {current.stage} it called {self.links[done.link].name}.")
        leaves = [
            current.received_for(leaf) if isinstance(leaf, ShadowTensor) else leaf for leaf in leaves_of(done.arguments)
        ]
        kinds = [_kind(leaf) for leaf in (*leaves, *tree_leaves((call.args, call.kwargs)))]
        key = (current.stage, model.training, *kinds)
        if key not in self._sent:
            self._sent[key] = self._rehearse(model, current, call, done)
        sent = [leaves[i] for i in self._sent[key]]
        for leaf in sent:
            if isinstance(leaf, ShadowTensor):
                raise self._not_sent_error(leaf, current.stage)
        return sent

    def _rehearse(self, model: nn.Module, current: StageCall, call: StageInput, done: StageDone) -> list[int]:
        """Run the next stage up to its first module, and return which of its arguments are shadows."""
        metadata = StageMetadata(done.link, tuple(current.calls))
        rehearsal = StageCall(self, current.stage + 1, metadata, None, call.begin)
        with without_traces(self.device):
            try:
                self._run(model, rehearsal, call)
            except StageDone as rehearsed:
                return [i for i, _ in unique_shadows(leaves_of(rehearsed.arguments))]
        raise self.order_error("A second time it did not call the modules that it had called the first time.")

    def order_error(self, what: str) -> LoopError:
        return LoopError(
            f"{self.name} does not call its modules in the order of the pipeline's stages.",
            f"It is expected to call them in the order in which it has them. {what} (It could not be followed "
            f"without data: {self.why})",
            "define them in the order in which forward calls them; let stages start elsewhere, "
            "--set 'parallel.split_points=[...]'; or --set parallel.pipeline=1",
        )

    # -- the protocol ShadowStage

    def received_for(self, shadow: ShadowTensor) -> torch.Tensor:
        return shadow if self.current is None else self.current.received_for(shadow)

    def refusal(self, shadow: ShadowTensor) -> LoopError | None:
        if self.current is None:
            name, _, stage = shadow.source.rpartition(" of stage ")
            return called_alone_error(name, int(stage))
        return self._not_sent_error(shadow, self.current.stage) if self.current.begun else None

    def _not_sent_error(self, shadow: ShadowTensor, stage: int) -> LoopError:
        return LoopError(
            f"Stage {stage} of a pipeline needs a result that it does not get: that of {shadow.source}.",
            f"It gets those results of earlier stages with which its first module is called, "
            f"{self.links[self.stages.index(stage)].name}.",
            "pass it through the modules between; let stages start elsewhere, --set 'parallel.split_points=[...]'; "
            "or --set parallel.pipeline=1",
        )


class StageCall:
    """One stage's run of the forward with one micro-batch.

    Args:
        partition: The partition.
        stage: The stage.
        metadata: The calls in earlier stages; None: this is the first stage.
        received: The tensors that take the place of shadows; None: this is a rehearsal, which ends where the stage's
            part would begin.
        begin: Called where the stage's part begins.

    Attributes:
        calls: The records of all calls of links so far, of earlier stages and then of this one.
    """

    def __init__(
        self,
        partition: ShadowPartition,
        stage: int,
        metadata: StageMetadata | None,
        received: Sequence[torch.Tensor] | None,
        begin: Callable[[], None],
    ) -> None:
        self.partition, self.stage, self.metadata, self.received = partition, stage, metadata, received
        self.calls: list[CallRecord] = []
        self.begun, self._inside, self._begin = metadata is None, False, begin
        self._received_for: dict[int, tuple[ShadowTensor, torch.Tensor]] = {}  # by the shadow's id; it must stay alive
        if self.begun:
            begin()

    def received_for(self, shadow: ShadowTensor) -> torch.Tensor:
        return self._received_for.get(id(shadow), (shadow, shadow))[1]

    def call(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a link: compute it, return a shadow, or leave the forward."""
        stage, name = self.partition.stages[number], self.partition.links[number].name
        if self._inside:
            return forward(*args, **kwargs)
        if not self.begun:
            if stage < self.stage:
                return self._shadow_output(number)
            self._begin_own_part(number, args, kwargs)
        if stage > self.stage:
            raise StageDone(number, args, kwargs)
        if stage < self.stage:
            raise self.partition.order_error(f"In stage {self.stage} it called {name} of stage {stage}.")
        args, kwargs = _replace_shadows(self.received_for, (args, kwargs), is_leaf=_is_leaf)
        self._inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        self.calls.append(record_call(number, name, output))
        return output

    def _shadow_output(self, number: int) -> Any:
        """Return what a link returned in an earlier stage, with shadows in place of tensors."""
        assert self.metadata is not None
        partition, known = self.partition, self.metadata.calls
        if len(self.calls) == len(known) or known[len(self.calls)].link != number:
            raise partition.order_error(f"{partition.links[number].name} was called in stage {self.stage} only.")
        record = known[len(self.calls)]
        self.calls.append(record)
        source = f"{partition.links[number].name} of stage {partition.stages[number]}"

        def leaf(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            return shadow_like(spec.empty("meta"), partition.device, partition, source)

        return tree_unflatten([leaf(spec) for spec in record.leaves], load_treespec(record.spec))

    def _begin_own_part(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Replace the shadows among the arguments of the stage's first module by the received tensors."""
        assert self.metadata is not None
        links = self.partition.links
        name = links[number].name
        if number != self.metadata.next_link or len(self.calls) < len(self.metadata.calls):
            expected = links[self.metadata.next_link].name
            raise self.partition.order_error(f"Stage {self.stage} came to {name}, and the one before it to {expected}.")
        if self.received is None:
            raise StageDone(number, args, kwargs)
        shadows = [shadow for _, shadow in unique_shadows(leaves_of((args, kwargs)))]
        shapes = [tuple(t.shape) for t in self.received]
        if [tuple(shadow.shape) for shadow in shadows] != shapes:
            raise self.partition.order_error(f"For {name}, stage {self.stage} expects {shadows}, and gets {shapes}.")
        self._received_for = {id(shadow): (shadow, t) for shadow, t in zip(shadows, self.received, strict=True)}
        self.begun = True
        self._begin()


class PartitionedModule(ForwardWrapper):
    """The forward of a link: it computes in the stage to which the link belongs."""

    def __init__(self, module: nn.Module, partition: ShadowPartition, number: int) -> None:
        super().__init__(module)
        self.partition, self.number = partition, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current, partition = self.partition.current, self.partition
        if current is not None:
            return current.call(self.number, self.forward, args, kwargs)
        if partition.stages[self.number] not in partition.own:
            raise called_alone_error(partition.links[self.number].name, partition.stages[self.number])
        return self.forward(*args, **kwargs)


# -- the row of links


def links_of(model: nn.Module) -> Iterator[PartitionLink]:
    """Yield the modules with parameters that a forward may call, in the order in which the model has them."""
    inside = {id(part) for part in unwrapped(model)}
    for name, part in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        params = list(part.parameters())
        if id(part) not in inside and id(parent) in inside and params:
            yield PartitionLink(name, params, cost_of(part))


def in_call_order(model: nn.Module, links: list[PartitionLink]) -> list[PartitionLink]:
    """Return links in the order of calls, if the model has example inputs.

    A Hugging Face model has `dummy_inputs`, a few tokens. (OPT has its last norm before its layers.)
    """
    inputs = getattr(model, "dummy_inputs", None)
    if not isinstance(inputs, Mapping):
        return links
    called: list[str] = []

    def note(name: str, *_: Any) -> None:
        called.append(name)

    hooks = [model.get_submodule(link.name).register_forward_pre_hook(partial(note, link.name)) for link in links]
    modes = [(part, part.training) for part in model.modules()]
    device = next(model.parameters()).device
    try:
        with without_traces(device):
            model.eval()(**tree_map_only(torch.Tensor, lambda t: t.to(device), dict(inputs)))
    except Exception:  # they do not fit every config; every step checks the order anyway
        return links
    finally:
        for part, training in modes:
            part.training = training
        for hook in hooks:
            hook.remove()
    place = {name: i for i, name in enumerate(dict.fromkeys(called))}
    keys = list(accumulate(links, lambda before, link: place.get(link.name, before), initial=-1))[1:]
    return [links[i] for i in sorted(range(len(links)), key=keys.__getitem__)]


@contextmanager
def without_traces(device: torch.device) -> Iterator[None]:
    """Run a forward that leaves no gradient and draws no random number."""
    devices = [] if device.type == "cpu" else [device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
        yield


# -- arguments and outputs of modules


def _identity(leaf: Any) -> Any:
    return leaf


def _is_leaf(value: Any) -> bool:
    """Search arguments in these containers only: the content of a cache, say, is the same in every stage."""
    return not isinstance(value, tuple | list | dict)


def _replace_shadows(
    received_for: Callable[[ShadowTensor], torch.Tensor], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Replace the shadows in a tree by the tensors received for them. A tree without shadows is returned as it is."""
    if not any(isinstance(leaf, ShadowTensor) for leaf in tree_leaves(tree, is_leaf=is_leaf)):
        return tree
    return tree_map_only(ShadowTensor, received_for, tree, is_leaf=is_leaf)


def leaves_of(arguments: Any) -> list[Any]:
    """Return the arguments of a call as a flat list."""
    return tree_leaves(arguments, is_leaf=_is_leaf)


def unique_shadows(leaves: Sequence[Any]) -> list[tuple[int, ShadowTensor]]:
    """Return the shadows among these, each once, with their positions."""
    found = {id(leaf): (i, leaf) for i, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, ShadowTensor)}
    return sorted(found.values(), key=lambda pair: pair[0])


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
