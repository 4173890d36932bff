"""Recognize scripts for DistributedDataParallel, Accelerate, Fabric and others, and the pages that convert them."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError
from unisono.launcher.supervisor import RunOutcome

PAGES = {
    "accelerate": ("Accelerate", "docs/start/from-accelerate.md"),
    "lightning": ("Lightning", "docs/start/from-lightning.md"),
    "lightning_fabric": ("Fabric", "docs/start/from-fabric.md"),
    "pytorch_lightning": ("Lightning", "docs/start/from-lightning.md"),
    "torchtune": ("torchtune", "docs/start/from-torchtune.md"),
    "deepspeed": ("DeepSpeed", "docs/start/from-ddp.md"),
    "horovod": ("Horovod", "docs/start/from-ddp.md"),
}
"""Libraries and their pages, by the name that a script imports."""

TORCH_NAMES = (
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "fully_shard",
    "DistributedSampler",
    "init_process_group",
)
"""Names of torch in scripts that distribute their training themselves."""

NOT_SET = "environment variable RANK expected, but not set"
"""Part of the error of torch's init_process_group without the environment variables of torchrun."""


def foreign(script: Path) -> tuple[str, str] | None:
    """Return the library that a script is written for, and the page that converts it, without running it.

    Returns:
        None if the script imports unisono, is not valid Python, or is for no known library.
    """
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
    if "lightning.fabric" in imported:
        return PAGES["lightning_fabric"]
    for name, found in PAGES.items():
        if name in libraries:
            return found
    words = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    words |= {node.id for node in nodes if isinstance(node, ast.Name)}
    words |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    return next(((f"torch's {known}", "docs/start/from-ddp.md") for known in TORCH_NAMES if known in words), None)


def _uses_unisono(folder: Path, module: str) -> bool:
    """Return whether this is a module in the script's folder that mentions unisono."""
    files = [folder / f"{module}.py", *sorted((folder / module).glob("*.py"))] if module else []
    return any("unisono" in file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())


def pointer(script: Path, line: CommandLine) -> Problem | None:
    """Return the message for a script that is written for another library; None if it is not."""
    found = foreign(script)
    if found is None:
        return None
    library, page = found
    facts = f"It uses {library}. Processes of a run join in unisono.main."
    do = f"{page} converts such a script line by line; unisono copy text writes an example."
    return Problem(f"{script.name} ended without calling unisono.main.", facts, do)


def hint(script: Path, line: CommandLine, outcome: RunOutcome) -> Problem | None:
    """Return advice for a script that failed because it distributes its training itself; None if that is not so."""
    record = outcome.failure.record if outcome.failure is not None else None
    if (problem := pointer(script, line)) is not None:
        return problem
    if record is None or NOT_SET not in record.message:
        return None
    error = f"{script.name} calls init_process_group."
    facts = "unisono.main joins the processes of a run, with any launcher."
    return Problem(error, facts, "remove init_process_group and destroy_process_group (docs/start/from-ddp.md).")


def never_joined(script: Path, ranks: int, line: CommandLine) -> SettingsError:
    """Return the error for a script that several processes ran independently of each other."""
    if (problem := pointer(script, line)) is not None:
        return SettingsError(*problem)
    facts = f"{ranks} processes ran it independently of each other. Processes of a run join in unisono.main."
    alone = shlex.join(["python", str(script)])
    do = f"unisono copy text my_{script.stem}.py (an example that calls it), or, as one process: {alone}"
    return SettingsError(f"{script.name} ended without calling unisono.main.", facts, do)
