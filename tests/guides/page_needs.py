"""What pages need besides their text: files, earlier runs, moments to wait for, statuses of commands that fail."""

from __future__ import annotations

from collections.abc import Mapping

from tests.guides.page_commands import Command, files
from tests.guides.page_scripts import REFUSED_BY_CONVERT, STATEFUL, TRAIN, WITH_DROPOUT

SITUATIONS = "docs/guide/situations"
TEXT = (
    "--set steps=4 --set batch=16 --set model.width=32 --set model.depth=2 --set model.context=32"
    " --set validate_bytes=2048 --set sample_bytes=0"
)
RECIPES: Mapping[str, str] = {
    "run text": TEXT,
    "run distill": "--set steps=4 --set batch=16 --set validate_bytes=2048",
    "run supernet": (
        "--set source=digits --set epochs=none --set steps=2 --set batch=16 --set train_images=64 --set width=8"
        " --set population=4 --set generations=1"
    ),
    "run finetune": (
        "--set steps=2 --set batch=8 --set base_steps=2 --set length=64 --set valid_documents=8 --set lora.rank=2"
    ),
    "run imagenet": (
        "--set epochs=none --set steps=2 --set batch=16 --set drawn=40 --set size=16 --set model.width=2"
        " --set model.heads=2 --set model.depth=1"
    ),
    "run detection": "--set epochs=none --set steps=2 --set batch=8 --set drawn=20 --set size=48 --set width=4",
}
"""Flags that make recipes small, by command. What the page sets comes later, and wins."""
SMALLER: Mapping[str, tuple[tuple[str, str], ...]] = {
    "docs/start/first-run.md": (("--ranks 4", "--ranks 2"), ("per-node 4", "per-node 2"), ("epochs=60", "epochs=20")),
    "docs/guide/distillation.md": (("steps=400", "steps=4"),),
    "docs/guide/exchanges/local-sgd.md": (("--ranks 4", "--ranks 2"),),
    "docs/guide/exchanges/parameter-servers.md": (("--ranks 4", "--ranks 2"), ("--ranks 5", "--ranks 3")),
    "docs/guide/faults/restarts.md": (("--ranks 8", "--ranks 2"),),
    "docs/guide/hosts/encryption.md": (("a:4,b:4", "a:1,b:1"),),
    "docs/guide/hosts/slurm.md": (("--ranks-per-node 4", "--ranks-per-node 1"),),
    "docs/guide/hosts/ssh.md": (("a:4,b:4", "a:1,b:1"), ("--ranks 8", "--ranks 2")),
    "docs/guide/learning-rate.md": (("--ranks 4", "--ranks 2"),),
    "docs/guide/population.md": (
        ("--population 8 --interval 500", "--population 2 --interval 2 --set steps=4"),
        ("--ranks 4", "--ranks 2"),
    ),
    "docs/guide/prediction.md": (("runs/mine inputs", "runs/plain inputs"),),
    "docs/guide/tune.md": (("--trials 50 --ranks 4", "--trials 2 --ranks 2 --set steps=2"),),
}
"""By page, parts of commands that would take long, and what is typed in place of them."""

SLOW = frozenset(
    {
        "docs/guide/access.md",
        "docs/guide/adapters.md",
        "docs/guide/architecture-search.md",
        "docs/guide/bench.md",
        "docs/guide/check.md",
        "docs/guide/checkpoints.md",
        "docs/guide/convert.md",
        "docs/guide/distillation.md",
        "docs/guide/exchanges/local-sgd.md",
        "docs/guide/exchanges/parameter-servers.md",
        "docs/guide/export.md",
        "docs/guide/faults/process-death.md",
        "docs/guide/faults/replay.md",
        "docs/guide/faults/silent-corruption.md",
        "docs/guide/hosts/back-ends.md",
        "docs/guide/hosts/encryption.md",
        "docs/guide/hosts/ssh.md",
        "docs/guide/learning-rate.md",
        "docs/guide/monitoring/logs.md",
        "docs/guide/monitoring/report.md",
        "docs/guide/monitoring/watch.md",
        "docs/guide/parallel/index.md",
        "docs/guide/parallel/prove.md",
        "docs/guide/pictures.md",
        "docs/guide/population.md",
        "docs/guide/precision.md",
        "docs/guide/prediction.md",
        "docs/guide/profiles.md",
        "docs/guide/quantization.md",
        "docs/guide/replan.md",
        "docs/guide/settings.md",
        "docs/guide/trackers.md",
        "docs/guide/tune.md",
    }
)
"""Pages that `make slow` follows in place of CI, because each takes 40 seconds or more.

CI follows all Start pages, all situations, and the pages on Slurm and resume, however long they take.
"""

