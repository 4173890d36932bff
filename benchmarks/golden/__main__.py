"""Record the fingerprints of short runs, and compare later runs with the record.

    python -m benchmarks.golden                     compare with fingerprints.json: minutes
    python -m benchmarks.golden --record            write it
    python -m benchmarks.golden --only tree shard   runs whose names contain one of these words

Use it around a change that must not move a bit: a renaming, a refactoring. A fingerprint depends on the version of
torch and the instruction set of the processor, so a record is valid on machines like the one that wrote it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.environment import inherited

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("fingerprints.json")
SCRIPT = "benchmarks/golden/script.py"
TEXT = "text batch=16 steps=5 model.width=32 model.depth=2 model.context=32 validate_bytes=4096 sample_bytes=0"
IMAGE = "image source=digits batch=32 steps=5 epochs=none model.width=8 train_images=300 valid_images=64"
SPEECH = "speech source=spoken voices=3 draws=1 batch=16 steps=4 epochs=none model.width=16"
TOPICS = "topics steps=5 epochs=none"


class Resume(NamedTuple):
    """The second start of a run: its number of processes and its settings."""

    ranks: int
    sets: str


class Case(NamedTuple):
    """A run: a target with settings of its own, the number of processes, further settings, and a resume."""

    target: str
    ranks: int = 1
    sets: str = ""
    then: Resume | None = None


def net(name: str, ranks: int = 1, sets: str = "", then: Resume | None = None) -> Case:
    """Return a case that trains one of the networks of script.py."""
    return Case(f"{SCRIPT} net={name}", ranks, sets, then)


CASES: dict[str, Case] = {
    "text on 1": Case(TEXT),
    "text on 3": Case(TEXT, 3),
    "text, shard 2": Case(TEXT, 2, "parallel.shard=2"),
    "text, shard 2 gathered once a step": Case(TEXT, 2, "parallel.shard=2 parallel.reshard=step"),
    "text, tensor 2": Case(TEXT, 2, "parallel.tensor=2"),
    "text, tensor 2 with sequence and loss": Case(
        TEXT, 2, "parallel.tensor=2 parallel.sequence_parallel=true parallel.loss_parallel=true"
    ),
    "text, context 2": Case(TEXT, 2, "parallel.context=2"),
    "text, pipeline 2": Case(TEXT, 2, "parallel.pipeline=2"),
    "text, pipeline 2 of 2 stages each": Case(TEXT, 2, "parallel.pipeline=2 parallel.schedule=Interleaved1F1B"),
    "text, replicate 2 of shard 2": Case(TEXT, 4, "parallel.shard=2"),
    "text, shard 2 of tensor 2": Case(TEXT, 4, "parallel.shard=2 parallel.tensor=2"),
    "text, recompute": Case(TEXT, 1, "parallel.activation_checkpoint=full"),
    "text, bf16": Case(TEXT, 2, "precision=bf16"),
    "text, bf16 parameters": Case(TEXT, 2, "parallel.param_dtype=bf16"),
    "image on 1": Case(IMAGE),
    "image on 2": Case(IMAGE, 2),
    "image, group norm, shard 2": Case(IMAGE, 2, "model.norm=group parallel.shard=2"),
    "speech on 2": Case(SPEECH, 2),
    "topics on 1": Case(TOPICS),
    "topics on 2, loader worker": Case(TOPICS, 2, "loader.workers=1"),
    "wide": net("mlp", 2, "exchange=wide"),
    "allreduce": net("mlp", 2, "exchange=allreduce"),
    "ring": net("mlp", 2, "exchange=ring"),
    "ddp": net("mlp", 2, "exchange=ddp"),
    "server": net("mlp", 3, "exchange=server server.count=1"),
    "two servers": net("cnn", 4, "exchange=server server.count=2"),
    "local": net("mlp", 2, "exchange=local_sgd local_sgd.sites=2 local_sgd.sync_every=3"),
    "local, 8 bits, fragments": net(
        "mlp", 2, "exchange=local_sgd local_sgd.sync_every=4 local_sgd.bits=8 local_sgd.num_fragments=2"
    ),
    "local, average": net("mlp", 2, "exchange=local_sgd local_sgd.sync_every=3 local_sgd.outer_optimizer=average"),
    "compress fp16": net("mlp", 2, "compress.kind=fp16"),
    "compress int8": net("mlp", 2, "compress.kind=int8 compress.start_step=2"),
    "compress topk": net("mlp", 2, "compress.kind=topk compress.ratio=0.1"),
    "compress powersgd": net("mlp", 2, "compress.kind=powersgd compress.rank=2"),
    "mlp on 1": net("mlp"),
    "mlp on 5": net("mlp", 5),
    "mlp, one virtual rank": net("mlp", 1, "virtual_ranks=1"),
    "mlp, micro-batches and clip": net("mlp", 2, "micro_batch=2 clip=0.5"),
    "mlp, sgd, shard 3": net("mlp", 3, "optimizer=sgd parallel.shard=3"),
    "mlp, adafactor": net("mlp", 2, "optimizer=adafactor"),
    "cnn on 1": net("cnn"),
    "cnn on 3": net("cnn", 3),
    "rnn on 2": net("rnn", 2),
    "transformer on 2": net("transformer", 2),
    "transformer, shard 2 of replicate 2 with buddies": net(
        "transformer", 4, "parallel.shard=2 parallel.replicate_shards=true"
    ),
    "transformer, fp16": net("transformer", 2, "precision=fp16"),
    "mlp, work stealing": net("mlp", 2, "balance.work_stealing=true"),
    "mlp, audit": net("mlp", 3, "audit_every=3"),
    "mlp, resume": net("mlp", 2, "steps=4", Resume(3, "steps=11")),
    "cnn, stop and resume": net("cnn", 2, "stop=3", Resume(2, "")),
    "transformer, shard 2, resume on 1": net(
        "transformer", 2, "steps=3 parallel.shard=2", Resume(1, "steps=6 parallel.shard=1")
    ),
    "mlp, a death": net("mlp", 3, "dies=3"),
    "transformer, shard 2, a death": net("transformer", 4, "dies=2 parallel.shard=2"),
    "server, a death": net("mlp", 3, "exchange=server dies=2"),
}


def machine() -> dict[str, str]:
    """Return the facts about this machine that change fingerprints."""
    return {"torch": torch.__version__.partition("+")[0], "instruction_set": torch.backends.cpu.get_cpu_capability()}


def start(case: Case, folder: Path, ranks: int, sets: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the command of a case in `folder`."""
    target, *own = case.target.split()
    words = [sys.executable, "-m", "unisono.cli.main", "run", target, "--run-dir", str(folder / "run")]
    words += ["--ranks", str(ranks), *flags]
    words += [word for each in (*own, *sets.split()) for word in ("--set", each)]
    environment = inherited({"PYTHONPATH": str(ROOT), "GOLDEN_FOLDER": str(folder)})
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=300)


