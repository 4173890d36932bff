"""Scripts for other libraries: DistributedDataParallel, Accelerate, Fabric; and the page that converts each."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError
from unisono.launcher.supervisor import RunOutcome

PAGES = {
    "accelerate": ("Accelerate", "docs/start/from-accelerate.md"),
    "lightning": ("Lightning", "docs/start/from-fabric.md"),
    "lightning_fabric": ("Fabric", "docs/start/from-fabric.md"),
    "pytorch_lightning": ("Lightning", "docs/start/from-fabric.md"),
    "deepspeed": ("DeepSpeed", "docs/start/from-ddp.md"),
    "horovod": ("Horovod", "docs/start/from-ddp.md"),
}
"""Libraries by the name that a script imports, and the page for it."""

TORCHS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "fully_shard": "fully_shard",
    "DistributedSampler": "DistributedSampler",
    "init_process_group": "init_process_group",
}
"""Names of torch's that stand in a script which distributes its training by itself."""

NOT_SET = "environment variable RANK expected, but not set"
"""What torch's init_process_group says where no launcher of torch's has set its variables."""


def foreign(script: Path) -> tuple[str, str] | None:
    """The library that this script is written for, and the page that converts it; None: it imports unisono, it is not
    understood, or it is for none of those known here. The script is read and not run."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"), str(script))
    except (OSError, ValueError, SyntaxError):  # its own process reports that
        return None
    nodes = list(ast.walk(tree))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    libraries = {name.partition(".")[0] for name in imported}
    if "unisono" in libraries or any(_uses_unisono(script.parent, name) for name in libraries):
        return None
    for name, found in PAGES.items():
        if name in libraries:
            return found
    words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return next(((f"torch's {known}", "docs/start/from-ddp.md") for known in TORCHS if known in words), None)


def _uses_unisono(folder: Path, module: str) -> bool:
    """Is this a module beside the script, and does its text name unisono?"""
    files = [folder / f"{module}.py", *sorted((folder / module).glob("*.py"))] if module else []
    return any("unisono" in file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def pointer(script: Path, line: CommandLine) -> Problem | None:
    """What to say of a script for another library that was started as one of ours; None: nothing is known."""
    found = foreign(script)
    if found is None:
        return None
    library, page = found
    true = f"{script.name} uses {library}, and ended without calling unisono.main, where the processes of a run join."
    do = f"{page} converts such a script line by line; unisono copy text writes one to start from."
    return Problem(str(line), true, do)


def hint(script: Path, line: CommandLine, outcome: RunOutcome) -> Problem | None:
    """What to say beside a failure of the script that comes from how it distributes its training; None: nothing."""
    record = outcome.failure.record if outcome.failure is not None else None
    if (told := pointer(script, line)) is not None:
        return told
    if record is None or NOT_SET not in record.message:
        return None
    true = f"{script.name} calls init_process_group. unisono.main joins the processes of a run, with any launcher."
    return Problem(str(line), true, "remove init_process_group and destroy_process_group (docs/start/from-ddp.md).")


def never_joined(script: Path, ranks: int, line: CommandLine) -> SettingsError:
    """Several processes were started, and each ran the script by itself."""
    if (told := pointer(script, line)) is not None:
        return SettingsError(*told)
    true = f"It ran {ranks} times, each time alone: it never called unisono.main, where processes join."
    alone = shlex.join(["python", str(script)])
    do = f"unisono copy text my_{script.stem}.py (a script that calls it, to start from), or, as one process: {alone}"
    return SettingsError(str(line), true, do)