HOSTS = frozenset({"docs/guide/hosts/ssh.md", "docs/guide/hosts/encryption.md"})
"""Pages whose commands are typed on the host a, beside b, although their prompts name no host."""
SLURM = frozenset({"docs/guide/hosts/slurm.md"})
"""Pages whose commands are typed on a host with Slurm."""

DRAW = "python -m unisono.recipes.vision.drawn_shapes"
PACK = 'python -c "from pathlib import Path; from tests.pictures import pack'
MINE = "unisono run train.py --ranks 2 --run-dir runs/mine --set checkpoint.every=10"
BEFORE: Mapping[str, tuple[str, ...]] = {
    "docs/guide/access.md": (MINE,),
    "docs/guide/adapters.md": (f"{MINE} --set steps=4",),
    "docs/guide/export.md": (MINE,),
    "docs/guide/faults/replay.md": (MINE,),
    "docs/guide/faults/silent-corruption.md": (MINE,),
    "docs/guide/monitoring/logs.md": (MINE,),
    "docs/guide/monitoring/watch.md": (MINE,),
    "docs/guide/monitoring/report.md": (MINE, "cp -r runs/mine runs/one", "cp -r runs/mine runs/two"),
    "docs/guide/quantization.md": (MINE,),
    "docs/guide/pictures.md": (
        f"{DRAW} pictures --pictures 130 --valid 12 --classes 3",
        f"{DRAW} scenes --pictures 20 --valid 8 --scenes",
        f"{PACK}; pack(Path('pictures/train'), Path(), 128); pack(Path('pictures/val'), Path(), 10)\"",
        "for i in $(seq 0 99); do mv train-$i.tar train-$(printf %03d $i).tar; done",
    ),
    "docs/guide/prediction.md": (
        f"{MINE} --set steps=4",
        MINE.replace("train.py", "plain.py").replace("runs/mine", "runs/plain"),
        "printf '1 2 3 4\\n5 6 7 8\\n' > texts.txt",
        'python -c "import torch; from safetensors.torch import save_file;'
        " save_file({'input': torch.zeros(6, 20)}, 'inputs.safetensors')\"",
    ),
    "docs/guide/streams.md": (
        f"{DRAW} drawn --pictures 30 --valid 3 --classes 3 && mv drawn/train pictures",
        'mkdir texts && printf \'{"text": "a"}\\n{"text": "b"}\\n\' | tee texts/0.jsonl > texts/1.jsonl',
    ),
    "docs/start/from-trainer.md": (
        'python -c "from pathlib import Path; from unisono.recipes.finetune import Settings, make_base;'
        " make_base(Path('FOLDER'), Settings(base_steps=2))\"",
    ),
}
"""Commands that a reader of the page has typed earlier."""

LATER: Mapping[tuple[str, str], str] = {
    ("docs/start/first-run.md", "kill -KILL $!"): "runs/mine/checkpoints/step-00000100/manifest.json",
    (f"{SITUATIONS}/spot.md", "kill -TERM $!"): "runs/*/checkpoints/step-00000050/manifest.json",
    (f"{SITUATIONS}/spot.md", "kill -KILL $!"): "runs/spot/checkpoints/step-00000200/manifest.json",
    (f"{SITUATIONS}/spot.md", "unisono run train.py --ranks 2 --run-dir runs/other --autoresume"): (
        "runs/other/timeline/rank-0.jsonl"
    ),
}
"""Files, as patterns, for which a reader would wait before typing a command."""

STATUS: Mapping[tuple[str, str], tuple[int, ...]] = {
    ("docs/start/first-run.md", "wait $!"): (137,),
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
    (f"{SITUATIONS}/two-machines.md", "unisono doctor --hosts a,b --script train.py"): "it describes other machines",
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


def typed(command: Command) -> str:
    """Return what is typed for a command of a page: the command, or the same with smaller numbers."""
    text = command.text
    for long, short in SMALLER.get(command.page, ()):
        text = text.replace(long, short)
    return text


def files_for(page: str) -> dict[str, str]:
    """Return the files that a page presupposes, by name."""
    if page.startswith(f"{SITUATIONS}/"):
        return files(f"{SITUATIONS}/index.md")
    found = {"train.py": TRAIN, "small.toml": "steps = 3\n"}
    if page == "docs/guide/distillation.md":
        found["FILE"] = TRAIN
    if page == "docs/guide/population.md":
        found["train.py"] = WITH_DROPOUT
    if page == "docs/guide/prediction.md":
        found["plain.py"] = TRAIN
    if page == "docs/guide/convert.md":
        found |= {"gan.py": REFUSED_BY_CONVERT, "ddp.py": files("docs/start/from-ddp.md")["ddp.py"]}
    if page == "docs/guide/check.md":
        found["train.py"] = STATEFUL
    return found
