"""What pages need besides their text: files, earlier runs, moments to wait for, statuses of commands that fail."""

from __future__ import annotations

from collections.abc import Mapping

from tests.guides.page_commands import files
from tests.guides.page_scripts import REFUSED_BY_CONVERT, STATEFUL, TRAIN

SITUATIONS = "docs/guide/situations"
TEXT = (
    "--set steps=4 --set batch=16 --set model.width=32 --set model.depth=2 --set model.context=32"
    " --set validate_bytes=2048 --set sample_bytes=0"
)
RECIPES: Mapping[str, str] = {
    "run text": TEXT,
    "run distill": f"{TEXT} --set heads=2",
    "run supernet": "--set steps=2 --set batch=16",
}
"""Flags that make recipes small, by command. What the page sets comes later, and wins."""
SIZES: Mapping[str, Mapping[str, str]] = {"docs/start/first-run.md": {}}
"""The same for pages with sizes of their own."""

HOSTS = frozenset({"docs/guide/hosts/ssh.md", "docs/guide/hosts/encryption.md"})
"""Pages whose commands are typed on the host a, beside b, although their prompts name no host."""
SLURM = frozenset({"docs/guide/hosts/slurm.md"})
"""Pages whose commands are typed on a host with Slurm."""

MINE = "unisono run train.py --ranks 2 --run-dir runs/mine --set checkpoint.every=10"
BEFORE: Mapping[str, tuple[str, ...]] = {
    "docs/guide/access.md": (MINE,),
    "docs/guide/export.md": (MINE,),
    "docs/guide/faults/replay.md": (MINE,),
    "docs/guide/faults/silent-corruption.md": (MINE,),
    "docs/guide/monitoring/logs.md": (MINE,),
    "docs/guide/monitoring/watch.md": (MINE,),
    "docs/guide/monitoring/report.md": (MINE, "cp -r runs/mine runs/one", "cp -r runs/mine runs/two"),
    "docs/guide/quantization.md": (MINE,),
}
"""Commands that a reader of the page has typed earlier."""

LATER: Mapping[tuple[str, str], str] = {
    (f"{SITUATIONS}/spot.md", "kill -TERM $!"): "runs/*/checkpoints/step-00000050/manifest.json",
    (f"{SITUATIONS}/spot.md", "kill -KILL $!"): "runs/spot/checkpoints/step-00000200/manifest.json",
    (f"{SITUATIONS}/spot.md", "unisono run train.py --ranks 2 --run-dir runs/other --autoresume"): (
        "runs/other/timeline/rank-0.jsonl"
    ),
}
"""Files, as patterns, for which a reader would wait before typing a command."""

STATUS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("docs/guide/check.md", "unisono check train.py"): (1,),
    ("docs/guide/convert.md", "unisono convert gan.py"): (2,),
    (f"{SITUATIONS}/small-batches.md", "unisono run train.py --ranks 8 --set batch=4"): (2,),
    (f"{SITUATIONS}/two-machines.md", "unisono run train.py --hosts a:1,nowhere:1"): (2,),
    (f"{SITUATIONS}/several-gpus.md", "unisono run train.py --ranks 9"): (2,),
    (f"{SITUATIONS}/spot.md", "wait $!"): (0, 137),
    (
        f"{SITUATIONS}/too-large.md",
        "(ulimit -d 700000; unisono run train.py --set width=2048 --set depth=8 --set steps=2)",
    ): (1,),
    (f"{SITUATIONS}/spot.md", "unisono run train.py --ranks 2 --run-dir runs/other --autoresume"): (2,),
    (f"{SITUATIONS}/reproduce.md", "diff paper-environment.json runs/mine/environment.json"): (1,),
}
"""Exit statuses of commands that are to fail, or that a signal ends."""

UNQUOTED: Mapping[tuple[str, str], str] = {
    ("docs/start/install.md", "unisono doctor"): "it describes another machine",
    ("docs/guide/access.md", "unisono audit-log runs/mine"): "the run of the page was on two hosts, and was stopped",
    ("docs/guide/bench.md", "unisono bench --ranks 2"): "all of its figures are times",
    ("docs/guide/check.md", "unisono check train.py"): "the script of the page has another number of values",
    ("docs/guide/convert.md", "unisono convert gan.py"): "the script of the page is longer",
    ("docs/guide/faults/process-death.md", "unisono run text --ranks 4"): (
        "no process is killed here: tests/cli/test_deaths.py kills some"
    ),
    ("docs/guide/faults/process-death.md", "unisono run train.py --ranks 4 --set parallel.shard=2"): (
        "no process is killed here: tests/cli/test_deaths.py kills some"
    ),
    ("docs/guide/faults/replay.md", "unisono replay runs/mine --step 23"): "the script of the page is another one",
    ("docs/guide/monitoring/logs.md", "unisono logs runs/mine"): "the logs of the page are those of another script",
    ("docs/guide/monitoring/watch.md", "unisono top runs/mine"): "the run of the page has not ended yet",
    (f"{SITUATIONS}/uneven-pair.md", "unisono report runs/uneven --text"): (
        "which finding comes depends on what else the machine computes"
    ),
    ("docs/guide/profiles.md", "unisono profile runs/mine"): "the operators of the page are those of another script",
}
"""Commands whose output on the page is not that of the walk, each with the reason."""


PACKAGES: Mapping[tuple[str, str], str] = {
    ("docs/start/from-lightning.md", "python before.py"): "lightning",
    ("docs/start/from-torchtune.md", "python before.py"): "torchtune",
    ("docs/start/from-torchtune.md", "unisono run after.py --ranks 2"): "torchtune",
}
"""Packages without which a command is left out."""


def files_for(page: str) -> dict[str, str]:
    """Return the files that a page presupposes, by name."""
    if page.startswith(f"{SITUATIONS}/"):
        return files(f"{SITUATIONS}/index.md")
    found = {"train.py": TRAIN, "small.toml": "steps = 3\n"}
    if page == "docs/guide/convert.md":
        found |= {"gan.py": REFUSED_BY_CONVERT, "ddp.py": files("docs/start/from-ddp.md")["ddp.py"]}
    if page == "docs/guide/check.md":
        found["train.py"] = STATEFUL
    return found


def sizes_for(page: str) -> Mapping[str, str]:
    """Return the flags that are inserted after commands of a page."""
    return SIZES.get(page, RECIPES)
