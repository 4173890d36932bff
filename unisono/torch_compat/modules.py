"""The private names of torch.nn, autograd and DTensor that layouts of models use.

Public accessors such as `nn.Module.named_parameters` and `setattr` are not enough where a module's slots are exchanged
for a forward pass: `setattr` refuses a plain tensor in the place of a parameter, and counts as a change by the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

Slot = tuple[nn.Module, str]
"""Where a parameter is found: a module, and the parameter's name in it. A tied parameter has several."""


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module keeps its own parameters."""
    return module._parameters


def buffer_slots(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dict in which a module keeps its own buffers."""
    return module._buffers


def module_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dict in which a module keeps its own submodules."""
    return module._modules


def forward_hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """Return the dicts in which a module keeps the hooks before and after its forward."""
    return [module._forward_hooks, module._forward_pre_hooks]


def has_gradient_hook(p: torch.Tensor) -> bool:
    """Return whether `register_hook` was called on a tensor."""
    return bool(p._backward_hooks)


def accumulation_hooks(p: torch.Tensor) -> Iterable[Callable[[torch.Tensor], None]]:
    """Return the hooks that autograd calls after it has accumulated into p.grad."""
    return (p._post_accumulate_grad_hooks or {}).values()


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to in place; -1 for an inference tensor, which does not count."""
    return -1 if tensor.is_inference() else tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return bool(tensor._is_view())


def is_in_backward() -> bool:
    """Return whether this thread runs inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def saved_tensor_hooks() -> Any:
    """Return the innermost pair of hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks), or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def disable_jit_profiling() -> None:
    """Turn off the profiling executor of torch.jit.script."""
    torch._C._jit_set_profiling_mode(False)


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the table of operators that DTensor computes by a function of their own."""
    from torch.distributed.tensor import DTensor  # takes half a second

    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return a DTensor's part on this process. (`to_local` is for autograd; handlers run below it.)"""
    part: torch.Tensor = tensor._local_tensor
    return part.detach()


def loads_plainly(module: nn.Module) -> bool:
    """Return whether a module's state_dict has its own tensors, and it copies others into them when it loads.

    A module may replace these methods or register hooks. FSDP2's hooks only free gathered parameters.
    """
    kind = type(module)
    methods = (
        kind.state_dict is nn.Module.state_dict,
        kind.load_state_dict is nn.Module.load_state_dict,
        kind.get_extra_state is nn.Module.get_extra_state,
        kind.set_extra_state is nn.Module.set_extra_state,
        kind._save_to_state_dict is nn.Module._save_to_state_dict,
        kind._load_from_state_dict in (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict),
    )
    hooks = (
        *(module._state_dict_hooks, module._state_dict_pre_hooks),
        *(module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks),
    )
    return all(methods) and all(map(_is_of_fsdp, (hook for found in hooks for hook in found.values())))


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(hook, "hook", hook).__module__).startswith("torch.distributed.fsdp")


