"""Command lines that cannot be parsed: the message proposes the command that was probably meant."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import unisono
from tests.cli.refused_requests import RequestProblems
from unisono.cli.main import main
from unisono.cli.request.run_options import RunRequest
from unisono.errors import Problem, SettingsError

RUN = "unisono run train.py"
CHECK = "unisono check train.py --json"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "error", "facts", "do"),
    [
        (
            "run train.py --batch 64 --ranks 2",
            "There is no flag --batch.",
            "batch is a setting; settings are given with --set.",
            "unisono run train.py --set batch=64 --ranks 2 --json",
        ),
        (
            "run train.py --micro-batch=4",
            "There is no flag --micro-batch.",
            "micro_batch is a setting; settings are given with --set.",
            "unisono run train.py --set micro_batch=4 --json",
        ),
        (
            "run train.py --rank 2",
            "There is no flag --rank.",
            "The nearest flag is --ranks.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "run train.py --parallel shard=2 --ranks 2",
            "There is no flag --parallel.",
            "--parallel is a flag of unisono prove; settings are given with --set.",
            "unisono run train.py --set parallel.shard=2 --ranks 2 --json",
        ),
        (
            "prove train.py --ranks 2 --steps 3",
            "There is no flag --ranks.",
            "Other verbs have it; unisono prove does not.",
            "unisono prove train.py --steps 3 --json (without it)",
        ),
        (
            "run train.py --steps 20",
            "There is no flag --steps.",
            "steps is a setting; settings are given with --set.",
            "unisono run train.py --set steps=20 --json",
        ),
        (
            "run --lr 0.1 train.py",
            "There is no flag --lr.",
            "lr is a setting; settings are given with --set.",
            "unisono run --set lr=0.1 train.py --json",
        ),
        (
            "run train.py batch=64 lr=2 --ranks 2",
            "Unexpected argument: batch=64 lr=2",
            "Settings are given with --set.",
            "unisono run train.py --ranks 2 --json --set batch=64 --set lr=2",
        ),
        (
            "check train.py batch=64",
            "Unexpected argument: batch=64",
            "Settings are given with --set.",
            "unisono check train.py --json --set batch=64",
        ),
        (
            "run train.py mine=64 --ranks 2",
            "Unexpected argument: mine=64",
            "Arguments of the script itself come after --.",
            "unisono run train.py --ranks 2 --json -- mine=64",
        ),
        *(
            (
                f"run train.py {typed}",
                "--set lr has no value.",
                "--set takes key=value, in one word.",
                f"unisono run train.py {meant} --json",
            )
            for typed, meant in (
                ("--set lr 0.1", "--set lr=0.1"),
                ("--set lr -0.1 --ranks 2", "--set lr=-0.1 --ranks 2"),
                ("--set lr = 0.1", "--set lr=0.1"),
                ("--set lr= 0.1", "--set lr=0.1"),
                ("--set lr =0.1", "--set lr=0.1"),
                ("--set lr 0.1 --set batch 64", "--set lr=0.1 --set batch=64"),
                ("--set lr 0.1 --set batch=64", "--set lr=0.1 --set batch=64"),
            )
        ),
        (
            "run --set lr 0.1 train.py",
            "--set lr has no value.",
            "--set takes key=value, in one word.",
            "unisono run --set lr=0.1 train.py --json",
        ),
        (
            "run --set lr 0.1 --set batch 64",
            "--set lr has no value.",
            "--set takes key=value, in one word.",
            "unisono run --set lr=0.1 --set batch=64 --json",
        ),
        (
            "run train.py --set lr 0.1 batch=64",
            "--set lr has no value.",
            "--set takes key=value, in one word.",
            "unisono run train.py --set lr=0.1 --json --set batch=64",
        ),
        (
            "run train.py --set lr=0.1 more",
            "Unexpected argument: more",
            "Arguments of the script itself come after --.",
            "unisono run train.py --set lr=0.1 --json -- more",
        ),
        (
            "bench batch=64",
            "Unexpected argument: batch=64",
            "unisono bench takes no such argument.",
            "unisono bench --help",
        ),
        (
            "bench --steps 3",
            "There is no flag --steps.",
            "Other verbs have it; unisono bench does not.",
            "unisono bench --json (without it)",
        ),
        (
            "run train.py --nproc_per_node=4 --resume",
            "There is no flag --nproc_per_node.",
            "--ranks is the number of processes.",
            "unisono run train.py --ranks 4 --resume --json",
        ),
        (
            "run train.py --local_rank=0 --resume",
            "There is no flag --local_rank.",
            "Launchers pass it to each process that they start.",
            "unisono run train.py --ranks 2 --resume --json",
        ),
        (
            "run train.py -np 4",
            "There is no flag -np.",
            "--ranks is the number of processes.",
            "unisono run train.py --ranks 4 --json",
        ),
        (
            "run train.py --num_gpus 2",
            "There is no flag --num_gpus.",
            "--ranks is the number of processes.",
            f"{RUN} --ranks 2 --json",
        ),
        (
            "run train.py --gpus 0,1",
            "There is no flag --gpus.",
            "Devices are selected with CUDA_VISIBLE_DEVICES.",
            f"env CUDA_VISIBLE_DEVICES=0,1 {RUN} --ranks 2 --json",
        ),
        (
            "run train.py --nnodes 1 --master_addr 127.0.0.1 --master_port 29501 --gpus 4",
            "There is no flag --gpus.",
            "--ranks is the number of processes.",
            f"{RUN} --ranks 4 --json",
        ),
        *(
            (
                f"run train.py {typed}",
                f"There is no flag {flag}.",
                "unisono run starts processes on several hosts: the same command on each, with its number.",
                f"{RUN} {rest}--json --ranks {ranks} --nodes {nodes} --node {node} --meet {at} on the first host; on "
                "the others --node 1, ...",
            )
            for typed, flag, nodes, ranks, node, at, rest in (
                ("--nnodes 3", "--nnodes", 3, 6, 0, "HOST:29500", ""),
                ("--num-nodes 2 --resume", "--num-nodes", 2, 4, 0, "HOST:29500", "--resume "),
                ("--nnodes=2 --nproc_per_node=8 --master_addr a --master_port 1", "--nnodes", 2, 16, 0, "a:1", ""),
                ("--num_machines 2 --machine_rank 1 --main_process_ip a", "--num_machines", 2, 4, 1, "a:29500", ""),
                ("--rdzv-endpoint=a:7 --rdzv-backend=c10d", "--rdzv-endpoint", 2, 4, 0, "a:7", ""),
            )
        ),
        *(
            (
                f"run train.py {typed}",
                f"There is no flag {flag}.",
                "unisono run starts processes on several hosts with ssh.",
                f"{RUN} --json --hosts {hosts}",
            )
            for typed, flag, hosts in (
                ("-H a,b,c -np 4", "-H", "a,b,c --ranks 4"),
                ("-H a:2,b:2", "-H", "a:2,b:2"),
                ("--hostfile nodes.txt", "--hostfile", "nodes.txt"),
            )
        ),
        (
            "check train.py --nnodes 2",
            "There is no flag --nnodes.",
            "unisono check uses this host only.",
            f"{CHECK} (without it)",
        ),
        (
            "run train.py --backend nccl",
            "There is no flag --backend.",
            "backend is a setting; settings are given with --set.",
            f"{RUN} --set backend=nccl --json",
        ),
        (
            "run train.py --max-restarts 3",
            "There is no flag --max-restarts.",
            "A process that dies is replaced, and if it cannot be, the run restarts by itself.",
            f"{RUN} --json (without it)",
        ),
        (
            "run train.py --standalone --ranks 2",
            "There is no flag --standalone.",
            "All processes are started on this host.",
            f"{RUN} --ranks 2 --json (without it)",
        ),
        (
            "run train.py -x 3",
            "There is no flag -x.",
            "Arguments of the script itself come after --.",
            "unisono run train.py --json -- -x 3",
        ),
        (
            "run train.py --ranks 2 --cpu-ranks 1.5",
            "Invalid value for --cpu-ranks: 1.5",
            "--cpu-ranks takes a whole number.",
            "unisono run train.py --ranks 2 --cpu-ranks 1 --json",
        ),
        (
            "prove train.py --steps=2.5",
            "Invalid value for --steps: 2.5",
            "--steps takes a whole number.",
            "unisono prove train.py --steps 2 --json",
        ),
        (
            "prove train.py --tolerance small",
            "Invalid value for --tolerance: small",
            "--tolerance takes a number.",
            "unisono prove train.py --tolerance 0.001 --json",
        ),
        (
            "run train.py --ranks",
            "--ranks has no value.",
            "It takes a value, such as 2.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "run train.py --cpu_ranks=1.5",
            "Invalid value for --cpu_ranks: 1.5",
            "--cpu_ranks takes a whole number.",
            "unisono run train.py --cpu_ranks 1 --json",
        ),
        (
            "audit train.py -nx",
            "Invalid value for -n: x",
            "-n takes a whole number.",
            "unisono audit train.py -n 2 --json",
        ),
        (
            "prove --parallel shard=2 train.py --parallel",
            "--parallel has no value.",
            "It takes a value, such as shard=2.",
            "unisono prove --parallel shard=2 train.py --parallel shard=2 --json",
        ),
        (
            "run train.py --resume=perhaps",
            "Invalid value for --resume: perhaps",
            "--resume takes no value.",
            "unisono run train.py --resume --json",
        ),
        (
            "run train.py --xyzzy",
            "There is no flag --xyzzy.",
            "Arguments of the script itself come after --.",
            "unisono run train.py --json -- --xyzzy",
        ),
        (
            "run train.py --ranks two",
            "Invalid value for --ranks: two",
            "--ranks takes a whole number.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "run",
            "unisono run needs the name of a recipe, or the path of a script.",
            "The command line has none.",
            "unisono run text",
        ),
        (
            "fingerprint",
            "unisono fingerprint needs a run directory, or a checkpoint.",
            "The command line has none.",
            "unisono fingerprint runs/NAME-TIME",
        ),
        ("rnu train.py", "There is no command rnu.", "The nearest command is run.", "unisono run train.py --json"),
        (
            "train.py --ranks 2",
            "There is no command train.py.",
            "train.py is a script, and unisono run trains it.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "launch train.py --ranks 2",
            "There is no command launch.",
            "unisono run does that.",
            "unisono run train.py --ranks 2 --json",
        ),
        ("train train.py", "There is no command train.", "unisono run does that.", "unisono run train.py --json"),
        ("start", "There is no command start.", "unisono run does that.", "unisono run text --json"),
        ("env", "There is no command env.", "unisono doctor does that.", "unisono doctor --json"),
        ("test mine", "There is no command test.", "unisono doctor does that.", "unisono doctor --json"),
        (
            "text --ranks 2",
            "There is no command text.",
            "text is a recipe, and unisono run trains it.",
            "unisono run text --ranks 2 --json",
        ),
        (
            "xyzzy",
            "There is no command xyzzy.",
            "The commands are run, slurm, kubernetes, ray, copy, convert, shards, bench, speedup, scale, plan, tune, "
            "check, prove, audit, replay, verify, report, watch, top, doctor, logs, audit-log, fingerprint, profile, "
            "export, predict.",
            "unisono --help",
        ),
    ],
)
def test_a_command_that_cannot_be_parsed_is_corrected(
    request_problems: RequestProblems, words: str, error: str, facts: str, do: str
) -> None:
    assert request_problems(*shlex.split(words)) == [Problem(error, facts, do)]


@pytest.mark.parametrize("name", ["port.py", "launch", "export.py"])
def test_a_script_takes_precedence_over_the_nearest_verb(
    request_problems: RequestProblems, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("")
    do = f"unisono run {name} --ranks 2 --json"
    facts = f"{name} is a script, and unisono run trains it."
    assert request_problems(name, "--ranks", "2") == [Problem(f"There is no command {name}.", facts, do)]


UNSET = "Perhaps a variable of the shell is not set."


@pytest.mark.parametrize(
    ("words", "errors", "do"),
    [
        (
            "run train.py --run-dir ''",
            ["--run-dir has an empty path."],
            "unisono run train.py --run-dir runs/mine --json",
        ),
        (
            "run train.py --run_dir= --resume",
            ["--run-dir has an empty path."],
            "unisono run train.py --run-dir runs/mine --resume --json",
        ),
        (
            "check train.py --settings ''",
            ["--settings has an empty path."],
            "unisono check train.py --json (without it)",
        ),
        (
            "run train.py --settings '' --run-dir '' --ranks 2",
            ["--settings has an empty path.", "--run-dir has an empty path."],
            "unisono run train.py --run-dir runs/mine --ranks 2 --json",
        ),
    ],
)
def test_an_empty_path_is_refused(request_problems: RequestProblems, words: str, errors: list[str], do: str) -> None:
    """Cover `--run-dir "$OUT"` where OUT is not set."""
    assert request_problems(*shlex.split(words)) == [Problem(each, UNSET, do) for each in errors]


def test_an_empty_path_is_refused_by_a_script() -> None:
    with pytest.raises(SettingsError) as caught:
        RunRequest.parse(["--run-dir="], unisono.Settings, "train.py")
    assert caught.value.problems == (
        Problem("--run-dir has an empty path.", UNSET, "python train.py --run-dir runs/mine"),
    )
    assert RunRequest.parse(["--set", "data=", "--", "--run-dir", ""], unisono.Settings, "train.py").own == (
        "--run-dir",
        "",
    )


def test_arguments_of_the_script_come_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", "--ranks", "2", "more", "words"]) == 2
    assert "Next: unisono run train.py --ranks 2 -- more words" in capsys.readouterr().err
    assert main(["fingerprint", "runs", "--", "more"]) == 2
    message = (
        "Only `unisono run`, `slurm`, `kubernetes`, `ray`, `speedup`, `scale`, `plan`, `tune`, `convert`, `check`, "
        "`prove`, `audit` and `doctor` pass arguments to a script."
    )
    assert message in capsys.readouterr().err