def run(case: Case) -> dict[str, Any]:
    """Return the fingerprint, the loss and the promise of a run, or the first line of its error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = start(case, folder, case.ranks, case.sets)
        if case.then is not None and (folder / "run" / "result.json").exists():
            process = start(case, folder, case.then.ranks, case.then.sets, "--resume")
        path = folder / "run" / "result.json"
        if process.returncode or not path.exists():
            return {"error": (process.stderr.strip() or process.stdout.strip())[-600:]}
        result = json.loads(path.read_text())
        return {name: result.get(name) for name in ("weights_sha256", "loss", "promise", "steps")}


def names(only: Sequence[str]) -> list[str]:
    """Return the names of the cases that contain one of the words; without words, all."""
    return [name for name in CASES if not only or any(word in name for word in only)]


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--record", action="store_true", help="write fingerprints.json")
    flags.add_argument("--only", nargs="*", default=[], help="runs whose names contain one of these words")
    args = flags.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"machine": machine(), "runs": {}}
    if not args.record and record["machine"] != machine():
        print(f"The record is from another machine: {record['machine']}. This machine: {machine()}.")
        return 2
    differences = 0
    for name in names(args.only):
        result = run(CASES[name])
        if args.record:
            record["runs"][name] = result
        recorded = record["runs"].get(name)
        same = recorded == result and "error" not in result
        differences += not same
        print(f"{'same   ' if same else 'DIFFERS'}  {name}", "" if same else f"\n  {result}\n  {recorded}")
    if args.record:
        RECORD.write_text(json.dumps({"machine": machine(), "runs": record["runs"]}, indent=1) + "\n")
    print(f"{differences} of {len(names(args.only))} runs differ.")
    return min(differences, 1)


if __name__ == "__main__":
    sys.exit(main())
