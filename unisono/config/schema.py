"""The settings that every run has: for each one its type, default, help text, limits, and whether results depend on it.

Each field is declared with `setting(default, help, ...)`. The command's help, the settings reference in the docs and
the validation of values read these declarations, so that nothing about a setting is written twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, TypeVar

from unisono.config.exchange_registry import ExchangeName
from unisono.errors import SettingsError

T = TypeVar("T")

INFO = "setting_info"
"""The key of a `SettingInfo` in the metadata of a dataclass field."""


class Range(NamedTuple):
    """The values that a numeric setting may have.

    Args:
        least: the smallest allowed value.
        most: the largest allowed value.
        above: a bound that is not itself allowed.
        below: a bound that is not itself allowed.
        instead: values to propose when one is out of range, the best first; by default the violated bound.
    """

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf
    instead: tuple[str, ...] = ()

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.least <= value <= self.most and self.above < value < self.below

    def words(self) -> str:
        """Return the range for a table, as in ", at least 1"."""
        bounds = [("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below)]
        return "".join(f", {words} {bound}" for words, bound in bounds if isfinite(bound))

    def violated(self, value: float) -> tuple[str, str]:
        """Return the requirement that a value violates ("at least 1"), and the nearest allowed bound ("1")."""
        bounds = [
            (self.least, not value >= self.least, "at least"),
            (self.most, not value <= self.most, "at most"),
            (self.above, not value > self.above, "above"),
            (self.below, not value < self.below, "below"),
        ]
        finite = [(bound, words) for bound, wrong, words in bounds if wrong and isfinite(bound)]
        bound, words = finite[0] if finite else (0, "")
        return (f"{words} {bound}" if finite else "finite"), str(bound)


class SettingInfo(NamedTuple):
    """The description of a setting.

    Args:
        help: one line for `--help` and for the settings reference.
        changes_bits: whether results depend on the setting, so that a resume refuses another value.
        limits: the allowed values of a numeric setting. None is always allowed where the type allows it.
    """

    help: str
    changes_bits: bool
    limits: Range | None = None


def setting(default: T, help: str, limits: Range | None = None, *, changes_bits: bool = False) -> T:  # noqa: A002
    """Declare a field of a settings class that no result depends on."""
    metadata = {INFO: SettingInfo(help, changes_bits, limits)}
    if isinstance(default, list):
        items: Any = field(default_factory=lambda: type(default)(default), metadata=metadata)
        return items
    declared: Any = field(default=default, metadata=metadata)
    return declared


def result_setting(default: T, help: str, limits: Range | None = None) -> T:  # noqa: A002
    """Declare a field of a settings class that results depend on."""
    return setting(default, help, limits, changes_bits=True)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are saved, where, and how many are kept."""

    every: int = setting(0, "steps between checkpoints; 0: only at a stop and at the end", Range(0))
    keep: int = setting(2, "number of recent checkpoints to keep", Range(1))
    keep_every: int = setting(0, "also keep checkpoints of steps that are multiples of this; 0: none", Range(0))
    async_save: bool = setting(True, "write in the background; training waits only for the copy")
    dir: str | None = setting(None, "a folder or URL (s3://bucket/{run}) for checkpoints; none: the run directory")


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Loader worker processes, and what they do with damaged samples."""

    workers: int = setting(0, "loader worker processes per training process", Range(0))
    prefetch: int = setting(2, "micro-batches that each worker loads ahead", Range(1))
    on_error: Literal["stop", "skip"] = result_setting("stop", "what to do with a damaged sample of a stream")


@dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """The sizes of the mesh's axes, and how the model uses them."""

    replicate: int = setting(-1, "number of model replicas (data parallel); -1: all remaining processes")
    shard: int = setting(1, "number of processes that one replica's parameters are sharded over (FSDP)")
    tensor: int = setting(1, "tensor parallel degree")
    pipeline: int = setting(1, "number of processes that divide the layers (pipeline parallel)")
    context: int = setting(1, "number of processes that each sequence is divided over")
    sequence_parallel: bool = setting(False, "divide sequences between blocks over the tensor parallel processes")
    loss_parallel: bool = setting(False, "keep logits divided by classes over the tensor parallel processes")
    reshard: Literal["layer", "step"] = setting(
        "layer", "layer: gather and free shards layer by layer; step: gather all shards once a step"
    )
    replicate_shards: bool = setting(False, "keep a copy of each shard and its optimizer state on another process")
    layer_classes: list[str] = setting([], "class names of the layers to shard one by one; []: found automatically")
    offload: bool = setting(False, "keep shards in CPU memory between uses")
    param_dtype: Literal["fp32", "bf16"] = result_setting(
        "fp32", "data type that layers compute with and shards are gathered in"
    )
    model_parallel_devices: int = setting(
        1, "number of devices of one process that the layers of one model are divided over", Range(1)
    )
    data_parallel_devices: int = result_setting(
        1, "number of devices of one process that compute parts of each micro-batch in threads", Range(1)
    )
    devices: list[str] = setting(
        [], "devices for model_parallel_devices or data_parallel_devices, by torch's names; []: the first ones"
    )
    activation_checkpoint: Literal["none", "full", "selective"] = setting(
        "none", "which activations to recompute in backward instead of storing them"
    )
    compile: bool = result_setting(False, "compile each layer with torch.compile")
    cuda_graphs: bool = setting(
        False, "replay a micro-batch of step.run as a CUDA graph, where shapes repeat and nothing else changes"
    )
    schedule: Literal[
        "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
    ] = setting("1F1B", "pipeline schedule, by torch's names")
    split_points: list[str] = setting(
        [], "names of the modules that start the second and later pipeline stages; []: balanced automatically"
    )
    stages_per_rank: int = setting(2, "pipeline stages per process, under schedules that interleave them", Range(1))

    def refuse(self, script: str, reason: str, axes: Sequence[str] = ("tensor", "context", "pipeline")) -> None:
        """Raise an error if the model is divided in a way that a script does not support.

        Call it in `__post_init__` of the script's settings.

        Args:
            script: the subject of the error's first line, such as "The speech recipe".
            reason: a sentence, the second line of the error.
            axes: the names of the settings whose value must be 1.

        Raises:
            SettingsError: a setting in `axes` is greater than 1. The error proposes to shard the parameters instead.
        """
        for axis in axes:
            size = getattr(self, axis)
            if size > 1:
                raise SettingsError(
                    f"{script} does not support parallel.{axis}={size}.",
                    reason,
                    f"--set parallel.{axis}=1 --set parallel.shard={size}",
                )


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Kernels for the same computation. Other kernels round differently, so each of them has bits of its own."""

    compile_model: bool = result_setting(False, "compile the forward pass of each placed model as a whole")
    optimizer: Literal["script", "foreach", "fused", "compiled"] = result_setting(
        "script", "how optimizers of torch compute their step; script: as the script created them"
    )
    channels_last: bool = result_setting(False, "store the weights of convolutions in the format channels_last")
    attention: Literal["any", "math", "flash", "memory_efficient", "cudnn"] = result_setting(
        "any", "back end of scaled_dot_product_attention; any: torch chooses"
    )
    float8: Literal["none", "tensorwise", "rowwise", "emulated"] = result_setting(
        "none", "compute linear layers in float8 with torchao; emulated: round like tensorwise, on any device"
    )


@dataclass(frozen=True, kw_only=True)
class DdpSettings:
    """Arguments of torch's DistributedDataParallel, under exchange=ddp."""

    static_graph: bool = setting(
        False, "static_graph of DistributedDataParallel: the same parameters are used in every step"
    )
    bucket_mb: float = setting(25.0, "bucket size of gradients, in megabytes", Range(0.001))


