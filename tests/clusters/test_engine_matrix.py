"""Every engine has the bits of one process, on 2, 3 and 4 hosts, and resumes the runs of the other engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters import ray_nodes
from tests.clusters.engine_runs import EngineHosts, engine_hosts, missing
from tests.network.test_encrypted_links import captured

reason = missing()
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.skipif(bool(reason), reason=reason)]

RECORD = b"\x17\x03\x03"
"""Begins a record with data of TLS (RFC 8446, section 5.1)."""

ENGINES = ("ssh", "torchrun", "slurm", "kubernetes", *([] if ray_nodes.missing() else ["ray"]))
LAYOUTS = [(hosts, processes) for hosts in (2, 3, 4) for processes in (1, 2, 3)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHosts]:
    with engine_hosts(tmp_path_factory.mktemp("shared")) as running:
        running.alone("one")
        yield running


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("hosts", "processes"), LAYOUTS)
def test_an_engine_has_the_bits_of_one_process(cluster: EngineHosts, engine: str, hosts: int, processes: int) -> None:
    name = f"{engine}-{hosts}-{processes}"
    cluster.train(engine, hosts=hosts, processes=processes, run_dir=name)
    found = cluster.result(name)
    assert found["weights_sha256"] == cluster.result("one")["weights_sha256"]
    assert (found["ranks"], found["promise"]) == (hosts * processes, "exact")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_s_processes_send_each_other_tls(cluster: EngineHosts, engine: str) -> None:
    (cluster.folder / "secret").write_text("4f1d" * 16)
    (cluster.folder / "secret").chmod(0o600)
    own = engine in ("ssh", "ray")  # their processes reach each other through a connection that is encrypted
    words = ["--set", "secure.transport=tls", *([] if own else ["--set", "secure.secret_file=secret"])]
    packets = cluster.folder / f"{engine}.packets"  # hosts share this folder only
    with captured(cluster.nodes[1], packets):
        cluster.train(engine, *words, hosts=2, processes=2, run_dir=f"{engine}-tls")
    found = cluster.result(f"{engine}-tls")
    assert found["weights_sha256"] == cluster.result("one")["weights_sha256"]
    assert (found["ranks"], found["promise"]) == (4, "exact")
    if engine != "ray":  # whose nodes are on one host here
        assert packets.read_bytes().count(RECORD) > found["steps"]


@pytest.mark.parametrize("first", ENGINES)
def test_another_engine_resumes_a_run(cluster: EngineHosts, first: str) -> None:
    """Half of the steps on 2 x 2 processes under one engine, the others on 3 x 1 under each other one."""
    for second in ENGINES:
        if second == first:
            continue
        name = f"{first}-then-{second}"
        cluster.train(first, "--set", "steps=12", hosts=2, processes=2, run_dir=name)
        resume = ["--set", "steps=24", *([] if second == "kubernetes" else ["--resume"])]
        cluster.train(second, *resume, hosts=3, processes=1, run_dir=name)
        found = cluster.result(name)
        assert found["weights_sha256"] == cluster.result("one")["weights_sha256"], name
        assert (found["ranks"], found["resumed_at"], found["promise"]) == (3, 12, "exact")
