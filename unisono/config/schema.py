"""What every run has: its settings, what each means, and whether another value is another computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the state of a run is saved, and how much of it is kept."""

    every: int = 0
    keep: int = 2
    keep_every: int = 0
    async_save: bool = True
    dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How a process gets its data."""

    workers: int = 0
    prefetch: int = 2
    damaged: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How a model lies over devices: the sizes of the axes of one mesh, and how it uses them."""

    replicate: int = -1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence: bool = False
    loss: bool = False
    gather: Literal["layer", "step"] = "layer"
    buddy: bool = False
    layers: list[str] = field(default_factory=list)
    offload: bool = False
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    split: int = 1
    threads: int = 1
    devices: list[str] = field(default_factory=list)
    recompute: Literal["none", "layer", "selective"] = "none"
    compile: bool = False
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    stages: list[str] = field(default_factory=list)
    loops: int = 2


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """Arguments of torch's DistributedDataParallel, under exchange=ddp."""

    static_graph: bool = False
    bucket_mb: float = 25.0


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """In which form gradients travel."""

    kind: Literal["none", "fp16", "bf16", "int8", "topk", "powersgd"] = "none"
    begin: int = 0
    nodes: int | None = None
    rank: int = 4
    keep: float = 0.01


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Parameter servers, under exchange=server."""

    count: int = 1
    staleness: int | None = 0


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Sites that train by themselves from one meeting to the next, under exchange=local."""

    sites: int = 2
    every: int = 50
    begin: int = 0
    outer: Literal["average", "nesterov"] = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    bits: Literal[32, 8, 4] = 32
    fragments: int = 1
    overlap: int = 0


@dataclass(frozen=True, kw_only=True)
class DealSettings:
    """How virtual ranks find their processes. It never changes the result."""

    by_speed: bool = True
    claim: bool = False


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """When processes compare what all of them hold, and what is done when it is not the same."""

    every: int = 1000
    heal: bool = False


@dataclass(frozen=True, kw_only=True)
class PromiseSettings:
    """When a run checks its own promise, and what happens when it does not hold."""

    check: bool = True
    pause: float = 120.0
    broken: Literal["auto", "stop", "tell"] = "auto"


