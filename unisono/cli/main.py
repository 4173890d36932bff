"""The command `unisono`: its verbs, its help, and how errors are reported.

Exit status: 0 success, 1 failure, 2 a wrong request.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cyclopts import App, Group, Parameter

import unisono
from unisono.cli.clusters.kubernetes_command import kubernetes
from unisono.cli.clusters.ray_command import ray
from unisono.cli.clusters.slurm_command import slurm
from unisono.cli.commands.audit import audit
from unisono.cli.commands.bench import bench
from unisono.cli.commands.check import check
from unisono.cli.commands.copy import copy
from unisono.cli.commands.doctor import doctor
from unisono.cli.commands.export import export
from unisono.cli.commands.fingerprint import fingerprint
from unisono.cli.commands.profile import profile
from unisono.cli.commands.prove import prove
from unisono.cli.commands.replay import replay
from unisono.cli.commands.run_command import run
from unisono.cli.conversion.convert_command import convert
from unisono.cli.inspect.audit_log import audit_log
from unisono.cli.inspect.report import report
from unisono.cli.inspect.top import top
from unisono.cli.inspect.verify import verify
from unisono.cli.inspect.watch import watch
from unisono.cli.logs.logs_command import logs
from unisono.cli.planning.plan_command import plan
from unisono.cli.prediction.predict_command import predict
from unisono.cli.request.request_checks import inspect_script
from unisono.cli.request.run_options import RunRequest, split
from unisono.cli.request.suggestions import parsed
from unisono.cli.request.target import recipes
from unisono.cli.scaling_curve.scale_command import scale
from unisono.cli.sharding.shards_command import shards
from unisono.cli.speedup.speedup_command import speedup
from unisono.cli.tuning.tune_command import tune
from unisono.config import Settings, entries_of
from unisono.environment import remember_secrets
from unisono.errors import SettingsError, UnisonoError
from unisono.monitor import console

EXAMPLES = """\
Examples:
  unisono run text --ranks 2            train a language model on two processes
  unisono run train.py --set steps=500  train your own script
  unisono run train.py --resume         continue its newest run
  unisono slurm train.py --nodes 2      write a batch script for Slurm
  unisono kubernetes train.py --image I write manifests for a cluster
  unisono ray train.py --ranks 8        train in actors of Ray
  unisono copy text train.py            copy a recipe, to change it
  unisono convert ddp.py                convert a script for DDP or Accelerate
  unisono shards pictures shards        write shards of a folder, with an index
  unisono check train.py                compare 1, 2 and 3 processes bit by bit
  unisono prove train.py                compare shards and other placements
  unisono speedup train.py              try faster kernels
  unisono scale train.py --ranks 1,2,4  measure the speed-up of more processes
  unisono plan train.py --ranks 8       predict memory and time of placements
  unisono tune train.py --search ...    search settings
  unisono replay runs/mine --step 43    repeat a step of a run on one process
  unisono audit runs/mine               detect hardware that computes wrongly
  unisono profile runs/mine             show the cost of operators (profile.steps)
  unisono logs runs/mine --errors       print the errors of all ranks
  unisono audit-log runs/mine           print joins, losses and refusals
  unisono report runs/mine              write its report as a page
  unisono watch runs/mine               serve its report while it grows
  unisono top runs/mine                 show its ranks in the terminal
  unisono predict runs/mine DATA OUT    compute outputs for other data
  unisono doctor                        check that this machine is ready
  unisono bench --ranks 4               measure how fast processes communicate
"""

RUN = """\
  unisono run text --ranks 2
  unisono run train.py --ranks 4 --set batch=64 --set model.width=128
  unisono run train.py --run-dir runs/mine --resume
  unisono run train.py --watch           with a page that grows
  unisono run train.py -- --argument-of-the-script
  unisono run train.py --help            with the settings of the script
"""
BENCH = """\
  unisono bench --ranks 4                every collective and pair, on this host
  unisono bench --only all_reduce --only ring --sizes 1MB,16MB
  unisono bench --hosts a,b,c --only pairs
  torchrun --nnodes 2 --nproc-per-node 4 ... --no-python unisono bench
"""
SLURM = """\
  unisono slurm train.py --nodes 2 --ranks-per-node 4 --time 12:00:00
  unisono slurm train.py --gpus-per-node 8 --partition gpu --submit
  unisono slurm train.py --array 0-7 --set seed=%a
  unisono slurm text --nodes 2 --sbatch mem=64G --write job.sbatch
"""
RAY = """\
  unisono ray train.py --ranks 8         where a cluster is running
  unisono ray train.py --ranks 8 --gpus-per-rank 1 --strategy STRICT_PACK
  unisono ray text --ranks 2 --address local
