"""Settings that cannot be combined: one table.

Each row of `CONFLICTS` names two conditions that cannot hold at once, the reason, and what to set instead. Rules that
compute with numbers (how many processes fit a mesh, say) are in validate_sizes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from unisono.config.command_line import CommandLine
from unisono.config.exchange_registry import DIVIDING_AXES, EXCHANGES
from unisono.config.schema import CompressSettings, SecureSettings, Settings
from unisono.config.value_types import shown
from unisono.errors import Problem


class Condition(NamedTuple):
    """A condition on one setting.

    instead  a value with which the condition does not hold, as it is typed: "none"
    """

    name: str
    holds: Callable[[Any], bool]
    instead: str

    def describe(self, values: Mapping[str, Any]) -> str:
        """Return the setting with its value: "exchange = tree"."""
        return f"{self.name} = {shown(values[self.name])}"

    @property
    def change(self) -> str:
        """The setting with the value `instead`: "exchange=tree"."""
        return f"{self.name}={self.instead}"


def is_(name: str, *choices: Any, instead: str) -> Condition:
    """Return the condition that a setting has one of these values."""
    return Condition(name, lambda value: value in choices, instead)


def is_not(name: str, plain: Any) -> Condition:
    """Return the condition that a setting has another value than this one."""
    return Condition(name, lambda value: value != plain, shown(plain))


def above(name: str, limit: int) -> Condition:
    """Return the condition that a setting is a number above this one."""
    return Condition(name, lambda value: value is not None and value > limit, str(limit))


TOGETHER = "{0} cannot be combined with {1}."
UNUSED = "{0} has no effect with {1}."


class Conflict(NamedTuple):
    """Two conditions that cannot hold at once.

    why      the reason
    changes  alternatives to type, each with settings and flags separated by spaces; {0} is the first setting's value.
             By default: what makes the first condition false, then what makes the second one false
    error    the first line of the message, with the two settings as {0} and {1}
    only     a third condition: the two exclude each other only if it holds too
    """

    first: Condition
    second: Condition
    why: str
    changes: tuple[str, ...] = ()
    error: str = TOGETHER
    only: Condition | None = None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether all conditions hold. A setting without a value fulfills none."""
        conditions = (self.first, self.second, self.only)
        return all(each is None or (each.name in values and each.holds(values[each.name])) for each in conditions)

    def problem(self, values: Mapping[str, Any], line: CommandLine) -> Problem:
        """Return the message."""
        value = shown(values[self.first.name])
        changes = self.changes or (self.first.change, self.second.change)
        dos = [_typed(change.format(value), line) for change in changes]
        do = dos[0] + "".join(f", or (other bits): {do}" if "virtual_ranks=" in do else f", or: {do}" for do in dos[1:])
        return Problem(self.error.format(self.first.describe(values), self.second.describe(values)), self.why, do)


def _typed(change: str, line: CommandLine) -> str:
    """Return the command line with these settings, and with this number of processes if --ranks is among them."""
    words = change.split(" ")
    if "--ranks" not in words:
        return str(line.setting(*words))
    place = words.index("--ranks")
    return str(line.setting(*words[:place]).in_processes(int(words[place + 1])))


