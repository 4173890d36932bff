"""A model whose forward cannot be followed without data is run: every stage runs the whole of it, with shadows for what
other stages compute.

                 embedding   layer 0   layer 1   layer 2   head      what the model's forward calls, in this order
    stage 0      computes    computes  -> sends what it was called with, and leaves
    stage 1      a shadow    a shadow  computes  computes  computes

What the model does between its modules is so done by the model itself, in every stage and for every micro-batch: masks,
positions, caches, keyword arguments, an output that is a class of its own. This is how models of Hugging Face go
through a pipeline. A module of an earlier stage gives a shadow of what it gave there (shadow_tensor.py); the shapes of
that travel with the activations. When the first module of the stage is called, those of its arguments that are shadows
become what was received. From there on the forward pass is that of one process.

What a sender has to send it sees in a rehearsal, once for batches of a kind: it goes the receiver's way with its own
micro-batch, and looks which arguments are shadows there.

The links are the modules with parameters, in the order in which the model has them, or calls them for its own
`dummy_inputs`: whether it keeps to this order is seen whenever it runs. And of what an earlier stage has computed no
more may be used later than what the first module of the stage is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only, tree_unflatten, treespec_loads

from unisono.errors import LoopError
from unisono.parallel.layers import ForwardWrapper
from unisono.parallel.pipeline_parallel.metadata import (
    ReceivedMetadata,
    StageMessage,
    decoded,
    encoded,
    gave,
)
from unisono.parallel.pipeline_parallel.partition import (
    Partition,
    PartitionLink,
    StageInput,
    Tensors,
    called_alone,
    cost_of,
    unwrapped,
)
from unisono.parallel.pipeline_parallel.shadow_tensor import ShadowTensor, shadow_like
from unisono.tensors.spec import TensorSpec


class StageDone(BaseException):
    """The stage has done its part. Not an Exception: no code of the model's is to catch it."""

    def __init__(self, link: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.link, self.arguments = link, (args, kwargs)


class ShadowPartition(Partition):
    """A model's forward, which every stage runs for itself.

    now  the turn of a stage that is under way
    """

    def __init__(self, model: nn.Module, why: str) -> None:
        """`why`: could the forward not be followed?"""
        self.name, self.why = type(model).__name__, why
        self.now: StageCall | None = None
        self.links: list[PartitionLink] = as_called(model, list(links_of(model)))
        self.stages: list[int] = []  # of the links
        self.ours: Collection[int] = ()
        self.device = next(model.parameters()).device
        self._veils: dict[int, list[tuple[str, str, ShadowTensor]]] = {}
        self._crossings: dict[Any, list[int]] = {}
        rows = (model.get_submodule(link.name.rpartition(".")[0]) for link in self.links)
        in_row = [isinstance(row, nn.ModuleList | nn.Sequential) for row in rows]
        self._enters = in_row.index(True) if True in in_row else 0  # the number of the first link that is in a row

    def __deepcopy__(self, memo: dict[int, Any]) -> ShadowPartition:
        return self  # an average of the weights is cut alike, and takes its turns when the model has none

    def _widths(self) -> list[int]:
        """Between an embedding and the first layer there may be sums of several things; from there on it is one."""
        return [0, *(2 if i < self._enters else 1 for i in range(1, len(self.links)))]

    # -- who has what

    def settle(self, model: nn.Module, begins: Sequence[int], ours: Collection[int], kept: Collection[int]) -> None:
        """Modules stay what they are, but without the parameters and buffers of other stages; these have shadows."""
        stretches, users = self.stretches(begins), self.users(model, begins)
        self.ours, self.device = ours, next(model.parameters()).device
        self.stages = [stage for stage, links in enumerate(stretches) for _ in links]
        for number, link in enumerate(self.links):
            part = model.get_submodule(link.name)
            part.forward = PartitionedModule(part, self, number)
            if self.stages[number] not in ours:
                for inner in part.modules():
                    for key, buffer in inner._buffers.items():
                        if buffer is not None:
                            inner.__dict__[key] = self._shadow_of(buffer, f"{link.name}'s {key}", self.stages[number])
                            inner._buffers[key] = None
        acts = {stage for mine in ours for stage in (mine, mine + 1)}  # a rehearsal is of the next one's part
        self._veils = {stage: [] for stage in acts}
        for prefix, part in model.named_modules():
            for key, p in part._parameters.items():
                if p is None:
                    continue
                shadow = self._shadow_of(p, f"{prefix}.{key}".lstrip("."), users[id(p)][0])
                if id(p) not in kept:
                    part._parameters[key] = None
                    part.__dict__[key] = shadow
                    continue
                for stage in acts.difference(users[id(p)]):
                    self._veils[stage].append((prefix, key, shadow))

    def _shadow_of(self, tensor: torch.Tensor, name: str, stage: int) -> ShadowTensor:
        return ShadowTensor.of(tensor.detach(), self, f"{name} of stage {stage}")

    @contextmanager
    def _veiled(self, model: nn.Module, stage: int) -> Iterator[None]:
        """In a stage's turn, the parameters of this process's other stages are shadows as well."""
        veils = [(model.get_submodule(path).__dict__, key, shadow) for path, key, shadow in self._veils[stage]]
        for own, key, shadow in veils:
            own[key] = shadow  # found before what is in _parameters
        try:
            yield
        finally:
            for own, key, _ in veils:
                del own[key]

    # -- a turn

    def compute(self, model: nn.Module, stage: int, call: StageInput, received: Tensors) -> tuple[Any, Tensors]:
        told = decoded(received[-1]) if received else None
        act = StageCall(self, stage, told, received[:-1], call.begin)
        again = call._replace(**tree_map(_itself, {"args": call.args, "kwargs": call.kwargs}))  # a dict may be emptied
        try:
            output = self._run(model, act, call)
        except StageDone as left:
            sent = encoded(ReceivedMetadata(left.link, tuple(act.gave))).to(self.device)
            return None, [*self._crossing(model, act, again, left), sent]
        if stage < self.stages[-1] or not act.begun:
            names = ", ".join(link.name for link, of in zip(self.links, self.stages, strict=True) if of > stage)
            raise self.disorder(
                f"It had returned in stage {stage} before it called any of {names}."
                if act.begun
                else f"It returned without having called a module of stage {stage}."
            )
        return _with(act.real, output), []

    def _run(self, model: nn.Module, act: StageCall, call: StageInput) -> Any:
        before, self.now = self.now, act
        try:
            with self._veiled(model, act.stage):
                return call.forward(*call.args, **call.kwargs)
        finally:
            self.now = before

    def _crossing(self, model: nn.Module, act: StageCall, call: StageInput, left: StageDone) -> list[torch.Tensor]:
        """Of what the next stage's first module was called with, that which the next stage cannot compute."""
        if self.stages[left.link] != act.stage + 1:
            raise self.disorder(f"After stage {act.stage} it called {self.links[left.link].name}.")
        leaves = [act.real(leaf) if isinstance(leaf, ShadowTensor) else leaf for leaf in leaves_of(left.arguments)]
        kinds = [_kind(leaf) for leaf in (*leaves, *tree_leaves((call.args, call.kwargs)))]
        key = (act.stage, model.training, *kinds)
        if key not in self._crossings:
            self._crossings[key] = self._rehearse(model, act, call, left)
        crossing = [leaves[i] for i in self._crossings[key]]
        for leaf in crossing:
            if isinstance(leaf, ShadowTensor):
                raise self._not_sent(leaf, act.stage)
        return crossing

    def _rehearse(self, model: nn.Module, act: StageCall, call: StageInput, left: StageDone) -> list[int]:
        rehearsal = StageCall(self, act.stage + 1, ReceivedMetadata(left.link, tuple(act.gave)), None, call.begin)
        with unseen(self.device):
            try:
                self._run(model, rehearsal, call)
            except StageDone as there:
                return [i for i, _ in unique_shadows(leaves_of(there.arguments))]
        raise self.disorder("A second time it did not call what it had called the first time.")

    def disorder(self, what: str) -> LoopError:
        return LoopError(
            f"{self.name} was to compute in the stages of a pipeline.",
            f"It is taken to call its modules in the order in which it has them. {what} (It could not be followed "
            f"without data: {self.why})",
            "make them in the order in which forward calls them; let stages begin elsewhere, "
            "--set 'parallel.split_points=[...]'; or --set parallel.pipeline=1",
        )

    # -- what shadows ask

    def real(self, shadow: ShadowTensor) -> torch.Tensor:
        return shadow if self.now is None else self.now.real(shadow)

    def refusal(self, shadow: ShadowTensor) -> LoopError | None:
        act = self.now
        if act is None:
            name, _, stage = shadow.maker.rpartition(" of stage ")
            return called_alone(name, int(stage))
        return self._not_sent(shadow, act.stage) if act.begun else None

    def _not_sent(self, shadow: ShadowTensor, stage: int) -> LoopError:
        return LoopError(
            f"Stage {stage} of a pipeline was to compute with what comes from {shadow.maker}.",
            f"Of what other stages have, it is sent what its first module is called with, "
            f"{self.links[self.stages.index(stage)].name}.",
            "pass it through the modules between; let stages begin elsewhere, --set 'parallel.split_points=[...]'; "
            "or --set parallel.pipeline=1",
        )


class StageCall:
    """A stage's turn with one micro-batch.

    told      of the stages before it; None: there are none
    received  what it gets for shadows; None: this is a rehearsal, which ends where the stage's part would begin
    gave      what every call of a link gave, of the earlier stages and then of this one
    """

    def __init__(
        self,
        replay: ShadowPartition,
        stage: int,
        told: ReceivedMetadata | None,
        received: Sequence[torch.Tensor] | None,
        begin: Callable[[], None],
    ) -> None:
        self.replay, self.stage, self.told, self.received = replay, stage, told, received
        self.gave: list[StageMessage] = []
        self.begun, self._inside, self._begin = told is None, False, begin
        self._arrived: dict[
            int, tuple[ShadowTensor, torch.Tensor]
        ] = {}  # by the shadow's id; it is kept, so that it is one
        if self.begun:
            begin()

    def real(self, shadow: ShadowTensor) -> torch.Tensor:
        return self._arrived.get(id(shadow), (shadow, shadow))[1]

    def call(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model calls one of its links."""
        stage, name = self.replay.stages[number], self.replay.links[number].name
        if self._inside:
            return forward(*args, **kwargs)
        if not self.begun:
            if stage < self.stage:
                return self._shadows(number)
            self._arrive(number, args, kwargs)
        if stage > self.stage:
            raise StageDone(number, args, kwargs)
        if stage < self.stage:
            raise self.replay.disorder(f"In stage {self.stage} it called {name} of stage {stage}.")
        args, kwargs = _with(self.real, (args, kwargs), is_leaf=_is_leaf)
        self._inside = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._inside = False
        self.gave.append(gave(number, name, output))
        return output

    def _shadows(self, number: int) -> Any:
        """What a link gave in an earlier stage, without what is in it."""
        assert self.told is not None
        if len(self.gave) == len(self.told.gave) or self.told.gave[len(self.gave)].link != number:
            raise self.replay.disorder(f"{self.replay.links[number].name} was called in stage {self.stage} only.")
        found = self.told.gave[len(self.gave)]
        self.gave.append(found)
        maker = f"{self.replay.links[number].name} of stage {self.replay.stages[number]}"

        def leaf(about: Any) -> Any:
            if not isinstance(about, TensorSpec):
                return about
            return shadow_like(about.empty("meta"), self.replay.device, self.replay, maker)

        return tree_unflatten([leaf(about) for about in found.leaves], treespec_loads(found.spec))

    def _arrive(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The stage's part begins: shadows among the arguments become what was received."""
        assert self.told is not None
        name = self.replay.links[number].name
        if number != self.told.to or len(self.gave) < len(self.told.gave):
            raise self.replay.disorder(
                f"Stage {self.stage} came to {name}, and the one before it to {self.replay.links[self.told.to].name}."
            )
        if self.received is None:
            raise StageDone(number, args, kwargs)
        shadows = [shadow for _, shadow in unique_shadows(leaves_of((args, kwargs)))]
        shapes = [tuple(t.shape) for t in self.received]
        if [tuple(shadow.shape) for shadow in shadows] != shapes:
            raise self.replay.disorder(f"For {name}, stage {self.stage} waits for {shadows}, and gets {shapes}.")
        self._arrived = {id(shadow): (shadow, t) for shadow, t in zip(shadows, self.received, strict=True)}
        self.begun = True
        self._begin()


class PartitionedModule(ForwardWrapper):
    """The forward of a link: it computes where it belongs to the stage whose turn it is."""

    def __init__(self, module: nn.Module, replay: ShadowPartition, number: int) -> None:
        super().__init__(module)
        self.replay, self.number = replay, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        act, replay = self.replay.now, self.replay
        if act is not None:
            return act.call(self.number, self.forward, args, kwargs)
        if replay.stages[self.number] not in replay.ours:
            raise called_alone(replay.links[self.number].name, replay.stages[self.number])
        return self.forward(*args, **kwargs)


# -- the row of links


def links_of(model: nn.Module) -> Iterator[PartitionLink]:
    """The modules with parameters that a forward may call, in the order in which the model has them."""
    inside = {id(part) for part in unwrapped(model)}
    for name, part in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        params = list(part.parameters())
        if id(part) not in inside and id(parent) in inside and params:
            yield PartitionLink(name, params, cost_of(part))


def as_called(model: nn.Module, links: list[PartitionLink]) -> list[PartitionLink]:
    """In the order in which they are called, if the model says what it can be tried with: a model of Hugging Face has
    `dummy_inputs`, a few words. (OPT has its last norm before its layers.)"""
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
        with unseen(device):
            model.eval()(**tree_map_only(torch.Tensor, lambda t: t.to(device), dict(inputs)))
    except Exception:  # they do not fit each config; whether the order is right is seen in every step anyway
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
def unseen(device: torch.device) -> Iterator[None]:
    """For a forward pass of which nothing is to stay, no gradient and no random number."""
    devices = [] if device.type == "cpu" else [device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type):
        yield


# -- what goes into modules, and what comes out


def _itself(leaf: Any) -> Any:
    return leaf


def _is_leaf(thing: Any) -> bool:
    """Arguments are looked for in these only: a cache, say, has in every stage what is in it there."""
    return not isinstance(thing, tuple | list | dict)


def _with(
    real: Callable[[ShadowTensor], torch.Tensor], things: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """These things, with what has arrived for shadows. (Without any, they are the same objects.)"""
    if not any(isinstance(leaf, ShadowTensor) for leaf in tree_leaves(things, is_leaf=is_leaf)):
        return things
    return tree_map_only(ShadowTensor, real, things, is_leaf=is_leaf)


def leaves_of(arguments: Any) -> list[Any]:
    """What a module is called with, one after the other."""
    return tree_leaves(arguments, is_leaf=_is_leaf)


def unique_shadows(leaves: Sequence[Any]) -> list[tuple[int, ShadowTensor]]:
    """The shadows among these, each once, with their places."""
    found = {id(leaf): (i, leaf) for i, leaf in reversed(list(enumerate(leaves))) if isinstance(leaf, ShadowTensor)}
    return sorted(found.values(), key=lambda pair: pair[0])


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)
