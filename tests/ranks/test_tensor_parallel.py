"""Tensor parallel: divided matrices compute what whole ones do, to rounding; and the same bits however data lies."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.agreement import GPT, Came, Sentences, agree, come
from tests.ranks.loops import attempt
from unisono.checkpoint.sharded_state import gather_tensor
from unisono.config import ParallelSettings, Settings
from unisono.config.mesh_shape import MeshShape
from unisono.distributed.init import join_process_group
from unisono.distributed.mesh import build_mesh
from unisono.environment import World
from unisono.parallel.parallelize import parallelize
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = Settings(steps=4, batch=12, virtual_ranks=4, clip=1.0)
"""Over 60 sequences: whole batches. The norm is clipped, so it counts."""


def trained(
    size: int, folder: Path, config: Settings = CONFIG, build: Any = GPT, plan: Any = None, **axes: Any
) -> Came:
    config = replace(config, parallel=ParallelSettings(**axes))
    everybody = run_ranks(come, size, str(folder), config, build, plan)
    assert len({came.fingerprint for came in everybody}) == 1
    assert all(came.losses == everybody[0].losses for came in everybody)
    return everybody[0]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Came:
    return trained(1, tmp_path_factory.mktemp("truth"))


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        (2, {"tensor": 2}),
        pytest.param(4, {"tensor": 4}, marks=pytest.mark.slow),
        (2, {"tensor": 2, "sequence_parallel": True}),
        pytest.param(2, {"tensor": 2, "loss_parallel": True}, marks=pytest.mark.slow),
        (4, {"tensor": 4, "sequence_parallel": True, "loss_parallel": True}),
    ],
)
def test_it_agrees_with_one_process(tmp_path: Path, truth: Came, size: int, axes: dict[str, Any]) -> None:
    came = trained(size, tmp_path, **axes)
    agree(came, truth)
    assert came.promise[0] == "exact"
    assert f"other layouts than tensor={size}" in came.promise[1]


def test_one_virtual_rank_is_clipped_where_some_gradients_are_cut_and_some_are_not(tmp_path: Path) -> None:
    config = replace(CONFIG, virtual_ranks=1)
    agree(trained(2, tmp_path / "2", config, tensor=2), trained(1, tmp_path / "1", config))


class Marked(GPT):
    """Its norms do not train, and what has no rows is marked for the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad_("norm" not in name)
            p.no_decay = p.dim() < 2  # type: ignore[attr-defined]


def marks(run: Run[Any]) -> Any:
    return [(name, p.requires_grad, p.__dict__["no_decay"]) for name, p in run.place(Marked).named_parameters()]


@pytest.mark.parametrize("axes", [{"tensor": 2, "sequence_parallel": True}, {"shard": 2}])
def test_divided_parameters_train_and_are_marked_as_the_whole_ones_were(tmp_path: Path, axes: dict[str, Any]) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", marks)
    config = replace(CONFIG, parallel=ParallelSettings(**axes))
    assert run_ranks(attempt, 2, tmp_path / "2", marks, config) == [truth, truth]


class Counting(GPT):
    """Its blocks count all heads, where a part of them is; in torch's attention or in one by hand."""

    def __init__(self, by_hand: bool, width: int = -1) -> None:
        super().__init__()

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.out_proj = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q = self.query(x).view(*x.shape[:2], 4, width).transpose(1, 2)
                mask = torch.ones(x.shape[1], x.shape[1]).tril().log()
                seen = (q @ q.mT + mask).softmax(-1) @ q if by_hand else F.scaled_dot_product_attention(q, q, q)
                out: torch.Tensor = x + self.out_proj(seen.transpose(1, 2).flatten(2))
                return out

        self.blocks = nn.ModuleList(Attention() for _ in range(2))


def counting(run: Run[Any]) -> Any:
    run.place(lambda: Counting(False))(torch.zeros(2, 12, dtype=torch.long))


def by_hand_counting(run: Run[Any]) -> Any:
    run.place(lambda: Counting(True))(torch.zeros(2, 12, dtype=torch.long))


