"""Shard a model: each process of the axis holds a part of every parameter, and gathers whole ones when it needs them.

torch's FSDP2 gathers (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; Zhao et al., PyTorch
FSDP, VLDB 2023), one layer at a time: a block of a transformer, say. Parameters outside of all layers form one more
layer, the model's own. The setting `parallel.reshard` chooses between two ways:

    layer   gather a layer, compute, free it; again in the backward pass, and reduce-scatter its gradient at once.
            Least memory: parameters, gradients and optimizer state are divided by the number of processes.
    step    gather all layers at a step's first micro-batch, and free them after the last one. Gradients are whole in
            between. Parameters travel once a step; only optimizer state, and what exists between two steps, is divided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from unisono.torch_compat.modules import (
    add_no_nodes_to_inputs,
    parameter_slots,
    reduce_unused_gradients,
    set_shard_group,
)

if TYPE_CHECKING:
    from unisono.config import ParallelSettings
    from unisono.tensors.mapped_memory import MappedMemory


@dataclass
class ShardedLayer:
    """A module whose parameters are gathered together.

    Attributes:
        label: Its name in messages, as the first words of a sentence.
        module: A part of a model that FSDP2 shards.
        names: The names of its own parameters within it; those of layers inside it are not its own.
        shapes: The shapes of these as they are gathered on this process.
        place: The rank of this process among those that share the layer, and their number.
        params: The shards of the parameters.
        gather_order: Checks the order of gathers, if the layer is gathered whenever it is called.
        reduce_number: The number by which `gather_order` identifies the reduction of its gradient.
    """

    label: str
    module: nn.Module
    names: list[str]
    shapes: list[torch.Size]
    place: tuple[int, int]
    params: list[nn.Parameter] = field(default_factory=list)
    gather_order: GatherOrder | None = None
    reduce_number: int = 0
    reordered: list[nn.Parameter] = field(default_factory=list)
    """The parameters that are not stored row by row in the whole model."""
    used: list[bool] = field(default_factory=list)
    """Which parameters took part in a backward pass since the flags were cleared."""
    _hooked: set[int] = field(default_factory=set)
    _trains: bool = False

    @property
    def label_in_sentence(self) -> str:
        """The label for the middle of a sentence."""
        return self.label[0].lower() + self.label[1:]

    def current_params(self) -> list[nn.Parameter]:
        """Return its parameters as the module has them now: whole while they are gathered, shards otherwise."""
        return [self.module.get_parameter(name) for name in self.names]

    def on_gathered(self, *_: Any) -> None:
        """Prepare whole parameters: they require gradients where their shards do, and note when they get one."""
        self._check_dtypes()
        for i, (name, shard) in enumerate(zip(self.names, self.params, strict=True)):
            *path, own = name.split(".")
            p = parameter_slots(self.module.get_submodule(".".join(path)))[own]
            if not isinstance(p, nn.Parameter):  # cast for a call around this one (param_dtype.py), and hooked before
                continue
            if p.requires_grad != shard.requires_grad:
                p.requires_grad_(shard.requires_grad)
            if p.requires_grad and i not in self._hooked:
                self._hooked.add(i)
                p.register_post_accumulate_grad_hook(partial(_mark_used, self.used, i))
        trains = any(shard.requires_grad for shard in self.params)
        if trains and not self._trains:
            self._fsdp.unshard()  # it is gathered already, but FSDP2 then looks up the dtype of gradients again
        self._trains = trains

    def configure(self, *, by_layer: bool) -> None:
        """Set up FSDP2, which has just taken over the module."""
        self.params = self.current_params()
        self.used = [False] * len(self.params)
        self.module.register_forward_pre_hook(self.on_gathered)  # after FSDP2's own, which gathers
        self._fsdp.set_reshard_after_backward(by_layer, recurse=False)
        self._fsdp.set_requires_gradient_sync(by_layer, recurse=False)
        reduce_unused_gradients(self._fsdp)
        add_no_nodes_to_inputs(self._fsdp)
        self._fsdp.set_gradient_divide_factor(1.0)
        self._fsdp.set_force_sum_reduction_for_comms(True)

    def unshard(self) -> list[nn.Parameter]:
        """Gather it until `reshard`, and return its whole parameters, the same objects every time."""
        self._check_dtypes()
        self._fsdp.unshard()
        self.on_gathered()
        return self.current_params()

    def reshard(self) -> None:
        """Free the whole parameters, if there are any."""
        self._fsdp.reshard()

    def assign_gradients(self, wanted: Collection[int]) -> None:
        """Give each shard its part of the gradient of the whole parameter, for the shards with these ids."""
        for whole, shard in zip(self.current_params(), self.params, strict=True):
            if id(shard) in wanted:
                shard.grad = (
                    None
                    if whole.grad is None
                    else from_local_like(self._part(to_local(whole.grad), to_local(shard)), shard)
                )

    def _part(self, whole: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a whole tensor; it shares its memory, if it is on the same device."""
        rank, size = self.place
        first = min(rank * -(-len(whole) // size), len(whole))
        return whole[first : first + len(shard)].to(shard.device)

    def check_order(self, gather_order: GatherOrder) -> None:
        """Check from now on that all processes that share the layer gather and reduce it at the same time."""
        self.gather_order = gather_order
        self.reduce_number = gather_order.register(f"done with {self.label_in_sentence} in backward")
        all_gather: Any = CheckedAllGather(self.label_in_sentence, gather_order)  # it has FSDP2's protocol
        self._fsdp.set_custom_all_gather(all_gather)

    def gather_over(self, group: ProcessGroup) -> None:
        """Gather it over this group from now on, whatever torch's group in it is by then."""
        all_gather: Any = AllGather(group)  # it has FSDP2's protocol
        self._fsdp.set_custom_all_gather(all_gather)

    def regroup(self, group: ProcessGroup) -> None:
        """Use the new group of the processes that share the layer."""
        if self.gather_order is not None:
            self.gather_order.reset()
        set_shard_group(self._fsdp, group.handle or dist.group.WORLD)

    def set_reduce_scatter(self, comm: Any) -> None:
        """Pass gradients to `comm` from now on, as the sums that they are."""
        self._fsdp.set_custom_reduce_scatter(comm)

    def _check_dtypes(self) -> None:
        """Refuse gradients of several dtypes, which a frozen parameter that is trained from now on may add."""
        params = dict(zip(self.names, self.params, strict=True))
        _refuse_mixed(type(self.module).__mro__[2], params, self.place[1], cast=False)

    @property
    def _fsdp(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module


def _mark_used(used: list[bool], i: int, _: torch.Tensor) -> None:
    """Note that a parameter got a gradient.

    The hook does not refer to its layer. A reference cycle through a hook is never collected, and would keep the
    process group, which aborts when the interpreter ends.
    """
    used[i] = True


def apply_shard(
    model: nn.Module, mesh: DeviceMesh, parallel: ParallelSettings, device: torch.device, memory: MappedMemory
) -> list[ShardedLayer]:
    """Shard a model's parameters over the processes of a mesh. All of them have the same content before.

    Args:
        model: The model; its parameters may be on the CPU, and are moved to `device` layer by layer.
        mesh: The processes.
        parallel: The settings.
        device: The device on which the parts are.
        memory: The files in which the model was built.

    Returns:
        What is gathered together.

    Raises:
        LoopError: A parameter cannot be sharded.
    """
    by_layer = parallel.reshard == "layer"
    _refuse_unshardable(model, mesh.size(), by_layer=by_layer)
    if parallel.tensor == 1:
        draw_as_whole()
    strides = lay_out_rows(model)
    layers = _shard_layers(model, mesh, parallel, device, memory)
    for layer in layers:
        layer.configure(by_layer=by_layer)
    for layer in layers:
        own = strides.of(layer.names, layer.module)
        own.register_hooks(layer.module)
        layer.reordered = [
            p for name, p in zip(layer.names, layer.params, strict=True) if own.holds(layer.module, name)
        ]
    for part in model.modules():  # called by itself, or recomputed in backward
        strides.of(parameter_slots(part), part).register_hooks(part)
    if not by_layer:
        strides.register_hooks(model)
    return layers


def _shard_layers(
    model: nn.Module, mesh: DeviceMesh, parallel: ParallelSettings, device: torch.device, memory: MappedMemory
) -> list[ShardedLayer]:
    """Let FSDP2 take over each layer, and at last the model with the parameters that are in none."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": parallel.reshard == "layer",
        "mp_policy": policy_of(parallel),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type != "cpu") if parallel.offload else OffloadPolicy(),
    }
    found = layers_of(model, parallel.layer_classes)
    if parallel.activation_checkpoint == "selective":  # torch counts a layer's operators, and a gather would be one
        found = [layer for layer in outermost(model, parallel.layer_classes) if layer is not model]
    modules = untied(model, [*found, model])
    names_of = {part: name for name, part in model.named_modules()}
    layers = []
    for module in modules:
        names = own_parameters(module, [other for other in modules if other is not module])
        if names:
            named = {name: module.get_parameter(name) for name in names}
            _refuse_mixed(type(module), named, mesh.size(), cast=parallel.param_dtype != "fp32")
            shapes = [to_local(module.get_parameter(name).detach()).shape for name in names]
            fully_shard(module, **options)
            memory.release_pages()
            class_name = type(module).__mro__[2].__name__  # FSDP2 has derived two classes from the module's own
            label = f"The {class_name} {names_of[module]}".strip()
            layers.append(ShardedLayer(label, module, names, shapes, (mesh.get_local_rank(), mesh.size())))
    return layers


def _refuse_unshardable(model: nn.Module, size: int, *, by_layer: bool) -> None:
    scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
    if scalars:
        raise LoopError(
            f"Cannot shard a {type(model).__name__} over {size} processes: it has scalar parameters.",
            f"{len(scalars)} of its parameters are single numbers without a dimension (the first is {scalars[0]}).",
            "give it one: nn.Parameter(torch.ones(1)).",
        )
    if not by_layer:
        return
    for name, part in model.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            raise LoopError(
                f"Cannot shard a {type(model).__name__} over {size} processes: it has sparse gradients.",
                f"{name or type(part).__name__} is an embedding with sparse gradients. With parallel.reshard=layer "
                "FSDP2 packs the gradients of a layer into one dense buffer.",
                "--set parallel.reshard=step, or sparse=False.",
            )
    empty = [name for name, p in model.named_parameters() if not p.numel()]
    if empty:
        raise LoopError(
            f"Cannot shard a {type(model).__name__} over {size} processes: it has an empty parameter.",
            f"{empty[0]} has no elements, and with parallel.reshard=layer FSDP2 does not reduce such a gradient.",
            "--set parallel.reshard=step, or remove it from the model.",
        )


def _refuse_mixed(kind: type[nn.Module], params: Mapping[str, torch.Tensor], size: int, *, cast: bool) -> None:
    """Refuse a layer that trains parameters of several dtypes: FSDP2 reduces its gradients as one piece of memory.

    Frozen parameters may have other dtypes, those of a quantized base for instance, because FSDP2 gathers such a layer
    as bytes. With `cast` it would convert all of them to one dtype.
    """
    first = {p.dtype: name for name, p in reversed([*params.items()]) if cast or p.requires_grad}
    if len(first) > 1:
        dtypes = " and ".join(f"{name} is {dtype_name(dtype)}" for dtype, name in first.items())
        what = "its parameters have" if cast else "it trains parameters of"
        how = "casts the parameters" if cast else "reduces the gradients"
        raise LoopError(
            f"Cannot shard a {kind.__name__} over {size} processes: {what} several dtypes.",
            f"FSDP2 {how} of a layer as one tensor, which has one dtype: {dtypes}.",
            "put the parameters of one dtype into a module of their own and name its class "
            "(--set parallel.layer_classes=CLASS), or give all of them one dtype.",
        )


def policy_of(parallel: ParallelSettings) -> MixedPrecisionPolicy:
    """Return the dtypes in which FSDP2 gathers parameters and passes gradients on.

    With parallel.reshard=step, parameters may also be used outside of their layer, in float32. Then what a layer
    computes with is cast as on one process (param_dtype.py). Inputs are always cast there.
    """
    if parallel.param_dtype == "fp32" or parallel.reshard == "step":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(DTYPES[parallel.param_dtype], torch.float32, cast_forward_inputs=False)


def own_parameters(module: nn.Module, others: Sequence[nn.Module]) -> list[str]:
    """Return the names of a module's parameters without those of `others` inside it, each once.

    They are in the order in which FSDP2 lays them out: those of its submodules come before its own.
    """
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
