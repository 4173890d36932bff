"""Flags of other launchers: settings of a script with the same name, and flags that a launcher adds."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

import pytest

import unisono
from unisono.cli.request.launcher_flags import without_local_rank
from unisono.cli.request.run_options import RunRequest
from unisono.environment import World
from unisono.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Named(unisono.Settings):
    """Settings whose names are flags of launchers."""

    hosts: int = 1
    local_rank: int = 0


def test_a_setting_takes_precedence_over_a_launchers_flag() -> None:
    with pytest.raises(SettingsError) as caught:
        RunRequest.parse(["--hosts", "2"], Named, "train.py")
    assert caught.value.problems[0].remedy == "python train.py --set hosts=2"


@pytest.mark.parametrize("flag", ["--local_rank=1", "--local-rank=1"])
def test_the_local_rank_of_old_launchers_is_ignored(flag: str) -> None:
    """torch.distributed.launch and deepspeed pass it in LOCAL_RANK and on the command line."""
    words = [flag, "--set", "steps=3", "--", flag]
    world = World(rank=1, size=2, local_rank=1, local_size=2, launcher="torchrun")
    assert without_local_rank(words, world) == ["--set", "steps=3", "--", flag]
    assert without_local_rank(words, World()) == words
    assert without_local_rank(words, replace(world, local_rank=0)) == words


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
            "unisono run 'my train.py' --resume --ranks 4 --nodes 2 --node 0 --meet HOST:29500 on the first host; on "
            "the others --node 1, ...",
        ),
    ],
)
def test_suggestions_for_a_script_that_python_starts(words: str, do: str) -> None:
    with pytest.raises(SettingsError) as caught:
        RunRequest.parse(shlex.split(words), unisono.Settings, "my train.py")
    (problem,) = caught.value.problems
    assert problem.remedy == do