"""
COPY = """\
  unisono copy text                      to text.py in the working directory
  unisono copy text train.py
"""
CONVERT = """\
  unisono convert ddp.py                 to ddp_unisono.py, beside it
  unisono convert ddp.py train.py --ranks 4
  unisono convert ddp.py --no-check --force
"""
SHARDS = """\
  unisono shards pictures shards         a folder for each class
  unisono shards texts shards --shard-size 1GB --order shuffled
  unisono shards pictures shards --skip-bad --force
"""
KUBERNETES = """\
  unisono kubernetes train.py --ranks 16 --image IMAGE --claim runs | kubectl apply -f -
  unisono kubernetes text --ranks 4 --image IMAGE --volume-size 10Gi --output text.yaml
  unisono kubernetes train.py --ranks 32 --gpus-per-pod 8 --image IMAGE --claim runs --job-set
"""
CHECK = """\
  unisono check train.py
  unisono check text --steps 5 --set model.dropout=0.1
"""
PROVE = """\
  unisono prove train.py                 every placement that fits 4 processes
  unisono prove text --parallel shard=2 --parallel replicate=2,shard=2
  unisono prove text --parallel shard=4 --steps 10 --set model.depth=2
"""
SPEEDUP = """\
  unisono speedup train.py               all options, on one process
  unisono speedup text --ranks 2 --only fused-optimizer --only bf16
  unisono speedup train.py --steps 30 --rounds 5 --json
"""
SCALE = """\
  unisono scale train.py                 powers of two up to the cores of this machine
  unisono scale text --ranks 1,2,3,4 --only strong
  unisono scale train.py --steps 30 --rounds 5 --page scale.html
"""
PLAN = """\
  unisono plan train.py                  up to one process for each core
  unisono plan train.py --ranks 8 --memory 24GB
  unisono plan text --ranks 2 --virtual-ranks --set model.width=512
"""
TUNE = """\
  unisono tune train.py --search 'lr=log(1e-4,1e-1)' --search 'model.depth=[2,4,8]' --trials 50
  unisono tune text --search 'lr=log(1e-4,1e-1)' --ranks 4 --pruner hyperband
  unisono tune train.py --search 'width=linear(8,64,8)' --minimize loss --minimize parameters
  unisono tune train.py --search 'lr=log(1e-4,1e-1)' --population 8 --interval 500
  unisono tune train.py --resume         continue a study that was stopped or killed
"""
AUDIT = """\
  unisono audit train.py                 a script from its beginning
  unisono audit runs/mine --steps 100    a run from its newest checkpoint
"""
REPLAY = """\
  unisono replay runs/mine --step 43
  unisono replay runs/mine --step 43 --virtual-rank 5 --debug
"""
DOCTOR = """\
  unisono doctor
  unisono doctor --json
  unisono doctor --hosts a,b --script train.py
  srun unisono doctor                    the hosts of the job
  unisono doctor --rehearse train.py --ranks 4
"""
LOGS = """\
  unisono logs runs/mine                 all ranks, merged by time
  unisono logs runs/mine --rank 2 --follow
  unisono logs runs/mine --errors
"""
FINGERPRINT = """\
  unisono fingerprint runs/mine          its newest complete checkpoint
  unisono fingerprint runs/mine/checkpoints/step-00000040 --state
"""
PROFILE = """\
  unisono run train.py --run-dir runs/mine --set profile.steps=20:23
  unisono profile runs/mine
  unisono profile runs/mine --rows 30
"""
REPORT = """\
  unisono report runs/mine               to runs/mine/report.html
  unisono report runs/one runs/two       compare them, in report.html
  unisono report runs/mine --text        what slowed it down, with the evidence
  unisono report runs/mine --flops       with model FLOPs utilization
"""
TOP = """\
  unisono top runs/mine                  q ends it
  unisono top runs/mine | cat            once
"""
AUDIT_LOG = """\
  unisono audit-log runs/mine
"""
WATCH = """\
  unisono watch runs/mine
  unisono watch runs                     a list of all runs
  unisono watch runs/mine --port 8000
  unisono watch runs/mine --stop         also print an address that may stop it
"""
EXPORT = """\
  unisono export runs/mine model.safetensors
  unisono export runs/mine average.safetensors --model average
  unisono export runs/mine model.safetensors --sign release.pem
"""

PREDICT = """\
  unisono predict runs/mine texts.txt labels.jsonl --ranks 2
  unisono predict runs/mine inputs.safetensors outputs.safetensors
"""
SIGNED = """\
  unisono verify runs/mine --key team.pub    its newest checkpoint
  unisono verify model.safetensors --key team.pub