def conflicts_among(values: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield the rows of the table that these settings, by their dotted names, run into."""
    return (conflict for conflict in CONFLICTS if conflict.holds(values))


def divided(axis: str) -> Condition:
    """Return the condition that an axis of the mesh has several processes."""
    return above(f"parallel.{axis}", 1)


AUDIT = above("audit_every", 0)
COMPRESSED = is_not("compress.kind", "none")
GRAPHS = is_("parallel.cuda_graphs", True, instead="false")
MODEL_DEVICES = above("parallel.model_parallel_devices", 1)
DATA_DEVICES = above("parallel.data_parallel_devices", 1)
NOISE = above("noise_scale_every", 0)
NOT_TREE = is_not("exchange", "tree")
ONE_RANK = is_("virtual_ranks", 1, instead="2")
PARAM_DTYPE = is_not("parallel.param_dtype", "fp32")
PIPELINE = divided("pipeline")
REPLANNED = is_("plan.auto", True, instead="false")
SELECTIVE = is_("parallel.activation_checkpoint", "selective", instead="full")
SERVER = is_("exchange", "server", instead="tree")
PLAIN_TRANSPORT = is_("secure.transport", "plain", instead="tls")
STEALING = is_("balance.work_stealing", True, instead="false")

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Pipeline schedules that compute the gradients of inputs first, and those of weights later."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Pipeline schedules that place two stages on each process, the first and the last one on the same process."""

SEVERAL_DEVICES = "It uses several devices of one process; {} divides the model over several processes."
WHOLE_COMPILED = is_("speed.compile_model", True, instead="false")
COMPILED_STEP = is_("speed.optimizer", "compiled", instead="fused")
FLOAT8 = is_not("speed.float8", "none")
NO_COPY = "torch.nn.DataParallel copies the model as it is defined, in each forward pass."


def _exchange_rows() -> Iterator[Conflict]:
    """Yield what follows from the table of exchanges."""
    for name, info in EXCHANGES.items():
        chosen = is_("exchange", name, instead="tree")
        for axis in DIVIDING_AXES:
            if axis not in info.axes:
                yield Conflict(chosen, divided(axis), info.reason_against(axis))
        if "shard" in info.axes and not info.reshard_by_layer:
            yield Conflict(
                chosen,
                divided("shard"),
                "With parallel.reshard=layer gradients are averaged layer by layer, which only exchange=tree does.",
                changes=("exchange=tree", "parallel.reshard=step"),
                only=is_("parallel.reshard", "layer", instead="step"),
            )
        if not info.compressed:
            able = " and ".join(other for other, each in EXCHANGES.items() if each.compressed)
            yield Conflict(
                COMPRESSED, chosen, f"Compression works with {able}.", changes=("exchange=tree", "compress.kind=none")
            )
        if not info.work_stealing:
            yield Conflict(STEALING, chosen, "Idle processes take whole virtual ranks, which exchange=tree adds up.")
        if info.loop:
            yield Conflict(NOISE, chosen, "Its processes do not compute the gradient of one batch together.")
            yield Conflict(REPLANNED, chosen, "Its processes make different steps, so no step time holds for all.")
        if info.not_recomputed:
            yield Conflict(AUDIT, chosen, info.not_recomputed)
        if info.has_section:
            for field in fields(getattr(Settings(), name)):
                yield Conflict(
                    is_not(f"{name}.{field.name}", field.default),
                    Condition("exchange", lambda value, name=name: value != name, name),  # type: ignore[misc]
                    f"It is a setting of exchange={name}.",
                    changes=(f"exchange={name}", f"{name}.{field.name}={shown(field.default)}"),
                    error=UNUSED,
                )


def _compression_rows() -> Iterator[Conflict]:
    """Yield settings of compression that the chosen kind does not read."""
    plain = CompressSettings()
    none = is_("compress.kind", "none", instead="int8")
    for name, kind in {"start_step": "", "groups": "", "rank": "powersgd", "ratio": "topk"}.items():
        default = getattr(plain, name)
        other = Condition("compress.kind", lambda value, kind=kind: value != kind, kind) if kind else none  # type: ignore[misc]
        yield Conflict(
            is_not(f"compress.{name}", default),
            other,
            f"It is a setting of compress.kind={kind}." if kind else "Gradients are not compressed.",
            changes=(other.change, f"compress.{name}={shown(default)}"),
            error=UNUSED,
        )


def _transport_rows() -> Iterator[Conflict]:
    """Yield what does not go together with the transport of messages between hosts."""
    for name in ("ca", "cert", "key", "secret_file", "hosts"):
        unset = getattr(SecureSettings(), name)
        why = "Without TLS no certificate is made, shown or asked for."
        yield Conflict(is_not(f"secure.{name}", unset), PLAIN_TRANSPORT, why, error=UNUSED)
    for name, other in (("ca", "cert"), ("cert", "key"), ("key", "ca")):
        missing = is_(f"secure.{other}", None, instead="FILE")
        why = "Certificates of an organization need three files: secure.ca, secure.cert and secure.key."
        yield Conflict(is_not(f"secure.{name}", None), missing, why, changes=(missing.change, f"secure.{name}=none"))
    yield Conflict(
        is_not("secure.secret_file", None),
        is_not("secure.ca", None),
        "The run's own certificates are made from the secret, and those of an organization are files.",
    )
    yield Conflict(
        is_("secure.transport", "tls", instead="plain"),
        Condition("backend", lambda value: value not in ("auto", "gloo", "tcp"), "auto"),
        "Only the back end that Unisono brings encrypts, and it sends from the CPU.",
        changes=("backend=auto", "secure.transport=plain"),
    )
    yield Conflict(
        is_("secure.transport", "tls", instead="plain"),
        Condition("metrics.address", lambda value: value not in ("127.0.0.1", "::1", "localhost"), "127.0.0.1"),
        "The page of metrics is encrypted with the certificate of this host, and there is none.",
        changes=("secure.ca=FILE secure.cert=FILE secure.key=FILE", "metrics.address=127.0.0.1"),
        only=is_("secure.cert", None, instead="FILE"),
    )


def _speed_rows() -> Iterator[Conflict]:
    """Yield what does not go together with other kernels for the same computation."""
    checkpointed = is_not("parallel.activation_checkpoint", "none")
    for axis in DIVIDING_AXES:
        layers = ("parallel.compile=true speed.compile_model=false", f"parallel.{axis}=1")
        why = "Messages between processes are sent within the forward pass of the model, and not within a layer's."
        yield Conflict(WHOLE_COMPILED, divided(axis), why, changes=layers)
    for axis in ("shard", "tensor", "pipeline"):
        why = "A compiled step may round an element differently at another place, and each process has a part."
        yield Conflict(COMPILED_STEP, divided(axis), why)
    for axis in ("tensor", "context"):
        why = "A scale is computed from a whole matrix, of which each process has a part."
        yield Conflict(FLOAT8, divided(axis), why)
    yield Conflict(FLOAT8, PIPELINE, "Stages were not tested in float8.")
    formatted = is_("speed.channels_last", True, instead="false")
    for axis, why in (
        ("tensor", "A part of a weight is stored row by row."),
        ("pipeline", "Stages send activations row by row, and the next stage would round them differently."),
    ):
        yield Conflict(formatted, divided(axis), why)
    ddp = is_("exchange", "ddp", instead="tree")
    yield Conflict(WHOLE_COMPILED, ddp, "DistributedDataParallel divides compiled code by its own buckets.")
    inner = is_("parallel.compile", True, instead="false")
    yield Conflict(WHOLE_COMPILED, inner, "A layer is compiled as a part of the model.")
    for other, why in (
        (checkpointed, "A layer that is recomputed restores random generators, which compiled code does not."),
        (PARAM_DTYPE, "Compiled code leaves out the roundings of casts around layers."),
        (GRAPHS, "The two were not tested together."),
        (MODEL_DEVICES, "Copies from device to device are made within the forward pass of the model."),
        (DATA_DEVICES, NO_COPY),
    ):
        yield Conflict(WHOLE_COMPILED, other, why)
    for other, why in (
        (PARAM_DTYPE, "The inputs of a layer would be cast to bfloat16 before they are scaled."),
        (DATA_DEVICES, NO_COPY),
    ):
        yield Conflict(FLOAT8, other, why)
    for exchange in ("server", "local_sgd"):
        why = "Its optimizers step on some of the processes, where other kernels were not tested."
        yield Conflict(is_not("speed.optimizer", "script"), is_("exchange", exchange, instead="tree"), why)


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(
        is_("steps", None, instead="100"),
        is_("epochs", None, instead="1"),
        "One of them must say when the run ends.",
        error="Neither steps nor epochs is set.",
    ),
    Conflict(
        is_not("steps", None),
        is_not("epochs", None),
        "Only one of them can say when the run ends.",
        changes=("epochs=none", "steps=none"),
    ),
    *_exchange_rows(),
    *_compression_rows(),
    *_transport_rows(),
    *_speed_rows(),
    *(
        Conflict(COMPRESSED, divided(axis), "Gradients of whole models are compressed; here each process holds a part.")
        for axis in DIVIDING_AXES
    ),
    Conflict(
        COMPRESSED,
        is_("virtual_ranks", 1, instead="8"),
        "One virtual rank runs on one process, so no gradient is sent.",
    ),
    Conflict(
        COMPRESSED,
        STEALING,
        "Each process keeps the compression error of its own virtual ranks, so these cannot move within a step.",
        changes=("balance.work_stealing=false", "compress.kind=none"),
    ),
    Conflict(
        is_not("compress.groups", None),
        is_("exchange", "allreduce", instead="tree"),
        "With exchange=allreduce each process compresses the sum of all its gradients.",
        changes=("exchange=tree", "compress.groups=none"),
        error=UNUSED,
        only=COMPRESSED,
    ),
    *(
        Conflict(STEALING, divided(axis), "Idle processes take whole virtual ranks, so each needs the whole model.")
        for axis in DIVIDING_AXES
    ),
    *(
        Conflict(NOISE, divided(axis), "The gradient of each micro-batch must be on one process.")
        for axis in DIVIDING_AXES
        if axis != "shard"
    ),
    Conflict(
        NOISE,
        divided("shard"),
        "With parallel.reshard=layer the gradient of a layer is divided as soon as it is computed.",
        changes=("noise_scale_every=0", "parallel.reshard=step"),
        only=is_("parallel.reshard", "layer", instead="step"),
    ),
    Conflict(NOISE, GRAPHS, "A replayed graph runs no hook on the gradient of a micro-batch."),
    Conflict(
        NOISE,
        ONE_RANK,
        "The noise is estimated from the gradients of several micro-batches, and a step has one.",
        only=is_("micro_batch", None, instead="8"),
    ),
    *(
        Conflict(AUDIT, divided(axis), "A process with the whole model computes a virtual rank again.")
        for axis in DIVIDING_AXES
    ),
    Conflict(
        AUDIT,
        ONE_RANK,
        "One virtual rank draws its random numbers from one stream, so no part of it can be computed again.",
    ),
    Conflict(
        is_not("parallel.replicate", -1),
        SERVER,
        "Its processes are servers and workers, and there is one replica of the model.",
    ),
    Conflict(
        SERVER,
        ONE_RANK,
        "One virtual rank draws its random numbers from one stream, which the server cannot save.",
        changes=("virtual_ranks=2",),
    ),
    Conflict(
        is_not("server.staleness", 0),
        above("loader.workers", 0),
        "An asynchronous worker learns its next step when the last one is done, so nothing can be loaded ahead.",
        changes=("loader.workers=0", "server.staleness=0"),
        only=SERVER,
    ),
    *(
        Conflict(
            is_not(f"local_sgd.{name}", default),
            is_("local_sgd.outer_optimizer", "average", instead="nesterov"),
            "The average of the sites is used as it is.",
            changes=("local_sgd.outer_optimizer=nesterov", f"local_sgd.{name}={default}"),
            error=UNUSED,
        )
        for name, default in (("outer_lr", 0.7), ("outer_momentum", 0.9))
    ),
    Conflict(
        MODEL_DEVICES,
        DATA_DEVICES,
        "One divides the layers of a model over devices, the other copies the model to all of them.",
        changes=("parallel.data_parallel_devices=1", "parallel.model_parallel_devices=1"),
    ),
    *(
        Conflict(devices, divided(axis), SEVERAL_DEVICES.format(f"parallel.{axis}"))
        for devices in (MODEL_DEVICES, DATA_DEVICES)
        for axis in DIVIDING_AXES
    ),
    *(
        Conflict(
            DATA_DEVICES,
            other,
            NO_COPY,
            changes=("parallel.data_parallel_devices=1 --ranks {0}", other.change),
        )
        for other in (is_not("parallel.activation_checkpoint", "none"), is_not("parallel.compile", False))
    ),
    *(
        Conflict(
            GRAPHS,
            other,
            "A graph holds the kernels of one process on one device, and no message or copy between them.",
            changes=("parallel.cuda_graphs=false", other.change),
        )
        for other in (*map(divided, DIVIDING_AXES), MODEL_DEVICES, DATA_DEVICES)
    ),
    Conflict(
        GRAPHS,
        is_not("parallel.activation_checkpoint", "none"),
        "Recomputation restores the states of random generators, which the host keeps.",
        changes=("parallel.cuda_graphs=false", "parallel.activation_checkpoint=none"),
    ),
    Conflict(
        PARAM_DTYPE,
        is_("precision", "fp16", instead="bf16"),
        "bfloat16 has fewer digits than float16, and float16 a smaller range: casting to both loses both.",
        changes=("precision=bf16", "parallel.param_dtype=fp32"),
    ),
    Conflict(
        PARAM_DTYPE,
        DATA_DEVICES,
        "torch.nn.DataParallel copies the model's own parameters, not their casts.",
        changes=("parallel.data_parallel_devices=1", "parallel.param_dtype=fp32 precision=bf16"),
    ),
    Conflict(
        PARAM_DTYPE,
        PIPELINE,
        "Casts are made when a layer or the model is called, and a pipeline stage calls neither.",
        changes=("parallel.pipeline=1", "parallel.param_dtype=fp32 precision=bf16"),
    ),
    Conflict(
        PIPELINE,
        ONE_RANK,
        "One virtual rank draws its random numbers from one stream, which runs through one process.",
        changes=("virtual_ranks=2",),
    ),
    Conflict(PIPELINE, divided("shard"), "Each process holds its whole stage; shards of stages are not implemented."),
    Conflict(PIPELINE, divided("context"), "Stages pass on whole sequences; slices of them are not implemented."),
    Conflict(
        is_("parallel.schedule", *SPLIT_BACKWARD, instead="Interleaved1F1B"),
        SELECTIVE,
        "This schedule runs backward through a layer twice, and the first pass frees what selective mode keeps.",
        changes=("parallel.activation_checkpoint=full", "parallel.schedule=Interleaved1F1B"),
        only=PIPELINE,
    ),
    Conflict(
        is_("parallel.schedule", *V_SHAPED, instead="Interleaved1F1B"),
        is_not("parallel.stages_per_rank", 2),
        "This schedule has 2 stages per process.",
        changes=("parallel.stages_per_rank=2", "parallel.schedule=Interleaved1F1B"),
        only=PIPELINE,
    ),
)

