"""The options that `unisono speedup` tries, and why a script or a machine cannot use one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

BACK_ENDS_OF_CPU = ("math", "flash")


class SpeedOption(NamedTuple):
    """A way to compute the same steps.

    Attributes:
        name: As it is typed after --only.
        sets: The settings.
        group: At most one option of a group is used at the same time.
        fewer_digits: Whether numbers have fewer digits, so that the quality of the model may change.
    """

    name: str
    sets: tuple[str, ...]
    group: str
    fewer_digits: bool = False


@dataclass(frozen=True)
class ScriptSurvey:
    """What the first step of a script computes with.

    Args:
        device: The type of the device.
        convolutions: Number of convolutions with 2 or 3 dimensions.
        float8_layers: Number of linear layers whose sizes are multiples of 16.
        attention_calls: Number of calls of scaled_dot_product_attention.
        optimizers: For each optimizer, its name, and whether torch has each kind of step for it.
        settings: The settings of the script, by dotted name.
    """

    device: str
    convolutions: int
    float8_layers: int
    attention_calls: int
    optimizers: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def why_not(self, option: SpeedOption) -> str:
        """Return why the script or its device cannot use an option; "": nothing speaks against it."""
        if all(self._is_set(each) for each in option.sets):
            return "It is set already."
        if option.group == "optimizer":
            way = option.sets[0].partition("=")[2]
            unable = [each["name"] for each in self.optimizers if not each[way]]
            return f"torch has no {way} step of {' and '.join(unable)}." if unable else ""
        if option.group == "format" and not self.convolutions:
            return "The model has no convolution with 2 or 3 dimensions."
        if option.group == "attention":
            if not self.attention_calls:
                return "The first step does not call scaled_dot_product_attention."
            back_end = option.sets[0].partition("=")[2]
            if self.device == "cpu" and back_end not in BACK_ENDS_OF_CPU:
                return f"The CPU has the back ends {' and '.join(BACK_ENDS_OF_CPU)}."
        if option.name.startswith("float8") and not self.float8_layers:
            return "The model has no linear layer whose sizes are multiples of 16."
        if option.group == "graphs" and self.device != "cuda":
            return f"CUDA graphs need an NVIDIA GPU, and processes compute on {self.device}."
        return ""

    def _is_set(self, text: str) -> bool:
        name, _, value = text.partition("=")
        return str(self.settings.get(name)).lower() == value


def options(spare_threads: int) -> Iterator[SpeedOption]:
    """Yield all options.

    Args:
        spare_threads: The number of threads of each process with which all cores are used.
    """
    yield SpeedOption("compile-layers", ("parallel.compile=true",), "compile")
    yield SpeedOption("compile-model", ("speed.compile_model=true",), "compile")
    for way in ("compiled", "fused", "foreach"):
        yield SpeedOption(f"{way}-optimizer", (f"speed.optimizer={way}",), "optimizer")
    yield SpeedOption("channels-last", ("speed.channels_last=true",), "format")
    for back_end in ("math", "flash", "memory_efficient", "cudnn"):
        yield SpeedOption(f"{back_end.replace('_', '-')}-attention", (f"speed.attention={back_end}",), "attention")
    yield SpeedOption("cuda-graphs", ("parallel.cuda_graphs=true",), "graphs")
    yield SpeedOption("threads", (f"threads={spare_threads}",), "threads")
    yield SpeedOption("bf16", ("precision=bf16",), "precision", fewer_digits=True)
    for kind in ("tensorwise", "rowwise"):
        yield SpeedOption(f"float8-{kind}", (f"speed.float8={kind}",), "precision", fewer_digits=True)
