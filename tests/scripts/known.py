"""Cases in which a run is known to promise exact bits and to miss them, and that are being mended elsewhere.

The generator leaves out what stands here, so that every other difference is new. To draw a case again, remove its line,
or name it: `python -m tests.scripts --with sparse`.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "sparse": "EmbeddingBag and Embedding with sparse=True: gradients are summed in another order",
    "jit": "torch.jit.script functions: the profiling executor computes other bits from the second call on",
    "slices": "samples from torch.from_numpy of slices: loader workers give them another alignment",
    "remembers": "a module that remembers in a Python attribute",
    "unfrozen": "requires_grad changed once by the script: lost by a resume",
    "fused in shards": "an optimizer with fused=True under parallel.shard",
    "bfloat16 in shards": "bfloat16 parameters under parallel.shard",
    "clips by hand in shards": "torch.nn.utils.clip_grad_norm_ under parallel.shard",
}
"""Name of a trait of a script (or of a trait with a placement): what goes wrong."""
