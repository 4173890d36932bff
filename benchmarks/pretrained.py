"""Measure the memory of placing a pretrained model of transformers: read on every process, or in parts.

    python -m benchmarks.pretrained            some minutes, 6 GB of memory
    python -m benchmarks.pretrained --quick    a smoke test

The model is a Llama with random weights, in files of at most 100 MB. The figures are the increase of a process's peak
resident memory (Linux's VmHWM) over its memory before run.place, and the bytes of tensors that it reads from the files;
of two processes the larger ones. `from_pretrained` reads the whole model on each process, `PretrainedWeights` its part.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import parser, show
from benchmarks.memory import kilobytes, reset_peak
from unisono.checkpoint.safetensors_reader import SafetensorsFiles
from unisono.config import ParallelSettings, Settings
from unisono.distributed.init import join_process_group as join
from unisono.environment import World
from unisono.testing import build_run, close_run, run_ranks

ROWS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "replicate=2": (2, {}),
    "shard=2": (2, {"shard": 2}),
    "tensor=2": (2, {"tensor": 2}),
    "pipeline=2": (2, {"pipeline": 2}),
}


def config(layers: int, width: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        vocab_size=8000,
        tie_word_embeddings=False,
        use_cache=False,
    )


def write_model(folder: str, layers: int, width: int) -> float:
    """Write the model. Return its size in MB."""
    import transformers

    model = transformers.LlamaForCausalLM(config(layers, width))
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(p.nbytes for p in model.parameters()) / 2**20


def measure_rank(
    world: World, parallel: dict[str, Any], weights: str, folder: str, in_parts: bool
) -> tuple[float, float, str]:
    """Return the increase of this process's peak memory, what it reads, both in MB, and the fingerprint."""
    import transformers

    from unisono.integrations.transformers import PretrainedWeights

    transformers.LlamaForCausalLM(config(1, 64))  # loads what models need
    settings = Settings(steps=1, batch=2, virtual_ranks=2, parallel=ParallelSettings(**parallel))
    with join(world) as group:
        run = build_run(settings, world, group, Path(folder))
        gc.collect()
        reader: Any = SafetensorsFiles
        counted, read = 0, reader.read

        def counting(*args: Any) -> Any:
            nonlocal counted
            found = read(*args)
            counted += found.nbytes
            return found

        reader.read = counting
        before = reset_peak()
        if in_parts:
            model = PretrainedWeights(weights).place(run)
        else:
            model = run.place(lambda: transformers.LlamaForCausalLM.from_pretrained(weights))
        peak = (kilobytes("VmHWM") - before) / 1024
        reader.read = read
        run.track(model=model)
        found = run.context.state.fingerprint()
        close_run(run)
    return peak, counted / 2**20, found


def measure(weights: str, name: str) -> dict[str, Any]:
    size, parallel = ROWS[name]
    row: dict[str, Any] = {"placement": name}
    for column, in_parts in (("from_pretrained", False), ("PretrainedWeights", True)):
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(measure_rank, size, parallel, weights, folder, in_parts, seconds=600.0)
        row[column] = max(peak for peak, _, _ in ranks)
        row["read"] = max(megabytes for _, megabytes, _ in ranks)
        row["fingerprints"] = sorted({*row.get("fingerprints", ()), *(found for _, _, found in ranks)})
    return row


def table(rows: list[dict[str, Any]], whole: float) -> str:
    lines = [f"a model of {whole:.0f} MB", f"{'MB':12}  from_pretrained  PretrainedWeights   read"]
    for row in rows:
        peaks = f"{row['from_pretrained']:15.0f}  {row['PretrainedWeights']:17.0f}"
        lines.append(f"{row['placement']:12}  {peaks}  {row['read']:5.0f}")
    equal = len({found for row in rows for found in row["fingerprints"]}) == 1
    return "\n".join([*lines, f"the same weights in each: {'yes' if equal else 'NO'}"])


def main() -> None:
    args = parser(__doc__).parse_args()
    layers, width = (4, 128) if args.quick else (16, 1024)
    with tempfile.TemporaryDirectory() as weights:
        (whole,) = run_ranks(_write, 1, weights, layers, width, seconds=300.0)
        rows = [measure(weights, name) for name in ROWS]
    show("pretrained", {"rows": rows, "whole": whole}, lambda: table(rows, whole), as_json=args.json)


def _write(_: World, weights: str, layers: int, width: int) -> float:
    return write_model(weights, layers, width)


if __name__ == "__main__":
    main()
