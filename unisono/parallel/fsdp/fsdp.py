"""Shards: each process of the axis holds a part of every parameter, and gathers whole ones when it needs them.

torch's FSDP2 does the gathering (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; Zhao et al.,
PyTorch FSDP, VLDB 2023). One layer is gathered at a time: a block of a transformer, say; what is in none is the
model's own. Two ways to use it, by the setting `parallel.reshard`:

    layer   gather a layer, compute, let go of it; again in the backward pass, and reduce its gradient into shards at
            once. Least memory: parameters, gradients and optimizer state are divided by the number of processes.
    step    gather all at a step's first micro-batch, and let go after the last one; gradients are whole meanwhile.
            Parameters travel once a step, and only optimizer state, and what is between two steps, is divided.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from unisono.distributed.process_group import ProcessGroup, from_local_like, to_local
from unisono.errors import LoopError
from unisono.parallel.fsdp.gather_order import AllGather, CheckedAllGather, GatherOrder
from unisono.parallel.fsdp.sharded_rng import draw_as_whole
from unisono.parallel.layers import layers_of, outermost, untied
from unisono.parallel.memory_format import lay_out_rows
from unisono.parallel.precision import DTYPES
from unisono.tensors.spec import dtype_name

if TYPE_CHECKING:
    from unisono.config import ParallelSettings


@dataclass
class ShardedLayer:
    """What is gathered at once.

    called  in messages
    module  a part of a model that FSDP2 has taken over
    names   of its own parameters within it: not those of layers inside it
    shapes  of these, as this process has them when they are gathered
    place   which part is this process's, and of how many
    params  the shards of these
    notes   of who gathers what, if it is gathered whenever it is called; `reduced` says there that its gradient leaves
    """

    called: str
    module: nn.Module
    names: list[str]
    shapes: list[torch.Size]
    place: tuple[int, int]
    params: list[nn.Parameter] = field(default_factory=list)
    notes: GatherOrder | None = None
    reduced: int = 0
    reordered: list[nn.Parameter] = field(default_factory=list)
    """Those whose whole is not stored row by row on one process."""
    used: list[bool] = field(default_factory=list)
    """Which of them have taken part in a backward pass since somebody looked."""
    _watched: set[int] = field(default_factory=set)
    _trained: bool = False

    @property
    def within(self) -> str:
        """What it is called within a sentence."""
        return self.called[0].lower() + self.called[1:]

    def current(self) -> list[nn.Parameter]:
        """Its parameters as the module has them now: whole while they are gathered, shards otherwise."""
        return [self.module.get_parameter(name) for name in self.names]

    def watch(self, *_: Any) -> None:
        """It is gathered, and about to be used: whole parameters need a gradient where their shards do, and tell when
        they get one."""
        for i, (name, shard) in enumerate(zip(self.names, self.params, strict=True)):
            *path, own = name.split(".")
            p = self.module.get_submodule(".".join(path))._parameters[own]
            if not isinstance(
                p, nn.Parameter
            ):  # cast for a call around this one (param_dtype.py), and watched since before
                continue
            if p.requires_grad != shard.requires_grad:
                p.requires_grad_(shard.requires_grad)
            if p.requires_grad and i not in self._watched:
                self._watched.add(i)
                p.register_post_accumulate_grad_hook(partial(_note, self.used, i))
        trains = any(shard.requires_grad for shard in self.params)
        if trains and not self._trained:
            self._fsdp.unshard()  # nothing is left to gather, but FSDP2 asks again in which numbers gradients leave
        self._trained = trains

    def prepare(self, *, by_layer: bool) -> None:
        """FSDP2 has just taken the module over: nothing of it is gathered yet."""
        self.params = self.current()
        self.used = [False] * len(self.params)
        self.module.register_forward_pre_hook(self.watch)  # after FSDP2's own, which gathers
        self._fsdp.set_reshard_after_backward(by_layer, recurse=False)
        self._fsdp.set_requires_gradient_sync(by_layer, recurse=False)
        self._fsdp.set_reduce_scatter_unused_params(True, recurse=False)
        self._fsdp.set_gradient_divide_factor(1.0)
        self._fsdp.set_force_sum_reduction_for_comms(True)

    def gather(self) -> list[nn.Parameter]:
        """Gather it until `rest`; returns its whole parameters, the same objects every time."""
        self._fsdp.unshard()
        self.watch()
        return self.current()

    def divide(self, wanted: Collection[int]) -> None:
        """Whole parameters have gradients: every shard that is wanted (by id) gets its part."""
        for whole, shard in zip(self.current(), self.params, strict=True):
            if id(shard) in wanted:
                shard.grad = (
                    None
                    if whole.grad is None
                    else from_local_like(self._part(to_local(whole.grad), to_local(shard)), shard)
                )

    def _part(self, whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """This process's part of a whole tensor. Shares its memory, if it is on the same device."""
        rank, size = self.place
        first = min(rank * -(-len(whole) // size), len(whole))
        return whole[first : first + len(shard)].to(shard.device)

    def rest(self) -> None:
        """Let go of whole parameters, if there are any."""
        self._fsdp.reshard()

    def listen(self, notes: GatherOrder) -> None:
        """From now on, whoever gathers it tells the others so, and is told what they do."""
        self.notes, self.reduced = notes, notes.number(f"done with {self.within} in backward")
        self._fsdp.set_custom_all_gather(CheckedAllGather(self, notes))  # type: ignore[arg-type]  # it keeps that protocol

    def gather_by(self, group: ProcessGroup) -> None:
        """From now on it is gathered over this group, whichever torch's own is then."""
        self._fsdp.set_custom_all_gather(AllGather(group))  # type: ignore[arg-type]  # it keeps that protocol

    def become(self, group: ProcessGroup) -> None:
        """Those who share it have a new group."""
        if self.notes is not None:
            self.notes.forget()
        for of in self._fsdp._get_fsdp_state()._fsdp_param_groups:
            about: Any = of.mesh_info
            about.shard_process_group = group.handle or dist.group.WORLD

    def reduce_by(self, comm: Any) -> None:
        """Hand gradients to `comm` from now on, as the sums that they are."""
        self._fsdp.set_custom_reduce_scatter(comm)

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module


def _note(used: list[bool], i: int, _: torch.Tensor) -> None:
    """A hook that knows nothing of its layer: a cycle through a hook is never collected, and with it neither would the
    process group be, which aborts when the interpreter ends."""
    used[i] = True


def apply_shard(
    model: nn.Module, mesh: DeviceMesh, parallel: ParallelSettings, device: torch.device
) -> list[ShardedLayer]:
    """Divide a model's parameters among the processes of the mesh. Every one of them has the same content before.

    Raises LoopError for a parameter that cannot be divided.
    """
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        raise LoopError(
            f"run.place was given a {type(model).__name__}, to be shared by {mesh.size()} processes.",
            f"{len(scalars)} of its parameters are single numbers without a dimension (the first is {scalars[0]}).",
            "give it one: nn.Parameter(torch.ones(1)).",
        )
    if parallel.reshard == "layer":
        _refuse_sparse(model, mesh.size())
    empty = [name for name, p in model.named_parameters() if not p.numel()]
    if empty and parallel.reshard == "layer":
        raise LoopError(
            f"run.place was to divide a {type(model).__name__} among {mesh.size()} processes, gathered by layer.",
            f"{empty[0]} has no elements, which FSDP2 does not add up.",
            "--set parallel.reshard=step, or leave it out of the model.",
        )
    if parallel.tensor == 1:
        draw_as_whole()
    ordered = lay_out_rows(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": parallel.reshard == "layer",
        "mp_policy": policy_of(parallel),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if parallel.offload else OffloadPolicy(),
    }
    found = layers_of(model, parallel.layer_classes)
    if (
        parallel.activation_checkpoint == "selective"
    ):  # torch counts the operators within a layer, and gathering would be some
        found = [layer for layer in outermost(model, parallel.layer_classes) if layer is not model]
    modules = untied(model, [*found, model])
    known = {part: name for name, part in model.named_modules()}
    layers = []
    for module in modules:
        names = own_parameters(module, [other for other in modules if other is not module])
        if names:
            _refuse_mixed(module, names, mesh.size())
            shapes = [to_local(module.get_parameter(name).detach()).shape for name in names]
            fully_shard(module, **options)
            called = f"The {type(module).__mro__[2].__name__} {known[module]}".strip()  # FSDP2 has made a class of it
            layers.append(ShardedLayer(called, module, names, shapes, (mesh.get_local_rank(), mesh.size())))
    for layer in layers:
        layer.prepare(by_layer=parallel.reshard == "layer")
    for layer in layers:
        rows = ordered.of(layer.names, layer.module)
        rows.listen(layer.module)
        layer.reordered = [
            p for name, p in zip(layer.names, layer.params, strict=True) if rows.holds(layer.module, name)
        ]
    for part in model.modules():  # called by itself, or computed again in backward
        ordered.of(part._parameters, part).listen(part)
    if parallel.reshard == "step":
        ordered.listen(model)
    return layers


def _refuse_mixed(module: nn.Module, names: Sequence[str], size: int) -> None:
    """FSDP2 gathers a layer as one piece of memory."""
    first = {module.get_parameter(name).dtype: name for name in reversed(names)}
    if len(first) > 1:
        told = " and ".join(f"{name} is {dtype_name(dtype)}" for dtype, name in first.items())
        raise LoopError(
            f"run.place was to divide a {type(module).__name__} among {size} processes.",
            f"A layer is gathered as one, and has one kind of numbers: {told}.",
            "give those of one kind a module of their own and name its class (--set parallel.layer_classes=CLASS), "
            "or make "
            "all parameters alike.",
        )


def _refuse_sparse(model: nn.Module, size: int) -> None:
    """FSDP2 puts a layer's gradients into one piece of memory before they are added up."""
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise LoopError(
                f"run.place was to divide a {type(model).__name__} among {size} processes, gathered by layer.",
                f"{name or type(part).__name__} is an embedding with sparse gradients, which no shard takes.",
                "--set parallel.reshard=step, or sparse=False.",
            )


def policy_of(parallel: ParallelSettings) -> MixedPrecisionPolicy:
    """In which numbers FSDP2 gathers, and hands gradients on. What is whole for a step may be used outside of its layer
    as well, in float32; what a layer computes with is cast then as it is on one process (param_dtype.py), and inputs
    always.
    """
    if parallel.param_dtype == "fp32" or parallel.reshard == "step":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(DTYPES[parallel.param_dtype], torch.float32, cast_forward_inputs=False)


def own_parameters(module: nn.Module, others: Sequence[nn.Module]) -> list[str]:
    """The names of a module's parameters but for those of `others` inside it, each once, in the order in which FSDP2
    lays them out: those of its parts come before its own."""
    names: dict[nn.Parameter, str] = {}
    seen: set[nn.Module] = set()

    def visit(part: nn.Module, prefix: str) -> None:
        if part in seen or part in others:
            return
        seen.add(part)
        for name, child in part.named_children():
            visit(child, f"{prefix}{name}.")
        for name, p in part.named_parameters(recurse=False):
            names.setdefault(p, f"{prefix}{name}")

    visit(module, "")
    return list(names.values())