def tensor_with_data(tensor: Any) -> torch.Tensor:
    """Return the tensor whose `data` is this process's part of a DTensor; any other tensor itself."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def set_shard_group(module: Any, group: Any) -> None:
    """Let FSDP2 shard a module over another process group. It has no public way to change the group."""
    for of in _param_groups(module):
        of.mesh_info.shard_process_group = group


def _param_groups(module: Any) -> list[Any]:
    """Return FSDP2's groups of parameters of a module. In torch 2.10 and 2.11 it has at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reduce_unused_gradients(module: Any) -> None:
    """Let FSDP2 reduce zeros for parameters of this module that got no gradient: other processes may have used them.

    torch 2.13 has a setting for it. In torch 2.10 and 2.11 the zeros are set as gradients just before FSDP2 reduces.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in _param_groups(module):
        group.post_backward = partial(_with_zeros, group, group.post_backward)


def add_no_nodes_to_inputs(module: Any) -> None:
    """Let FSDP2 learn from a hook of a tensor that the backward pass of this module is over.

    FSDP2 passes all inputs of a layer through an autograd function, whose backward pass tells it. Such a node adds up
    the gradient of an input that the layer uses several times, before the uses by other layers are added. Without
    shards the uses are added one by one, from the last to the first: ((a + b) + c) + d, not (a + b) + (c + d).
    """
    state = module._get_fsdp_state()
    for group in _param_groups(module):
        watch = _BackwardWatch(group, group._register_post_backward_hook, state._register_pre_backward_hook)
        group._register_post_backward_hook = watch.inputs
        state._register_pre_backward_hook = watch.outputs


class _BackwardWatch:
    """Hooks of the inputs and outputs of a layer, from which FSDP2 learns when its backward pass begins and is over.

    Args:
        group: FSDP2's group of the layer's parameters.
        add_node: FSDP2's function that passes inputs through an autograd function.
        register: FSDP2's function that registers hooks of outputs.
    """

    def __init__(self, group: Any, add_node: Callable[..., Any], register: Callable[[Any], Any]) -> None:
        self._group, self._add_node, self._register = group, add_node, register
        self._inputs: list[torch.Tensor] = []
        self._awaited = 0
        """Hooks that have not been called yet."""

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call `group.post_backward` after the backward pass of a layer with these inputs, and return the inputs.

        The engine runs, of the nodes that are ready, the one that was made last. So the node of an input runs after all
        nodes that the layer has made, and of several inputs that of the youngest one runs first.

        A layer that is recomputed as a part of a larger one has its hook already, and may get the same input again.
        (Where torch recomputes with reentrant autograd, the first forward pass has no graph, and registers no hook.)
        """
        self._inputs[:] = _differentiable((args, kwargs))
        made = [each for each in self._inputs if each.grad_fn is not None]
        if not torch.is_grad_enabled() or not made:  # the node of a leaf runs at once
            found: tuple[tuple[Any, ...], dict[str, Any]] = self._add_node(args, kwargs)
            return found
        if not (self._awaited and is_in_backward()):
            self._awaited += 1
            youngest = max(made, key=lambda tensor: tensor.grad_fn._sequence_nr())  # type: ignore[union-attr]
            youngest.register_hook(self._end)
        return args, kwargs

    def outputs(self, output: Any) -> Any:
        """Let FSDP2 gather a layer when the backward pass comes to its outputs, but not to inputs that it returns."""
        passed = {id(each) for each in self._inputs}
        self._inputs.clear()
        outputs = _differentiable(output)
        if not any(id(each) in passed for each in outputs):
            return self._register(output)
        self._register([each for each in outputs if id(each) not in passed])
        return output

    def _end(self, _: torch.Tensor) -> None:
        self._awaited -= 1
        self._group.post_backward()


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and each.requires_grad]


def _with_zeros(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    for param in group.fsdp_params if group.reduce_grads else ():
        if not hasattr(param, "_unsharded_param") or param.unsharded_accumulated_grad is not None:
            continue
        whole = param.unsharded_param
        if whole.requires_grad and whole.grad is None:
            whole.grad = torch.zeros_like(whole)
    post_backward(*unused)


def arguments_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the declaration of each argument of an operator, and its value in a call."""
    for i, argument in enumerate(operator._schema.arguments):
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)


def written_tensors(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    found: list[Any] = []
    for argument, value in arguments_of(operator, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tree_leaves(value)
    return [target for target in found if isinstance(target, torch.Tensor)]


def no_torch_function() -> Any:
    """Return a context in which operators skip `__torch_function__` of tensor subclasses."""
    return torch._C.DisableTorchFunctionSubclass()


def make_wrapper(
    cls: type[torch.Tensor], shape: Any, stride: Any, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Make a tensor subclass without memory (https://docs.pytorch.org/docs/stable/notes/extending.html)."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=device)
    return made
