"""Hosts that each run the command with a number: here on one host, with loopback as the network."""

from __future__ import annotations

import json
import secrets
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli.command import PATIENCE_SECONDS, Command
from tests.cli.test_training import SCRIPT, kill_process_tree, result, uninterrupted
from unisono.handshake.mutual_proof import OtherSecretError, RunSecret, prove


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_nodes(command: Command, *more: str, ranks: int = 3, nodes: int = 2, port: int = 0) -> list[Popen[str]]:
    """Start the command of every node, the last one first."""
    port = port or free_port()
    words = ["run", "script.py", "--run-dir", "out", "--ranks", str(ranks), "--meet", f"127.0.0.1:{port}", *more]
    started = [command.start(*words, "--nodes", str(nodes), "--node", str(n)) for n in reversed(range(nodes))]
    return started[::-1]


@pytest.mark.ci
def test_nodes_train_together(command: Command) -> None:
    command.script(SCRIPT)
    whole = uninterrupted(command)
    first, second = start_nodes(command)
    ended, other = command.end(first), command.end(second)
    assert (ended.status, other.status) == (0, 0), ended.err + other.err
    assert other.out == ""
    assert "hosts: node-0 1" in ended.err
    assert ended.err.count("Without --secret-file, every program that reaches 127.0.0.1:") == 1
    found = result(command, "out")
    assert (found["ranks"], found["weights_sha256"]) == (3, whole["weights_sha256"])
    assert sorted(path.name for path in (command.folder / "out" / "log").glob("*.log")) == [
        f"rank-{rank}.log" for rank in range(3)
    ]
    assert [path.name for path in (command.folder / "out").glob(".reach*")] == []


def secret_file(command: Command, name: str = "run.secret") -> Path:
    path = command.folder / name
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def attack(at: tuple[str, int]) -> None:
    """Do to a port what strangers do: be silent, flood, send garbage, send much, and be a node with a wrong secret."""
    with ExitStack() as stack:
        for number in range(300):
            stranger = stack.enter_context(socket.create_connection(at, timeout=PATIENCE_SECONDS))
            with suppress(OSError):  # it is closed because there are too many
                if number % 3 == 0:
                    stranger.sendall(b'{"node": 1}\n' * 100)
                elif number % 3 == 1:
                    stranger.sendall(b"x")
        with socket.create_connection(at, timeout=PATIENCE_SECONDS) as large, pytest.raises(ConnectionError):
            large.sendall(bytes(1 << 30))
    for wrong in (RunSecret(), RunSecret.random()):
        while not is_refused(at, wrong):
            pass


def is_refused(at: tuple[str, int], secret: RunSecret) -> bool:
    """Return whether node 0 refuses a node with this secret. It may close the connection because there are too many."""
    with socket.create_connection(at, timeout=PATIENCE_SECONDS) as stranger:
        try:
            prove(stranger, secret, "node", 1)
        except OtherSecretError:
            return True
        except ConnectionError:
            return False
    raise AssertionError("a stranger is a node")


@pytest.mark.slow
def test_strangers_at_the_port_change_nothing(command: Command) -> None:
    attacked, pause = command.folder / "attacked", "time.sleep(run.settings.pause)"
    wait = 'while step.number == 1 and not Path(__file__).with_name("attacked").exists(): time.sleep(0.01)'
    command.script(SCRIPT.replace(pause, wait))
    attacked.touch()
    whole = uninterrupted(command)
    attacked.unlink()
    port = free_port()
    first, second = start_nodes(command, "--secret-file", str(secret_file(command)), port=port)
    with command.listening():
        command.wait_for(*(f"step 0 of {rank}" for rank in range(3)))
        attack(("127.0.0.1", port))
        attacked.touch()
    ended, other = command.end(first), command.end(second)
    assert (ended.status, other.status) == (0, 0), ended.err + other.err
    found = result(command, "out")
    assert (found["weights_sha256"], found.get("deaths", [])) == (whole["weights_sha256"], [])
    assert ended.err.count(f"Refused a connection from 127.0.0.1 to port {port}: ") == 1
    text = (command.folder / "run.secret").read_text()
    files = [path for path in (command.folder / "out").rglob("*") if path.is_file()]
    assert [path for path in files if text in path.read_text("latin-1")] == []
    assert text not in ended.err + other.err


