"""The commands of pages that no walk types, each with the reason.

A key is a page and the beginning of a command, or "" for all commands of the page. `python -m tests.guides` counts
them.
"""

from __future__ import annotations

from tests.guides.page_commands import Command

REGISTRY = "it installs packages: tests/package installs the wheel in new environments"
PLACEHOLDER = "words of it stand for the reader's own"
LONG = "it takes minutes"
STAYS = "it serves until Ctrl-C"
ELSEWHERE = "it is typed in {}"

NOT_RUN: dict[tuple[str, str], str] = {
    ("docs/start/first-run.md", "srun"): ELSEWHERE.format("tests/cli/test_slurm.py, on a Slurm of the test"),
    ("docs/start/first-run.md", "mpirun"): ELSEWHERE.format("tests/cli/test_mpirun.py"),
    ("docs/start/install.md", "pip install"): REGISTRY,
    ("docs/start/install.md", "make run"): "it makes the environment in which this test runs",
    ("docs/start/install.md", ". .venv"): "it enters the environment in which this test runs",
    ("docs/guide/bench.md", "torchrun"): PLACEHOLDER,
    ("docs/guide/bench.md", "unisono bench --hosts"): ELSEWHERE.format("the page on slow networks, on two hosts"),
    ("docs/guide/checkpoints.md", "unisono run train.py --ranks 4 --set checkpoint.every=500 --set checkpoint.dir"): (
        "it needs a bucket: tests/unit/test_storage.py has one"
    ),
    ("docs/guide/convert.md", "pip install"): REGISTRY,
    ("docs/guide/export.md", "unisono export runs/mine folder"): (
        ELSEWHERE.format("the page on adapters, on a model of transformers")
    ),
    ("docs/guide/export.md", "unisono export runs/mine model.onnx"): (
        ELSEWHERE.format("tests/cli/test_export_program.py, where the packages for it are installed")
    ),
    ("docs/guide/export.md", "unisono export runs/mine model.gguf"): (
        ELSEWHERE.format("tests/cli/test_export_transformers.py, on a model that llama.cpp knows")
    ),
    ("docs/guide/export.md", "unisono export runs/mine model.pte"): (
        ELSEWHERE.format("tests/cli/test_export_program.py, where the packages for it are installed")
    ),
    ("docs/guide/faults/fault-drills.md", ""): f"{LONG}: tests/cli/test_rehearse.py types it",
    ("docs/guide/faults/hangs.md", ""): "it waits for ten minutes: tests/ranks/test_hangs.py waits less",
    ("docs/guide/faults/restarts.md", "export"): "it belongs to the command below it",
    ("docs/guide/faults/restarts.md", "torchrun"): ELSEWHERE.format("tests/network/test_torchrun_hosts.py"),
    ("docs/guide/hosts/encryption.md", "torchrun"): PLACEHOLDER,
    ("docs/guide/hosts/host-checks.md", ""): ELSEWHERE.format("tests/network/test_host_checks.py, on three hosts"),
    ("docs/guide/hosts/kubernetes.md", "pip install"): REGISTRY,
    ("docs/guide/hosts/kubernetes.md", "unisono kubernetes"): (
        "it needs a cluster: tests/cli/test_kubernetes.py submits manifests to an emulator"
    ),
    ("docs/guide/hosts/kubernetes.md", "kubectl"): "it needs a cluster",
    ("docs/guide/hosts/ray.md", "pip install"): REGISTRY,
    ("docs/guide/hosts/ray.md", "unisono ray"): (
        "it needs a cluster: tests/clusters/test_ray.py types it on one, where Ray is installed"
    ),
    (
        "docs/guide/monitoring/metrics.md",
        "unisono run",
    ): "it takes a fixed port: tests/cli/test_metrics_page.py has a free one",
    (
        "docs/guide/monitoring/metrics.md",
        "curl",
    ): "it asks a fixed port: tests/cli/test_metrics_page.py has a free one",
    ("docs/guide/monitoring/watch.md", "unisono watch"): STAYS,
    ("docs/guide/monitoring/watch.md", "unisono run train.py --ranks 4 --watch"): STAYS,
    ("docs/guide/pictures.md", "unisono run imagenet --ranks 2 --set data=SHARDS"): (
        ELSEWHERE.format("tests/recipes/test_imagenet.py, on shards of the test")
    ),
    (
        "docs/guide/pictures.md",
        "python -m unisono.recipes.vision.drawn_shapes",
    ): "it draws many pictures: the walk types it before the others, for a few",
    ("docs/guide/plan.md", "unisono plan"): f"{LONG}: tests/cli/test_plan.py types it",
    ("docs/guide/quantization.md", "pip install"): REGISTRY,
    ("docs/guide/speed.md", ""): f"{LONG}, to compile: tests/cli/test_speedup.py types it",
    ("docs/guide/speed-up.md", ""): f"{LONG}: tests/cli/test_scale.py types it with smaller numbers",
    ("docs/guide/situations/several-gpus.md", "unisono scale"): f"{LONG}: tests/cli/test_scale.py types it",
    ("docs/guide/situations/too-large.md", "unisono plan"): f"{LONG}: tests/cli/test_plan.py types it",
    ("docs/guide/trackers.md", "tensorboard"): STAYS,
    ("docs/guide/trackers.md", "MLFLOW"): "it needs a server: tests/cli/test_tracker_libraries.py has one",
    ("docs/guide/trackers.md", "wandb sync"): "it needs an account",
    ("docs/guide/trackers.md", "TRACKIO"): STAYS,
    ("docs/guide/uneven.md", "unisono run text --ranks 2 --cpu-ranks"): (
        "it needs an accelerator: tests/cli/test_cpu_ranks.py has a simulated one"
    ),
    ("docs/guide/uneven.md", "unisono run text --ranks 3 --ranks-per-device"): (
        "it needs an accelerator: tests/cli/test_shared_devices.py has a simulated one"
    ),
}


def key_of(command: Command) -> tuple[str, str] | None:
    """Return the entry of NOT_RUN that holds for a command; None if there is none."""
    return next((key for key in NOT_RUN if key[0] == command.page and command.text.startswith(key[1])), None)


def why_not(command: Command) -> str | None:
    """Return the reason why a command is not typed; None if it is."""
    key = key_of(command)
    return None if key is None else NOT_RUN[key]
