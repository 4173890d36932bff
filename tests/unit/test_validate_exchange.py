"""Checks of exchanges: the placements that they support, and settings that would have no effect."""

from __future__ import annotations

import itertools
import re
from math import inf
from typing import Any

import pytest

from unisono.config import (
    BalanceSettings,
    CommandLine,
    CompressSettings,
    DdpSettings,
    LoaderSettings,
    LocalSGDSettings,
    ParallelSettings,
    ServerSettings,
    Settings,
)
from unisono.config.validate import check

LINE = CommandLine(("unisono", "run", "train.py"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"exchange": "ddp", "parallel": ParallelSettings(tensor=2)},
            "exchange = ddp cannot be combined with parallel.tensor = 2\\.: "
            ".*whole models.*exchange=tree.*parallel.tensor=1",
        ),
        (
            {"exchange": "allreduce", "parallel": ParallelSettings(shard=2)},
            "exchange = allreduce cannot be combined with parallel.shard = 2\\.: "
            ".*layer by layer.*exchange=tree.*parallel.reshard=step",
        ),
        (
            {"exchange": "wide", "parallel": ParallelSettings(pipeline=2)},
            "exchange = wide cannot be combined with parallel.pipeline = 2\\.: .*different parameters.*exchange=tree",
        ),
        (
            {"exchange": "wide", "compress": CompressSettings(kind="int8")},
            "compress.kind = int8 cannot be combined with exchange = wide\\.: "
            ".*tree and allreduce.*exchange=tree.*compress.kind=none",
        ),
        (
            {"compress": CompressSettings(kind="fp16"), "parallel": ParallelSettings(tensor=2)},
            "compress.kind = fp16 cannot be combined with parallel.tensor = 2\\.: "
            ".*holds a part.*compress.kind=none.*parallel.tensor=1",
        ),
        (
            {"compress": CompressSettings(kind="topk"), "parallel": ParallelSettings(shard=2, reshard="step")},
            "compress.kind = topk cannot be combined with parallel.shard = 2\\.: .*holds a part",
        ),
        (
            {"compress": CompressSettings(kind="topk"), "balance": BalanceSettings(work_stealing=True)},
            "compress.kind = topk cannot be combined with balance.work_stealing = true\\.: .*within a "
            "step.*balance.work_stealing=false",
        ),
        (
            {"compress": CompressSettings(kind="topk", ratio=0.0)},
            "compress.ratio = 0.0 is out of range.: .*above 0.*ratio=0.01",
        ),
        (
            {"compress": CompressSettings(kind="int8", groups=6)},
            "compress.groups = 6 is no level of the tree.: .*2, 4, 8 nodes.*groups=4",
        ),
        (
            {"compress": CompressSettings(kind="int8", rank=2)},
            "rank = 2 has no effect with compress.kind = int8.: .*of compress.kind=powersgd.*rank=4",
        ),
        (
            {"compress": CompressSettings(groups=2)},
            "groups = 2 has no effect with compress.kind = none.: .*not compressed.*groups=none",
        ),
        (
            {"exchange": "allreduce", "compress": CompressSettings(kind="int8", groups=2)},
            "compress.groups = 2 has no effect with exchange = allreduce.: .*each process compresses.*exchange=tree",
        ),
        (
            {"ddp": DdpSettings(static_graph=True)},
            "ddp.static_graph = true has no effect with exchange = tree.: .*of exchange=ddp.*static_graph=false",
        ),
        (
            {"local_sgd": LocalSGDSettings(sync_every=10)},
            "local_sgd.sync_every = 10 has no effect with exchange = tree.: "
            ".*of exchange=local.*exchange=local.*local_sgd.sync_every=50",
        ),
        (
            {"server": ServerSettings(staleness=None)},
            "server.staleness = none has no effect with exchange = tree.: .*of exchange=server",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(sync_every=0)},
            "local_sgd.sync_every = 0 is out of range.: .*at least 1.*local_sgd.sync_every=50",
        ),
        (
            {"exchange": "server", "server": ServerSettings(staleness=-1)},
            "server.staleness = -1 is out of range.: .*at least 0.*server.staleness=0",
        ),
        (
            {"exchange": "server", "server": ServerSettings(count=4)},
            "exchange = server does not fit 4 processes.: 4 servers and at least 1 worker make 5.*--ranks 5",
        ),
        (
            {"exchange": "server", "parallel": ParallelSettings(pipeline=2)},
            "exchange = server cannot be combined with parallel.pipeline = 2\\.: "
            ".*whole models.*exchange=tree.*parallel.pipeline=1",
        ),
        (
            {"exchange": "server", "parallel": ParallelSettings(context=2)},
            "exchange = server cannot be combined with parallel.context = 2\\.: "
            ".*whole models.*exchange=tree.*parallel.context=1",
        ),
        (
            {"exchange": "server", "parallel": ParallelSettings(shard=2)},
            "exchange = server cannot be combined with parallel.shard = 2\\.: "
            ".*whole models.*exchange=tree.*parallel.shard=1",
        ),
        (
            {"exchange": "server", "parallel": ParallelSettings(replicate=4)},
            "parallel.replicate = 4 cannot be combined with exchange = server.: "
            ".*servers and workers.*parallel.replicate=-1",
        ),
        (
            {"exchange": "server", "virtual_ranks": 1},
            "exchange = server cannot be combined with virtual_ranks = 1.: .*one stream.*virtual_ranks=2",
        ),
        (
            {"exchange": "server", "server": ServerSettings(staleness=1)},
            "server.staleness = 1 is too small for 3 workers.: .*late by 2.*server.staleness=2.*--ranks 3",
        ),
        (
            {"exchange": "server", "server": ServerSettings(staleness=None), "loader": LoaderSettings(workers=2)},
            "server.staleness = none cannot be combined with loader.workers = 2.: .*loaded ahead.*loader.workers=0",
        ),
        (
            {"exchange": "allreduce", "balance": BalanceSettings(work_stealing=True)},
            "balance.work_stealing = true cannot be combined with exchange = allreduce\\.: .*exchange=tree "
            "adds.*balance.work_stealing=false.*exchange=tree",
        ),
        (
            {"parallel": ParallelSettings(tensor=2), "balance": BalanceSettings(work_stealing=True)},
            "balance.work_stealing = true cannot be combined with parallel.tensor = 2\\.: "
            ".*balance.work_stealing=false.*parallel.tensor=1",
        ),
        (
            {"exchange": "local_sgd", "virtual_ranks": 8, "local_sgd": LocalSGDSettings(sites=3)},
            "virtual_ranks = 8 cannot be divided among 3 sites.: .*multiple of "
            "3.*virtual_ranks=6.*virtual_ranks=9.*local_sgd.sites=2",
        ),
        (
            {"exchange": "local_sgd", "virtual_ranks": 9, "local_sgd": LocalSGDSettings(sites=3)},
            "4 processes cannot be divided among 3 sites.: .*multiple of 3.*--ranks 6.*--ranks 3.*local_sgd.sites=2",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(sync_every=4, num_fragments=5)},
            "local_sgd.num_fragments = 5 is more than sync_every.: "
            ".*4 steps.*local_sgd.num_fragments=4.*local_sgd.sync_every=5",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(sync_every=4, sync_delay=4)},
            "local_sgd.sync_delay = 4 is not below sync_every.: "
            ".*4 steps later.*local_sgd.sync_delay=3.*local_sgd.sync_every=5",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(outer_lr=0.0)},
            "local_sgd.outer_lr = 0.0 is out of range.: .*above 0.*local_sgd.outer_lr=0.7",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(outer_lr=inf)},
            "local_sgd.outer_lr = inf is out of range.: .*finite.*local_sgd.outer_lr=0.7",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(outer_momentum=1.0)},
            "local_sgd.outer_momentum = 1.0 is out of range.: .*below 1",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(outer_optimizer="average", outer_momentum=0.5)},
            "local_sgd.outer_momentum = 0.5 has no effect with local_sgd.outer_optimizer = average.: .*average of the "
            "sites.*local_sgd.outer_optimizer=nesterov.*local_sgd.outer_momentum=0.9",
        ),
        (
            {"exchange": "local_sgd", "local_sgd": LocalSGDSettings(sites=1)},
            "local_sgd.sites = 1 is out of range.: .*at least 2.*local_sgd.sites=2",
        ),
        (
            {"exchange": "local_sgd", "parallel": ParallelSettings(shard=2)},
            "exchange = local_sgd cannot be combined with parallel.shard = 2\\.: .*whole models",
        ),
    ],
)
def test_conflicting_settings_are_refused_with_a_command(fields: dict[str, Any], words: str) -> None:
    problems = check(Settings(steps=1, **fields), 4, LINE)
    messages = [f"{problem.error}: {problem.facts} {problem.remedy}" for problem in problems]
    assert any(re.search(words, line) for line in messages), messages


