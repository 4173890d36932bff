"""Make an accelerator compute the same bits each time, and name the operators that cannot.

    torch     deterministic kernels (torch.use_deterministic_algorithms): no sums in the order of threads, and attention
              whose backward pass is repeatable. An operator without such a kernel raises an error
    cuBLAS    a workspace of fixed size (CUBLAS_WORKSPACE_CONFIG)
    cuDNN     no choice of kernels by measuring them

The formats of numbers (TF32, sums of 16 bits) remain as the script sets them. They are a part of the run's identity.

On the CPU torch's kernels are deterministic for one number of threads, and its configuration is left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from unisono import environment
from unisono.config import PromiseSettings
from unisono.errors import LoopError
from unisono.parallel.compiler_determinism import cpp_compiler
from unisono.parallel.speed.attention_backend import disabled_on_cpu, use_attention
from unisono.train.extensions import Extension

SIGN = "does not have a deterministic implementation"

ATTENTION = "Memory Efficient attention defaults to a non-deterministic algorithm"
"""The beginning of torch's warning of memory-efficient attention, where operators without a deterministic kernel cause
warnings. Where they cause errors, its backward pass is deterministic."""

CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""https://docs.nvidia.com/cuda/cublas/#results-reproducibility"""

CURES = {
    "ctc_loss": "compute the loss on the CPU: F.ctc_loss(log_probs.cpu(), targets.cpu(), ...)",
    "nll_loss2d": "flatten the pixels: F.cross_entropy(out.movedim(1, -1).flatten(0, -2), target.flatten())",
    "adaptive_avg_pool": "use F.avg_pool2d with a kernel size, or x.mean((2, 3)) for an output of 1 by 1",
    "adaptive_max_pool": "use F.max_pool2d with a kernel size",
    "fractional_max_pool": "use F.max_pool2d",
    "max_pool3d_with_indices": "use strides as large as the kernel",
    "reflection_pad": 'pad with zeros: F.pad(x, sizes, "constant")',
    "replication_pad": 'pad with zeros: F.pad(x, sizes, "constant")',
    "upsample": 'use F.interpolate(mode="nearest"), or "bilinear" for images',
    "grid_sampler": "sample on the CPU: F.grid_sample(x.cpu(), grid.cpu())",
    "cumsum": "multiply by a triangular matrix of ones, or compute it on the CPU",
    "embedding_bag": 'use nn.EmbeddingBag(mode="sum") or "mean"',
    "put_": "use index_put_, or put_(accumulate=True)",
    "kthvalue": "sort, and take the element",
    "median": "sort, and take the element",
    "histc": "use torch.histogram on the CPU",
    "bincount": "count without weights, or on the CPU",
}
"""By the beginning of an operator's name, as torch reports it: what to use instead."""

unrepeatable: list[str] = []
"""Why kernels of this process may compute other bits the next time."""


def fix_kernels(device: torch.device, promise: PromiseSettings) -> None:
    """Choose deterministic kernels for an accelerator, before the script computes on it."""
    if device.type == "cpu":
        return
    if promise.kernels == "fastest":
        unrepeatable.append("kernels are chosen for speed (promise.kernels=fastest)")
        return
    environment.set_for_libraries(*CUBLAS)
    warns = promise.on_violation == "warn"
    is_inspected = torch.is_deterministic_algorithms_warn_only_enabled()  # by `unisono check`, which names operators
    torch.use_deterministic_algorithms(True, warn_only=warns or is_inspected)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  (a property, of a module)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if warns and not is_inspected:
        _collect_warnings()


class AttentionChoice(Extension):
    """The back end of attention, from now to the end of the run."""

    def __init__(self, backend: str) -> None:
        self._restore = use_attention(backend)

    def close(self) -> None:
        self._restore()


def describe_kernels(device: torch.device, attention: str = "any", *, compiles: bool = False) -> str:
    """Return the formats of numbers and the kinds of kernels that bits depend on, as one text.

    Args:
        device: the device of this process.
        attention: the setting `speed.attention`. If it chooses a back end, torch's switches are not described: a resume
            compares the setting.
        compiles: whether settings compile code. For the CPU it depends on the version of the C++ compiler.
    """
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    found = [f"float32 products {torch.get_float32_matmul_precision()}"]
    if device.type == "cpu":
        found += [f"no {name} attention" for name in disabled_on_cpu() if attention == "any"]
        found += [cpp_compiler()] if compiles else []
    else:
        found.append("deterministic" if torch.are_deterministic_algorithms_enabled() else "not deterministic")
    if device.type == "cuda":
        formats = {
            "TF32 convolutions": cudnn.allow_tf32,
            "sums of 16 bits in bf16 products": _enabled(cuda.matmul.allow_bf16_reduced_precision_reduction),
            "sums of 16 bits in fp16 products": _enabled(cuda.matmul.allow_fp16_reduced_precision_reduction),
            "flash attention": attention != "any" or cuda.flash_sdp_enabled(),
            "memory-efficient attention": attention != "any" or cuda.mem_efficient_sdp_enabled(),
            "cuDNN attention": attention != "any" or cuda.cudnn_sdp_enabled(),
            "cuDNN": cudnn.enabled,
        }
        found += [name if on else f"no {name}" for name, on in formats.items()]
        found += [f"CUDA {torch.version.cuda}", f"cuDNN {cudnn.version()}"]
    return ", ".join(found)


def _enabled(value: Any) -> bool:
    """Return a switch of torch, which is a bool, or in some versions a tuple that begins with one."""
    return bool(value[0] if isinstance(value, tuple) else value)


@contextmanager
def name_unrepeatable_operator() -> Iterator[None]:
    """Raise LoopError instead of torch's own error where an operator has no deterministic kernel."""
    try:
        yield
    except RuntimeError as error:
        if SIGN not in str(error):
            raise
        name = _operator_in(str(error))
        cure = next((text for start, text in CURES.items() if name.startswith(start)), "use another operator")
        raise LoopError(
            f"The operator {name} computes other bits each time.",
            "torch has no deterministic kernel of it for this device, and the run promises equal bits.",
            f"{cure}; or continue with a lowered promise: --set promise.on_violation=warn",
        ).with_traceback(error.__traceback__) from None


def _operator_in(message: str) -> str:
    """Return the name of the operator in torch's message."""
    if ATTENTION in message:
        return "memory-efficient attention"
    return message.partition(SIGN)[0].split()[-1].removeprefix("torch.").removeprefix("Tensor.")


def _collect_warnings() -> None:
    """Append to `unrepeatable` each operator of which torch warns, and print the first warning of each."""
    show = warnings.showwarning

    def show_once(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if SIGN in str(message) or ATTENTION in str(message):
            why = f"{_operator_in(str(message))} has no deterministic kernel"
            if why in unrepeatable:
                return
            unrepeatable.append(why)
        show(message, *args, **kwargs)

    warnings.showwarning = show_once
    for sign in (SIGN, ATTENTION):
        warnings.filterwarnings("always", message=f".*{sign}", category=UserWarning)
