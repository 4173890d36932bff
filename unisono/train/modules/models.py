"""The models of a run: the placed modules, the parameters that are trained now, and the growth of models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_map

from unisono.checkpoint.sharded_state import fill_module, gather_tensor
from unisono.config.wording import plural
from unisono.data import alignment
from unisono.distributed.mesh import Mesh
from unisono.errors import LoopError
from unisono.parallel.context_parallel.ulysses import ContextParallel
from unisono.parallel.fsdp.sharded_reductions import reduce_whole
from unisono.parallel.parallelize import parallelize
from unisono.parallel.param_attributes import attributes_of_params, restore_attributes
from unisono.torch_compat.modules import tensor_with_data
from unisono.train.guarantees.rank_consistency import check_same_parameters, check_same_values
from unisono.train.modules.buffer_sync import BufferSync, Gathered
from unisono.train.modules.wrappers import refuse_wrapped, refuse_wrapping

if TYPE_CHECKING:
    from unisono.config import ParallelSettings
    from unisono.parallel.fsdp.fsdp import ShardedLayer
    from unisono.parallel.fsdp.gather_order import GatherOrder
    from unisono.parallel.parallel_plan import ParallelPlan
    from unisono.parallel.tensor_parallel.tensor_parallel import Plan
    from unisono.tensors.mapped_memory import MappedMemory
    from unisono.train.pipelining.pipeline_run import Pipeline
    from unisono.train.pipelining.stage_timing import TimingExample


class Models:
    """The models that run.place was called with.

    params   all parameters, each once
    trained  those that need a gradient now
    names    names of parameters, by id
    """

    def __init__(self, mesh: Mesh, virtual_ranks: int) -> None:
        self.mesh, self.group = mesh, mesh.world
        self.modules: list[torch.nn.Module] = []
        self.names: dict[int, str] = {}
        self.params: list[torch.nn.Parameter] = []
        self.trained: list[torch.nn.Parameter] = []
        self.layers: list[ShardedLayer] = []
        """The layers of all models, if these are sharded. The parameters of a layer are gathered together."""
        self.gather_order: GatherOrder | None = None
        """Checks the order of gathering, if layers are gathered one by one."""
        self.pipeline: Pipeline | None = None
        """The pipeline of the model, if it is divided into stages."""
        self.buffers = BufferSync(mesh.data, virtual_ranks)
        self.buffers.attributes.grew = lambda: self._grew or self._grew_within
        if mesh.pipeline.size > 1:  # each stage has shadows of the others' modules
            self.buffers.attributes.enabled = False
        self.context = ContextParallel(mesh.context)
        self.tracked: list[torch.nn.Module] = []
        """The modules with buffers that are tracked, placed or not."""
        self.busy = False
        """Whether a step or an evaluation is in progress, in which all processes run forward passes."""
        self.plans: list[Plan | ParallelPlan | None] = []
        """The division of each model along the axis `tensor`; None: the default plan."""
        self.comm_hook: tuple[Any, Any] | None = None
        """The communication hook of the script, (state, hook), which every exchange gets."""
        self.divided_loss = False
        """Whether logits come out of a model divided by classes."""
        self.heard: list[Callable[[], None]] = []
        """Functions to call when the set of trained parameters has changed."""
        self._undo: Callable[[], None] | None = None  # ends reductions over whole tensors
        self._signature: list[bool] | None = None
        self._grew = True  # a parameter or module was registered since the last check
        self._grew_within = False  # one was registered in a forward pass of this process
        self._notices: list[Any] = []
        self._buffers: dict[int, torch.Tensor] = {}

    def add(
        self,
        model: torch.nn.Module,
        parallel: ParallelSettings,
        plan: Plan | ParallelPlan | None,
        memory: MappedMemory,
        together: Callable[[], None],
        example: TimingExample | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """Place a model: from now on every process holds the same values, or its part of them.

        Args:
            model: the model.
            parallel: the settings of parallelism.
            plan: how the model is divided under tensor parallelism.
            memory: the files in which the model was built, if it is divided.
            together: is called before a forward pass that needs the parts of all processes, outside of steps and
                evaluations.
            example: a micro-batch to time the layers with, if the model is divided into stages.
            values: values of parameters and buffers by name, of which each process reads its part.
        """
        refuse_wrapped(model)
        if not self.modules:
            self._notices.append(register_module_module_registration_hook(partial(refuse_wrapping, self.modules)))
        if self.mesh.tensor.size > 1:
            self.divided_loss = parallel.loss_parallel
            model.register_forward_hook(lambda _, __, out: out if self.busy else tree_map(gather_tensor, out))
        check_same_parameters(self.group, model.named_parameters(), "run.place")
        check_same_values(self.group, values)
        alignment.align_([*model.parameters(), *model.buffers()])
        marks = attributes_of_params(model)
        own = model.state_dict(keep_vars=True) if values else {}
        filled = {id(own[name]) for name in own.keys() & (values or {}).keys()}
        layers = parallelize(model, self.mesh, parallel, plan, memory, filled)
        if layers and parallel.reshard == "layer":
            from unisono.parallel.fsdp.gather_order import GatherOrder  # the import takes up to 0.5 s

            self.gather_order = self.gather_order or GatherOrder(self.mesh.shard)
            for layer in layers:
                layer.check_order(self.gather_order)
        elif layers:
            for layer in layers:
                layer.gather_over(self.mesh.shard)
        if layers and self._undo is None:
            self._undo = reduce_whole(self.mesh.shard)
        self.layers += layers
        restore_attributes(model, marks)
        self.plans.append(plan)
        if self.mesh.pipeline.size > 1:
            from unisono.train.pipelining.pipeline_run import Pipeline  # the import takes 0.5 s

            self.pipeline = Pipeline(self.mesh, parallel, model, self.pipeline, example, memory)
        for nbytes in fill_module(model, values) if values else ():
            memory.touch(nbytes)
        memory.move_out(map(tensor_with_data, [*model.parameters(), *model.buffers()]))
        if self.mesh.device_mesh is not None:

            def meet(*_: Any) -> None:
                if not self.busy and (self.pipeline is None or self.pipeline.turn is None):
                    together()

            model.register_forward_pre_hook(meet, prepend=True)
        self.names |= {id(p): name for name, p in model.named_parameters()}
        self.modules.append(model)
        self.params = list({id(p): p for p in [*self.params, *model.parameters()]}.values())
        self._grew = True

    @property
    def ties(self) -> str:
        """The names of parameters that several stages of a pipeline use, as text.

        Their gradients are added once a step, and not in every micro-batch, which results in other bits.
        """
        return ", ".join(self.pipeline.names.tied) if self.pipeline is not None else ""

    def track(self, modules: Iterable[torch.nn.Module]) -> None:
        """Set the tracked modules. Their buffers are synchronized, too, wherever their parameters are."""
        self.tracked = list(modules)
        self._grew = True

    def regroup(self) -> None:
        """Use the current process groups of the mesh, after they have changed (distributed/mesh.py)."""
        for layer in self.layers:
            layer.regroup(self.mesh.shard)

    def batch_norms(self) -> list[tuple[str, _BatchNorm]]:
        """Return every batch norm, with its name."""
        return [
            (f"{name} of {type(model).__name__}" if name else "that is placed", part)
            for model in self.modules
            for name, part in model.named_modules()
            if isinstance(part, _BatchNorm)
        ]

    def on_change(self) -> None:
        """Register hooks that detect the growth of a model."""
        self._notices += [
            register_module_module_registration_hook(self._notice),
            register_module_parameter_registration_hook(self._notice),
            register_module_buffer_registration_hook(self._notice),
        ]

    def check_growth(self) -> bool:
        """Update the set of trained parameters. Return whether it has changed.

        Raises:
            LoopError: no parameter trains, and there is no pipeline, in which other stages may train.
        """
        new = False
        if self._grew or self._grew_within:
            new = self._look_again(share=self._grew)
            self._grew = self._grew_within = False
        signature = [p.requires_grad for p in self.params]
        if signature == self._signature and not new:
            return False
        if not any(signature) and self.pipeline is None:  # in a pipeline other stages may train
            raise self.nothing_trains_error()
        self._signature = signature
        self.trained = [p for p in self.params if p.requires_grad]
        for notify in self.heard:
            notify()
        return True

    def nothing_trains_error(self) -> LoopError:
        """Return the error for a run in which no parameter trains."""
        placed = plural(len(self.modules), "model was", "models were")
        without = f"{placed} placed, and none of the parameters needs a gradient."
        return LoopError(
            "No parameter requires a gradient.",
            without if self.modules else "No model was placed, so there is nothing to train.",
            "place the model that trains: model = run.place(lambda: Net()).",
        )

    def _look_again(self, *, share: bool) -> bool:
        """Find new parameters and buffers. Return whether the parameters have changed.

        With `share`, which all processes pass between two steps, new buffers get the values of the main process, as in
        run.place.
        """
        known = {id(p) for p in self.params}
        self.params = list({id(p): p for model in self.modules for p in model.parameters()}.values())
        new = [p for p in self.params if id(p) not in known]
        if new:
            if self.pipeline is not None:
                raise self.pipeline.grown(len(new))
            self.group.broadcast_(new)
        buffers = [b for model in self.modules for b in model.buffers()]
        alignment.align_([*self.params, *buffers])
        if share:
            self.group.broadcast_([b for b in buffers if self._buffers and id(b) not in self._buffers])
        self._buffers = {id(b): b for b in buffers}
        self.names |= {id(p): name for model in self.modules for name, p in model.named_parameters()}
        self.buffers.look_at([*self.modules, *self.tracked])
        return bool(new) or len(self.params) != len(known)

    def _notice(self, *_: Any) -> None:
        """Record that a model may have grown. torch calls this when any module registers a parameter or a module."""
        if self.busy:
            self._grew_within = True
        else:
            self._grew = True

    def settle_growth(self, gathered: Gathered) -> None:
        """Write the gathered values of a pass into buffers and attributes. Every process calls this.

        Buffers that forward passes have replaced, on any process, do not count as new in the next step.
        """
        self.buffers.settle(gathered)
        if gathered[1] is not None:
            self._buffers = {id(b): b for model in self.modules for b in model.buffers()}

    @property
    def needs_lockstep(self) -> bool:
        """Whether a forward pass needs other processes, so that all must compute equally many micro-batches."""
        return bool(self.layers) or self.mesh.context.size > 1

    def around_loss(self) -> AbstractContextManager[None]:
        """Return a block in which torch can compute the cross entropy of logits that are divided by classes."""
        if not self.divided_loss:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel  # the import takes 0.5 s

        context: AbstractContextManager[None] = loss_parallel()
        return context

    def gather(self) -> None:
        """Gather every layer, until `reshard`. In between, processes may call layers in any order."""
        for layer in self.layers:
            layer.unshard()

    def reshard(self) -> None:
        """Free gathered parameters, so that only shards are held, as between two steps."""
        for layer in self.layers:
            layer.reshard()

    def end_evaluation(self) -> None:
        """End an evaluation, after its last forward pass."""
        self.reshard()
        if self.gather_order is not None:
            self.gather_order.end_step()

    def close(self) -> None:
        """Remove the hooks of torch. Closing twice changes nothing."""
        self.context.close()
        if self._undo is not None:
            self._undo()
            self._undo = None
        notices, self._notices = self._notices, []
        for notice in notices:
            notice.remove()