"""

TRAIN, VERIFY, INSPECT = (Group(name, sort_key=i) for i, name in enumerate(("Train", "Verify", "Inspect")))

VERBS: tuple[tuple[Callable[..., int], Group, str], ...] = (
    (run, TRAIN, RUN),
    (slurm, TRAIN, SLURM),
    (kubernetes, TRAIN, KUBERNETES),
    (ray, TRAIN, RAY),
    (copy, TRAIN, COPY),
    (convert, TRAIN, CONVERT),
    (shards, TRAIN, SHARDS),
    (bench, TRAIN, BENCH),
    (speedup, TRAIN, SPEEDUP),
    (scale, TRAIN, SCALE),
    (plan, TRAIN, PLAN),
    (tune, TRAIN, TUNE),
    (check, VERIFY, CHECK),
    (prove, VERIFY, PROVE),
    (audit, VERIFY, AUDIT),
    (replay, VERIFY, REPLAY),
    (verify, VERIFY, SIGNED),
    (report, INSPECT, REPORT),
    (watch, INSPECT, WATCH),
    (top, INSPECT, TOP),
    (doctor, INSPECT, DOCTOR),
    (logs, INSPECT, LOGS),
    (audit_log, INSPECT, AUDIT_LOG),
    (fingerprint, INSPECT, FINGERPRINT),
    (profile, INSPECT, PROFILE),
    (export, INSPECT, EXPORT),
    (predict, INSPECT, PREDICT),
)
"""Each verb with its group in the help, and examples."""


def build_app(words: Sequence[str] = ()) -> App:
    """Return the parser. If these words ask for the help of `run`, it lists the settings of their target."""
    app = App(
        name="unisono",
        help="Train on one process or a hundred and get the same model, to the last bit.",
        help_epilogue=EXAMPLES,
        help_format="plaintext",
        version=unisono.__version__,
        default_parameter=Parameter(negative=()),
    )
    app["--help"].group = app["--version"].group = INSPECT
    for place, (verb, group, examples) in enumerate(VERBS):
        settings = _settings_of_target(words) if verb is run else ""
        app.command(verb, group=group, help_epilogue=f"Examples:\n{examples}{settings}", sort_key=place)
    return app


def _settings_of_target(words: Sequence[str]) -> str:
    """Return the table of settings below the help of `unisono run TARGET`; "" without a target."""
    if words[:1] != ["run"] or not {"--help", "-h"} & set(words):
        return ""
    script = _script_among(words)
    if script is None:
        return ""
    report = inspect_script(script)
    if report is None:
        return f"\n{script} did not reach unisono.main, so its settings are not listed.\n"
    return f"\n{report.table}\n"


def _script_among(words: Sequence[str]) -> Path | None:
    """Return the script of the recipe, or the script, that these words name; None if they name none."""
    known = recipes()
    paths = [known.get(word, Path(word)) for word in words[1:]]
    return next((path for path in paths if path.is_file()), None)


def _names_for_target(words: Sequence[str]) -> Sequence[str]:
    """Return the settings that can be given on a command line with these words."""
    script = _script_among(words)
    report = inspect_script(script) if script is not None else None
    return report.names if report is not None else [entry.name for entry in entries_of(Settings)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    remember_secrets()
    with console.broken_pipe_safe():
        try:
            return _execute(words)
        except UnisonoError as error:
            print(error, file=sys.stderr)
            if "--json" in split(words)[0]:
                print(json.dumps({"error": json_of(error)}))
            return error.exit_status
        except KeyboardInterrupt:
            return 1


def _execute(words: Sequence[str]) -> int:
    """Parse a command line, and call its verb."""
    flags, own = split(words)
    command, bound = parsed(build_app(flags), ["unisono"], flags, lambda: _names_for_target(flags))
    if command in (run, slurm, kubernetes, ray, check, prove, audit, doctor, speedup, scale, plan, tune, convert):
        bound.arguments["request"] = bound.arguments.get("request", RunRequest()).with_own(words, own)
    elif own:
        facts = (
            "Only `unisono run`, `slurm`, `kubernetes`, `ray`, `speedup`, `scale`, `plan`, `tune`, `convert`, `check`, "
            "`prove`, `audit` and `doctor` pass arguments to a script."
        )
        raise SettingsError(f"Unexpected argument: {shlex.join(own)}", facts, shlex.join(["unisono", *flags]))
    return command(*bound.args, **bound.kwargs) or 0


def json_of(error: UnisonoError) -> dict[str, object]:
    """Return an error as JSON can hold it."""
    return {
        "exit_status": error.exit_status,
        "type": type(error).__name__,
        "message": str(error),
        "problems": [problem._asdict() for problem in error.problems],
    }


if __name__ == "__main__":
    sys.exit(main())
