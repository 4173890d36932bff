"""Readers of engines that number nodes, of submitit and PALS, and addresses of stores with IPv6."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unisono import environment
from unisono.environment import Nodes, World, host_of, join_port, read_nodes
from unisono.environment.addresses import hosted_address, port_of_job
from unisono.environment.readers import READERS
from unisono.errors import WorldError

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_TASK_ID": "sky-2026-07-06-21-18-31_mine_1",
}
DSTACK = {
    "DSTACK_NODE_RANK": "2",
    "DSTACK_NODES_NUM": "3",
    "DSTACK_MASTER_NODE_IP": "fd00::1",
    "DSTACK_RUN_ID": "9f1e",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-0.train"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "mine-node-0-0.mine",
    "PET_MASTER_PORT": "29500",
    "PET_NPROC_PER_NODE": "8",
    "JOB_COMPLETION_INDEX": "1",
}
SUBMITIT = {
    "SUBMITIT_LOCAL_NTASKS": "3",
    "SUBMITIT_LOCAL_GLOBALID": "2",
    "SUBMITIT_LOCAL_LOCALID": "2",
    "SUBMITIT_LOCAL_JOB_ID": "4711",
}
PALS = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
SRUN = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
OTHERS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
NODES = {"skypilot": SKYPILOT, "dstack": DSTACK, "kubernetes": KUBERNETES, "kubeflow": KUBEFLOW}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = {**TORCHRUN, **SKYPILOT, **DSTACK, **KUBERNETES, **KUBEFLOW, **SUBMITIT, **PALS, **SRUN}
    for name in (*known, *environment.RESTARTS, *OTHERS):
        monkeypatch.delenv(name, raising=False)
    yield
    environment.assign(None)


def given(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str]) -> None:
    for name, value in {name: value for each in variables for name, value in each.items()}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("engine", "nodes"),
    [
        ("skypilot", Nodes(2, 1, "10.0.0.1", 0, "skypilot", "sky-2026-07-06-21-18-31_mine_1")),
        ("dstack", Nodes(3, 2, "fd00::1", 0, "dstack", "9f1e")),
        ("kubernetes", Nodes(2, 1, "train-0.train", 0, "kubernetes", "train-0.train")),
        ("kubeflow", Nodes(2, 1, "mine-node-0-0.mine", 29500, "kubeflow", "mine-node-0-0.mine")),
    ],
)
def test_an_engine_that_numbers_nodes(monkeypatch: pytest.MonkeyPatch, engine: str, nodes: Nodes) -> None:
    given(monkeypatch, NODES[engine])
    port = nodes.port or port_of_job(nodes.job)
    found = read_nodes()
    assert found == Nodes(nodes.count, nodes.index, nodes.address, port, engine, nodes.job)
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (nodes.index, nodes.count, 0, 1)
    assert (world.launcher, world.foreign) == (engine, True)
    assert world.store == f"hosted://{join_port(nodes.address, port)}/{nodes.job}-0"
    assert host_of(world.store) == (nodes.address, port)
    monkeypatch.setenv("MASTER_PORT", "2222")
    found = read_nodes()
    assert found is not None
    assert found.port == 2222


def test_an_address_by_hand_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, SKYPILOT, {"MASTER_ADDR": "[fd00::7]", "MASTER_PORT": "2222"})
    assert str(World.current().store).startswith("hosted://[fd00::7]:2222/sky-")
    assert host_of(World.current().store) == ("fd00::7", 2222)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"},
        {**DSTACK, "DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0"},
        {**KUBERNETES, "WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "0"},
        {**KUBEFLOW, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "3"},
        {"JOB_COMPLETION_INDEX": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500"},
        {**SUBMITIT, "SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0", "SUBMITIT_LOCAL_LOCALID": "0"},
    ],
    ids=["plain", "skypilot", "dstack", "kubernetes", "kubeflow", "sweep", "sweep-with-address", "submitit"],
)
def test_one_node_and_a_sweep_of_jobs_are_single_processes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    given(monkeypatch, variables)
    assert (World.current().size, World.current().launcher) == (1, "python")
    assert read_nodes() is None


def without(variables: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in variables.items() if key != name}


@pytest.mark.parametrize(
    ("variables", "true"),
    [
        (without(SKYPILOT, "SKYPILOT_NODE_RANK"), "SKYPILOT_NODE_RANK is not set."),
        (without(SKYPILOT, "SKYPILOT_NODE_IPS"), "SKYPILOT_NODE_IPS is not set."),
        (without(SKYPILOT, "SKYPILOT_TASK_ID"), "SKYPILOT_TASK_ID is not set."),
        (
            {**SKYPILOT, "SKYPILOT_NUM_NODES": "3"},
            "SKYPILOT_NUM_NODES is 3, and SKYPILOT_NODE_IPS has 2 addresses.",
        ),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "2"}, "Node 2 of 2 is impossible: nodes are numbered from 0."),
        (without(DSTACK, "DSTACK_MASTER_NODE_IP"), "DSTACK_MASTER_NODE_IP is not set."),
        (without(DSTACK, "DSTACK_NODE_RANK"), "DSTACK_NODE_RANK is not set."),
        ({**DSTACK, "DSTACK_NODES_NUM": "two"}, "DSTACK_NODES_NUM is 'two', which is not a non-negative integer."),
        ({**DSTACK, "DSTACK_NODE_RANK": "3"}, "Node 3 of 3 is impossible: nodes are numbered from 0."),
        ({**DSTACK, "MASTER_PORT": "x"}, "MASTER_PORT is 'x', which is not a non-negative integer."),
        (without(KUBERNETES, "MASTER_ADDR"), "MASTER_ADDR is not set."),
        ({**KUBERNETES, "JOB_COMPLETION_INDEX": "2"}, "Node 2 of 2 is impossible: nodes are numbered from 0."),
        ({**KUBERNETES, "WORLD_SIZE": "0"}, "Node 1 of 0 is impossible: nodes are numbered from 0."),
        (without(KUBERNETES, "JOB_COMPLETION_INDEX"), "RANK and MASTER_PORT are not set."),
        (without(KUBEFLOW, "PET_MASTER_PORT"), "PET_MASTER_PORT is not set."),
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, "PET_NNODES is 1:4, a range: only torchrun's agents know how many pods"),
        (without(SUBMITIT, "SUBMITIT_LOCAL_LOCALID"), "SUBMITIT_LOCAL_LOCALID is not set."),
        (
            {**SUBMITIT, "SUBMITIT_LOCAL_GLOBALID": "3"},
            "Rank 3 of 3 is impossible with local rank 2 of 3 on this host.",
        ),
        (without(PALS, "PMI_LOCAL_SIZE"), "PMI_LOCAL_SIZE is not set."),
        ({"PMIX_RANK": "1"}, "PMIX_RANK is 1, and no variable gives the number of processes."),
    ],
)
def test_variables_that_are_incomplete_or_contradict_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], true: str
) -> None:
    given(monkeypatch, variables)
    with pytest.raises(WorldError) as caught:
        World.current()
    (problem,) = caught.value.problems
    assert problem.facts.startswith(true)
    assert problem.remedy


def test_tasks_of_submitit_are_the_processes_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, SUBMITIT)
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 3, 2, 3)
    assert world.store == f"hosted://127.0.0.1:{port_of_job('submitit-4711')}/submitit-4711"


def test_the_local_ranks_of_pals(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, PALS, {"MASTER_ADDR": "a", "MASTER_PORT": "2222"})
    world = World.current()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (3, 4, 1, 2)
    assert world.store == "hosted://a:2222/mpirun"


@pytest.mark.parametrize("outer", NODES)
def test_engines_that_number_processes_start_inside_those_that_number_nodes(
    monkeypatch: pytest.MonkeyPatch, outer: str
) -> None:
    given(monkeypatch, NODES[outer], SRUN)
    assert World.current().launcher == "srun"
    given(monkeypatch, TORCHRUN)
    assert World.current().launcher == "torchrun"
    assert read_nodes() is None


def test_kubeflow_is_a_layer_on_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, KUBERNETES, KUBEFLOW)
    assert World.current().launcher == "kubeflow"


def test_the_first_world_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader returns None where its engine is absent, so every reader can be asked anywhere."""
    assert [read() for read in READERS] == [None] * len(READERS)


@pytest.mark.parametrize(
    ("host", "written"), [("10.0.0.1", "10.0.0.1:7"), ("fd00::1", "[fd00::1]:7"), ("[::1]", "[::1]:7"), ("a", "a:7")]
)
def test_addresses_with_a_port(host: str, written: str) -> None:
    assert join_port(host, 7) == written
    assert hosted_address(host, 7, "a/b:c 1") == f"hosted://{written}/a-b-c-1"
    assert host_of(hosted_address(host, 7, "a")) == (host.strip("[]"), 7)


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_brackets_in_torchruns_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    given(monkeypatch, {"MASTER_ADDR": address, "MASTER_PORT": "29500"})
    assert host_of("env://") == ("::1", 29500)
