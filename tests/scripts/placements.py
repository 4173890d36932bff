"""Choose layouts for a script: one process without interruption, and two layouts with a stop and a resume."""

from __future__ import annotations

from collections.abc import Collection
from random import Random
from typing import NamedTuple

from tests.scripts.draft import Script


class Placement(NamedTuple):
    """A number of processes, and settings that must not change the result."""

    ranks: int
    sets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(["--ranks", str(self.ranks), *(f"--set {word}" for word in self.sets)])


class Trial(NamedTuple):
    """An uninterrupted run on one process (`whole`), and a run that is stopped in step `stop` and resumed."""

    whole: Placement
    first: Placement
    second: Placement
    stop: int


def draw_trial(script: Script, left_out: Collection[str]) -> Trial:
    random = Random(f"placement {script.seed}")
    most = min(3, script.virtual_ranks)
    sizes = random.sample([1, 2, 3][:most], min(2, most)) if most > 1 else [1, 1]
    if sizes == [1, 1] or max(sizes) == 1:
        sizes = [1, 1]
    stop = random.randrange(0, max(1, script.steps - 2))
    whole = Placement(1, ("loader.workers=1",) if random.random() < 0.15 else ())
    first, second = (draw_placement(random, script, size, left_out) for size in sizes)
    return Trial(whole, first, second, stop)


def draw_placement(random: Random, script: Script, size: int, left_out: Collection[str]) -> Placement:
    sets = [f"loader.workers={random.choice([0, 0, 0, 1, 2])}"]
    shards = random.random() < 0.35
    gather, replicate = random.choice(["layer", "step"]), random.random() < 0.15
    offload = random.random() < 0.1
    known = {f"{trait} in shards" for trait in ("fused", "bfloat16") if trait in script.traits}
    known |= {"clips by hand in shards"} if "gradients: norm" in script.traits else set()
    divided = shards and size == 2 and not known & set(left_out) and "compressed" not in script.traits
    sets.append(f"parallel.shard={2 if divided else 1}")
    sets.append(f"parallel.reshard={gather}")
    sets.append(f"parallel.replicate_shards={str(divided and replicate).lower()}")
    sets.append(f"parallel.offload={str(divided and offload).lower()}")
    recompute = random.choice(["none", "none", "none", "none", "full", "selective"])
    sets.append(f"parallel.activation_checkpoint={recompute}")
    if not divided and size > 1 and random.random() < 0.15 and "compressed" not in script.traits:
        sets.append("balance.work_stealing=true")
    else:
        sets.append("balance.work_stealing=false")
    sets.append(f"checkpoint.async_save={random.choice(['true', 'false'])}")
    return Placement(size, tuple(sets))
