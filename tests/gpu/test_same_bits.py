"""One fingerprint on a GPU: on 1, 2 and 3 processes that share it, with workers, after a resume, and after a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Gpu
from tests.gpu.runs import SCRIPT, Start, train_all

TEXT = "text batch=16 steps=6 model.width=64 model.depth=2 model.context=64 validate_bytes=4096 sample_bytes=0"
IMAGE = "image source=digits batch=32 steps=6 epochs=none model.width=8 train_images=300 valid_images=64"
SPEECH = "speech source=spoken voices=3 draws=1 batch=16 steps=6 epochs=none model.width=16"
TARGETS = {
    "text": TEXT,
    "image with batch norm": IMAGE,
    "speech": SPEECH,
    "mlp with dropout": f"{SCRIPT} net=mlp steps=6",
    "llama": f"{SCRIPT} net=llama steps=6",
}
SHARED = {"1": (Start(1),), "2": (Start(2),), "3": (Start(3),)}
WORKERS = {
    "loader worker": (Start(1, "loader.workers=1"),),
    "loader workers on 2": (Start(2, "loader.workers=2"),),
}
RESUME = {
    "resume on 2": (Start(1, "steps=3"), Start(2, "steps=6"))
}  # not for the recipes, whose schedules need all steps
DEATH = {"death": (Start(3, "dies=2"),)}


def assert_one_fingerprint(results: dict[str, dict[str, Any]]) -> None:
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    assert not errors, "\n\n".join(f"{name}:\n{text}" for name, text in errors.items())
    assert {result["promise"] for result in results.values()} == {"exact"}, results
    fingerprints = {name: result["weights_sha256"] for name, result in results.items()}
    assert len(set(fingerprints.values())) == 1, fingerprints


@pytest.mark.parametrize("target", TARGETS)
def test_in_fp32(gpu: Gpu, tmp_path: Path, target: str) -> None:
    variants = SHARED | WORKERS | (RESUME | DEATH if SCRIPT in TARGETS[target] else {})
    assert_one_fingerprint(train_all(tmp_path, TARGETS[target], variants, gpu.environment))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("target", TARGETS)
def test_in_16_bits(gpu: Gpu, tmp_path: Path, target: str, precision: str) -> None:
    assert_one_fingerprint(train_all(tmp_path, f"{TARGETS[target]} precision={precision}", SHARED, gpu.environment))


@pytest.mark.usefixtures("only_cuda")
@pytest.mark.parametrize("target", ["text", "mlp with dropout", "llama"])
def test_compiled(gpu: Gpu, tmp_path: Path, target: str) -> None:
    variants = SHARED | (RESUME if SCRIPT in TARGETS[target] else {})
    assert_one_fingerprint(train_all(tmp_path, f"{TARGETS[target]} parallel.compile=true", variants, gpu.environment))


@pytest.mark.parametrize(
    ("net", "precision"), [("mlp", "fp32"), ("mlp", "fp16"), ("transformer", "fp32"), ("llama", "bf16")]
)
def test_replayed_as_cuda_graphs(gpu: Gpu, tmp_path: Path, net: str, precision: str) -> None:
    graphs = "parallel.cuda_graphs=true"
    variants = {"1": (Start(1),), "graphs": (Start(1, graphs),), "graphs on 2": (Start(2, graphs),)}
    target = f"{SCRIPT} net={net} steps=12 batch=16 virtual_ranks=4 precision={precision}"
    results = train_all(tmp_path, target, variants, gpu.environment)
    assert_one_fingerprint(results)
    found = [results[name]["cuda_graphs"] for name in ("graphs", "graphs on 2")]
    assert gpu.dry or all(each["off"] == "" and each["replays"] > 8 for each in found), found


KERNELS = {
    "float8 by tensors": (TEXT, "speed.float8=tensorwise"),
    "float8 by rows": (TEXT, "speed.float8=rowwise"),
    "fused optimizer": (TEXT, "speed.optimizer=fused"),
    "compiled optimizer": (TEXT, "speed.optimizer=compiled"),
    "compiled model": (TEXT, "speed.compile_model=true"),
    "channels_last": (f"{IMAGE} precision=bf16", "speed.channels_last=true"),
    **{f"{kind} attention": (f"{TEXT} precision=bf16", f"speed.attention={kind}") for kind in ("math", "flash")},
    "cuDNN attention": (f"{TEXT} precision=bf16", "speed.attention=cudnn"),
    "memory-efficient attention": (f"{TEXT} precision=bf16", "speed.attention=memory_efficient"),
}


@pytest.mark.usefixtures("only_cuda")
@pytest.mark.parametrize("kernel", KERNELS)
def test_other_kernels(gpu: Gpu, tmp_path: Path, kernel: str) -> None:
    """Settings of the section `speed` have the same bits on any number of processes."""
    if "float8" in kernel:
        pytest.importorskip("torchao")
    target, setting = KERNELS[kernel]
    variants = {"as it is": (Start(1),)} | {str(n): (Start(n, setting),) for n in (1, 2, 3)}
    results = train_all(tmp_path, target, variants, gpu.environment)
    whole = results.pop("as it is")
    if "attention" in kernel and "error" in results["1"]:  # cuDNN's has no deterministic backward pass
        assert all("cannot compute an attention" in result["error"] for result in results.values()), results
        return
    assert "error" not in results["1"], results
    assert results["1"]["loss"] == pytest.approx(whole["loss"], rel=0.02)
    assert_one_fingerprint(results)


@pytest.mark.usefixtures("only_cuda")
@pytest.mark.parametrize("reshard", ["layer", "step"])
def test_two_shards_on_one_gpu_are_refused(gpu: Gpu, tmp_path: Path, reshard: str) -> None:
    """Collectives of gloo with tensors of a GPU crash under FSDP, so processes that share one cannot share a model."""
    start = Start(2, f"parallel.shard=2 parallel.reshard={reshard}")
    found = train_all(tmp_path, TEXT, {"shards": (start,)}, gpu.environment)["shards"]
    assert "parallel.shard = 2 needs a device for each process." in found["error"]


def test_wide_sums(gpu: Gpu, tmp_path: Path) -> None:
    target = f"{SCRIPT} net=mlp steps=6 exchange=wide"
    assert_one_fingerprint(train_all(tmp_path, target, SHARED, gpu.environment))


@pytest.mark.parametrize("kind", ["fp16", "int8", "topk", "powersgd"])
def test_compressed_gradients_train(gpu: Gpu, tmp_path: Path, kind: str) -> None:
    target = f"{SCRIPT} net=mlp steps=6 compress.kind={kind}"
    results = train_all(tmp_path, target, {"1": (Start(1),), "2": (Start(2),)}, gpu.environment)
    assert not [result for result in results.values() if "error" in result], results
    assert results["2"]["loss"] == pytest.approx(results["1"]["loss"], rel=0.05)
