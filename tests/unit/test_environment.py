"""The World of a process: from our launcher, torchrun, srun or mpirun, or alone. (test_engines.py has the others.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono import environment
from unisono.environment import World
from unisono.errors import WorldError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def clear_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*TORCHRUN, *SRUN, *environment.RESTARTS, *OMPI, *MPICH, "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    environment.assign(None)


def test_a_plain_process_is_alone() -> None:
    world = World.current()
    assert (world.rank, world.size, world.store, world.launcher) == (0, 1, None, "python")
    assert world.is_main


def test_torchruns_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert (world.store, world.launcher, world.terminal) == ("env://", "torchrun", False)


@pytest.mark.parametrize(
    ("name", "value", "true"),
    [
        ("WORLD_SIZE", None, "WORLD_SIZE is not set."),
        ("RANK", None, "RANK is not set."),
        ("MASTER_PORT", None, "MASTER_PORT is not set."),
        ("RANK", "x", "RANK is 'x', which is not a non-negative integer."),
        ("RANK", "-1", "RANK is '-1', which is not a non-negative integer."),
        ("RANK", "4", "Rank 4 of 4 is impossible with local rank 1 of 2 on this host."),
        ("LOCAL_RANK", "2", "Rank 3 of 4 is impossible with local rank 2 of 2 on this host."),
    ],
)
def test_invalid_torchrun_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, true: str
) -> None:
    for key, given in TORCHRUN.items():
        monkeypatch.setenv(key, given)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(WorldError) as caught:
        World.current()
    assert caught.value.problems[0].facts == true
    assert "torchrun" in caught.value.problems[0].remedy


def test_variables_of_unisono_run_have_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    mine = World(rank=2, size=3, launcher="unisono", store="file:///somewhere")
    environment.assign(mine)
    assert World.current() is mine


def test_a_started_process_inherits_the_environment_which_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    theirs = environment.inherited({"OMP_NUM_THREADS": "1"})
    assert theirs["PYTHONPATH"] == "/somewhere"
    assert theirs["OMP_NUM_THREADS"] == "1"
    assert environment.variables(["OMP_NUM_THREADS", "PYTHONPATH"]) == {"PYTHONPATH": "/somewhere"}


SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04,7],big1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
}


@pytest.fixture
def in_a_step(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_tasks_of_a_slurm_step_are_the_processes_of_a_run(in_a_step: pytest.MonkeyPatch) -> None:
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (6, 7, 2, 3)
    assert (world.launcher, world.restarts, environment.job()) == ("srun", 0, "17.0")
    where, _, name = str(world.store).rpartition("/")
    assert where.startswith("hosted://gpu03:")
    assert int(where.rpartition(":")[2]) in environment.PORTS
    in_a_step.setenv("SLURM_RESTART_COUNT", "1")
    again = World.current()
    assert (again.restarts, name, str(again.store).endswith("/17.0-1")) == (1, "17.0-0", True)
    in_a_step.setenv("MASTER_ADDR", "10.0.0.1")
    in_a_step.setenv("MASTER_PORT", "2222")
    assert World.current().store == "hosted://10.0.0.1:2222/17.0-1"


def test_a_batch_script_and_a_step_of_one_task_are_one_process(in_a_step: pytest.MonkeyPatch) -> None:
    in_a_step.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert World.current().size == 1
    in_a_step.delenv("SLURM_STEP_NUM_TASKS")
    in_a_step.delenv("SLURM_STEP_ID")
    in_a_step.setenv("SLURM_NTASKS", "7")  # of the job
    in_a_step.setenv("SLURM_RESTART_COUNT", "2")
    world = World.current()
    assert (world.size, world.restarts, world.launcher, environment.job()) == (1, 2, "python", "17")


def test_torchrun_within_a_slurm_step_has_precedence(in_a_step: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        in_a_step.setenv(name, value)
    assert World.current().launcher == "torchrun"
    in_a_step.delenv("RANK")  # a batch script that exports WORLD_SIZE for others
    assert (World.current().launcher, World.current().size) == ("srun", 7)


def test_missing_slurm_variables_are_named(in_a_step: pytest.MonkeyPatch) -> None:
    in_a_step.delenv("SLURM_NODEID")
    with pytest.raises(WorldError) as caught:
        World.current()
    assert caught.value.problems[0].facts == "SLURM_NODEID is not set."


@pytest.mark.parametrize(
    ("name", "value", "true"),
    [
        ("STEP_NUM_TASKS", "many", "SLURM_STEP_NUM_TASKS is 'many', which is not a non-negative integer."),
        ("PROCID", "7", "Rank 7 of 7 is impossible with local rank 2 of 3 on this host."),
        ("LOCALID", "3", "Rank 6 of 7 is impossible with local rank 3 of 3 on this host."),
        ("NODEID", "3", "Rank 6 of 7 is impossible with local rank 2 of 0 on this host."),
        ("STEP_TASKS_PER_NODE", "", "Rank 6 of 7 is impossible with local rank 2 of 0 on this host."),
    ],
)
def test_invalid_slurm_variables_are_refused(in_a_step: pytest.MonkeyPatch, name: str, value: str, true: str) -> None:
    in_a_step.setenv(f"SLURM_{name}", value)
    with pytest.raises(WorldError) as caught:
        World.current()
    assert caught.value.problems[0].facts == true


@pytest.mark.parametrize("port", ["0", "65536", "x", ""])
@pytest.mark.parametrize("by", ["srun", "torchrun"])
def test_an_invalid_port_is_refused(in_a_step: pytest.MonkeyPatch, by: str, port: str) -> None:
    for name, value in TORCHRUN.items() if by == "torchrun" else ():
        in_a_step.setenv(name, value)
    in_a_step.setenv("MASTER_PORT", port)
    with pytest.raises(WorldError, match=f"MASTER_PORT is '?{port}") as caught:
        World.current()
    assert caught.value.problems[0].remedy.startswith("export MASTER_PORT=20000")


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("a", "a"), ("a1,b", "a1"), ("n[007-9]", "n007"), ("n[5,7-9]-x,m", "n5-x"), ("r[0-1]n[2-3]", "r0n2")],
)
def test_the_first_host_of_a_slurm_host_list(hosts: str, first: str) -> None:
    assert environment.first_host(hosts) == first


OMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-a@1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def given(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_processes_of_mpirun_are_those_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, OMPI)
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 3, 4)
    assert (world.launcher, world.foreign) == ("mpirun", True)
    where, _, name = str(world.store).rpartition("/")
    assert name == "prterun-a-1"
    assert where.startswith("hosted://127.0.0.1:")
    assert int(where.rpartition(":")[2]) in environment.PORTS
    given(monkeypatch, {"MASTER_ADDR": "gpu1", "MASTER_PORT": "2222", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "1")
    assert World.current().store == "hosted://gpu1:2222/prterun-a-1"


def test_mpirun_that_uses_srun_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {**SRUN, **OMPI})
    assert (World.current().launcher, World.current().size) == ("mpirun", 4)
    given(monkeypatch, TORCHRUN)
    assert World.current().launcher == "torchrun"


def test_srun_with_pmi_is_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {**SRUN, **MPICH, "PMI_SIZE": "7"})
    assert World.current().launcher == "srun"


def test_one_process_of_mpirun_is_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {**OMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})
    assert (World.current().size, World.current().launcher) == (1, "python")


NO_ADDRESS = "mpirun gives no address for their rendezvous, and MASTER_ADDR and MASTER_PORT are not set."


@pytest.mark.parametrize(
    ("variables", "true"),
    [
        (MPICH, NO_ADDRESS),
        ({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, NO_ADDRESS),
        ({**MPICH, "MASTER_ADDR": "a"}, NO_ADDRESS.replace("MASTER_ADDR and MASTER_PORT are", "MASTER_PORT is")),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPI_LOCALRANKID and MPI_LOCALNRANKS are not set."),
        ({**OMPI, "OMPI_COMM_WORLD_RANK": "4"}, "Rank 4 of 4 is impossible with local rank 3 of 4 on this host."),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1, and no variable gives the number of processes."),
    ],
)
def test_incomplete_mpirun_variables_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], true: str
) -> None:
    given(monkeypatch, variables)
    with pytest.raises(WorldError) as caught:
        World.current()
    (problem,) = caught.value.problems
    assert problem.facts == true
    assert problem.remedy.startswith("unisono run ")
    assert "MASTER_ADDR" in problem.remedy
