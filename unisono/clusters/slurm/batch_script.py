"""Write the batch script of a run.

The script is a plain file for sbatch: it needs nothing but Slurm and the Python environment of the run, and it can be
read and changed. https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.clusters.slurm.job_request import JobRequest

INDEX = "%a"
"""Stands for the index of a job in its array, as in the names of output files."""

COMMENT_COLUMN = 40

SAVED = """\

# What the run has saved: its checkpoints, and the number of steps when it was stopped.
saved() {
    ls "$run_dir/checkpoints" 2> /dev/null
    grep -s '"steps":' "$run_dir/result.json"
}
before=$(saved)
"""

AGAIN = """\

# Queue the job again if it was stopped before its last step (status 0), or if a rank failed. Without
# a new checkpoint since this start, the same failure would come back, so the job ends.
stopped=$(grep -s '"stopped": true' "$run_dir/result.json")
if [ $status != 0 ] || [ -n "$stopped" ]; then
    if [ "$(saved)" != "$before" ]; then
        scontrol requeue "$job"
    fi
fi
"""


@dataclass(frozen=True, kw_only=True)
class BatchScript:
    """The batch script of a run.

    Attributes:
        request: the resources.
        folder: the working directory.
        program: the words that start one rank, without flags: the Python, and the script.
        flags: the flags of the run, a list of words for each, without --run-dir and --autoresume.
        own: the arguments of the script itself.
        run_dir: the run directory; "" for runs/NAME-JOB.
        typed: the command that wrote the file.
        file: the name of the file.
    """

    request: JobRequest
    folder: Path
    program: Sequence[str]
    flags: Sequence[Sequence[str]]
    own: Sequence[str]
    run_dir: str
    typed: str
    file: str

    def text(self) -> str:
        """Return the content of the file."""
        parts = ["#!/bin/bash", f"# Written by: {' '.join(self.typed.split())}", f"# Submit it: sbatch {self.file}"]
        parts += [*self._header(), "", *self._names()]
        if self.request.requeue:
            parts += [*SAVED.splitlines()]
        parts += ["", *self._command(), "status=$?"]
        if self.request.requeue:
            parts += [*AGAIN.splitlines()]
        return "\n".join([*parts, "exit $status", ""])

    # -- options

    def _header(self) -> Iterator[str]:
        for name, (value, why) in self._options().items():
            text = f"#SBATCH --{name}" + (f"={_quoted(value)}" if value else "")
            yield f"{text:<{COMMENT_COLUMN}}  # {why}" if why else text

    def _options(self) -> Mapping[str, tuple[str, str]]:
        """Return the options of sbatch by name, each with its value and the reason."""
        asked, found = self.request, dict[str, tuple[str, str]]()
        found["job-name"] = (asked.name, "")
        found["nodes"] = (str(asked.nodes), "")
        found["ntasks-per-node"] = (str(asked.ranks_per_node), "one task is one rank")
        for name, value in (
            ("cpus-per-task", str(asked.cpus_per_task or "")),
            ("gpus-per-node", asked.gpus_per_node),
            ("partition", asked.partition),
            ("account", asked.account),
            ("time", asked.time),
        ):
            if value:
                found[name] = (value, "")
        if asked.lead_seconds:
            why = "seconds before the time limit: finish the step, and save"
            found["signal"] = (f"TERM@{asked.lead_seconds}", why)
        if asked.requeue:
            found["requeue"] = ("", "after a node failure or a preemption")
        else:
            found["no-requeue"] = ("", "")
        if asked.array:
            found["array"] = (asked.array, "each task of the array is a run of its own")
        found["output"] = ("%x-%A_%a.out" if asked.array else "%x-%j.out", "")
        found["open-mode"] = ("append", "a requeued job keeps its earlier output")
        found["chdir"] = (str(self.folder), "")
        return found | {name: (value, "") for name, value in asked.other_options().items()}

    # -- the run

    def _names(self) -> Iterator[str]:
        """Yield the lines that name the job and its run directory."""
        yield "# The run directory is that of the job. A requeued job keeps its number, and continues there."
        if self.request.array:
            yield "job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        else:
            yield "job=$SLURM_JOB_ID"
        if not self.run_dir:
            yield f"run_dir={shlex.quote(f'runs/{self.request.name}-')}$job"
        else:
            yield f"run_dir={self._word(self.run_dir)}"

    def _command(self) -> Iterator[str]:
        """Yield the lines of the srun command."""
        cpus = f" --cpus-per-task={self.request.cpus_per_task}" if self.request.cpus_per_task else ""
        if self.request.ranks > 1:
            yield "# If one rank dies, end the others: they cannot finish the step without it."
        lines = [f"srun --kill-on-bad-exit=1{cpus}", shlex.join(self.program)]
        lines += ['--run-dir "$run_dir" --autoresume']
        lines += [" ".join(self._word(word) for word in words) for words in self.flags]
        lines += ["-- " + " ".join(self._word(word) for word in self.own)] if self.own else []
        yield from (" \\\n" + "    ").join(lines).split("\n")

    def _word(self, word: str) -> str:
        """Return a word as the shell reads it; in an array, %a is its index."""
        if not self.request.array or INDEX not in word:
            return shlex.quote(word)
        return '"' + re.sub(r'([\\"$`])', r"\\\1", word).replace(INDEX, "${SLURM_ARRAY_TASK_ID}") + '"'


def with_index(word: str, index: str) -> str:
    """Return a word for the job of an array with this index; "": no array."""
    return word.replace(INDEX, index) if index else word


def _quoted(value: str) -> str:
    """Return a value as sbatch reads it in a line #SBATCH."""
    return value if re.fullmatch(r"[^\s\"'\\#]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'