@pytest.mark.parametrize(("size", "count", "staleness"), [(2, 1, 0), (9, 1, 0), (10, 2, 0), (30, 1, None), (4, 1, 2)])
def test_virtual_ranks_are_the_workers(size: int, count: int, staleness: int | None) -> None:
    server = ServerSettings(count=count, staleness=staleness)
    assert check(Settings(steps=1, exchange="server", server=server), size, LINE) == []


def test_more_workers_than_virtual_ranks_are_too_many() -> None:
    (problem,) = check(Settings(steps=1, batch=8, exchange="server"), 10, LINE)
    assert (problem.error, problem.facts) == (
        "9 workers are more than virtual_ranks.",
        "Each of the 8 virtual ranks runs on one: 1 to 8 workers.",
    )
    assert "--ranks 9, or (other bits):" in problem.remedy
    assert "--ranks 10 --set virtual_ranks=9 --set batch=9" in problem.remedy


@pytest.mark.parametrize(
    ("exchange", "axis"),
    [
        *itertools.product(["tree", "allreduce", "ring"], ["tensor", "context", "pipeline"]),
        ("wide", "tensor"),
        ("wide", "context"),
    ],
)
def test_exchanges_that_add_parts_support_parallel_axes(exchange: Any, axis: str) -> None:
    sizes: dict[str, Any] = {axis: 2}
    assert check(Settings(steps=1, exchange=exchange, parallel=ParallelSettings(**sizes)), 4, LINE) == []