def four_wide(run: Run[Any]) -> Any:
    run.place(lambda: Counting(True, 4))(torch.zeros(2, 12, dtype=torch.long))


class Encoder(nn.Module):
    """torch's own layers: attention that computes with its matrices itself, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 24)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_attention_of_torchs_own_stays_whole(tmp_path: Path) -> None:
    agree(trained(2, tmp_path / "2", build=Encoder, tensor=2), trained(1, tmp_path / "1", build=Encoder))


def same_bits(folder: Path, beside: list[tuple[int, dict[str, Any]]], **ways: Any) -> None:
    config = replace(CONFIG, virtual_ranks=12, steps=2)
    one = trained(2, folder / "one", config, tensor=2, **ways)
    for size, axes in beside:
        other = trained(size, folder / str(axes), config, tensor=2, **axes, **ways)
        assert other.fingerprint == one.fingerprint, axes
        assert (other.losses, other.norms) == (one.losses, one.norms), axes


def test_data_may_be_divided_in_any_way_with_the_same_bits(tmp_path: Path) -> None:
    same_bits(tmp_path, [(4, {"replicate": 2}), (4, {"shard": 2})])


@pytest.mark.slow
def test_and_gathered_once_a_step(tmp_path: Path) -> None:
    same_bits(tmp_path, [(4, {"shard": 2, "reshard": "step"})])


@pytest.mark.slow
def test_that_holds_for_divided_sequences_too(tmp_path: Path) -> None:
    same_bits(tmp_path, [(4, {"shard": 2})], sequence_parallel=True)


@pytest.mark.slow
def test_and_over_many_processes(tmp_path: Path) -> None:
    """Three and four replicas; and a mesh of three axes."""
    same_bits(tmp_path, [(6, {"replicate": 3}), (8, {"replicate": 4}), (8, {"shard": 2, "replicate": 2})])


def predicted(run: Run[Any]) -> Any:
    model = run.place(GPT)
    return run.predict(model, Sentences(5)).flatten().tolist()


@pytest.mark.parametrize("ways", [{}, {"loss_parallel": True, "sequence_parallel": True}])
def test_predictions_are_whole(tmp_path: Path, ways: dict[str, Any]) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", predicted, CONFIG)
    config = replace(CONFIG, parallel=ParallelSettings(tensor=2, **ways))
    for rows in run_ranks(attempt, 2, tmp_path / "2", predicted, config):
        assert rows == pytest.approx(truth, rel=1e-4, abs=1e-6)


def test_a_checkpoint_leaves_the_layout(tmp_path: Path, truth: Came) -> None:
    trained(2, tmp_path, replace(CONFIG, steps=2), tensor=2)
    more = replace(CONFIG, steps=4)
    (came,) = run_ranks(come, 1, str(tmp_path), more, GPT, None, True)
    assert came.losses[-1] == pytest.approx(truth.losses[-1], rel=1e-4)
    back = replace(more, steps=5, parallel=ParallelSettings(tensor=2, shard=2))
    assert len(run_ranks(come, 4, str(tmp_path), back, GPT, None, True)[0].losses) == 2


def by_hand() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def test_a_plan_of_ones_own(tmp_path: Path, truth: Came) -> None:
    agree(trained(2, tmp_path, plan=by_hand, tensor=2), truth)


def strange_plan() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    return {"block.*.up": ColwiseParallel()}


def cut_in_two_ways() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    return {"head": ColwiseParallel()}


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))


def place(build: Any, plan: Any = None) -> Any:
    def loop(run: Run[Any]) -> Any:
        run.place(build, **({"plan": plan()} if plan else {}))

    return loop


def odd_width(run: Run[Any]) -> Any:
    run.place(lambda: GPT(width=18, heads=3))


def strange_names(run: Run[Any]) -> Any:
    run.place(Strange)


def no_blocks(run: Run[Any]) -> Any:
    run.place(lambda: nn.Linear(4, 4))


def no_such_module(run: Run[Any]) -> Any:
    run.place(GPT, plan=strange_plan())


def no_style(run: Run[Any]) -> Any:
    plan: Any = {"blocks.*.down": "rowwise"}
    run.place(GPT, plan=plan)


def not_for_norms(run: Run[Any]) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    run.place(GPT, plan={"blocks.*.norm_think": ColwiseParallel()})


def tied_in_two_ways(run: Run[Any]) -> Any:
    run.place(GPT, plan=cut_in_two_ways())


def whole_beside_parts(run: Run[Any]) -> Any:
    class Placed(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.zeros(12, 16))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(self.tokens(tokens) + self.place)
            return out

    run.place(Placed)(torch.zeros(2, 12, dtype=torch.long))


def attention_in_slices(run: Run[Any]) -> Any:
    run.place(Encoder)


WRONG = {
    odd_width: (4, r"parallel.tensor=4 .*blocks.0.query_key_value has 54 outputs.*parallel.tensor=3"),
    strange_names: (2, r"name of rows.1.1 does not show whether it comes first or second.*plan="),
    no_blocks: (2, r"no blocks in a row.*plan="),
    no_such_module: (2, r"no module called block.\*.up.*names of its own"),
    whole_beside_parts: (
        2,
        r"in a Placed \(aten.add.Tensor, test_tensor_parallel.py.*sequence_parallel=false",
    ),
    counting: (2, r"heads are 2 wide with a part of its matrices, and 4.*unflatten\(-1, \(-1, head_width\)\)"),
    by_hand_counting: (2, r"heads are 2 wide with a part of its matrices, and 4"),
    four_wide: (2, r"forward pass fails: shape .*unflatten"),
    no_style: (2, r"'blocks.\*.down': 'rowwise', which is no style.*a style is an object"),
    not_for_norms: (2, r"not support its module: ColwiseParallel currently only support.*SequenceParallel for norms"),
    attention_in_slices: (2, r"layers.0.self_attn is an nn.MultiheadAttention.*sequence_parallel=false"),
    tied_in_two_ways: (2, r"share a parameter of shape \(24, 16\).*do not tie"),
}


@pytest.mark.parametrize("loop", WRONG)
def test_what_cannot_be_cut_is_told_on_every_process(tmp_path: Path, loop: Any) -> None:
    size, words = WRONG[loop]
    parallel = ParallelSettings(tensor=size, sequence_parallel=loop in (whole_beside_parts, attention_in_slices))
    for told in run_ranks(attempt, size, tmp_path, loop, replace(CONFIG, parallel=parallel)):
        assert isinstance(told, str), told
        assert re.search(words, told, re.DOTALL), told


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


class Looked(nn.Module):
    """Rows behind an embedding, whose parts of the sum are still on their way when the first row is called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.rows = nn.ModuleList(Row() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for row in self.rows:
            x = row(x)
        return x


def gradient_of_an_embedding(world: World) -> list[float]:
    with join_process_group(world) as ours:
        mesh = build_mesh(MeshShape(tensor=world.size), ours)
        torch.manual_seed(0)
        model = Looked()
        parallelize(model, mesh, ParallelSettings(tensor=world.size, compile=True))
        for row in model.rows:
            code: Any = row.forward
            code._code = torch.compile(code.forward, backend="aot_eager")  # nothing that takes a compiler's time
        model(torch.arange(8)).square().sum().backward()
        found = model.embed.weight.grad
        assert found is not None
        gradient: torch.Tensor = gather_tensor(found)
        return list(gradient.flatten().tolist())


@pytest.mark.slow  # following a forward pass takes seconds, even where nothing is compiled
@pytest.mark.timeout(400)
def test_compiled_layers_hand_their_gradient_on() -> None:
    (alone,), parts = (run_ranks(gradient_of_an_embedding, size, seconds=180.0) for size in (1, 2))
    assert parts[0] == parts[1] == pytest.approx(alone, rel=1e-5)
