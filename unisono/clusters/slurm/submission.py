"""Submit a batch script with sbatch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from unisono.config import plural
from unisono.errors import SettingsError

SECONDS = 60
"""The longest time for the controller to answer."""


def submit(file: Path) -> str:
    """Submit a batch script and return the number of the job.

    Raises:
        SettingsError: if Slurm is not installed, does not answer or does not accept the job. The file stays.
    """
    again = f"sbatch {file}"
    if shutil.which("sbatch") is None:
        fact = f"{file} is written. There is no sbatch on this host's PATH."
        raise SettingsError("Slurm is not installed here.", fact, f"{again} (on a login node of the cluster)")
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(file)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        fact = f"{file} is written. sbatch waited {plural(SECONDS, 'second')} for the controller."
        do = f"scontrol ping, and squeue --me (to see whether the job is there), then {again}"
        raise SettingsError("Slurm does not answer.", fact, do) from None
    said = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines() if line.strip()]
    reason = "; ".join(said) or f"sbatch ended with status {done.returncode}"
    reason = f"{reason[:1].upper()}{reason[1:]}"
    if done.returncode and "contact slurm controller" in reason:
        fact = f"{file} is written. {reason}."
        raise SettingsError("Slurm does not answer.", fact, f"scontrol ping, then {again}")
    if done.returncode:
        fact = f"{file} is written. {reason}."
        raise SettingsError("Slurm does not accept the job.", fact, f"correct the request, or the file, then {again}")
    return done.stdout.strip().partition(";")[0]