@dataclass(frozen=True, kw_only=True)
class TreeSettings:
    """How gradients are sent under exchange=tree. It never changes the result."""

    bucket_mb: float = setting(25.0, "bucket size of gradients, in megabytes", Range(0.001))


@dataclass(frozen=True, kw_only=True)
class CompressSettings:
    """How gradients are compressed before they are sent."""

    kind: Literal["none", "fp16", "bf16", "int8", "topk", "powersgd"] = result_setting(
        "none", "how gradients are compressed before they are sent"
    )
    start_step: int = result_setting(0, "first step whose gradients are compressed", Range(0))
    groups: int | None = result_setting(
        None, "number of partial sums that are compressed; none: one per virtual rank", Range(2)
    )
    rank: int = result_setting(4, "rank of PowerSGD's approximation", Range(1))
    ratio: float = result_setting(
        0.01, "fraction of the gradient's elements that topk sends", Range(above=0, most=1, instead=("0.01",))
    )


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Parameter servers, under exchange=server."""

    count: int = setting(1, "number of parameter servers; they are the first ranks", Range(1))
    staleness: int | None = result_setting(
        0, "largest number of updates by which a gradient may be late; 0: synchronous; none: no limit", Range(0)
    )


@dataclass(frozen=True, kw_only=True)
class LocalSGDSettings:
    """Sites that train independently between synchronizations, under exchange=local_sgd."""

    sites: int = result_setting(
        2, "number of groups of processes that train independently between synchronizations", Range(2)
    )
    sync_every: int = result_setting(50, "local steps between two synchronizations", Range(1))
    warmup_steps: int = result_setting(0, "number of first steps in which all sites train synchronously", Range(0))
    outer_optimizer: Literal["average", "nesterov"] = result_setting(
        "nesterov", "how the mean change of the sites is applied"
    )
    outer_lr: float = result_setting(
        0.7, "learning rate of the outer optimizer nesterov", Range(above=0, below=inf, instead=("0.7",))
    )
    outer_momentum: float = result_setting(
        0.9, "momentum of the outer optimizer nesterov", Range(0, below=1, instead=("0.9",))
    )
    bits: Literal[32, 8, 4] = result_setting(32, "bits per number that sites send to each other")
    num_fragments: int = result_setting(1, "parts of the model that are synchronized one after the other", Range(1))
    sync_delay: int = result_setting(0, "local steps that overlap with a synchronization", Range(0))


@dataclass(frozen=True, kw_only=True)
class BalanceSettings:
    """How virtual ranks are assigned to processes. It never changes the result."""

    by_speed: bool = setting(True, "assign more virtual ranks to faster processes")
    work_stealing: bool = setting(False, "let idle processes take virtual ranks that have not started elsewhere")


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What a run changes while it trains. It never changes the result."""

    auto: bool = setting(False, "try other ways to compute the same bits while the run trains, and use those that pay")


