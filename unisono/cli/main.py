"""The command `unisono`: which verbs there are, and how a request that cannot be met is told.

Exit status: 0 done, 1 it failed, 2 the request was wrong.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cyclopts import App, Group, Parameter

import unisono
from unisono.cli.commands.audit import audit
from unisono.cli.commands.bench import bench
from unisono.cli.commands.check import check
from unisono.cli.commands.copy import copy
from unisono.cli.commands.doctor import doctor
from unisono.cli.commands.export import export
from unisono.cli.commands.fingerprint import fingerprint
from unisono.cli.commands.prove import prove
from unisono.cli.commands.replay import replay
from unisono.cli.commands.run_command import run
from unisono.cli.request.request_checks import ScriptReport, inspect_script
from unisono.cli.request.run_options import RunRequest, split
from unisono.cli.request.suggestions import parsed
from unisono.cli.request.target import recipes
from unisono.config import Settings, entries_of
from unisono.errors import SettingsError, UnisonoError
from unisono.monitor import console

EXAMPLES = """\
Examples:
  unisono run text --ranks 2              train a language model, two processes
  unisono run train.py --set steps=500    train your own script
  unisono run train.py --resume           go on where its newest run stopped
  unisono copy text train.py              get a recipe to change
  unisono check train.py                  is it placement-proof?
  unisono prove train.py                  do shards and the like compute the same?
  unisono replay runs/mine --step 43      see one of its steps again, on one process
  unisono audit runs/mine                 does this machine compute rightly?
  unisono doctor                          is this machine ready?
  unisono bench --ranks 4                 how fast do processes talk to each other?
"""
RUN_EXAMPLES = """\
Examples:
  unisono run text --ranks 2
  unisono run train.py --ranks 4 --set batch=64 --set model.width=128
  unisono run train.py --run-dir runs/mine --resume
  unisono run train.py -- --an-argument-of-the-script
  unisono run train.py --help             with the settings of the script
"""

COPY_EXAMPLES = """\
Examples:
  unisono copy text                       to text.py, in the folder you are in
  unisono copy text train.py
"""
FINGERPRINT_EXAMPLES = """\
Examples:
  unisono fingerprint runs/mine           its newest complete checkpoint
  unisono fingerprint runs/mine/checkpoints/step-00000040 --state
"""
CHECK_EXAMPLES = """\
Examples:
  unisono check train.py                  is it placement-proof?
  unisono check text --steps 5 --set model.dropout=0.1
"""
PROVE_EXAMPLES = """\
Examples:
  unisono prove train.py                  every placement that fits on 4 processes
  unisono prove text --parallel shard=2 --parallel replicate=2,shard=2,reshard=step
  unisono prove text --parallel shard=4 --steps 10 --set model.depth=2
"""
REPLAY_EXAMPLES = """\
Examples:
  unisono replay runs/mine --step 43
  unisono replay runs/mine --step 43 --virtual-rank 5 --debug
"""
AUDIT_EXAMPLES = """\
Examples:
  unisono audit train.py                  a few steps of a script, on three processes
  unisono audit runs/mine --steps 100     the model and the data of a run, from its newest checkpoint
"""
EXPORT_EXAMPLES = """\
Examples:
  unisono export runs/mine model.safetensors
  unisono export runs/mine/checkpoints/step-00000040 average.safetensors --model average
"""
BENCH_EXAMPLES = """\
Examples:
  unisono bench --ranks 4                 every collective and pair, on this machine
  unisono bench --only all_reduce --only ring --sizes 1MB,16MB
  torchrun --nnodes 2 --nproc-per-node 4 ... --no-python unisono bench    between hosts
"""
DOCTOR_EXAMPLES = """\
Examples:
  unisono doctor
  unisono doctor --json
  unisono doctor --rehearse train.py --ranks 4    what is survived, and how long does it take?
"""

TRAIN = Group("Train", sort_key=1)
LOOK = Group("Look", sort_key=2)


def build_app(words: Sequence[str] = ()) -> App:
    """The verbs. The help of `run` tells the settings of the target that these words name."""
    app = App(
        name="unisono",
        help="Train on one process or a hundred and get the same model, to the last bit.",
        help_epilogue=EXAMPLES,
        help_format="plaintext",
        version=unisono.__version__,
        default_parameter=Parameter(negative=()),
    )
    app["--help"].group = app["--version"].group = LOOK
    app.command(run, group=TRAIN, help_epilogue=RUN_EXAMPLES + _settings_of_target(words))
    app.command(check, group=TRAIN, help_epilogue=CHECK_EXAMPLES)
    app.command(prove, group=TRAIN, help_epilogue=PROVE_EXAMPLES)
    app.command(audit, group=TRAIN, help_epilogue=AUDIT_EXAMPLES)
    app.command(copy, group=TRAIN, help_epilogue=COPY_EXAMPLES)
    app.command(replay, group=LOOK, help_epilogue=REPLAY_EXAMPLES)
    app.command(fingerprint, group=LOOK, help_epilogue=FINGERPRINT_EXAMPLES)
    app.command(export, group=LOOK, help_epilogue=EXPORT_EXAMPLES)
    app.command(doctor, group=LOOK, help_epilogue=DOCTOR_EXAMPLES)
    app.command(bench, group=LOOK, help_epilogue=BENCH_EXAMPLES)
    return app


def _settings_of_target(words: Sequence[str]) -> str:
    """Return the table of settings below the help of `unisono run TARGET`; "" without a target."""
    if words[:1] != ["run"] or not {"--help", "-h"} & set(words):
        return ""
    report = _report_on_target(words)
    return f"\n{report.table}\n" if report is not None else ""


def _report_on_target(words: Sequence[str]) -> ScriptReport | None:
    """Return the settings of the recipe or script among these words, if there is one."""
    known = recipes()
    paths = [known.get(word, Path(word)) for word in words[1:]]
    return next((inspect_script(path) for path in paths if path.is_file()), None)


def _names_for_target(words: Sequence[str]) -> Sequence[str]:
    """Return the settings that can be given on a command line with these words."""
    report = _report_on_target(words)
    return report.names if report is not None else [entry.name for entry in entries_of(Settings)]


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    with console.broken_pipe_safe():
        try:
            return _obey(words)
        except UnisonoError as error:
            print(error, file=sys.stderr)
            if "--json" in split(words)[0]:
                print(json.dumps({"error": told(error)}))
            return error.exit_status
        except KeyboardInterrupt:
            return 1


def _obey(words: Sequence[str]) -> int:
    """Do what these words say."""
    flags, own = split(words)
    command, bound = parsed(build_app(flags), ["unisono"], flags, lambda: _names_for_target(flags))
    if command in (run, check, prove, audit, doctor):
        bound.arguments["request"] = replace(bound.arguments.get("request", RunRequest()), own=tuple(own))
    elif own:
        asked, do = shlex.join(["unisono", *words]), shlex.join(["unisono", *flags])
        raise SettingsError(
            asked, "Only `unisono run`, `check`, `prove`, `audit` and `doctor` hand arguments on to a script.", do
        )
    return command(*bound.args, **bound.kwargs) or 0


def told(error: UnisonoError) -> dict[str, object]:
    """An error for programs."""
    return {
        "exit_status": error.exit_status,
        "type": type(error).__name__,
        "message": str(error),
        "problems": [problem._asdict() for problem in error.problems],
    }


if __name__ == "__main__":
    sys.exit(main())