@pytest.mark.slow
def test_a_node_with_another_secret_ends_with_a_message(command: Command) -> None:
    command.script(SCRIPT)
    port = free_port()
    words = ["run", "script.py", "--run-dir", "out", "--ranks", "2", "--nodes", "2", "--meet", f"127.0.0.1:{port}"]
    one, other = secret_file(command), secret_file(command, "other.secret")
    first = command.start(*words, "--node", "0", "--secret-file", str(one))
    ended = command.run(*words, "--node", "1", "--secret-file", str(other))
    assert ended.status == 2
    error = f"Node 1 and node 0 at 127.0.0.1, port {port} have different secrets."
    assert ended.err.startswith(f"{error}\n  Node 1 has the one of its --secret-file.")
    second = command.run(*words, "--node", "1")
    assert "Without --secret-file, every program that reaches 127.0.0.1" in second.err
    assert (second.status, "  Node 1 has none." in second.err) == (2, True)
    joined = command.run(*words, "--node", "1", "--secret-file", str(one))  # node 0 still waits
    found = command.end(first)
    assert (joined.status, found.status) == (0, 0), found.err
    assert found.err.count("Refused a connection from 127.0.0.1") == 1


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
@pytest.mark.parametrize("kept", [False, True], ids=["plain", "secret"])
def test_all_nodes_start_again_after_early_deaths(command: Command, kept: bool) -> None:
    """A process of each node dies before the first step. All processes start twice more."""
    command.script(SCRIPT)
    whole = uninterrupted(command)
    deaths = [("main(run):\n", "main(run):\n    die(1)\n"), ("    optimizer = ", "    die(0)\n    optimizer = ")]
    text = SCRIPT
    for old, new in deaths:
        text = text.replace(old, new, 1)
    command.script(DIE + text)
    first, second = start_nodes(command, *(["--secret-file", str(secret_file(command))] if kept else []), ranks=2)
    ended, other = command.end(first, times=3), command.end(second, times=3)
    assert (ended.status, other.status) == (0, 0), ended.err + other.err
    assert ended.err.count("Restarting from the beginning") == 2
    assert result(command, "out")["weights_sha256"] == whole["weights_sha256"]


DIE = """
def die(rank):
    mark = Path(__file__).with_name(f"died-{rank}")
    if world.rank == rank and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


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
    assert f"Node 0 cannot wait for the others at 127.0.0.1, port {port}.\n  Address already in use." in ended.err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--nodes 2", "--nodes needs --meet."),
        ("--nodes 2 --node 2 --meet a:1", "--node 2 is out of range."),
        ("--nodes 2 --meet a", "Invalid value for --meet: a"),
        ("--nodes 2 --meet a:1 --hosts b", "--hosts cannot be combined with --nodes."),
        ("--nodes 2 --meet a:1 --secret-file no", "Cannot read the secret file no."),
        ("--secret-file no", "--secret-file needs --nodes."),
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
    started, words = [], ("--run-dir", "out", "--ranks", "4", "--secret-file", secret_file(command))
    for index in (1, 0):
        monkeypatch.setenv("SKYPILOT_NODE_RANK", str(index))
        started.append(command.start("run", "script.py", *words))
    other, first = (command.end(process) for process in started)
    assert (first.status, other.status) == (0, 0), first.err + other.err
    found = result(command, "out")
    assert (found["ranks"], found["weights_sha256"]) == (4, whole["weights_sha256"])


@pytest.mark.slow
def test_the_doctor_examines_nodes(command: Command) -> None:
    port = free_port()
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
    port = free_port()
    words = ["bench", "--only", "pairs", "--run-dir", "out", "--nodes", "2", "--meet", f"127.0.0.1:{port}"]
    second = command.start(*words, "--node", "1")
    first = command.start(*words, "--node", "0", "--json")
    ended, other = command.end(first), command.end(second)
    assert (ended.status, other.status, other.out) == (0, 0, ""), ended.err + other.err
    assert [pair["ranks"] for pair in json.loads(ended.out)["pairs"]] == [[0, 1]]
