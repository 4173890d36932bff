"""The exchanges: one entry for each value of the setting `exchange`.

Add an exchange in three steps: write its class (docs/guide/exchanges/custom.md has the protocol), add its name to
`ExchangeName`, and add an entry to `EXCHANGES`. Validation, the training loop, and the commands that repeat a run read
this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExchangeName = Literal["tree", "wide", "allreduce", "ring", "ddp", "server", "local_sgd"]

DIVIDING_AXES = ("shard", "context", "tensor", "pipeline")
"""Axes of the mesh along which a model, or what it computes, is divided. Replicas are the fifth axis."""


@dataclass(frozen=True)
class ExchangeInfo:
    """Describe one exchange.

    target           its class, as "module:Class"
    arguments        what its class is given besides parameters, virtual ranks and the group: "world", all processes;
                     "settings", the settings named after it
    axes             axes of the mesh, besides replicas, that it supports
    why_not          for an axis that it does not support, why; by default: it averages gradients of whole models
    reshard_by_layer whether it averages the gradients of shards that are gathered layer by layer
    compressed       the class that averages compressed gradients, as "module:Class"; "": there is none
    after_death      the class that continues a step after a death, as "module:Class"; "": the step cannot be repeated
    work_stealing    the class under which idle processes take virtual ranks from others; "": there is none
    has_section      whether settings are named after it: server.count, server.staleness
    mixed_devices    whether its processes may have different kinds of device
    not_recomputed   why another process cannot compute one of its gradients again; "": it can
    not_replayed     why one process cannot repeat its steps; "": it can
    loop             the loop in which its processes make steps, as "module:Class" or "module:function"; "": all
                     make every step together
    """

    target: str
    arguments: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    why_not: tuple[tuple[str, str], ...] = ()
    reshard_by_layer: bool = False
    compressed: str = ""
    after_death: str = ""
    work_stealing: str = ""
    has_section: bool = False
    mixed_devices: bool = True
    not_recomputed: str = ""
    not_replayed: str = ""
    loop: str = ""

    def reason_against(self, axis: str) -> str:
        """Return why this exchange does not support an axis that is not in `axes`."""
        return dict(self.why_not).get(axis, "This exchange averages gradients of whole models.")


EXCHANGES: dict[str, ExchangeInfo] = {
    "tree": ExchangeInfo(
        "unisono.exchange.tree.tree_exchange:TreeExchange",
        arguments=("settings",),
        axes=DIVIDING_AXES,
        reshard_by_layer=True,
        compressed="unisono.exchange.compression.compressed:CompressedTree",
        after_death="unisono.exchange.tree.dynamic_tree:DynamicTree",
        work_stealing="unisono.exchange.tree.dynamic_tree:DynamicTree",
        has_section=True,
    ),
    "wide": ExchangeInfo(
        "unisono.exchange.reproducible_sum:ReproducibleSum",
        arguments=("world",),
        axes=("shard", "context", "tensor"),
        why_not=(
            ("pipeline", "All processes agree on the grid of its sums, and pipeline stages hold different parameters."),
        ),
    ),
    "allreduce": ExchangeInfo(
        "unisono.exchange.allreduce:AllReduce",
        axes=DIVIDING_AXES,
        compressed="unisono.exchange.compression.compressed:CompressedAllReduce",
    ),
    "ring": ExchangeInfo("unisono.exchange.ring:RingAllReduce", axes=DIVIDING_AXES),
    "ddp": ExchangeInfo(
        "unisono.exchange.ddp:DdpExchange", arguments=("settings",), has_section=True, mixed_devices=False
    ),
    "server": ExchangeInfo(
        "unisono.param_server.push_pull:ParameterServerExchange",
        has_section=True,
        not_recomputed="Its processes are servers and workers, which hold different tensors.",
        not_replayed="Its workers train at their own pace, and the order of their updates is not recorded.",
        loop="unisono.param_server.sync_servers:choose_server_loop",
    ),
    "local_sgd": ExchangeInfo(
        "unisono.local_sgd.inner:InnerExchange",
        has_section=True,
        not_recomputed="Its sites hold different weights between synchronizations.",
        not_replayed="Its sites hold different weights between synchronizations, and a checkpoint has their mean.",
        loop="unisono.local_sgd.site_loop:LocalSGDLoop",
    ),
}