@dataclass(frozen=True, kw_only=True)
class DivergenceSettings:
    """When processes compare their weights and gradients, and what happens if they differ."""

    every: int = setting(1000, "steps between comparisons of weights and gradients among processes; 0: never", Range(0))
    repair: bool = setting(False, "overwrite weights that differ from those of the majority; false: stop the run")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Which steps torch's profiler records, and what it records of them."""

    steps: str = setting("", "steps to profile: FIRST:END, as in 20:23 for steps 20, 21 and 22; empty: none")
    ranks: str = setting("all", "ranks that record these steps, separated by commas; all: every rank")
    memory: bool = setting(False, "also record allocations of memory")
    shapes: bool = setting(False, "also record the shapes of operators' inputs")
    stacks: bool = setting(False, "also record Python calls; slower")


@dataclass(frozen=True, kw_only=True)
class PromiseSettings:
    """When a run checks its promise, and what happens if it does not hold."""

    check: bool = setting(True, "check that results are bit-identical, at steps 0, 1, 2, 4, 8 and later")
    min_interval: float = setting(120.0, "seconds between two checks after step 8", Range(0))
    on_violation: Literal["auto", "stop", "warn"] = setting(
        "auto", "stop the run, or warn and lower the promise; auto: stop before step 10, warn later"
    )
    kernels: Literal["deterministic", "fastest"] = result_setting(
        "deterministic", "kernels of accelerators; the fastest ones may change bits at each run"
    )


@dataclass(frozen=True, kw_only=True)
class WatchdogSettings:
    """When a run counts as hanging, and what happens then."""

    timeout: float = setting(600.0, "seconds without progress after which a hang is reported; 0: never", Range(0))
    action: Literal["end", "kill", "wait"] = setting(
        "end", "end the run, kill the process that causes the hang, or only report it"
    )


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """How the hosts of a run are sampled."""

    every: float = setting(2.0, "seconds between samples of processors, memory, traffic and energy; 0: never", Range(0))
    watts: float = setting(
        0.0, "power of a host in watts, to estimate energy where it cannot be measured; 0: no estimate", Range(0)
    )


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """The page of metrics that Prometheus reads."""

    port: int = setting(0, "port of a page with the run's metrics for Prometheus; 0: no page", Range(0, 65535))
    address: str = setting("127.0.0.1", "address that the page is served at; 0.0.0.0: all networks of the host")


