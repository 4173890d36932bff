"""Train a small model (the student) with the outputs of a large one (the teacher).

    source = unisono.SavedWeights("runs/large")
    teacher = run.place(lambda: source.load_frozen(GPT(large)))
    student = run.place(lambda: GPT(small))

    def loss(output, tokens, targets):
        with torch.no_grad():
            expected = teacher(tokens)
        hard, weight = loss_sum(output, tokens, targets)
        return 0.1 * hard + 0.9 * distill.soft_target_loss(output, expected, temperature=2.0), weight

The losses are sums over rows, as `step.backward` takes them. So the result does not depend on the placement.
"""

from unisono.distill.cached_outputs import CachedOutputs, WithOutputs, cache_outputs
from unisono.distill.losses import hidden_state_loss, relation_loss, soft_target_loss
from unisono.distill.recorded_outputs import RecordedOutputs
from unisono.distill.sequences import continue_sequences

__all__ = [
    "CachedOutputs",
    "RecordedOutputs",
    "WithOutputs",
    "cache_outputs",
    "continue_sequences",
    "hidden_state_loss",
    "relation_loss",
    "soft_target_loss",
]
