"""Context: sequences in slices, which meet in attention. To rounding the model of one process, and to the bit that of
any number of whole models or shards beside it."""

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


def attended(group: ProcessGroup, changes: dict[str, Any]) -> float:
    """How far attention in slices is from torch's own: the worst of its output and of the gradients of what goes in."""
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
    away = [(ours - complete[..., here, :]).norm() / complete.norm()]
    away += [(group.sum_(a.contiguous()) - b).norm() / (b.norm() + 1e-9) for a, b in zip(found, truth, strict=True)]
    return max(map(float, away))


def attend(world: World) -> dict[str, float]:
    with join(world) as group:
        return {what: attended(group, changes) for what, changes in SHAPES.items()}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_attention_in_slices_is_torchs_own(size: int) -> None:
    for told in run_ranks(attend, size):
        for what, away in told.items():
            assert away < {"double": 1e-13, "bfloat16": 1e-2}.get(what.split(" ")[-1], 1e-6), what


# -- a model in training

POSITIONS = {"gpt": {"cos": 0, "sin": 0}, "tiny": {"place": 0}, "recomputed": {"rows.weight": 0, "cos": 0, "sin": 0}}


class Recomputed(GPT):
    """An embedding of positions beside the angles, and blocks that are computed once more in the backward pass."""

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


