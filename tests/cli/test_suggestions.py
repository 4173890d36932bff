"""Command lines that are not understood: the whole line that was probably meant is proposed, and nothing is started."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import unisono
from tests.cli.asking import Ask
from unisono.cli.main import main
from unisono.cli.request.launcher_flags import without_local_rank
from unisono.cli.request.run_options import RunRequest
from unisono.environment import World
from unisono.errors import Problem, SettingsError

RUN = "unisono run train.py"
CHECK = "unisono check train.py --json"


@pytest.mark.parametrize(
    ("words", "true", "do"),
    [
        (
            "run train.py --batch 64 --ranks 2",
            "There is no flag --batch, but a setting batch, and settings are given with --set.",
            "unisono run train.py --set batch=64 --ranks 2 --json",
        ),
        (
            "run train.py --micro-batch=4",
            "There is no flag --micro-batch, but a setting micro_batch, and settings are given with --set.",
            "unisono run train.py --set micro_batch=4 --json",
        ),
        (
            "run train.py --rank 2",
            "There is no flag --rank; the nearest is --ranks.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "run train.py --parallel shard=2 --ranks 2",
            "Settings are given with --set; --parallel is a flag of unisono prove.",
            "unisono run train.py --set parallel.shard=2 --ranks 2 --json",
        ),
        (
            "prove train.py --ranks 2 --steps 3",
            "Other verbs have a flag --ranks; unisono prove has none.",
            "unisono prove train.py --steps 3 --json (without it)",
        ),
        (
            "run train.py --steps 20",
            "There is no flag --steps, but a setting steps, and settings are given with --set.",
            "unisono run train.py --set steps=20 --json",
        ),
        (
            "run --lr 0.1 train.py",
            "There is no flag --lr, but a setting lr, and settings are given with --set.",
            "unisono run --set lr=0.1 train.py --json",
        ),
        (
            "run train.py batch=64 lr=2 --ranks 2",
            "Settings are given with --set, so `batch=64 lr=2` means nothing.",
            "unisono run train.py --ranks 2 --json --set batch=64 --set lr=2",
        ),
        (
            "check train.py batch=64",
            "Settings are given with --set, so `batch=64` means nothing.",
            "unisono check train.py --json --set batch=64",
        ),
        (
            "run train.py mine=64 --ranks 2",
            "`mine=64` is for the script, and comes after --.",
            "unisono run train.py --ranks 2 --json -- mine=64",
        ),
        *(
            (f"run train.py {typed}", "--set takes key=value, in one word.", f"unisono run train.py {meant} --json")
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
            "--set takes key=value, in one word.",
            "unisono run --set lr=0.1 train.py --json",
        ),
        (
            "run --set lr 0.1 --set batch 64",
            "--set takes key=value, in one word.",
            "unisono run --set lr=0.1 --set batch=64 --json",
        ),
        (
            "run train.py --set lr 0.1 batch=64",
            "--set takes key=value, in one word.",
            "unisono run train.py --set lr=0.1 --json --set batch=64",
        ),
        (
            "run train.py --set lr=0.1 more",
            "`more` is for the script, and comes after --.",
            "unisono run train.py --set lr=0.1 --json -- more",
        ),
        ("bench batch=64", "There is no place for `batch=64`.", "unisono bench --help"),
        (
            "bench --steps 3",
            "Other verbs have a flag --steps; unisono bench has none.",
            "unisono bench --json (without it)",
        ),
        (
            "run train.py --nproc_per_node=4 --resume",
            "What --nproc_per_node is elsewhere is --ranks here.",
            "unisono run train.py --ranks 4 --resume --json",
        ),
        (
            "run train.py --local_rank=0 --resume",
            "--local_rank is what a launcher passes to each process that it starts.",
            "unisono run train.py --ranks 2 --resume --json",
        ),
        ("run train.py -np 4", "What -np is elsewhere is --ranks here.", "unisono run train.py --ranks 4 --json"),
        ("run train.py --num_gpus 2", "What --num_gpus is elsewhere is --ranks here.", f"{RUN} --ranks 2 --json"),
        (
            "run train.py --gpus 0,1",
            "--gpus 0,1 names devices: here CUDA_VISIBLE_DEVICES does.",
            f"env CUDA_VISIBLE_DEVICES=0,1 {RUN} --ranks 2 --json",
        ),
        (
            "run train.py --nnodes 1 --master_addr 127.0.0.1 --master_port 29501 --gpus 4",
            "What --gpus is elsewhere is --ranks here.",
            f"{RUN} --ranks 4 --json",
        ),
        *(
            (
                f"run train.py {typed}",
                f"unisono run starts processes on this host only; {flag} is for torchrun or srun, "
                "which start processes on several.",
                f"torchrun --nnodes {nodes} --nproc-per-node {each} --rdzv-backend c10d --rdzv-endpoint {at} "
                f"--no-python {RUN} {rest}--json on each host; under Slurm: "
                f"srun -N {nodes} -n {nodes * each} {RUN} {rest}--json",
            )
            for typed, flag, nodes, each, at, rest in (
                ("--nnodes 3", "--nnodes", 3, 2, "HOST:29500", ""),
                ("--hosts a,b --ranks 4", "--hosts", 2, 4, "a:29500", ""),
                ("-H a,b,c -np 4", "-H", 3, 4, "a:29500", ""),
                ("--num_nodes 2 --resume", "--num_nodes", 2, 2, "HOST:29500", "--resume "),
                ("--nnodes=2 --nproc_per_node=8 --master_addr a --master_port 1", "--nnodes", 2, 8, "a:1", ""),
                ("--num_machines 2 --machine_rank 0 --main_process_ip a", "--num_machines", 2, 2, "a:29500", ""),
                ("--rdzv-endpoint=a:7 --rdzv-backend=c10d", "--rdzv-endpoint", 2, 2, "a:7", ""),
            )
        ),
        ("check train.py --nnodes 2", "unisono check uses this host only, without --nnodes.", f"{CHECK} (without it)"),
        (
            "run train.py --backend nccl",
            "--backend is not needed: the device decides (NCCL for NVIDIA's, gloo for the CPU).",
            f"{RUN} --json (without it)",
        ),
        (
            "run train.py --max-restarts 3",
            "A process that dies is replaced; where it cannot be, the run begins again by itself.",
            f"{RUN} --json (without it)",
        ),
        (
            "run train.py --standalone --ranks 2",
            "--standalone is not needed: all processes are started on this host.",
            f"{RUN} --ranks 2 --json (without it)",
        ),
        (
            "run train.py -x 3",
            "There is no flag -x; what is for the script itself comes after --.",
            "unisono run train.py --json -- -x 3",
        ),
        (
            "run train.py --ranks 2 --cpu-ranks 1.5",
            "--cpu-ranks takes a whole number, which '1.5' is not.",
            "unisono run train.py --ranks 2 --cpu-ranks 1 --json",
        ),
        (
            "prove train.py --steps=2.5",
            "--steps takes a whole number, which '2.5' is not.",
            "unisono prove train.py --steps 2 --json",
        ),
        (
            "prove train.py --tolerance small",
            "--tolerance takes a number, which 'small' is not.",
            "unisono prove train.py --tolerance 0.001 --json",
        ),
        ("run train.py --ranks", "--ranks needs a value.", "unisono run train.py --ranks 2 --json"),
        (
            "run train.py --cpu_ranks=1.5",
            "--cpu_ranks takes a whole number, which '1.5' is not.",
            "unisono run train.py --cpu_ranks 1 --json",
        ),
        ("audit train.py -nx", "-n takes a whole number, which 'x' is not.", "unisono audit train.py -n 2 --json"),
        (
            "prove --parallel shard=2 train.py --parallel",
            "--parallel needs a value.",
            "unisono prove --parallel shard=2 train.py --parallel shard=2 --json",
        ),
        ("run train.py --resume=perhaps", "--resume takes no value.", "unisono run train.py --resume --json"),
        (
            "run train.py --xyzzy",
            "There is no flag --xyzzy; what is for the script itself comes after --.",
            "unisono run train.py --json -- --xyzzy",
        ),
        (
            "run train.py --ranks two",
            "--ranks takes a whole number, which 'two' is not.",
            "unisono run train.py --ranks 2 --json",
        ),
        ("run", "unisono run needs the name of a recipe, or the path of a script.", "unisono run text"),
        (
            "fingerprint",
            "unisono fingerprint needs a run directory, or one checkpoint.",
            "unisono fingerprint runs/NAME-TIME",
        ),
        ("rnu train.py", "There is no verb rnu; the nearest is run.", "unisono run train.py --json"),
        (
            "train.py --ranks 2",
            "train.py is a file, and unisono run trains it.",
            "unisono run train.py --ranks 2 --json",
        ),
        (
            "launch train.py --ranks 2",
            "What launch is elsewhere is run here.",
            "unisono run train.py --ranks 2 --json",
        ),
        ("train train.py", "What train is elsewhere is run here.", "unisono run train.py --json"),
        ("start", "What start is elsewhere is run here.", "unisono run text --json"),
        ("env", "What env is elsewhere is doctor here.", "unisono doctor --json"),
        ("test mine", "What test is elsewhere is doctor here.", "unisono doctor --json"),
        ("text --ranks 2", "text is a recipe, and unisono run trains it.", "unisono run text --ranks 2 --json"),
        (
            "xyzzy",
            "There is no verb xyzzy. "
            "There are run, check, prove, audit, copy, replay, fingerprint, export, doctor, bench.",
            "unisono --help",
        ),
    ],
)
def test_a_line_is_answered_with_the_one_that_was_meant(ask: Ask, words: str, true: str, do: str) -> None:
    assert ask(*shlex.split(words)) == [Problem(f"unisono {words} --json", true, do)]


@pytest.mark.parametrize("name", ["port.py", "launch", "export.py"])
def test_a_file_comes_before_the_nearest_verb(ask: Ask, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    do = f"unisono run {name} --ranks 2 --json"
    true = f"{name} is a file, and unisono run trains it."
    assert ask(name, "--ranks", "2") == [Problem(f"unisono {name} --ranks 2 --json", true, do)]


UNSET = "The path is empty; perhaps a variable of the shell is not set."


@pytest.mark.parametrize(
    ("words", "asked", "do"),
    [
        ("run train.py --run-dir ''", ["--run-dir ''"], "unisono run train.py --run-dir runs/mine --json"),
        (
            "run train.py --run_dir= --resume",
            ["--run-dir ''"],
            "unisono run train.py --run-dir runs/mine --resume --json",
        ),
        ("check train.py --settings ''", ["--settings ''"], "unisono check train.py --json (without it)"),
        (
            "run train.py --settings '' --run-dir '' --ranks 2",
            ["--settings ''", "--run-dir ''"],
            "unisono run train.py --run-dir runs/mine --ranks 2 --json",
        ),
    ],
)
def test_an_empty_path_is_not_the_folder_one_is_in(ask: Ask, words: str, asked: list[str], do: str) -> None:
    """--run-dir "$OUT", and nobody has set OUT."""
    assert ask(*shlex.split(words)) == [Problem(each, UNSET, do) for each in asked]


def test_a_scripts_own_line_has_no_empty_path_either() -> None:
    with pytest.raises(SettingsError) as caught:
        RunRequest.parse(["--run-dir="], unisono.Settings, "train.py")
    assert caught.value.problems == (Problem("--run-dir ''", UNSET, "python train.py --run-dir runs/mine"),)
    assert RunRequest.parse(["--set", "data=", "--", "--run-dir", ""], unisono.Settings, "train.py").own == (
        "--run-dir",
        "",
    )


def test_more_words_are_the_scripts_and_come_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "train.py", "--ranks", "2", "more", "words"]) == 2
    assert "Next: unisono run train.py --ranks 2 -- more words" in capsys.readouterr().err
    assert main(["fingerprint", "runs", "--", "more"]) == 2
    told = "Only `unisono run`, `check`, `prove`, `audit` and `doctor` hand arguments on to a script."
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "do"),
    [
        ("--learning-rate 3", "python 'my train.py' -- --learning-rate 3"),
        ("--batch 3", "python 'my train.py' --set batch=3"),
        ("--resume batch=3", "python 'my train.py' --resume --set batch=3"),
        ("--resume --set batch 3", "python 'my train.py' --resume --set batch=3"),
        ("mine --resume", "python 'my train.py' --resume -- mine"),
        ("--set --resume", "python 'my train.py' --set KEY=VALUE --resume"),
        ("--ranks 2 --resume", "unisono run 'my train.py' --ranks 2 --resume"),
        ("--ranks=2 --resume", "unisono run 'my train.py' --ranks 2 --resume"),
        ("--rank 2 --resume", "unisono run 'my train.py' --ranks 2 --resume"),
        ("--num_processes 2 --resume", "unisono run 'my train.py' --ranks 2 --resume"),
        ("--local_rank=1 --resume", "unisono run 'my train.py' --ranks 2 --resume"),
        (
            "--nnodes 2 --resume",
            "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 'my train.py' "
            "--resume on each host; under Slurm: srun -N 2 -n 4 python 'my train.py' --resume",
        ),
    ],
)
def test_so_is_a_scripts_own_line(words: str, do: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RunRequest.parse(shlex.split(words), unisono.Settings, "my train.py")
    (problem,) = caught.value.problems
    assert (problem.asked, problem.do) == (f"python 'my train.py' {words}", do)


@dataclass(frozen=True, kw_only=True)
class Named(unisono.Settings):
    """A script with settings that are flags elsewhere."""

    hosts: int = 1
    local_rank: int = 0


def test_a_setting_of_that_name_comes_before_a_launchers_flag() -> None:
    with pytest.raises(SettingsError) as caught:
        RunRequest.parse(["--hosts", "2"], Named, "train.py")
    assert caught.value.problems[0].do == "python train.py --set hosts=2"


@pytest.mark.parametrize("flag", ["--local_rank=1", "--local-rank=1"])
def test_the_local_rank_that_an_old_launcher_passes_is_taken(flag: str) -> None:
    """python -m torch.distributed.launch and deepspeed say it in LOCAL_RANK and on the command line."""
    words = [flag, "--set", "steps=3", "--", flag]
    world = World(rank=1, size=2, local_rank=1, local_size=2, launcher="torchrun")
    assert without_local_rank(words, world) == ["--set", "steps=3", "--", flag]
    assert without_local_rank(words, World()) == words
    assert without_local_rank(words, replace(world, local_rank=0)) == words