@dataclass(frozen=True, kw_only=True)
class SecureSettings:
    """Access to a run, what it trusts, and what proves that its files are its own."""

    transport: Literal["plain", "tls"] = setting(
        "plain", "how messages between hosts are sent: plain, or tls: TLS 1.3, for which both ends have a certificate"
    )
    ca: str | None = setting(
        None, "file of the authorities whose certificates are accepted, and revocation lists; none: the run's own one"
    )
    cert: str | None = setting(None, "file of this host's certificate, with secure.ca; none: one for each run")
    key: str | None = setting(None, "file of the private key of secure.cert")
    secret_file: str | None = setting(
        None,
        "file with a secret, the same on all hosts, from which the run's own certificates are made; none: the "
        "launcher passes one on",
    )
    hosts: list[str] = setting(
        [], "names of the hosts that may join, by their certificates if these have names; * is any text; []: all"
    )
    share: Literal["owner", "group", "all"] = setting(
        "owner", "users that may read the run directory and its checkpoints: owner, group, or all that the umask allows"
    )
    sign: str | None = setting(None, "file of an Ed25519 private key that signs each checkpoint; none: no signature")
    trust: list[str] = setting(
        [], "files of public keys; a checkpoint that none of them has signed is not loaded; []: any is loaded"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that every run has. A script's own class inherits from this one."""

    steps: int | None = setting(None, "number of optimizer steps; set this or epochs", Range(1))
    epochs: int | None = setting(None, "number of passes over the training data; set this or steps", Range(1))
    batch: int = result_setting(32, "global batch size: samples per step, over all processes", Range(1))
    micro_batch: int | None = result_setting(
        None, "largest number of samples per forward pass; none: the whole share of a virtual rank", Range(1)
    )
    virtual_ranks: int = result_setting(
        8, "parts that each batch is divided into; at most this many processes can share a batch", Range(1)
    )
    seed: int = result_setting(0, "seed of all random numbers", Range(0, 2**64 - 1))  # RNG keys have 64 bits
    precision: Literal["fp32", "bf16", "fp16"] = result_setting("fp32", "data type of forward and backward")
    clip: float | None = result_setting(
        None, "largest norm of the gradient; none: no clipping", Range(above=0, instead=("1.0", "none"))
    )
    exchange: ExchangeName = result_setting(
        "tree", "how gradients are averaged; tree: the same bits on any number of processes"
    )
    backend: str = setting(
        "auto",
        "back end for messages: auto (by the device), gloo, nccl, ucc, mpi, tcp, or one that the script registered; "
        "under tree and wide none of them changes bits",
    )
    threads: int = result_setting(1, "torch.set_num_threads in each process", Range(1))
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    speed: SpeedSettings = field(default_factory=SpeedSettings)
    tree: TreeSettings = field(default_factory=TreeSettings)
    ddp: DdpSettings = field(default_factory=DdpSettings)
    compress: CompressSettings = field(default_factory=CompressSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    local_sgd: LocalSGDSettings = field(default_factory=LocalSGDSettings)
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    divergence: DivergenceSettings = field(default_factory=DivergenceSettings)
    track: str = setting(
        "", "experiment trackers, separated by commas: csv, tensorboard, mlflow, wandb, trackio, or module:Class"
    )
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    audit_every: int = setting(
        0, "steps between audits, which compute one virtual rank on two processes; 0: never", Range(0)
    )
    noise_scale_every: int = setting(0, "steps between measurements of the gradient noise scale; 0: never", Range(0))
    machine: MachineSettings = field(default_factory=MachineSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    promise: PromiseSettings = field(default_factory=PromiseSettings)
    secure: SecureSettings = field(default_factory=SecureSettings)
    watchdog: WatchdogSettings = field(default_factory=WatchdogSettings)


SECTIONS = (
    Settings,
    CheckpointSettings,
    LoaderSettings,
    ParallelSettings,
    SpeedSettings,
    TreeSettings,
    DdpSettings,
    CompressSettings,
    ServerSettings,
    LocalSGDSettings,
    BalanceSettings,
    PlanSettings,
    DivergenceSettings,
    MachineSettings,
    ProfileSettings,
    MetricsSettings,
    PromiseSettings,
    SecureSettings,
    WatchdogSettings,
)
"""The classes of settings that the library itself defines."""
