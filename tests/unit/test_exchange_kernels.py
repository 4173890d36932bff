"""Kernels of exchanges have the bits of torch's operations, and are not used where they differ."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cli.command import ROOT
from unisono.exchange.kernels import device_kernels, reference
from unisono.exchange.kernels.device_kernels import REFERENCE, choose_kernels, kernels_for, unequal_kernels
from unisono.exchange.kernels.elementwise import divide_

CPU = torch.device("cpu")
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")


def kernels(**other: Any) -> Any:
    """Return the kernels of reference.py, some of them replaced."""
    names = ("divide_", "add_and_divide", "encode", "decode")
    return SimpleNamespace(**{name: getattr(reference, name) for name in names} | other)


def by_inverse(flat: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    return torch.isfinite(flat.mul_((1 / divisor).float()).sum())


def never_finite(flat: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    reference.divide_(flat, divisor)
    return torch.tensor(False)


def keeps_minus_zero(a: torch.Tensor, b: torch.Tensor, divisor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    is_finite = reference.add_and_divide(a, b, divisor, out)
    out.masked_fill_(out == 0, -0.0)
    return is_finite


def rounds_up(values: torch.Tensor, largest: float, bits: int) -> torch.Tensor:
    return reference.encode(torch.nextafter(values, values + 1), largest, bits)


def test_the_reference_equals_itself() -> None:
    assert unequal_kernels(REFERENCE, CPU) == []


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"divide_": by_inverse}, ["divide_"]),
        ({"divide_": never_finite}, ["divide_"]),
        ({"add_and_divide": keeps_minus_zero}, ["add_and_divide"]),
        ({"encode": rounds_up}, ["encode, 16 bits", "encode, 4 bits", "encode, 8 bits"]),
        ({"decode": lambda encoded, bits: reference.decode(encoded, bits) * 1.0000001}, None),
    ],
    ids=["inverse", "flag", "zeros", "rounding", "decode"],
)
def test_kernels_with_other_bits_are_named(other: dict[str, Any], named: list[str] | None) -> None:
    found = unequal_kernels(kernels(**other), CPU)
    assert found
    if named is not None:
        assert found == named


def test_kernels_with_other_bits_or_errors_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_kernels.cache_clear()
    monkeypatch.setattr(device_kernels.importlib, "import_module", lambda name: kernels(divide_=by_inverse))
    assert choose_kernels(CPU) == (REFERENCE, "other bits than torch: divide_")
    choose_kernels.cache_clear()

    def fail(name: str) -> Any:
        raise ImportError("No module named 'triton'\nand more")

    monkeypatch.setattr(device_kernels.importlib, "import_module", fail)
    assert choose_kernels(CPU) == (REFERENCE, "Triton does not work: ImportError: No module named 'triton'")
    choose_kernels.cache_clear()


def test_the_cpu_uses_torchs_operations() -> None:
    assert kernels_for(torch.ones(3)) is REFERENCE


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_divide_finds_elements_that_are_not_finite(value: float) -> None:
    flats = [torch.ones(3), torch.full((200_000,), 3e38), torch.ones(4, dtype=torch.float64)]
    assert divide_(flats, 2.0)  # the sum of the second overflows
    assert flats[1][0] == 1.5e38
    assert divide_([], 2.0)
    assert divide_([torch.empty(0)], 2.0)
    flats[0][1] = value
    assert not divide_(flats, 2.0)
    assert flats[1][0] == 0.75e38  # all are divided


RUN = """
import torch
from unisono.exchange.kernels.device_kernels import unequal_kernels
from unisono.exchange.kernels import triton_kernels
print(unequal_kernels(triton_kernels, torch.device("cpu")))
part = torch.zeros(3 + 2 * 260, dtype=torch.uint8)[3:].view(2, 260)  # a message whose memory is not aligned
print(triton_kernels.decode(part, 8).shape, triton_kernels.encode(torch.zeros(0, 256), 127.0, 8).shape)
"""


@NEEDS_TRITON
@pytest.mark.slow
def test_triton_kernels_have_the_bits_of_torch() -> None:
    """Triton's interpreter runs them on the CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RUN], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "torch.Size([2, 256]) torch.Size([0, 260])"], done.stderr


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from unisono.exchange.kernels import triton_kernels as kernels

def build(kernel, types, **constants):
    types = dict(zip((p.name for p in kernel.params if p.name not in constants), types, strict=True))
    signature = {p.name: types.get(p.name, "constexpr") for p in kernel.params}
    built = compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(built.asm["ptx"])

span = {"SPAN": kernels.SPAN}
build(kernels._divide, ["*fp32", "*fp64", "*i1", "i64"], **span)
build(kernels._add_and_divide, ["*fp32", "*fp32", "*fp64", "*fp32", "*i1", "i64"], **span)
for bits, codes in ((4, "*u8"), (8, "*i8"), (16, "*fp16")):
    blocks = {"LENGTH": 256, "BITS": bits, "ROWS": kernels.ROWS}
    build(kernels._encode, ["*fp32", "*fp32", codes, "i32", "i32", "fp32"], **blocks, ROUND=kernels.ROUND)
    build(kernels._decode, ["*fp32", codes, "*fp32", "i32", "i32"], **blocks)
"""


@NEEDS_TRITON
@pytest.mark.slow
def test_triton_kernels_compile_to_ieee_division_without_contraction() -> None:
    """Compile for an H100, which needs no GPU."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(".visible .entry") == 8
    assert "div.rn.f32" in done.stdout
    assert not any(word in done.stdout for word in ("div.full", "div.approx", "fma.", "mad.f32", ".ftz"))
