"""secure.transport=tls between hosts: what crosses a link cannot be read, and the bits are those of one process."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.authority import Authority
from tests.network.hosts import Host, HostProcess, hosts, missing
from tests.network.test_hosts import with_code

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

SECONDS = 300.0
PIPES = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE}

MARKERS = 625
"""Numbers of 16 bytes each, so 10,000 bytes."""

TRAIN = """
import os, signal
from pathlib import Path
import torch, unisono

MARKERS = torch.rand(2500, generator=torch.Generator().manual_seed(7))

def main(run):
    torch.manual_seed(1)
    model = run.place(lambda: torch.nn.Linear(2500, 1, bias=False))
    model.register_buffer("secret", MARKERS.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    x = torch.zeros(64, 1)
    x[-1] = 1.0                        # the gradient of one sample is the markers, and that of all others is zero
    for step in run.steps(torch.utils.data.TensorDataset(x)):
        for (inputs,) in step:
            step.backward(model(inputs * MARKERS).sum() * inputs.sum().sign(), weight=len(inputs))
        step.update(optimizer)
        mark = Path("died")
        if os.environ.get("DIE") and step.number == 5 and run.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if not os.environ.get("DIE"):
            run.collectives.all_gather(MARKERS.clone())

unisono.main(main, unisono.Settings)
"""

SETTINGS = ["steps=12", "batch=64", "virtual_ranks=8", "threads=1", "machine.every=0"]

CAPTURE = """
import socket, sys
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
link.bind(("eth0", 0))
print("Capturing", flush=True)
with open(sys.argv[1], "wb", 0) as file:
    while True:
        file.write(link.recv(1 << 17))
"""
"""What tshark would write, without its format, where it is not installed."""


def markers() -> list[bytes]:
    numbers = torch.rand(2500, generator=torch.Generator().manual_seed(7)).tolist()
    whole = struct.pack(f"={len(numbers)}f", *numbers)
    return [whole[n : n + 16] for n in range(0, len(whole), 16)]


@contextmanager
def captured(host: Host, path: Path) -> Iterator[None]:
    """Write every packet of a host's interface to a file, by tshark if it is installed."""
    words = [sys.executable, "-c", CAPTURE, str(path)]
    if shutil.which("tshark") is not None:
        words = ["tshark", "-q", "-i", "eth0", "-w", str(path)]
    process = host.start(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    assert any("Capturing" in line for line in process.stdout)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def found_in(path: Path) -> int:
    """Return how many of the markers a capture has."""
    content = path.read_bytes()
    assert len(content) > 20_000, "nothing was captured"
    return sum(marker in content for marker in markers())


def sets(*more: str) -> list[str]:
    return [word for value in (*SETTINGS, *more) for word in ("--set", value)]


def result_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the fingerprint of one process."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train.py").write_text(TRAIN)
    words = [sys.executable, "train.py", "--run-dir", "one", *sets()]
    subprocess.run(words, cwd=folder, env=with_code(), check=True, timeout=SECONDS, stderr=subprocess.PIPE)
    return str(result_of(folder / "one")["weights_sha256"])


def write_secret(folder: Path) -> Path:
    path = folder / "secret"
    path.write_text("4f1d" * 16)
    path.chmod(0o600)
    return path


def torchrun(folder: Path, transport: str) -> list[str]:
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29500", "--rdzv-id", "test"]
    secret = ["secure.secret_file=secret"] if transport == "tls" else []
    script = ["train.py", *sets(f"secure.transport={transport}", *secret), "--run-dir", "out"]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", "2", *script]


def nodes(number: int, transport: str, ranks: int) -> list[str]:
    words = [sys.executable, "-m", "unisono", "run", "train.py", "--ranks", str(ranks), "--run-dir", "out"]
    words += ["--nodes", "2", "--node", str(number), "--meet", "a:29500", *sets(f"secure.transport={transport}")]
    return [*words, "--secret-file", "secret"] if transport == "tls" else words


def ended(running: list[HostProcess]) -> list[str]:
    """Return what processes have printed, when all have ended well."""
    outputs = [process.communicate(timeout=SECONDS) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), outputs
    return ["".join(map(str, output)) for output in outputs]


@pytest.mark.parametrize("transport", ["tls", "plain"])
@pytest.mark.parametrize("engine", ["torchrun", "nodes"])
def test_gradients_cannot_be_read_on_the_link(tmp_path: Path, whole: str, engine: str, transport: str) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    with hosts(2, shared=[tmp_path]) as every, captured(every[1], tmp_path / "packets"):
        words = [torchrun(tmp_path, transport) if engine == "torchrun" else nodes(n, transport, 4) for n in range(2)]
        ended([host.start(each, **options) for host, each in zip(every, words, strict=True)])
    found = result_of(tmp_path / "out")
    assert (found["ranks"], found["weights_sha256"], found["promise"]) == (4, whole, "exact")
    readable = found_in(tmp_path / "packets")
    print(f"\n{engine}, {transport}: {16 * readable} of {16 * MARKERS} marker bytes can be read")
    assert readable == 0 if transport == "tls" else readable > 0.99 * MARKERS  # a few are split between two packets


def test_parameter_servers_are_encrypted(tmp_path: Path, whole: str) -> None:
    """Gradients go to servers over connections of their own."""
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    words = [*torchrun(tmp_path, "tls"), "--set", "exchange=server"]
    with hosts(2, shared=[tmp_path]) as every, captured(every[1], tmp_path / "packets"):
        ended([host.start(words, **options) for host in every])
    found = result_of(tmp_path / "out")
    assert (found["weights_sha256"] == whole) is (found["promise"] == "exact")
    assert found_in(tmp_path / "packets") == 0


def test_a_death_is_survived_and_the_replacement_is_encrypted(tmp_path: Path, whole: str) -> None:
    """The state of the run goes to the replacement: weights with the markers in them."""
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    options: dict[str, Any] = {"cwd": tmp_path, "env": {**with_code(), "DIE": "1"}, **PIPES}
    with hosts(2, shared=[tmp_path]) as every, captured(every[1], tmp_path / "packets"):
        ended([host.start(nodes(n, "tls", 2), **options) for n, host in enumerate(every)])
    found = result_of(tmp_path / "out")
    assert (found["weights_sha256"], found["promise"], len(found["deaths"])) == (whole, "exact", 1)
    assert found_in(tmp_path / "packets") == 0


def test_tls_without_a_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    with hosts(2, shared=[tmp_path]) as every:
        words = [[word for word in nodes(n, "tls", 2) if word not in ("--secret-file", "secret")] for n in range(2)]
        running = [host.start(each, **options) for host, each in zip(every, words, strict=True)]
        outputs = [process.communicate(timeout=SECONDS) for process in running]
    assert [process.returncode for process in running] != [0, 0]
    assert "secure.transport = tls needs a secret or certificates." in str(outputs)
    assert "add --secret-file FILE on all nodes" in str(outputs)
    assert not (tmp_path / "out" / "result.json").exists()


def test_another_secret_is_refused(tmp_path: Path) -> None:
    """A process with another secret reaches the private store of torchrun's processes, and nothing else."""
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    other = tmp_path / "other"
    other.write_text("9a2b" * 16)
    other.chmod(0o600)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    with hosts(2, shared=[tmp_path]) as every:
        words = [torchrun(tmp_path, "tls") for _ in range(2)]
        words[1] = [word.replace("secret_file=secret", "secret_file=other") for word in words[1]]
        running = [host.start(each, **options) for host, each in zip(every, words, strict=True)]
        try:
            output = running[1].communicate(timeout=SECONDS)
        finally:
            for process in running:
                process.send_signal(signal.SIGTERM)
                process.kill()
    assert running[1].returncode
    assert "cannot reach the private store" in str(output)
    assert not (tmp_path / "out" / "result.json").exists()


def organization(folder: Path, host: str, kind: str) -> list[str]:
    """Write a certificate for a host, and return the settings that name it. `kind`: what is wrong with that of b."""
    authority = AUTHORITIES.get(folder) or AUTHORITIES.setdefault(folder, Authority(folder))
    wrong = kind if host == "b" else ""
    names = ["a" if wrong == "name" else host]
    label = f"{host}-{kind}"
    if wrong == "authority":
        files = Authority(folder, "Other").issue(names, label=label, ca=authority.ca)
    elif wrong == "date":
        files = authority.issue(names, label=label, seconds=-60.0)
    elif wrong == "revoked":
        files = authority.issue(names, label=label, revoked=True)
        authority.write_ca(revocation_list=True)
    else:
        files = authority.issue(names, label=label)
    found = [f"secure.{name}={path}" for name, path in zip(("ca", "cert", "key"), files, strict=True)]
    return [*found, 'secure.hosts=["a"]'] if kind == "list" else found


AUTHORITIES: dict[Path, Authority] = {}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("", ""),
        ("name", "its certificate is that of a."),
        ("list", "The host of rank 1 on host b may not join."),
        ("authority", "The certificate of this process is not accepted by rank 0 on host a."),
        ("revoked", "The certificate of this process is not accepted by rank 0 on host a."),
        ("date", "The certificate of CN=b expired on"),
    ],
)
def test_certificates_of_an_organization(tmp_path: Path, whole: str, kind: str, text: str) -> None:
    """The process with the wrong certificate says what is wrong, and the run does not start."""
    (tmp_path / "train.py").write_text(TRAIN)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    settings = {name: sets("secure.transport=tls", *organization(tmp_path, name, kind)) for name in ("a", "b")}
    with hosts(2, shared=[tmp_path]) as every:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "a"]
        running = []
        for number, (host, name) in enumerate(zip(every, settings, strict=True)):
            script = ["train.py", *settings[name], "--run-dir", "out"]
            running.append(host.start([*words, "--node-rank", str(number), *script], **options))
        if not kind:
            ended(running)
        else:
            try:
                output = running[1].communicate(timeout=SECONDS)
            finally:
                running[0].kill()
            assert running[1].returncode
            assert text in str(output), output
            assert not (tmp_path / "out" / "result.json").exists()
    if not kind:
        found = result_of(tmp_path / "out")
        assert (found["ranks"], found["weights_sha256"]) == (2, whole)


