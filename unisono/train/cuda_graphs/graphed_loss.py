"""Choose for each micro-batch of `step.run` whether it is computed as usual or replayed as a CUDA graph.

A micro-batch is captured when it comes for the second time with the same shapes, model and loss function, outside of
steps that verify the promise. Before it is used, its loss and gradients are compared with those of the usual way, bit
by bit. Graphs are off for the rest of the run, with a note, where that is impossible: a batch with values that are no
tensors, a forward pass that changes buffers or attributes or draws random numbers on the CPU, a synchronization with
the host, more than MOST kinds of micro-batches.

The code of forward and loss runs only during a capture. A micro-batch is captured again after a change of a module's
attributes, of numbers that a function refers to, of layers' modes, or of the parameters that train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from unisono.data.rng import get_device_state, get_state, same_state, set_device_state
from unisono.train.cuda_graphs.micro_batch_graph import Capture, CaptureError, MicroBatchGraph, capture_on_cuda
from unisono.train.evaluation.model_call import LossCall, restored_rng
from unisono.train.modules.buffer_sync import versions
from unisono.train.modules.module_attributes import remembered

if TYPE_CHECKING:
    from unisono.train.modules.attribute_snapshot import AttributeSnapshot
    from unisono.train.modules.models import Models
    from unisono.train.step_state import StepState

MOST = 4
"""Kinds of micro-batches that are captured. Each needs memory for its activations."""

MOST_SEEN = 64
"""Kinds that may come. A function that refers to a new object in each step would be another kind each time."""

CAPTURES: dict[str, Capture] = {"cuda": capture_on_cuda}
"""How passes are captured, by the type of the device."""

PLAIN = (bool, int, float, str, type(None))


class Captured(NamedTuple):
    """A graph, the attributes of the model when it was captured, and what its key refers to."""

    graph: MicroBatchGraph
    attributes: AttributeSnapshot
    call: LossCall


class GraphedLoss:
    """Compute loss and weight of micro-batches, by replay where that is possible.

    Attributes:
        off: Why no micro-batch is replayed any more; "": they are.
        replays: The number of replays so far.
    """

    def __init__(self, models: Models, device: torch.device, note: Callable[[str], None]) -> None:
        self.models, self.device, self.note = models, device, note
        self.off, self.replays = "", 0
        self._seen: set[Any] = set()
        self._captured: dict[Any, Captured] = {}
        if device.type not in CAPTURES:
            self._turn_off(f"a {device.type} device has none")
        models.heard.append(self._captured.clear)

    def __call__(self, step: StepState, call: LossCall, batch: Any) -> tuple[torch.Tensor, Any]:
        """Return loss and weight of a micro-batch."""
        if self.off or step.gradient is None or not step.gradient.seen or step.is_verified:
            return call(batch)
        leaves, spec = tree_flatten(batch)
        if not all(isinstance(leaf, torch.Tensor) and leaf.device == self.device for leaf in leaves):
            self._turn_off(f"a batch holds other values than tensors on {self.device}")
            return call(batch)
        key = self._key(call, leaves, spec)
        captured = self._captured.get(key)
        if captured is not None and (not captured.graph.is_current or captured.attributes.changed()):
            del self._captured[key]
            captured = None
        if captured is None:
            is_first = key not in self._seen
            self._seen.add(key)
            if is_first and len(self._seen) <= MOST_SEEN:
                return self._observe(step, call, batch)
            if len(self._captured) == MOST or len(self._seen) > MOST_SEEN:
                self._turn_off("there are too many kinds of micro-batches, functions or shapes")
            else:
                self._capture(key, step, call, leaves, spec)
            captured = self._captured.get(key)
            if captured is None:
                return call(batch)
        self.replays += 1
        return captured.graph.replay(leaves)

    def result(self) -> dict[str, Any]:
        """Return entries of result.json."""
        return {"cuda_graphs": {"replays": self.replays, "off": self.off}}

    def _key(self, call: LossCall, leaves: list[Any], spec: TreeSpec) -> Any:
        shapes = tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) for leaf in leaves)
        modes = bytes(map(attrgetter("training"), call.model.modules()))
        return id(call.model), identity_of(call.loss_fn), identity_of(call.forward), modes, spec, shapes

    def _capture(self, key: Any, step: StepState, call: LossCall, leaves: list[Any], spec: TreeSpec) -> None:
        """Capture a micro-batch and compare its bits. Turn graphs off if that is impossible."""
        place = step.place
        assert place is not None
        step.place = place._replace(spare=True)  # sums of its passes do not count
        try:
            with restored_rng(self.models.modules, self.device), torch.enable_grad():
                graph = self._compare(call, leaves, spec)
        except CaptureError as error:
            self._turn_off(str(error))
        except RuntimeError as error:
            self._turn_off(f"torch cannot capture it: {str(_first_error(error)).splitlines()[0]}")
        else:
            self._captured[key] = Captured(graph, remembered([call.model]), call)
        finally:
            step.place = place

    def _observe(self, step: StepState, call: LossCall, batch: Any) -> tuple[torch.Tensor, Any]:
        """Compute the first micro-batch of a kind as usual. Turn graphs off if a replay would leave something out."""
        buffers = [buffer for model in self.models.modules for buffer in model.buffers()]
        state, added, before = get_state(), step.added, versions(buffers)
        attributes = remembered(self.models.modules)
        loss, weight = call(batch)
        for why, holds in {
            "a forward pass draws random numbers on the CPU": not same_state(state, get_state()),
            "a forward pass changes an attribute of a module": bool(attributes.changed()),
            "a forward pass changes a buffer": versions(buffers) != before,
            "the loss function calls step.add": step.added != added,
        }.items():
            if holds and not self.off:
                self._turn_off(why)
        return loss, weight

    def _compare(self, call: LossCall, leaves: list[Any], spec: TreeSpec) -> MicroBatchGraph:
        """Return a graph whose replay has the bits of the usual way. Raise CaptureError if it has others."""
        state, params = get_device_state(self.device), self.models.trained
        loss, weight = call(spec.unflatten(leaves))
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        graph = MicroBatchGraph(call.__call__, self.models.modules, params, leaves, spec, CAPTURES[self.device.type])
        set_device_state(self.device, state)
        again, weight_again = graph.replay(leaves)
        grads_again = torch.autograd.grad(again, params, allow_unused=True)
        ours: list[Any] = [loss, torch.as_tensor(weight), *grads]
        theirs: list[Any] = [again, torch.as_tensor(weight_again), *grads_again]
        if not all(map(same_bits, ours, theirs)):
            raise CaptureError("a replay has other bits")
        return graph

    def _turn_off(self, why: str) -> None:
        self.off = why
        self._captured.clear()
        self.note(f"parallel.cuda_graphs is off: {why}")


def _first_error(error: BaseException) -> BaseException:
    """Return the error in which a capture failed; the end of the capture raises another one."""
    while isinstance(error.__context__, RuntimeError):
        error = error.__context__
    return error


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same shape, dtype and bits, or are both None."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, two = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, two)


def identity_of(function: Any, within: tuple[Any, ...] = ()) -> Any:
    """Return a key that is equal for functions that compute the same.

    A lambda in a loop is another object in each step. Its code is the same, and so is what it refers to: numbers and
    functions, followed further, and other objects.

    Args:
        function: The function.
        within: The code of the functions that refer to it, which may be recursive.
    """
    if isinstance(function, MethodType):
        return id(function.__self__), identity_of(function.__func__, within)
    if isinstance(function, partial):
        given = (*function.args, *(value for _, value in sorted(function.keywords.items())))
        return identity_of(function.func, within), tuple(_value(value, within) for value in given)
    if not isinstance(function, FunctionType) or function.__code__ in within:
        return id(function)
    code, scope = function.__code__, function.__globals__
    held = [*(cell.cell_contents for cell in function.__closure__ or ()), *(function.__defaults__ or ())]
    held += [scope[name] for name in code.co_names if name in scope and isinstance(scope[name], (*PLAIN, FunctionType))]
    return code, tuple(_value(value, (*within, code)) for value in held)


def _value(value: Any, within: tuple[Any, ...]) -> Any:
    """Return a number or text as it is, a function by what it computes, and any other object by its identity."""
    if isinstance(value, PLAIN):
        return type(value), value
    return identity_of(value, within) if isinstance(value, (FunctionType, partial)) else id(value)
