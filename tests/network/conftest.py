from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.conftest import command as command
from tests.network import hosts as namespaces
from tests.network.ssh_cluster import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("shared")
    with namespaces.hosts(3, head=True, shared=[folder]) as (head, *others):
        yield Cluster(head, others, folder)


@pytest.fixture(scope="module")
def fingerprint(cluster: Cluster) -> str:
    """Return the fingerprint of one process."""
    status, err = cluster.run("--run-dir", "whole")
    assert status == 0, err
    return str(cluster.result("whole")["weights_sha256"])