@pytest.mark.parametrize(
    ("kind", "text"), [("list", "may not join"), ("authority", "does not accept"), ("revoked", "revoked")]
)
def test_the_audit_log_names_a_refused_process(tmp_path: Path, kind: str, text: str) -> None:
    """Rank 0 on host a refuses rank 1 on host b. The launcher on host a records that."""
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    issued = {name: organization(tmp_path, name, kind)[:3] for name in ("a", "b")}
    with hosts(2, shared=[tmp_path]) as every:
        for host in every:
            paths = [each.partition("=")[2] for each in issued[host.name]]  # each host has its own at the same path
            script = 'mkdir -p /run/tls && cp "$1" /run/tls/ca && cp "$2" /run/tls/cert && cp "$3" /run/tls/key'
            host.run(["sh", "-c", script, "sh", *paths], check=True)
        files = [f"secure.{name}=/run/tls/{name}" for name in ("ca", "cert", "key")]
        files += ['secure.hosts=["a"]'] if kind == "list" else []
        words = [[*nodes(n, "tls", 2), *(word for file in files for word in ("--set", file))] for n in range(2)]
        running = [host.start(each, **options) for host, each in zip(every, words, strict=True)]
        outputs = [process.communicate(timeout=SECONDS) for process in running]
    assert [process.returncode for process in running] != [0, 0]
    entries = [json.loads(line) for line in (tmp_path / "out" / "audit.jsonl").read_text().splitlines()]
    refusals = [entry for entry in entries if entry["event"] == "refusal"]
    assert any(text in entry["reason"] and "rank 1" in entry["reason"] for entry in refusals), (entries, outputs)
    assert {entry["process"] for entry in refusals} == {0}
    assert {entry["event"] for entry in entries} & {"restart"} == set()  # another start would change nothing
    assert "OSError" not in str(outputs)


