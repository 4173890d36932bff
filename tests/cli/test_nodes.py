"""Hosts that each run the command with a number: here on one host, with loopback as the network."""

from __future__ import annotations

import json
import socket
import time
from subprocess import Popen

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli.command import Command
from tests.cli.test_training import SCRIPT, kill_process_tree, result, uninterrupted


def start_nodes(command: Command, *more: str, ranks: int = 3, nodes: int = 2) -> list[Popen[str]]:
    """Start the command of every node, the last one first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["run", "script.py", "--run-dir", "out", "--ranks", str(ranks), "--meet", f"127.0.0.1:{port}", *more]
    started = [command.start(*words, "--nodes", str(nodes), "--node", str(n)) for n in reversed(range(nodes))]
    return started[::-1]


def test_nodes_train_together(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    first, second = start_nodes(command)
    ended, other = command.end(first), command.end(second)
    assert (ended.status, other.status) == (0, 0), ended.err + other.err
    assert other.out == ""
    assert "hosts: node-0 1" in ended.err
    found = result(command, "out")
    assert (found["ranks"], found["weights_sha256"]) == (3, whole["weights_sha256"])
    assert sorted(path.name for path in (command.folder / "out" / "log").glob("*.log")) == [
        f"rank-{rank}.log" for rank in range(3)
    ]
    assert [path.name for path in (command.folder / "out").glob(".reach*")] == []


@pytest.mark.slow
def test_the_others_continue_without_a_node(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    first, second = start_nodes(command, "--set", "pause=0.05")
    with command.listening():
        command.wait_for(*(f"step 5 of {rank}" for rank in range(3)))
    kill_process_tree(second)
    ended = command.end(first)
    assert ended.status == 0, ended.err
    found = result(command, "out")
    assert found["weights_sha256"] == whole["weights_sha256"]
    assert {death["process"] for death in found["deaths"]} == {1, 2}
    assert "Host node-1 is lost: the connection has ended." in ended.err


@pytest.mark.slow
def test_an_agent_ends_with_its_launcher(command: Command) -> None:
    command.script(SCRIPT)
    first, second = start_nodes(command, "--set", "pause=0.2")
    with command.listening():
        command.wait_for(*(f"step 0 of {rank}" for rank in range(3)))
    there = psutil.Process(second.pid).children(recursive=True)
    assert len(there) == 2
    kill_process_tree(first)
    ended = command.end(second)
    assert (ended.status, ended.err.count("has lost node 0 at 127.0.0.1")) == (1, 1)
    assert psutil.wait_procs(there, 5.0)[1] == []


def test_a_port_in_use_is_one_message(command: Command) -> None:
    command.script(SCRIPT)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ("--ranks", "2", "--nodes", "2", "--node", "0", "--meet", f"127.0.0.1:{port}")
        ended = command.run("run", "script.py", *words)
    assert ended.status == 2
    assert ended.err.startswith(
        f"Node 0 cannot wait for the others at 127.0.0.1, port {port}.\n  Address already in use."
    )


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--nodes 2", "--nodes needs --meet."),
        ("--nodes 2 --node 2 --meet a:1", "--node 2 is out of range."),
        ("--nodes 2 --meet a", "Invalid value for --meet: a"),
        ("--nodes 2 --meet a:1 --hosts b", "--hosts cannot be combined with --nodes."),
        ("--hosts a:0", "Invalid value for --hosts: a:0"),
        ("--hosts a:1 --ranks 3", "--ranks 3 is more than the hosts have room for."),
    ],
)
def test_wrong_flags_are_one_message(command: Command, words: str, error: str) -> None:
    command.script(SCRIPT)
    ended = command.run("run", "script.py", *words.split())
    assert (ended.status, ended.err.splitlines()[0]) == (2, error)


@pytest.mark.slow
def test_nodes_of_a_job_need_no_flags(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    monkeypatch.setenv("SKYPILOT_NODE_IPS", "127.0.0.1\n127.0.0.2")
    monkeypatch.setenv("SKYPILOT_NUM_NODES", "2")
    monkeypatch.setenv("SKYPILOT_TASK_ID", f"sky-{time.time()}-4")
    started = []
    for index in (1, 0):
        monkeypatch.setenv("SKYPILOT_NODE_RANK", str(index))
        started.append(command.start("run", "script.py", "--run-dir", "out", "--ranks", "4"))
    other, first = (command.end(process) for process in started)
    assert (first.status, other.status) == (0, 0), first.err + other.err
    found = result(command, "out")
    assert (found["ranks"], found["weights_sha256"]) == (4, whole["weights_sha256"])


@pytest.mark.slow
def test_the_doctor_examines_nodes(command: Command) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nodes", "2", "--meet", f"127.0.0.1:{port}"]
    second = command.start("doctor", *words, "--node", "1")
    first = command.start("doctor", *words, "--node", "0", "--json")
    ended, other = command.end(first), command.end(second)
    assert (ended.status, other.status, other.out) == (0, 0, ""), ended.err + other.err
    found = json.loads(ended.out)
    assert [(host["name"], host["address"]) for host in found["hosts"]] == [
        ("node-0", "127.0.0.1"),
        ("node-1", "127.0.0.1"),
    ]
    assert [(link["source"], link["target"], link["error"]) for link in found["links"]] == [
        ("node-0", "node-1", ""),
        ("node-1", "node-0", ""),
    ]


@pytest.mark.slow
def test_bench_measures_nodes(command: Command) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["bench", "--only", "pairs", "--run-dir", "out", "--nodes", "2", "--meet", f"127.0.0.1:{port}"]
    second = command.start(*words, "--node", "1")
    first = command.start(*words, "--node", "0", "--json")
    ended, other = command.end(first), command.end(second)
    assert (ended.status, other.status, other.out) == (0, 0, ""), ended.err + other.err
    assert [pair["ranks"] for pair in json.loads(ended.out)["pairs"]] == [[0, 1]]
