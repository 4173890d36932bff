"""An optimizer that steps local shards has the bits of one that steps whole parameters: parameters and state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from unisono.distributed.process_group import to_local
from unisono.train.optimization import sharded_step
from unisono.train.optimization.sharded_step import GRAIN, on_local_shards, prepare, spans

Case = tuple[str, dict[str, Any]]

SHAPES = [(19, 11), (65,), (33, 7), (1, 5)]
MORE = [(7,), (1, 40), (130, 13), (1,), (2, 1000), (700, 101)]
LARGE = [(700, 101), (3, 40_000)]
LOOPS: list[dict[str, Any]] = [{"foreach": True}, {"foreach": False}]
FUSED: list[dict[str, Any]] = [*LOOPS, {"fused": True}]

OPTIMIZERS: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        "SGD",
        [
            {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            {"lr": 0.01},
            {"lr": 0.01, "momentum": 0.9, "dampening": 0.3, "maximize": True, "weight_decay": 0.01},
        ],
        FUSED,
    ),
    (
        "Adam",
        [
            {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
            {"lr": 0.01, "maximize": True},
            {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1},
        ],
        FUSED,
    ),
    ("AdamW", [{"lr": 0.01}, {"lr": 0.01, "amsgrad": True, "maximize": True}], FUSED),
    ("Adagrad", [{"lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1}, {"maximize": True}], FUSED),
    ("Adadelta", [{"lr": 0.1, "weight_decay": 0.1, "maximize": True}, {}], LOOPS),
    ("Adamax", [{"lr": 0.01, "weight_decay": 0.1, "maximize": True}, {}], LOOPS),
    ("ASGD", [{"lr": 0.01, "weight_decay": 0.1, "maximize": True, "t0": 2}, {}], LOOPS),
    ("NAdam", [{"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}, {}], LOOPS),
    ("RAdam", [{"lr": 0.01, "weight_decay": 0.1, "maximize": True}, {"decoupled_weight_decay": True}], LOOPS),
    ("RMSprop", [{"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}, {"maximize": True}], LOOPS),
    ("Rprop", [{"lr": 0.01, "maximize": True}, {}], LOOPS),
]


def cases(*, full: bool) -> Iterator[Case]:
    for name, options, kinds in OPTIMIZERS:
        for chosen in options if full else options[:1]:
            for kind in kinds:
                yield name, {**chosen, **kind}


def broken(case: Case, dtype: torch.dtype) -> bool:
    """Return whether step.update refuses a case because the kernel of torch does not support it."""
    return case[0] == "SGD" and "fused" in case[1] and dtype.itemsize == 2


def part(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    rows = -(-len(tensor) // size)
    return tensor[rank * rows : (rank + 1) * rows].clone()


def trained(case: Case, dtype: torch.dtype, place: Callable[[torch.Tensor], Any], shapes: Any) -> tuple[Any, ...]:
    """Return parameters and state after three steps; in the second, the first parameter has no gradient."""
    g = torch.Generator().manual_seed(3)

    def drawn(shape: Any) -> Any:
        return place(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype))

    params = [torch.nn.Parameter(drawn(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, case[0])(params, **case[1])
    prepare(optimizer)
    for step in range(3):
        for number, (p, shape) in enumerate(zip(params, shapes, strict=True)):
            p.grad = drawn(shape)
            if step == 1 and number == 0:
                p.grad = None
        with on_local_shards(optimizer):
            optimizer.step()
    return [p.detach() for p in params], [
        (n, *item) for n, p in enumerate(params) for item in optimizer.state[p].items()
    ]


def bits(value: Any) -> Any:
    value = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


def expected(value: Any, rank: int, size: int) -> Any:
    return bits(part(value, rank, size) if isinstance(value, torch.Tensor) and value.dim() else value)


def differing(
    size: int, dtypes: Any, *, full: bool = False, shapes: Any = SHAPES, names: Any = None, threads: int = 1
) -> list[Any]:
    """Return the (rank, case, dtype) whose bits differ from those of one process."""
    selected = [
        (c, d) for c in cases(full=full) for d in dtypes if not broken(c, d) and (names is None or c[0] in names)
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        truth = [trained(case, dtype, lambda whole: whole, shapes) for case, dtype in selected]
        found: list[Any] = []
        for rank in range(size):
            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
            for (case, dtype), (params, state) in zip(selected, truth, strict=True):
                mine = trained(case, dtype, _placed(mesh, rank, size), shapes)
                same = [bits(p) for p in mine[0]] == [expected(p, rank, size) for p in params]
                same &= [(*k, bits(v)) for *k, v in mine[1]] == [(*k, expected(v, rank, size)) for *k, v in state]
                found += [] if same else [(rank, case, dtype)]
            dist.destroy_process_group()
        return found
    finally:
        torch.set_num_threads(before)
        if dist.is_initialized():
            dist.destroy_process_group()


def _placed(mesh: DeviceMesh, rank: int, size: int) -> Callable[[torch.Tensor], Any]:
    def place(whole: torch.Tensor) -> Any:
        mine = part(whole, rank, size)
        return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())

    return place


def test_every_elementwise_optimizer_has_the_bits_of_one_process() -> None:
    assert differing(3, [torch.float32, torch.bfloat16]) == []


def test_threads_divide_a_shard_as_they_divide_the_whole() -> None:
    few: dict[str, Any] = {"shapes": LARGE, "names": ["SGD"], "threads": 3}
    assert differing(2, [torch.float32, torch.bfloat16], **few) == []


def test_without_block_alignment_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_step, "depends_on_position", lambda p, group: False)
    found = differing(3, [torch.float32, torch.bfloat16], names=["SGD", "Adadelta"])
    assert {dtype for _, case, dtype in found if "fused" in case[1]} == {torch.float32}
    assert {dtype for _, case, dtype in found if "fused" not in case[1]} == {torch.bfloat16}


class Mixed(torch.optim.SGD):
    """Step DTensors and plain tensors together, which cannot run on local shards."""

    by_element = True


def test_an_optimizer_of_several_meshes_keeps_its_options() -> None:
    """Checkpoints contain the options, so they must not depend on the placement."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        params = [torch.nn.Parameter(_placed(mesh, 0, 2)(torch.ones(4, 3))), torch.nn.Parameter(torch.ones(3))]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = Mixed(params, lr=0.5, foreach=True)
        seen: list[bool] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["foreach"]))
        prepare(optimizer)
        with on_local_shards(optimizer):
            optimizer.step()
            seen.append(optimizer.param_groups[0]["foreach"])
        assert seen == [True, True]
        assert [float(to_local(p.detach()).view(-1)[0]) for p in params] == [0.5, 0.5]
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_all_options_of_every_optimizer(size: int, threads: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    assert differing(size, dtypes, full=True, shapes=[*SHAPES, *MORE], threads=threads) == []


@given(total=st.integers(1, 5 * GRAIN), block=st.sampled_from([16, 32, 64]), threads=st.integers(1, 7), data=st.data())
def test_spans_cover_a_shard_and_end_at_blocks(total: int, block: int, threads: int, data: Any) -> None:
    begin = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(begin + 1, total))
    parts = min(threads, -(-total // GRAIN)) if total > GRAIN else 1
    chunk = -(-total // parts)
    reached = begin
    for first, last in spans(begin, end, total, block, threads):
        assert max(first, begin) == reached, "no gap, and none twice"
        reached = min(last, end)
        of = first // chunk * chunk
        assert (first - of) % block == 0
        assert (last - of) % block == 0 or last == min(of + chunk, total)
        length = last - first
        cut = -(-length // (min(threads, -(-length // GRAIN)) if length > GRAIN else 1))
        assert cut == length or cut % block == 0, "threads meet at a block"
    assert reached == end