@dataclass(frozen=True, kw_only=True)
class StuckSettings:
    """When a run counts as stuck, and what is done then."""

    after: float = 600.0
    then: Literal["end", "kill", "wait"] = "end"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every run has. A script's own class inherits from this one."""

    steps: int | None = None
    epochs: int | None = None
    batch: int = 32
    micro_batch: int | None = None
    virtual_ranks: int = 8
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    clip: float | None = None
    exchange: Literal["tree", "wide", "allreduce", "ring", "ddp", "server", "local"] = "tree"
    threads: int = 1
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    ddp: DdpSettings = field(default_factory=DdpSettings)
    compress: CompressSettings = field(default_factory=CompressSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    local: LocalSettings = field(default_factory=LocalSettings)
    deal: DealSettings = field(default_factory=DealSettings)
    divergence: DivergenceSettings = field(default_factory=DivergenceSettings)
    audit_every: int = 0
    promise: PromiseSettings = field(default_factory=PromiseSettings)
    stuck: StuckSettings = field(default_factory=StuckSettings)


class SettingInfo(NamedTuple):
    """What a setting means, and whether another value is another computation (so that a resume refuses it)."""

    meaning: str
    mathematics: bool


# A table and not the fields' metadata, because a script that gives a field another default replaces the whole field.
SETTING_INFO = {
    "steps": SettingInfo("optimizer steps in all; these or epochs", False),
    "epochs": SettingInfo("passes over the training data; these or steps", False),
    "batch": SettingInfo("samples in one step, over all processes", True),
    "micro_batch": SettingInfo("most samples in one forward pass; none: a whole share", True),
    "virtual_ranks": SettingInfo("shares of a batch: so many processes can help", True),
    "seed": SettingInfo("where all randomness comes from", True),
    "precision": SettingInfo("numbers that forward and backward compute with", True),
    "clip": SettingInfo("the gradient's largest norm; none: no clipping", True),
    "exchange": SettingInfo("tree: the same bits on any number of processes", True),
    "threads": SettingInfo("threads of torch in each process", True),
    "checkpoint.every": SettingInfo("steps between checkpoints; 0: at a stop and the end", False),
    "checkpoint.keep": SettingInfo("how many of the newest checkpoints stay", False),
    "checkpoint.keep_every": SettingInfo("those after a multiple of so many steps stay as well; 0: none", False),
    "checkpoint.async_save": SettingInfo("write beside the next steps, which wait only for a copy", False),
    "checkpoint.dir": SettingInfo("where: a folder, or a URL (s3://bucket/{run}); none: the run directory", False),
    "loader.workers": SettingInfo("processes that fetch data, for each that trains", False),
    "loader.prefetch": SettingInfo("micro-batches that each worker fetches ahead", False),
    "loader.damaged": SettingInfo("what a damaged sample of a stream does to the run", True),
    "parallel.replicate": SettingInfo("whole models, each for its part of a batch; -1: what is left", False),
    "parallel.shard": SettingInfo("processes that share one model's parameters", False),
    "parallel.tensor": SettingInfo("processes that share every matrix, and compute with their parts of it", False),
    "parallel.pipeline": SettingInfo("processes that hold one stretch of the layers each", False),
    "parallel.context": SettingInfo("processes that share every sequence", False),
    "parallel.sequence": SettingInfo("between blocks, divide sequences over the axis tensor", False),
    "parallel.loss": SettingInfo("leave logits divided by classes over the axis tensor", False),
    "parallel.gather": SettingInfo("what shards gather at once: a layer, or, once a step, all", False),
    "parallel.buddy": SettingInfo("each shard, with its optimizer state, has a copy on the next process", False),
    "parallel.layers": SettingInfo("classes of the model's layers; none: found", False),
    "parallel.offload": SettingInfo("keep shards in the CPU's memory between uses", False),
    "parallel.param_dtype": SettingInfo("numbers that layers compute with, and that shards are gathered in", True),
    "parallel.split": SettingInfo("devices of one process that share the layers of one model", False),
    "parallel.threads": SettingInfo("devices of one process that each compute a piece of a micro-batch", True),
    "parallel.devices": SettingInfo("which devices these two use, as torch names them; none: the first ones", False),
    "parallel.recompute": SettingInfo("what is computed again in backward, instead of kept", False),
    "parallel.compile": SettingInfo("compile layers with torch.compile", True),
    "parallel.schedule": SettingInfo("in which order a pipeline's stages compute what; torch's schedules", False),
    "parallel.stages": SettingInfo("modules with which the second and further stages begin; none: balanced", False),
    "parallel.loops": SettingInfo("stages of each process, under the schedules that have several", False),
    "ddp.static_graph": SettingInfo("every step uses the same parameters in the same way", False),
    "ddp.bucket_mb": SettingInfo("megabytes of gradient that travel together", False),
    "compress.kind": SettingInfo("the form in which gradients travel", True),
    "compress.begin": SettingInfo("steps whose gradients travel as they are, before that", True),
    "compress.nodes": SettingInfo("partial sums that are compressed, of the virtual ranks'; none: one for each", True),
    "compress.rank": SettingInfo("columns that powersgd sends of each matrix", True),
    "compress.keep": SettingInfo("the part of a gradient that topk sends", True),
    "server.count": SettingInfo("processes that are parameter servers, the first ones", False),
    "server.staleness": SettingInfo("updates a gradient may be late by; 0: synchronous; none: any number", True),
    "local.sites": SettingInfo("sites that train by themselves between two meetings", True),
    "local.every": SettingInfo("steps from one meeting of the sites to the next", True),
    "local.begin": SettingInfo("steps that all sites make together before that", True),
    "local.outer": SettingInfo("what is done with the mean of the sites' ways", True),
    "local.lr": SettingInfo("the outer learning rate, for nesterov", True),
    "local.momentum": SettingInfo("the outer momentum, for nesterov", True),
    "local.bits": SettingInfo("bits of every number that sites send each other", True),
    "local.fragments": SettingInfo("parts of the model that meet one after the other", True),
    "local.overlap": SettingInfo("steps that a site makes while a meeting's numbers travel", True),
    "deal.by_speed": SettingInfo("give faster processes more virtual ranks", False),
    "deal.claim": SettingInfo("let who is done first take what others have not begun", False),
    "divergence.every": SettingInfo("steps after which processes compare weights and gradients; 0: never", False),
    "divergence.heal": SettingInfo("who holds other weights than most gets theirs; false: the run stops", False),
    "audit_every": SettingInfo("steps after which a virtual rank is computed in two places; 0: never", False),
    "promise.check": SettingInfo("check at steps 0, 1, 2, 4, 8 and later that the promise of equal bits holds", False),
    "promise.pause": SettingInfo("seconds between two checks after step 8", False),
    "promise.broken": SettingInfo("stop; or tell, and lower the promise; auto: stop before step 10", False),
    "stuck.after": SettingInfo("seconds without progress after which a run reports a hang; 0: never", False),
    "stuck.then": SettingInfo("what happens then: the run ends; who is to blame is killed; or it waits on", False),
}

SECTIONS = (
    Settings,
    CheckpointSettings,
    LoaderSettings,
    ParallelSettings,
    DdpSettings,
    CompressSettings,
    ServerSettings,
    LocalSettings,
    DealSettings,
    DivergenceSettings,
    PromiseSettings,
    StuckSettings,
)
