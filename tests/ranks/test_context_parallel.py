"""Context parallelism: agrees with one process to rounding; replicas and shards change no bit."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pairs import every_pair
from tests.ranks.loops import attempt
from tests.ranks.training import Sentences, TinyGPT, padded, settings
from unisono import SequenceDims
from unisono.checkpoint.sharded_state import gather_state
from unisono.config import ParallelSettings
from unisono.distributed.init import join_process_group as join
from unisono.distributed.process_group import ProcessGroup
from unisono.environment import World
from unisono.parallel.context_parallel.ulysses import ContextParallel
from unisono.recipes.text import GPT, Model
from unisono.testing import run_promise, run_ranks
from unisono.train.run import Run

# -- attention alone

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal, uneven": {"is_causal": True, "length": 13},
    "causal, fewer positions than processes": {"is_causal": True, "length": 1},
    "causal, in double": {"is_causal": True, "dtype": torch.float64},
    "causal, in bfloat16": {"is_causal": True, "dtype": torch.bfloat16},
    "a scale": {"scale": 0.3},
    "a wider value": {"value": 7},
    "no batch": {"batch": ()},
    "two dims of batch": {"batch": (2, 3)},
    "grouped heads": {"enable_gqa": True, "key_heads": 12, "heads": 24, "is_causal": True},
    "grouped heads, fewer than processes": {"enable_gqa": True, "key_heads": 2, "heads": 24, "is_causal": True},
    "one head of keys": {"enable_gqa": True, "key_heads": 1, "length": 11},
    "a mask": {"mask": (1, 1, "L", "L")},
    "a mask of two dims": {"mask": ("L", "L"), "length": 11},
    "a mask for each head": {"mask": (2, "H", "L", "L")},
    "a bias that is learnt": {"mask": (1, "H", "L", "L"), "kind": "learnt", "length": 11},
    "a mask of keys": {"mask": (2, 1, 1, "L"), "length": 11},
    "a mask of keys, in slices": {"mask": (2, 1, 1, "l"), "length": 11},
    "a bias of keys, in slices": {"mask": (2, 1, 1, "l"), "length": 11, "kind": "bias"},
    "a mask of one key": {"mask": (2, 1, 1, "l"), "length": 1},
}


def attention_error(group: ProcessGroup, changes: dict[str, Any]) -> float:
    """Return the largest error of attention in slices, of its output and the gradients of its inputs."""
    how: dict[str, Any] = {
        "batch": (2,),
        "heads": 12,
        "length": 24,
        "value": 5,
        "dtype": torch.float32,
        "mask": (),
    } | changes
    kinds: dict[str, Any] = {name: how[name] for name in ("is_causal", "scale", "enable_gqa") if name in how}
    length, heads, random = how["length"], how["heads"], torch.Generator().manual_seed(4)

    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(*how["batch"], heads, length, width, generator=random).to(how["dtype"]).requires_grad_()

    query, key = draw(heads, 5), draw(how.get("key_heads", heads), 5)
    value, weight = draw(how.get("key_heads", heads), how["value"]), draw(heads, how["value"])
    noise = torch.randn([{"L": length, "l": length, "H": heads}.get(n, n) for n in how["mask"]], generator=random)
    kind = how.get("kind")
    mask = (noise.requires_grad_(kind == "learnt") if kind else noise > -0.5) if how["mask"] else None
    leaves = [query, key, value, *([noise] if kind == "learnt" else [])]
    complete = F.scaled_dot_product_attention(query, key, value, mask, **kinds)
    truth = torch.autograd.grad(complete, leaves, weight)

    context = ContextParallel(group)
    context.add(nn.Linear(1, 1), SequenceDims())
    with context.part(torch.arange(length).view(1, length)) as part:
        here = part[0]
        own = mask[..., here] if mask is not None and how["mask"][-1] == "l" else mask
        q, k, v = (t[..., here, :] for t in (query, key, value))
        ours = F.scaled_dot_product_attention(q, k, v, own, **kinds)
        found = torch.autograd.grad(ours, leaves, weight[..., here, :])
    error = [(ours - complete[..., here, :]).norm() / complete.norm()]
    error += [(group.sum_(a.contiguous()) - b).norm() / (b.norm() + 1e-9) for a, b in zip(found, truth, strict=True)]
    return max(map(float, error))


def attention_errors(world: World) -> dict[str, float]:
    with join(world) as group:
        return {what: attention_error(group, changes) for what, changes in SHAPES.items()}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_in_slices_agrees_with_torch(size: int) -> None:
    for found in run_ranks(attention_errors, size):
        for what, error in found.items():
            assert error < {"double": 1e-13, "bfloat16": 1e-2}.get(what.split(" ")[-1], 1e-6), what


# -- a model in training

POSITIONS = {"gpt": {"cos": 0, "sin": 0}, "tiny": {"place": 0}, "recomputed": {"rows.weight": 0, "cos": 0, "sin": 0}}


class Recomputed(GPT):
    """An embedding of positions as well as angles, and blocks that are recomputed in backward."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.rows = nn.Embedding(model.context, model.width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.rows(torch.arange(length))
        for block in self.blocks:
            x = checkpoint(block, x, self.cos[:length], self.sin[:length], use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


MODEL = Model(width=16, depth=2, heads=4, context=16)
BUILD: dict[str, Any] = {
    "gpt": lambda: GPT(MODEL),
    "tiny": lambda: TinyGPT(dropout=0.0),
    "recomputed": lambda: Recomputed(MODEL),
}


def cross_entropy(output: Tensor, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


def whole_gradient(p: nn.Parameter) -> Any:
    grad: Any = p.grad
    return None if grad is None else gather_state(grad, keep=True).tolist()


def train_on_sentences(run: Run[Any], kind: str = "gpt", length: int = 37) -> dict[str, Any]:
    """Train on sequences of 2 to 12 tokens; return the values of every step, the first gradient, and the results."""
    model = run.place(BUILD[kind], sequence=SequenceDims(positions=POSITIONS[kind]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run.track(model=model, optimizer=optimizer)
    found: dict[str, Any] = {"losses": [], "norms": [], "tokens": [], "right": [], "here": 0}
    for step in run.steps(Sentences(length), collate_fn=padded):
        for tokens, targets in step:
            found["here"] += tokens.numel()
            output = model(tokens)
            loss, weight = cross_entropy(output, tokens, targets)
            step.add("right", (output.argmax(-1) == targets).sum(), weight)
            step.backward(loss, weight)
        found["losses"].append(step.loss)
        found["norms"].append(step.grad_norm)
        found["tokens"].append(step.weight)
        found["right"].append(step.sum("right"))
        if step.number == 0:
            found["gradients"] = {name: whole_gradient(p) for name, p in model.named_parameters()}
        step.update(optimizer)
    found["measured"] = run.evaluate(model, Sentences(21), cross_entropy, collate_fn=padded)["cross_entropy"]
    found["whole"] = model(torch.arange(9).view(1, 9)).tolist()  # outside of a step, on all processes
    found["predicted"] = run.predict(model, [(torch.arange(9),)] * 3).tolist()
    return found | {"state": run.context.state.fingerprint(), "promise": run_promise(run)}


def train_gpt(run: Run[Any]) -> Any:
    return train_on_sentences(run)


def train_tiny(run: Run[Any]) -> Any:
    return train_on_sentences(run, "tiny")


def train_recomputed(run: Run[Any]) -> Any:
    return train_on_sentences(run, "recomputed")


CONFIG = settings(steps=5, batch=12, virtual_ranks=4, clip=1.0)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return {
        loop: run_ranks(attempt, 1, folder / loop.__name__, loop, CONFIG)[0]
        for loop in (train_gpt, train_tiny, train_recomputed)
    }


def assert_close(found: dict[str, Any], truth: dict[str, Any]) -> None:
    """Compare sums to 1e-6, each gradient to 1e-5 of its norm; counts must be equal."""
    assert isinstance(found, dict), found
    assert found["tokens"] == truth["tokens"]
    for name in ("losses", "norms"):
        assert found[name] == pytest.approx(truth[name], rel=1e-5 if name == "norms" else 2e-6)
    for name, gradient in truth["gradients"].items():
        mine = found["gradients"][name]
        if gradient is None:
            assert mine is None, name
        else:
            near, true = torch.tensor(mine), torch.tensor(gradient)
            assert float((near - true).norm() / (true.norm() + 1e-12)) < 1e-5, name
    assert found["measured"] == pytest.approx(truth["measured"], rel=1e-5)
    for name in ("whole", "predicted"):
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(truth[name]), rtol=1e-3, atol=1e-4)
    assert re.search("other layouts than context=.* agree to rounding", found["promise"][1])


@pytest.mark.ci
@pytest.mark.parametrize(("loop", "size"), [(train_gpt, 2), (train_gpt, 4), (train_tiny, 2), (train_recomputed, 2)])
def test_a_model_in_slices_agrees_with_one_process(tmp_path: Path, single: Any, loop: Any, size: int) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(context=size))
    runs = run_ranks(attempt, size, tmp_path, loop, config)
    assert sum(run["here"] for run in runs) == single[loop]["here"]
    for run in runs:
        assert_close(run, single[loop])
        assert run["state"] == runs[0]["state"]
        assert run["losses"] == runs[0]["losses"]


def exact_part(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results that must be equal to the bit."""
    return {name: value for name, value in found.items() if name != "here"}


WITH_OTHER_AXES = {
    "two models": (4, ParallelSettings(context=2)),
    "three models": (6, ParallelSettings(context=2)),
    "two shards": (4, ParallelSettings(context=2, shard=2)),
    "two shards, gathered once a step": (4, ParallelSettings(context=2, shard=2, reshard="step")),
}


@pytest.mark.ci
@pytest.mark.parametrize(("what", "loop"), every_pair(WITH_OTHER_AXES, [train_recomputed, train_gpt]))
def test_replicas_and_shards_change_no_bit(
    tmp_path: Path, single: Any, context_only: Any, what: str, loop: Any
) -> None:
    size, parallel = WITH_OTHER_AXES[what]
    for run in run_ranks(attempt, size, tmp_path, loop, replace(CONFIG, parallel=parallel)):
        assert_close(run, single[loop])
        assert exact_part(run) == exact_part(context_only[loop])


@pytest.fixture(scope="module")
def context_only(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """Train on two processes with context parallelism only."""
    folder, config = tmp_path_factory.mktemp("divided"), replace(CONFIG, parallel=ParallelSettings(context=2))
    return {
        loop: run_ranks(attempt, 2, folder / loop.__name__, loop, config)[0] for loop in (train_gpt, train_recomputed)
    }


@pytest.mark.ci
def test_with_tensor_parallelism(tmp_path: Path, single: Any) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(context=2, tensor=2))
    for run in run_ranks(attempt, 4, tmp_path, train_gpt, config):
        assert_close(run, single[train_gpt])


CHANGES: dict[str, dict[str, Any]] = {
    "several micro-batches": {"micro_batch": 2},
    "one virtual rank": {"virtual_ranks": 1},
    "one virtual rank, several micro-batches": {"virtual_ranks": 1, "micro_batch": 5},
    "allreduce": {"exchange": "allreduce"},
}


@pytest.mark.ci
@pytest.mark.parametrize("what", CHANGES)
def test_other_settings(tmp_path: Path, what: str) -> None:
    config = replace(CONFIG, **CHANGES[what])
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", train_gpt, config)
    parallel = ParallelSettings(context=2)
    for run in run_ranks(attempt, 2, tmp_path / "2", train_gpt, replace(config, parallel=parallel)):
        assert_close(run, truth)


@pytest.mark.slow
def test_several_micro_batches_with_shards(tmp_path: Path) -> None:
    config = replace(CONFIG, micro_batch=2, parallel=ParallelSettings(context=2))
    sharded = replace(config, parallel=replace(config.parallel, shard=2))
    runs = run_ranks(attempt, 4, tmp_path / "models", train_gpt, config)
    runs += run_ranks(attempt, 4, tmp_path / "shards", train_gpt, sharded)
    assert isinstance(runs[0], dict), runs[0]
    assert [exact_part(run) for run in runs] == [exact_part(runs[0])] * 8


def with_dropout(run: Run[Any]) -> Any:
    """Run two steps with dropout, in attention and elsewhere; return the result of dropout on ones on this process."""
    model = run.place(lambda: TinyGPT(dropout=0.3), sequence=SequenceDims(positions={"place": 0}))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run.track(model=model, optimizer=optimizer)
    losses, drawn, after = [], [], []
    for step in run.steps(Sentences(24), collate_fn=padded):
        for tokens, targets in step:
            step.backward(*cross_entropy(model(tokens), tokens, targets))
            drawn.append(F.dropout(torch.ones(64), 0.5).tolist())
        after.append(torch.rand(()).item())
        step.update(optimizer)
        losses.append(step.loss)
    return {"drawn": drawn, "same": [losses, after, run.context.state.fingerprint()]}


@pytest.mark.parametrize("ranks", [4, 1])
def test_every_slice_draws_other_dropout(tmp_path: Path, ranks: int) -> None:
    config = replace(CONFIG, steps=2, virtual_ranks=ranks, parallel=ParallelSettings(context=2))
    first, second = run_ranks(attempt, 2, tmp_path / "2", with_dropout, config)
    assert first["same"] == second["same"]
    assert not any(a == b for a, b in zip(first["drawn"], second["drawn"], strict=True))
    if ranks > 1:
        runs = run_ranks(attempt, 4, tmp_path / "4", with_dropout, config)
        assert [run["same"] for run in runs] == [first["same"]] * 4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast(tmp_path: Path, precision: Any) -> None:
    config = replace(CONFIG, precision=precision, steps=2)
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", train_gpt, config)
    for run in run_ranks(attempt, 2, tmp_path / "2", train_gpt, replace(config, parallel=ParallelSettings(context=2))):
        assert run["losses"] == pytest.approx(truth["losses"], rel=1e-2)


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (4, 2))])
def test_a_checkpoint_is_loaded_on_any_number_of_slices(
    tmp_path: Path, single: Any, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Each entry is (processes, slices)."""
    for (size, context), steps in ((before, 2), (after, 5)):
        config = replace(CONFIG, steps=steps, parallel=ParallelSettings(context=context))
        found = run_ranks(partial(attempt, resume=steps == 5), size, tmp_path, train_gpt, config)[0]
        assert isinstance(found, dict), found
    assert found["losses"] == pytest.approx(single[train_gpt]["losses"][2:], rel=1e-5)


def train_in_passes(run: Run[Any]) -> Any:
    """Run two passes a step on sequences of two tokens, so some processes have none; average the weights."""
    model = run.place(lambda: GPT(MODEL), sequence=SequenceDims(positions=POSITIONS["gpt"]))
    average = torch.optim.swa_utils.AveragedModel(model)
    first, second = (torch.optim.SGD(params, lr=0.1) for params in (model.blocks.parameters(), [model.tokens.weight]))
    run.track(model=model, average=average, first=first, second=second)
    found = []
    for step in run.steps([torch.arange(i, i + 3) for i in range(24)], collate_fn=padded):
        for optimizer in (first, second):
            step.run(model, cross_entropy, over=[optimizer])
            found += [step.loss, step.grad_norm]
            step.update(optimizer)
        average.update_parameters(model)
    return [*found, run.evaluate(average, Sentences(9), cross_entropy, collate_fn=padded)["cross_entropy"]]


def test_passes_averages_and_empty_slices(tmp_path: Path) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", train_in_passes, replace(CONFIG, steps=2))
    config = replace(CONFIG, steps=2, parallel=ParallelSettings(context=4))
    for found in run_ranks(attempt, 4, tmp_path / "4", train_in_passes, config):
        assert found == pytest.approx(truth, rel=1e-5)


# -- unsupported models


class OtherAttention(nn.Module):
    """Attend to earlier positions in a given way."""

    seen: Tensor

    def __init__(self, look: Any = None, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.look = heads, look
        self.tokens, self.out = nn.Embedding(23, 12), nn.Linear(12, 23)
        self.norm = nn.BatchNorm1d(12) if look == "norm" else nn.LayerNorm(12)
        self.multi = nn.MultiheadAttention(12, 2, batch_first=True)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.norm(self.tokens(tokens))
        if self.look == "buffer":
            self.seen += 1
        logits: Tensor = self.out(x + self.back(x))
        return logits

    def back(self, x: Tensor) -> Tensor:
        if self.look == "hand":
            return (x @ x.mT).softmax(-1) @ x
        if self.look == "weights":
            seen, _ = self.multi(x, x, x)
            return torch.as_tensor(seen)
        heads = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mask = torch.ones(2 * x.shape[1:2], dtype=torch.bool).tril() if self.look == "mask" else None
        key = F.pad(heads, (0, 0, 1, 0)) if self.look == "longer" else heads
        return F.scaled_dot_product_attention(heads, key, key, mask).transpose(1, 2).flatten(2)


def train_other(run: Run[Any], build: Any, sequence: SequenceDims | None, data: Any = None) -> Any:
    model = run.place(build, sequence=sequence)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data or Sentences(24), collate_fn=padded if data is None else None):
        step.run(model, cross_entropy)
        step.update(optimizer)
    return run.evaluate(model, Sentences(3), cross_entropy, collate_fn=padded)


REFUSED: dict[str, tuple[Any, SequenceDims | None, Any, str]] = {
    "heads": (
        lambda: OtherAttention(heads=3),
        SequenceDims(),
        None,
        "3 heads.*no multiple of 2.*parallel.context=1.*has 4 heads",
    ),
    "nothing said of positions": (
        OtherAttention,
        None,
        None,
        r"Its buffers are: seen \(\).*sequence=unisono.SequenceDims",
    ),
    "no such positions": (
        OtherAttention,
        SequenceDims(positions={"cos": 0}),
        None,
        r"no parameter or buffer 'cos'.*positions=.*'seen'",
    ),
    "no such dim": (
        OtherAttention,
        SequenceDims(positions={"tokens.weight": 2}),
        None,
        r"no dim 2.*shape is \(23, 12\).*name the dim",
    ),
    "no such part": (OtherAttention, SequenceDims(batch={2: 1}), None, r"batch=\{2: 1\}.*It has 0: \(\d+, \d+\), 1: "),
    "nothing to divide": (OtherAttention, SequenceDims(), list(range(24)), "no tensor of two or more dims"),
    "attention by hand": (
        lambda: OtherAttention("hand"),
        SequenceDims(),
        None,
        "did not call F.scaled_dot.*positions have not met",
    ),
    "attention weights": (
        lambda: OtherAttention("weights"),
        SequenceDims(),
        None,
        "cannot return its weights.*need_weights=False",
    ),
    "a mask of a slice": (
        lambda: OtherAttention("mask"),
        SequenceDims(),
        None,
        "mask of . x . positions does not fit.*is_causal=True",
    ),
    "another length": (
        lambda: OtherAttention("longer"),
        SequenceDims(),
        None,
        "an attention from . to . positions.*of which . are here",
    ),
    "batch norm": (
        lambda: OtherAttention("norm"),
        SequenceDims(),
        None,
        "1 of its parts are batch norms.*norm.*LayerNorm",
    ),
    "a convolution": (
        lambda: nn.Sequential(OtherAttention(), nn.Conv1d(23, 4, 3)),
        SequenceDims(),
        None,
        "Its 1 is a Conv1d.*on another process",
    ),
    "a recurrence": (
        lambda: nn.LSTM(4, 4),
        SequenceDims(),
        None,
        "Its whole is a LSTM, which computes a position from its neighbors",
    ),
    "a buffer that changes": (
        lambda: OtherAttention("buffer"),
        SequenceDims(),
        None,
        "changed buffers.*slice of the sequences",
    ),
}


@pytest.mark.parametrize("ranks", [4, 1])
def test_unsupported_models_are_refused_on_every_process(tmp_path: Path, ranks: int) -> None:
    """Each is refused before any computation for which another process waits."""
    for found in run_ranks(refusals, 2, tmp_path, ranks):
        for what, words in found.items():
            assert isinstance(words, str), what
            assert re.search(REFUSED[what][-1], words, re.DOTALL), words


def refusals(world: World, folder: Path, ranks: int) -> dict[str, Any]:
    config = replace(CONFIG, steps=1, virtual_ranks=ranks, parallel=ParallelSettings(context=2))
    return {
        what: attempt(world, folder / str(i), partial(train_other, build=build, sequence=sequence, data=data), config)
        for i, (what, (build, sequence, data, _)) in enumerate(REFUSED.items())
    }