OVERWRITE = """
import datetime, json, socket, sys, threading, time
import torch.distributed as dist

def listen(door):                                  # the port to which rank 1 is sent in place of that of rank 0
    while True:
        connection, _ = door.accept()
        connection.sendall(b"UNISONO\\x01" + bytes(32))
        connection.recv(100)

door = socket.create_server(("", 7000))
threading.Thread(target=listen, args=(door,), daemon=True).start()
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        store = dist.TCPStore("a", 29500, timeout=datetime.timedelta(seconds=2), wait_for_workers=False)
        break
    except RuntimeError:
        time.sleep(0.1)
print("connected", flush=True)
prefixes, count = set(), 0
while time.monotonic() < until:
    try:
        for line in store.get("unisono-rounds").decode().splitlines():
            if line.startswith("lead"):
                prefixes.add(line.split()[2])
        for prefix in prefixes:
            store.set(f"{prefix}/private-store", json.dumps({"host": "a", "addresses": [sys.argv[1]], "port": 7000}))
            store.set(f"{prefix}/run-secret", "00" * 32)
            count += 1
            print("overwritten", flush=True)
    except RuntimeError:
        time.sleep(0.05)
"""


def test_keys_of_the_engine_s_store_are_overwritten(tmp_path: Path, whole: str) -> None:
    """A third machine sends rank 1 to a port of its own. The run ends with a message, or has the same bits."""
    (tmp_path / "train.py").write_text(TRAIN)
    write_secret(tmp_path)
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), **PIPES}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "a"]
    script = ["train.py", *sets("secure.transport=tls", "secure.secret_file=secret"), "--run-dir", "out"]
    with hosts(3, shared=[tmp_path]) as every:
        attacker = every[2].start([sys.executable, "-c", OVERWRITE, every[2].address], **options)
        words = [[*launcher, "--node-rank", str(number), *script] for number in range(2)]
        running = [host.start(each, **options) for host, each in zip(every, words, strict=False)]
        try:
            output = running[1].communicate(timeout=SECONDS)
            if running[1].returncode == 0:
                running[0].communicate(timeout=SECONDS)
        finally:
            for process in (*running, attacker):
                process.kill()
        said = attacker.communicate()[0]
    assert "overwritten" in str(said), "the attack has done nothing"
    if running[1].returncode == 0:
        assert result_of(tmp_path / "out")["weights_sha256"] == whole
    else:
        assert "cannot reach the private store of rank 0 on host a" in str(output)
        assert not (tmp_path / "out" / "result.json").exists()
