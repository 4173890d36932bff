"""What every run has: its settings, what each means, and whether another value is another computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from unisono.config.exchanges import ExchangeName


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
    on_error: Literal["stop", "skip"] = "stop"


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """How a model lies over devices: the sizes of the axes of one mesh, and how it uses them."""

    replicate: int = -1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    reshard: Literal["layer", "step"] = "layer"
    replicate_shards: bool = False
    layer_classes: list[str] = field(default_factory=list)
    offload: bool = False
    param_dtype: Literal["fp32", "bf16"] = "fp32"
    model_parallel_devices: int = 1
    data_parallel_devices: int = 1
    devices: list[str] = field(default_factory=list)
    activation_checkpoint: Literal["none", "full", "selective"] = "none"
    compile: bool = False
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = "1F1B"
    split_points: list[str] = field(default_factory=list)
    stages_per_rank: int = 2


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """Arguments of torch's DistributedDataParallel, under exchange=ddp."""

    static_graph: bool = False
    bucket_mb: float = 25.0


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """In which form gradients travel."""

    kind: Literal["none", "fp16", "bf16", "int8", "topk", "powersgd"] = "none"
    start_step: int = 0
    groups: int | None = None
    rank: int = 4
    ratio: float = 0.01


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Parameter servers, under exchange=server."""

    count: int = 1
    staleness: int | None = 0


@dataclass(frozen=True, kw_only=True)
class LocalSGDSettings:
    """Sites that train by themselves from one meeting to the next, under exchange=local."""

    sites: int = 2
    sync_every: int = 50
    warmup_steps: int = 0
    outer_optimizer: Literal["average", "nesterov"] = "nesterov"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    bits: Literal[32, 8, 4] = 32
    num_fragments: int = 1
    sync_delay: int = 0


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """How virtual ranks find their processes. It never changes the result."""

    by_speed: bool = True
    work_stealing: bool = False


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """When processes compare what all of them hold, and what is done when it is not the same."""

    every: int = 1000
    repair: bool = False


@dataclass(frozen=True, kw_only=True)
class PromiseSettings:
    """When a run checks its own promise, and what happens when it does not hold."""

    check: bool = True
    min_interval: float = 120.0
    on_violation: Literal["auto", "stop", "warn"] = "auto"


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """When a run counts as stuck, and what is done then."""

    timeout: float = 600.0
    action: Literal["end", "kill", "wait"] = "end"


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
    exchange: ExchangeName = "tree"
    threads: int = 1
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    ddp: DdpSettings = field(default_factory=DdpSettings)
    compress: CompressSettings = field(default_factory=CompressSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    local_sgd: LocalSGDSettings = field(default_factory=LocalSGDSettings)
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    divergence: DivergenceSettings = field(default_factory=DivergenceSettings)
    audit_every: int = 0
    promise: PromiseSettings = field(default_factory=PromiseSettings)
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)


class SettingInfo(NamedTuple):
    """What a setting means, and whether another value is another computation (so that a resume refuses it)."""

    meaning: str
    mathematics: bool


# A table and not the fields' metadata, because a script that gives a field another default replaces the whole field.
SETTING_INFO = {
    "steps": SettingInfo("number of optimizer steps; set this or epochs", False),
    "epochs": SettingInfo("number of passes over the training data; set this or steps", False),
    "batch": SettingInfo("global batch size: samples per step, over all processes", True),
    "micro_batch": SettingInfo(
        "largest number of samples per forward pass; none: the whole share of a virtual rank", True
    ),
    "virtual_ranks": SettingInfo(
        "parts that each batch is divided into; at most this many processes can share a batch", True
    ),
    "seed": SettingInfo("seed of all random numbers", True),
    "precision": SettingInfo("data type of forward and backward", True),
    "clip": SettingInfo("largest norm of the gradient; none: no clipping", True),
    "exchange": SettingInfo("how gradients are averaged; tree: the same bits on any number of processes", True),
    "threads": SettingInfo("torch.set_num_threads in each process", True),
    "checkpoint.every": SettingInfo("steps between checkpoints; 0: only at a stop and at the end", False),
    "checkpoint.keep": SettingInfo("number of recent checkpoints to keep", False),
    "checkpoint.keep_every": SettingInfo("also keep checkpoints of steps that are multiples of this; 0: none", False),
    "checkpoint.async_save": SettingInfo("write in the background; training waits only for the copy", False),
    "checkpoint.dir": SettingInfo(
        "a folder or URL (s3://bucket/{run}) for checkpoints; none: the run directory", False
    ),
    "loader.workers": SettingInfo("loader worker processes per training process", False),
    "loader.prefetch": SettingInfo("micro-batches that each worker loads ahead", False),
    "loader.on_error": SettingInfo("what to do with a damaged sample of a stream", True),
    "parallel.replicate": SettingInfo("number of model replicas (data parallel); -1: all remaining processes", False),
    "parallel.shard": SettingInfo("number of processes that one replica's parameters are sharded over (FSDP)", False),
    "parallel.tensor": SettingInfo("tensor parallel degree", False),
    "parallel.pipeline": SettingInfo("number of processes that divide the layers (pipeline parallel)", False),
    "parallel.context": SettingInfo("number of processes that each sequence is divided over", False),
    "parallel.sequence_parallel": SettingInfo(
        "divide sequences between blocks over the tensor parallel processes", False
    ),
    "parallel.loss_parallel": SettingInfo("keep logits divided by classes over the tensor parallel processes", False),
    "parallel.reshard": SettingInfo(
        "layer: gather and free shards layer by layer; step: gather all shards once a step", False
    ),
    "parallel.replicate_shards": SettingInfo(
        "keep a copy of each shard and its optimizer state on the next process", False
    ),
    "parallel.layer_classes": SettingInfo(
        "class names of the layers to shard one by one; none: found automatically", False
    ),
    "parallel.offload": SettingInfo("keep shards in CPU memory between uses", False),
    "parallel.param_dtype": SettingInfo("data type that layers compute with and shards are gathered in", True),
    "parallel.model_parallel_devices": SettingInfo(
        "number of devices of one process that the layers of one model are divided over", False
    ),
    "parallel.data_parallel_devices": SettingInfo(
        "number of devices of one process that compute parts of each micro-batch in threads", True
    ),
    "parallel.devices": SettingInfo(
        "the devices of these two settings, as torch names them; none: the first ones", False
    ),
    "parallel.activation_checkpoint": SettingInfo(
        "which activations to recompute in backward instead of storing them", False
    ),
    "parallel.compile": SettingInfo("compile each layer with torch.compile", True),
    "parallel.schedule": SettingInfo("pipeline schedule, by torch's names", False),
    "parallel.split_points": SettingInfo(
        "names of the modules that start the second and later pipeline stages; none: balanced", False
    ),
    "parallel.stages_per_rank": SettingInfo("pipeline stages per process, under schedules that interleave them", False),
    "ddp.static_graph": SettingInfo(
        "static_graph of DistributedDataParallel: the same parameters are used in every step", False
    ),
    "ddp.bucket_mb": SettingInfo("bucket size of gradients, in megabytes", False),
    "compress.kind": SettingInfo("how gradients are compressed before they are sent", True),
    "compress.start_step": SettingInfo("first step whose gradients are compressed", True),
    "compress.groups": SettingInfo("number of partial sums that are compressed; none: one per virtual rank", True),
    "compress.rank": SettingInfo("rank of PowerSGD's approximation", True),
    "compress.ratio": SettingInfo("fraction of the gradient's elements that topk sends", True),
    "server.count": SettingInfo("number of parameter servers; the first ranks", False),
    "server.staleness": SettingInfo(
        "largest number of updates a gradient may be late; 0: synchronous; none: no limit", True
    ),
    "local_sgd.sites": SettingInfo("number of groups that train independently between synchronizations", True),
    "local_sgd.sync_every": SettingInfo("local steps between two synchronizations", True),
    "local_sgd.warmup_steps": SettingInfo("first steps, in which all sites train synchronously", True),
    "local_sgd.outer_optimizer": SettingInfo("how the mean change of the sites is applied", True),
    "local_sgd.outer_lr": SettingInfo("learning rate of the outer optimizer nesterov", True),
    "local_sgd.outer_momentum": SettingInfo("momentum of the outer optimizer nesterov", True),
    "local_sgd.bits": SettingInfo("bits per number that sites send to each other", True),
    "local_sgd.num_fragments": SettingInfo("parts of the model that are synchronized one after the other", True),
    "local_sgd.sync_delay": SettingInfo("local steps that overlap with a synchronization", True),
    "balance.by_speed": SettingInfo("assign more virtual ranks to faster processes", False),
    "balance.work_stealing": SettingInfo(
        "let idle processes take virtual ranks that have not started elsewhere", False
    ),
    "divergence.every": SettingInfo(
        "steps between comparisons of weights and gradients among processes; 0: never", False
    ),
    "divergence.repair": SettingInfo(
        "overwrite weights that differ from those of the majority; false: stop the run", False
    ),
    "audit_every": SettingInfo(
        "steps between audits, which compute one virtual rank on two processes; 0: never", False
    ),
    "promise.check": SettingInfo("check that results are bit-identical, at steps 0, 1, 2, 4, 8 and later", False),
    "promise.min_interval": SettingInfo("seconds between two checks after step 8", False),
    "promise.on_violation": SettingInfo(
        "stop the run, or warn and lower the promise; auto: stop before step 10", False
    ),
    "watchdog.timeout": SettingInfo("seconds without progress after which a hang is reported; 0: never", False),
    "watchdog.action": SettingInfo("end the run, kill the process that causes the hang, or only report it", False),
}

SECTIONS = (
    Settings,
    CheckpointSettings,
    LoaderSettings,
    ParallelSettings,
    DdpSettings,
    CompressSettings,
    ServerSettings,
    LocalSGDSettings,
    BalanceSettings,
    DivergenceSettings,
    PromiseSettings,
    WatchdogSettings,
)