def test_a_refused_axis_is_reported_together_with_a_wrong_mesh() -> None:
    axis, mesh = check(Settings(steps=1, exchange="server", parallel=ParallelSettings(shard=2)), 3, LINE)
    assert mesh.error == "3 processes cannot form the mesh."
    assert axis.error == "exchange = server cannot be combined with parallel.shard = 2."


def test_all_conflicts_are_reported_together() -> None:
    fields: dict[str, Any] = {"local_sgd": LocalSGDSettings(sync_every=10, sites=3), "server": ServerSettings(count=2)}
    assert len(check(Settings(steps=1, **fields), 2, LINE)) == 3


def test_compression_needs_more_than_one_virtual_rank() -> None:
    settings = Settings(steps=1, virtual_ranks=1, compress=CompressSettings(kind="bf16"))
    (problem,) = check(settings, 1, LINE)
    assert problem.error == "compress.kind = bf16 cannot be combined with virtual_ranks = 1."
    assert "no gradient is sent" in problem.facts


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 5), (4, 5), (5, 5), (3, 3), (2, 2), (8, 8), (64, 100)])
def test_levels_of_the_tree_can_be_compressed(nodes: int, ranks: int) -> None:
    settings = Settings(steps=1, batch=100, virtual_ranks=ranks, compress=CompressSettings(kind="int8", groups=nodes))
    assert check(settings, 2, LINE) == []
