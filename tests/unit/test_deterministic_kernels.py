"""Deterministic kernels of accelerators: torch's configuration, and messages about operators that have none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from unisono import environment
from unisono.config import PromiseSettings
from unisono.errors import LoopError
from unisono.parallel.speed.attention_backend import use_attention
from unisono.train.guarantees import deterministic_kernels
from unisono.train.guarantees.deterministic_kernels import (
    CUBLAS,
    describe_kernels,
    fix_kernels,
    name_unrepeatable_operator,
)

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def torchs_configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore torch's configuration after a test."""
    monkeypatch.setattr(deterministic_kernels, "unrepeatable", [])
    monkeypatch.delenv(CUBLAS[0], raising=False)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
    torch.use_deterministic_algorithms(False)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # noqa: B010
    cudnn.deterministic, cudnn.benchmark = before
    torch.set_float32_matmul_precision("highest")


def put() -> None:
    """Call an operator that has no deterministic kernel on any device."""
    torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_configuration_on_an_accelerator() -> None:
    torch.backends.cudnn.benchmark = True
    fix_kernels(CUDA, PromiseSettings())
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)
    assert environment.variables([CUBLAS[0]]) == {CUBLAS[0]: ":4096:8"}


def test_workspace_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUBLAS[0], ":16:8")
    fix_kernels(CUDA, PromiseSettings())
    assert environment.variables([CUBLAS[0]]) == {CUBLAS[0]: ":16:8"}


def test_configuration_on_the_cpu_is_left_alone() -> None:
    fix_kernels(torch.device("cpu"), PromiseSettings())
    assert not torch.are_deterministic_algorithms_enabled()
    assert environment.variables([CUBLAS[0]]) == {}


def test_unrepeatable_operator_is_named_with_a_remedy() -> None:
    fix_kernels(CUDA, PromiseSettings())
    with pytest.raises(LoopError) as raised, name_unrepeatable_operator():
        put()
    (problem,) = raised.value.problems
    assert problem.error == "The operator put_ computes other bits each time."
    assert problem.remedy == (
        "use index_put_, or put_(accumulate=True); or continue with a lowered promise: --set promise.on_violation=warn"
    )


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="another"), name_unrepeatable_operator():
        raise RuntimeError("another")


def test_unrepeatable_operator_lowers_the_promise_and_warns_once() -> None:
    shown: list[str] = []
    warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
    fix_kernels(CUDA, PromiseSettings(on_violation="warn"))
    put()
    put()
    assert deterministic_kernels.unrepeatable == ["put_ has no deterministic kernel"]
    assert len(shown) == 1


def test_fastest_kernels_lower_the_promise() -> None:
    fix_kernels(CUDA, PromiseSettings(kernels="fastest"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert deterministic_kernels.unrepeatable == ["kernels are chosen for speed (promise.kernels=fastest)"]


def test_description_contains_what_bits_depend_on() -> None:
    assert describe_kernels(torch.device("cpu")) == "float32 products highest"
    torch.set_float32_matmul_precision("high")
    assert describe_kernels(torch.device("cpu")) == "float32 products high"
    fix_kernels(CUDA, PromiseSettings())
    words = describe_kernels(CUDA).split(", ")
    assert words[:2] == ["float32 products high", "deterministic"]
    assert any(word.endswith("flash attention") for word in words)


def test_kernels_of_the_cpu_are_described_where_a_script_or_a_compiler_chooses_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    before = describe_kernels(cpu)
    restore = use_attention("math")
    try:
        assert describe_kernels(cpu) == f"{before}, no flash attention"
        assert describe_kernels(cpu, "math") == before  # the setting is compared by itself
    finally:
        restore()
    assert describe_kernels(cpu) == before
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 1.2.3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert describe_kernels(cpu, compiles=True) == f"{before}, c++ 1.2.3"
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert describe_kernels(cpu, compiles=True) == f"{before}, no C++ compiler"