def learn(run: Run[Any], kind: str = "gpt", length: int = 37) -> dict[str, Any]:
    """Sequences of 2 to 12 tokens. What every step was like, the first one's gradient, and what came of it."""
    model = run.place(BUILD[kind], sequence=SequenceDims(positions=POSITIONS[kind]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run.track(model=model, optimizer=optimizer)
    told: dict[str, Any] = {"losses": [], "norms": [], "tokens": [], "right": [], "here": 0}
    for step in run.steps(Sentences(length), collate_fn=padded):
        for tokens, targets in step:
            told["here"] += tokens.numel()
            output = model(tokens)
            loss, weight = cross_entropy(output, tokens, targets)
            step.add("right", (output.argmax(-1) == targets).sum(), weight)
            step.backward(loss, weight)
        told["losses"].append(step.loss)
        told["norms"].append(step.grad_norm)
        told["tokens"].append(step.weight)
        told["right"].append(step.sum("right"))
        if step.number == 0:
            told["gradients"] = {name: whole_gradient(p) for name, p in model.named_parameters()}
        step.update(optimizer)
    told["measured"] = run.evaluate(model, Sentences(21), cross_entropy, collate_fn=padded)["cross_entropy"]
    told["whole"] = model(torch.arange(9).view(1, 9)).tolist()  # outside of a step, by everybody
    told["predicted"] = run.predict(model, [(torch.arange(9),)] * 3).tolist()
    return told | {"state": run.context.state.fingerprint(), "promise": run_promise(run)}


def recipe(run: Run[Any]) -> Any:
    return learn(run)


def tiny(run: Run[Any]) -> Any:
    return learn(run, "tiny")


def recomputed(run: Run[Any]) -> Any:
    return learn(run, "recomputed")


CONFIG = settings(steps=5, batch=12, virtual_ranks=4, clip=1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    return {loop: run_ranks(attempt, 1, folder / loop.__name__, loop, CONFIG)[0] for loop in (recipe, tiny, recomputed)}


def close_to(found: dict[str, Any], truth: dict[str, Any]) -> None:
    """The sums are those of one process to 1e-6, each gradient to 1e-5 of its norm; counts are the same."""
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


@pytest.mark.parametrize(("loop", "size"), [(recipe, 2), (recipe, 4), (tiny, 2), (recomputed, 2)])
def test_a_model_in_slices_is_that_of_one_process(tmp_path: Path, alone: Any, loop: Any, size: int) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(context=size))
    runs = run_ranks(attempt, size, tmp_path, loop, config)
    assert sum(run["here"] for run in runs) == alone[loop]["here"]
    for run in runs:
        close_to(run, alone[loop])
        assert run["state"] == runs[0]["state"]
        assert run["losses"] == runs[0]["losses"]


def of(told: dict[str, Any]) -> dict[str, Any]:
    """What must be the same to the bit."""
    return {name: value for name, value in told.items() if name != "here"}


BESIDE = {
    "two models": (4, ParallelSettings(context=2)),
    "three models": (6, ParallelSettings(context=2)),
    "two shards": (4, ParallelSettings(context=2, shard=2)),
    "two shards, gathered once a step": (4, ParallelSettings(context=2, shard=2, reshard="step")),
}


@pytest.mark.parametrize(("what", "loop"), every_pair(BESIDE, [recomputed, recipe]))
def test_beside_other_models_and_shards_it_has_the_same_bits(
    tmp_path: Path, alone: Any, divided: Any, what: str, loop: Any
) -> None:
    size, parallel = BESIDE[what]
    for run in run_ranks(attempt, size, tmp_path, loop, replace(CONFIG, parallel=parallel)):
        close_to(run, alone[loop])
        assert of(run) == of(divided[loop])


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, dict[str, Any]]:
    """On two processes, with nothing but slices."""
    folder, config = tmp_path_factory.mktemp("divided"), replace(CONFIG, parallel=ParallelSettings(context=2))
    return {loop: run_ranks(attempt, 2, folder / loop.__name__, loop, config)[0] for loop in (recipe, recomputed)}


def test_beside_divided_matrices(tmp_path: Path, alone: Any) -> None:
    config = replace(CONFIG, parallel=ParallelSettings(context=2, tensor=2))
    for run in run_ranks(attempt, 4, tmp_path, recipe, config):
        close_to(run, alone[recipe])


CHANGES: dict[str, dict[str, Any]] = {
    "several micro-batches": {"micro_batch": 2},
    "one virtual rank": {"virtual_ranks": 1},
    "one virtual rank, several micro-batches": {"virtual_ranks": 1, "micro_batch": 5},
    "allreduce": {"exchange": "allreduce"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_settings(tmp_path: Path, what: str) -> None:
    config = replace(CONFIG, **CHANGES[what])
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", recipe, config)
    parallel = ParallelSettings(context=2)
    for run in run_ranks(attempt, 2, tmp_path / "2", recipe, replace(config, parallel=parallel)):
        close_to(run, truth)


@pytest.mark.slow
def test_several_micro_batches_beside_shards(tmp_path: Path) -> None:
    config = replace(CONFIG, micro_batch=2, parallel=ParallelSettings(context=2))
    sharded = replace(config, parallel=replace(config.parallel, shard=2))
    runs = run_ranks(attempt, 4, tmp_path / "models", recipe, config)
    runs += run_ranks(attempt, 4, tmp_path / "shards", recipe, sharded)
    assert isinstance(runs[0], dict), runs[0]
    assert [of(run) for run in runs] == [of(runs[0])] * 8


def with_dropout(run: Run[Any]) -> Any:
    """Two steps with dropout, in attention and elsewhere; and what a dropout makes of ones on this process."""
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
def test_every_slice_draws_its_own_dropout(tmp_path: Path, ranks: int) -> None:
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
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", recipe, config)
    for run in run_ranks(attempt, 2, tmp_path / "2", recipe, replace(config, parallel=ParallelSettings(context=2))):
        assert run["losses"] == pytest.approx(truth["losses"], rel=1e-2)


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 1)), ((1, 1), (4, 2))])
def test_a_checkpoint_goes_from_any_number_of_slices_to_any_other(
    tmp_path: Path, alone: Any, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Each with (processes, slices)."""
    for (size, context), steps in ((before, 2), (after, 5)):
        config = replace(CONFIG, steps=steps, parallel=ParallelSettings(context=context))
        told = run_ranks(partial(attempt, resume=steps == 5), size, tmp_path, recipe, config)[0]
        assert isinstance(told, dict), told
    assert told["losses"] == pytest.approx(alone[recipe]["losses"][2:], rel=1e-5)


def in_passes(run: Run[Any]) -> Any:
    """Two passes a step, over sequences of two tokens, of which some processes have none; an average of the weights."""
    model = run.place(lambda: GPT(MODEL), sequence=SequenceDims(positions=POSITIONS["gpt"]))
    average = torch.optim.swa_utils.AveragedModel(model)
    first, second = (torch.optim.SGD(params, lr=0.1) for params in (model.blocks.parameters(), [model.tokens.weight]))
    run.track(model=model, average=average, first=first, second=second)
    told = []
    for step in run.steps([torch.arange(i, i + 3) for i in range(24)], collate_fn=padded):
        for optimizer in (first, second):
            step.run(model, cross_entropy, over=[optimizer])
            told += [step.loss, step.grad_norm]
            step.update(optimizer)
        average.update_parameters(model)
    return [*told, run.evaluate(average, Sentences(9), cross_entropy, collate_fn=padded)["cross_entropy"]]


def test_passes_averages_and_slices_without_a_position(tmp_path: Path) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", in_passes, replace(CONFIG, steps=2))
    config = replace(CONFIG, steps=2, parallel=ParallelSettings(context=4))
    for told in run_ranks(attempt, 4, tmp_path / "4", in_passes, config):
        assert told == pytest.approx(truth, rel=1e-5)


# -- what cannot be


class Other(nn.Module):
    """Looks back on what came before, in a way that is given."""

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


def other(run: Run[Any], build: Any, sequence: SequenceDims | None, data: Any = None) -> Any:
    model = run.place(build, sequence=sequence)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data or Sentences(24), collate_fn=padded if data is None else None):
        step.run(model, cross_entropy)
        step.update(optimizer)
    return run.evaluate(model, Sentences(3), cross_entropy, collate_fn=padded)


WRONG: dict[str, tuple[Any, SequenceDims | None, Any, str]] = {
    "heads": (
        lambda: Other(heads=3),
        SequenceDims(),
        None,
        "3 heads.*no multiple of 2.*parallel.context=1.*has 4 heads",
    ),
    "nothing said of positions": (Other, None, None, r"Its buffers are: seen \(\).*sequence=unisono.SequenceDims"),
    "no such positions": (
        Other,
        SequenceDims(positions={"cos": 0}),
        None,
        r"no parameter or buffer 'cos'.*positions=.*'seen'",
    ),
    "no such dim": (
        Other,
        SequenceDims(positions={"tokens.weight": 2}),
        None,
        r"no dim 2.*shape is \(23, 12\).*name the dim",
    ),
    "no such part": (Other, SequenceDims(batch={2: 1}), None, r"batch=\{2: 1\}.*It has 0: \(\d+, \d+\), 1: "),
    "nothing to divide": (Other, SequenceDims(), list(range(24)), "no tensor of two or more dims"),
    "attention by hand": (
        lambda: Other("hand"),
        SequenceDims(),
        None,
        "did not call F.scaled_dot.*positions have not met",
    ),
    "attention weights": (
        lambda: Other("weights"),
        SequenceDims(),
        None,
        "cannot return its weights.*need_weights=False",
    ),
    "a mask of a slice": (
        lambda: Other("mask"),
        SequenceDims(),
        None,
        "mask of . x . positions does not fit.*is_causal=True",
    ),
    "another length": (
        lambda: Other("longer"),
        SequenceDims(),
        None,
        "an attention from . to . positions.*of which . are here",
    ),
    "batch norm": (lambda: Other("norm"), SequenceDims(), None, "1 of its parts are batch norms.*norm.*LayerNorm"),
    "a convolution": (
        lambda: nn.Sequential(Other(), nn.Conv1d(23, 4, 3)),
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
    "a buffer that changes": (lambda: Other("buffer"), SequenceDims(), None, "changed buffers.*slice of the sequences"),
}


@pytest.mark.parametrize("ranks", [4, 1])
def test_what_cannot_be_is_told_on_every_process(tmp_path: Path, ranks: int) -> None:
    """All of it, one after the other: each is refused before anything is computed that others wait for."""
    for told in run_ranks(refused, 2, tmp_path, ranks):
        for what, words in told.items():
            assert isinstance(words, str), what
            assert re.search(WRONG[what][-1], words, re.DOTALL), words


def refused(world: World, folder: Path, ranks: int) -> dict[str, Any]:
    config = replace(CONFIG, steps=1, virtual_ranks=ranks, parallel=ParallelSettings(context=2))
    return {
        what: attempt(world, folder / str(i), partial(other, build=build, sequence=sequence, data=data), config)
        for i, (what, (build, sequence, data, _)) in enumerate(WRONG.items())
    }
