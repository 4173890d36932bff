"""Measure the exchange's work on one GPU beside the time that its memory traffic takes at least.

    python -m benchmarks.gpu.kernels

Bytes are those that the operation must read and write once. The bandwidth is that of a large copy on this device. A
share of 1 means that the operation is as fast as the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.device import Device, measured_device
from benchmarks.machine import parser, show
from unisono.exchange.compression.block_quantizer import BLOCK, BlockQuantizer
from unisono.exchange.compression.compressors import largest_elements
from unisono.exchange.kernels.device_kernels import REFERENCE, choose_kernels, kernels_for
from unisono.exchange.kernels.elementwise import divide_
from unisono.tensors.digest import tensor_hash

INT8 = BlockQuantizer(torch.int8, 127.0, 8)
INT4 = BlockQuantizer(torch.int8, 7.0, 4)
FP16 = BlockQuantizer(torch.float16, 0.0, 16)
PARAMETERS = 128


def operations(size: int, device: torch.device) -> dict[str, tuple[Callable[[], object], float]]:
    """Return, by name: an operation on `size` gradients, and the bytes that it must move per gradient."""
    a, b = torch.randn(size, device=device), torch.randn(size, device=device)
    wide = torch.zeros(size, dtype=torch.float64, device=device)
    one = torch.ones((), dtype=torch.float64, device=device)
    views, grads = a.split(-(-size // PARAMETERS)), b.clone().split(-(-size // PARAMETERS))
    int8, int4 = INT8.encode(a), INT4.encode(a)

    def store_one_by_one() -> None:
        for view, grad in zip(views, grads, strict=True):
            torch.add(grad, 0.0, out=view)

    def store_together() -> None:  # as in FlatGradient
        a.zero_()
        torch._foreach_add_(list(views), list(grads))

    return {
        f"store {PARAMETERS} gradients as 0 + g, one by one": (store_one_by_one, 8),
        f"store {PARAMETERS} gradients as 0 + g, together": (store_together, 8),
        "add two gradients": (lambda: a.add_(b), 12),
        "divide, and look for inf and nan": (lambda: divide_([a], 1.0), 8),
        "add, divide, and look for inf and nan": (lambda: kernels_for(a).add_and_divide(a, b, one, a), 12),
        "add to a wide sum": (lambda: wide.add_(b), 20),
        "fp16: encode": (lambda: FP16.encode(b), 6),
        "int8: encode": (lambda: INT8.encode(b), 5 + 4 / BLOCK),
        "int8: decode": (lambda: INT8.decode(int8), 5 + 4 / BLOCK),
        "4 bits: encode": (lambda: INT4.encode(b), 4.5 + 4 / BLOCK),
        "4 bits: decode": (lambda: INT4.decode(int4), 4.5 + 4 / BLOCK),
        "top 1 %: select": (lambda: largest_elements(b, size // 100), 4),
        "verify: hash": (lambda: tensor_hash(b), 4),
    }


def measure(device: Device, size: int, times: int) -> dict[str, Any]:
    """Return the time of each operation and its share of the bandwidth."""
    bandwidth = device.bandwidth()
    rows = {}
    for name, (work, moved) in operations(size, device.device).items():
        seconds = device.seconds(work, times)
        rows[name] = {"ms": 1e3 * seconds, "bytes": moved, "share": moved * size / bandwidth / seconds}
    return {"bandwidth": bandwidth, "size": size, "rows": rows, "kernels": in_use(device.device)}


def in_use(device: torch.device) -> str:
    """Say which kernels exchanges use on a device."""
    if device.type != "cuda":
        return "torch's operations, since this is not CUDA"
    kernels, reason = choose_kernels(device)
    return "Triton's" if kernels is not REFERENCE else f"torch's operations ({reason})"


def table(found: dict[str, Any]) -> str:
    lines = [
        f"| {found['size'] / 1e6:.0f} million gradients, {found['bandwidth'] / 1e9:.0f} GB/s | bytes each | ms | "
        "share of the bandwidth |",
        "|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        lines.append(f"| {name} | {row['bytes']:.2f} | {row['ms']:.3f} | {row['share']:.2f} |")
    lines += ["", f"Kernels in use for dividing and compressing: {found['kernels']}."]
    return "\n".join(lines)


def main() -> None:
    args = parser(__doc__).parse_args()
    device = measured_device()
    found = measure(device, 1 << (16 if device.dry else 27), 3 if device.dry else 20)
    show("gpu.kernels", {"device": device.name, **found}, lambda: table(found), as_json=args.json)


if __name__ == "__main__":
    main()