NOT_WITH_CUSTOM_EXCHANGE = (NOT_TREE, COMPRESSED, *map(divided, DIVIDING_AXES))
"""Settings that do not go with an exchange that the script passes to `run.steps`."""

NOT_ON_MIXED_DEVICES = (
    *(is_not(f"parallel.{axis}", 1) for axis in DIVIDING_AXES),
    is_("exchange", *(name for name, info in EXCHANGES.items() if not info.mixed_devices), instead="tree"),
)
"""Settings that need one kind of device on all processes: torch implements them with one back end."""


def problems_on_mixed_devices(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """Return what does not work if some processes have accelerators and others do not, or have those of two vendors."""
    return _problems_on_devices(
        values,
        line,
        "the same kind of device on all processes",
        "Here processes have different kinds of device.",
        "start processes on one kind of device only",
    )


def problems_on_shared_devices(values: Mapping[str, Any], line: CommandLine) -> list[Problem]:
    """Return what does not work if several processes use one accelerator whose tensors gloo cannot send."""
    return _problems_on_devices(
        values,
        line,
        "a device for each process",
        "Here several processes share one (--ranks-per-device). gloo does not send its tensors, or crashes with them.",
        f"{line.without('--ranks-per-device')} on a host with more devices",
    )


def _problems_on_devices(
    values: Mapping[str, Any], line: CommandLine, needed: str, fact: str, otherwise: str
) -> list[Problem]:
    return [
        Problem(
            f"{condition.describe(values)} needs {needed}.", fact, f"{line.setting(condition.change)}, or {otherwise}"
        )
        for condition in NOT_ON_MIXED_DEVICES
        if condition.holds(values[condition.name])
    ]
