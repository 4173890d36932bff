"""Choose the kernels for a device: torch's operations (reference.py), or Triton's on CUDA (triton_kernels.py).

Triton is part of torch's builds for CUDA. Before the first use on a device, all its kernels run on some thousand
numbers beside torch's operations, zeros of both signs, subnormal and infinite numbers among them. Unless all bits are
equal, this process keeps torch's operations there. The check takes a second or two, mostly for compiling; Triton keeps
compiled kernels on disk.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, cast

import torch

from unisono.exchange.kernels import reference


class Kernels(Protocol):
    """The functions of reference.py."""

    def divide_(self, flat: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor: ...

    def add_and_divide(
        self, a: torch.Tensor, b: torch.Tensor, divisor: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor: ...

    def encode(self, values: torch.Tensor, largest: float, bits: int) -> torch.Tensor: ...

    def decode(self, encoded: torch.Tensor, bits: int) -> torch.Tensor: ...


REFERENCE = cast(Kernels, reference)


def kernels_for(tensor: torch.Tensor) -> Kernels:
    """Return the kernels for a gradient in float32, or for an encoded one, like this tensor."""
    if not tensor.is_cuda or tensor.dtype not in (torch.float32, torch.uint8) or not tensor.is_contiguous():
        return REFERENCE
    return choose_kernels(tensor.device)[0]


@cache
def choose_kernels(device: torch.device) -> tuple[Kernels, str]:
    """Return the kernels for a CUDA device; if they are torch's operations, also why."""
    try:
        kernels = cast(Kernels, importlib.import_module("unisono.exchange.kernels.triton_kernels"))
        with torch.no_grad():
            wrong = unequal_kernels(kernels, device)
    except Exception as error:  # no Triton, no compiler, or a version of Triton that does not know these kernels
        return REFERENCE, f"Triton does not work: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return (REFERENCE, f"other bits than torch: {', '.join(wrong)}") if wrong else (kernels, "")


def unequal_kernels(kernels: Kernels, device: torch.device) -> list[str]:
    """Return the names of those kernels whose bits differ from those of reference.py."""
    generator = torch.Generator().manual_seed(24)
    numbers = torch.randn(40 * 256, generator=generator) * torch.logspace(-42, 30, 40 * 256)
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, 3.4e38, -3.4e38])
    finite = torch.cat([numbers[torch.randperm(len(numbers), generator=generator)][:-7], special]).to(device)
    other = finite.flip(0).mul(0.999)
    infinite = torch.cat([finite[:-3], finite.new_tensor([float("inf"), float("-inf"), float("nan")])])
    wrong = set()
    for a, b in ((finite[:9001], other[:9001]), (infinite[-4098:], other[-4098:]), (finite * 0, -finite * 0)):
        for weight in (7.0, 8.0, 1e-3):
            divisor = a.new_tensor(weight, dtype=torch.float64)
            expected, found = a.clone(), a.clone()
            REFERENCE.divide_(expected, divisor)
            is_finite = kernels.divide_(found, divisor)
            if not _same_bits(expected, found) or _is_finite(expected) != bool(is_finite):
                wrong.add("divide_")
            REFERENCE.add_and_divide(a, b, divisor, expected)
            is_finite = kernels.add_and_divide(a, b, divisor, found)
            if not _same_bits(expected, found) or _is_finite(expected) != bool(is_finite):
                wrong.add("add_and_divide")
    halves = (torch.arange(256, device=device) - 127.5).repeat(3, 1)  # quotients between two integers
    for values in (finite.view(-1, 256), halves, torch.zeros(2, 256, device=device)):
        for largest, bits in ((127.0, 8), (7.0, 4), (2.0**14, 16)):
            encoded = REFERENCE.encode(values, largest, bits)
            if not torch.equal(encoded, kernels.encode(values, largest, bits)):
                wrong.add(f"encode, {bits} bits")
            if not _same_bits(REFERENCE.decode(encoded, bits), kernels.decode(encoded, bits)):
                wrong.add(f"decode, {bits} bits")
    return sorted(wrong)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether all bits are equal, but for the sign and the payload of NaN."""
    a, b = (x.masked_fill(x.isnan(), float("nan")) for x in (a, b))
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())
