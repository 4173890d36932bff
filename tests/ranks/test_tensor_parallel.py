"""Tensor parallelism: it agrees with one process to rounding, and has the same bits for any layout of data."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.agreement import GPT, Sentences, TrainResult, assert_agree, train_gpt
from tests.ranks.loops import attempt
from unisono.checkpoint.sharded_state import gather_tensor
from unisono.config import ParallelSettings, Settings
from unisono.config.mesh_shape import MeshShape
from unisono.distributed.init import join_process_group
from unisono.distributed.mesh import build_mesh
from unisono.environment import World
from unisono.parallel.parallelize import parallelize
from unisono.tensors.mapped_memory import MappedMemory
from unisono.testing import run_ranks
from unisono.train.run import Run

CONFIG = Settings(steps=4, batch=12, virtual_ranks=4, clip=1.0)
"""Over 60 sequences: whole batches. The norm is clipped, so it affects the result."""


def trained(
    size: int, folder: Path, config: Settings = CONFIG, build: Any = GPT, plan: Any = None, **axes: Any
) -> TrainResult:
    config = replace(config, parallel=ParallelSettings(**axes))
    everybody = run_ranks(train_gpt, size, str(folder), config, build, plan)
    assert len({came.fingerprint for came in everybody}) == 1
    assert all(came.losses == everybody[0].losses for came in everybody)
    return everybody[0]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return trained(1, tmp_path_factory.mktemp("truth"))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("size", "axes"),
    [
        (2, {"tensor": 2}),
        pytest.param(4, {"tensor": 4}, marks=pytest.mark.slow),
        (2, {"tensor": 2, "sequence_parallel": True}),
        pytest.param(2, {"tensor": 2, "loss_parallel": True}, marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 4, "sequence_parallel": True, "loss_parallel": True}, marks=pytest.mark.slow),
    ],
)
def test_it_agrees_with_one_process(tmp_path: Path, truth: TrainResult, size: int, axes: dict[str, Any]) -> None:
    came = trained(size, tmp_path, **axes)
    assert_agree(came, truth)
    assert came.promise[0] == "exact"
    assert f"other layouts than tensor={size}" in came.promise[1]


def test_one_virtual_rank_is_clipped_with_divided_and_whole_gradients(tmp_path: Path) -> None:
    config = replace(CONFIG, virtual_ranks=1)
    assert_agree(trained(2, tmp_path / "2", config, tensor=2), trained(1, tmp_path / "1", config))


class WithAttributes(GPT):
    """Freeze the norms, and mark parameters without rows for the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad_("norm" not in name)
            p.no_decay = p.dim() < 2  # type: ignore[attr-defined]


def parameter_attributes(run: Run[Any]) -> Any:
    return [(name, p.requires_grad, p.__dict__["no_decay"]) for name, p in run.place(WithAttributes).named_parameters()]


@pytest.mark.parametrize("axes", [{"tensor": 2, "sequence_parallel": True}, {"shard": 2}])
def test_divided_parameters_keep_attributes_and_requires_grad(tmp_path: Path, axes: dict[str, Any]) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", parameter_attributes)
    config = replace(CONFIG, parallel=ParallelSettings(**axes))
    assert run_ranks(attempt, 2, tmp_path / "2", parameter_attributes, config) == [truth, truth]


class CountsAllHeads(GPT):
    """Count all heads although this process has a part of them, in torch's attention or by hand."""

    def __init__(self, own_plan: bool, width: int = -1) -> None:
        super().__init__()

        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.query, self.out_proj = nn.Linear(16, 16), nn.Linear(16, 16)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q = self.query(x).view(*x.shape[:2], 4, width).transpose(1, 2)
                mask = torch.ones(x.shape[1], x.shape[1]).tril().log()
                seen = (q @ q.mT + mask).softmax(-1) @ q if own_plan else F.scaled_dot_product_attention(q, q, q)
                out: torch.Tensor = x + self.out_proj(seen.transpose(1, 2).flatten(2))
                return out

        self.blocks = nn.ModuleList(Attention() for _ in range(2))


def place_counting(run: Run[Any]) -> Any:
    run.place(lambda: CountsAllHeads(False))(torch.zeros(2, 12, dtype=torch.long))


def place_counting_by_hand(run: Run[Any]) -> Any:
    run.place(lambda: CountsAllHeads(True))(torch.zeros(2, 12, dtype=torch.long))


def place_four_wide(run: Run[Any]) -> Any:
    run.place(lambda: CountsAllHeads(True, 4))(torch.zeros(2, 12, dtype=torch.long))


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


def test_multi_head_attention_stays_whole(tmp_path: Path) -> None:
    assert_agree(trained(2, tmp_path / "2", build=Encoder, tensor=2), trained(1, tmp_path / "1", build=Encoder))


def assert_same_bits(folder: Path, layouts: list[tuple[int, dict[str, Any]]], **settings_of_layout: Any) -> None:
    config = replace(CONFIG, virtual_ranks=12, steps=2)
    one = trained(2, folder / "one", config, tensor=2, **settings_of_layout)
    for size, axes in layouts:
        other = trained(size, folder / str(axes), config, tensor=2, **axes, **settings_of_layout)
        assert other.fingerprint == one.fingerprint, axes
        assert (other.losses, other.norms) == (one.losses, one.norms), axes


@pytest.mark.slow
def test_any_layout_of_data_has_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, [(4, {"replicate": 2}), (4, {"shard": 2})])


@pytest.mark.slow
def test_shards_gathered_once_a_step_have_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, [(4, {"shard": 2, "reshard": "step"})])


@pytest.mark.slow
def test_divided_sequences_have_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits(tmp_path, [(4, {"shard": 2})], sequence_parallel=True)


@pytest.mark.slow
def test_many_processes_have_the_same_bits(tmp_path: Path) -> None:
    """Three and four replicas, and a mesh of three axes."""
    assert_same_bits(tmp_path, [(6, {"replicate": 3}), (8, {"replicate": 4}), (8, {"shard": 2, "replicate": 2})])


def predicted(run: Run[Any]) -> Any:
    model = run.place(GPT)
    return run.predict(model, Sentences(5)).flatten().tolist()


@pytest.mark.parametrize("settings_of_layout", [{}, {"loss_parallel": True, "sequence_parallel": True}])
def test_predictions_are_whole(tmp_path: Path, settings_of_layout: dict[str, Any]) -> None:
    (truth,) = run_ranks(attempt, 1, tmp_path / "1", predicted, CONFIG)
    config = replace(CONFIG, parallel=ParallelSettings(tensor=2, **settings_of_layout))
    for rows in run_ranks(attempt, 2, tmp_path / "2", predicted, config):
        assert rows == pytest.approx(truth, rel=1e-4, abs=1e-6)


@pytest.mark.ci
def test_a_checkpoint_is_loaded_under_another_layout(tmp_path: Path, truth: TrainResult) -> None:
    trained(2, tmp_path, replace(CONFIG, steps=2), tensor=2)
    more = replace(CONFIG, steps=4)
    (came,) = run_ranks(train_gpt, 1, str(tmp_path), more, GPT, None, True)
    assert came.losses[-1] == pytest.approx(truth.losses[-1], rel=1e-4)
    back = replace(more, steps=5, parallel=ParallelSettings(tensor=2, shard=2))
    assert len(run_ranks(train_gpt, 4, str(tmp_path), back, GPT, None, True)[0].losses) == 2


def own_plan() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }


def test_a_plan_of_the_script(tmp_path: Path, truth: TrainResult) -> None:
    assert_agree(trained(2, tmp_path, plan=own_plan, tensor=2), truth)


def plan_with_unknown_name() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    return {"block.*.up": ColwiseParallel()}


def plan_that_divides_ties_in_two_ways() -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    return {"head": ColwiseParallel()}


class UnusualNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))


def place(build: Any, plan: Any = None) -> Any:
    def loop(run: Run[Any]) -> Any:
        run.place(build, **({"plan": plan()} if plan else {}))

    return loop


def odd_width(run: Run[Any]) -> Any:
    run.place(lambda: GPT(width=18, heads=3))


def unusual_names(run: Run[Any]) -> Any:
    run.place(UnusualNames)


def no_blocks(run: Run[Any]) -> Any:
    run.place(lambda: nn.Linear(4, 4))


def no_such_module(run: Run[Any]) -> Any:
    run.place(GPT, plan=plan_with_unknown_name())


def no_style(run: Run[Any]) -> Any:
    plan: Any = {"blocks.*.down": "rowwise"}
    run.place(GPT, plan=plan)


def not_for_norms(run: Run[Any]) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel

    run.place(GPT, plan={"blocks.*.norm_think": ColwiseParallel()})


def tied_in_two_ways(run: Run[Any]) -> Any:
    run.place(GPT, plan=plan_that_divides_ties_in_two_ways())


def whole_with_divided(run: Run[Any]) -> Any:
    class Placed(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.place = nn.Parameter(torch.zeros(12, 16))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.norm(self.tokens(tokens) + self.place)
            return out

    run.place(Placed)(torch.zeros(2, 12, dtype=torch.long))


def multi_head_with_sequence(run: Run[Any]) -> Any:
    run.place(Encoder)


REFUSED = {
    odd_width: (4, r"parallel.tensor=4: .*blocks.0.query_key_value has 54 outputs.*parallel.tensor=3"),
    unusual_names: (2, r"name of rows.1.1 does not show whether it comes first or second.*plan="),
    no_blocks: (2, r"no blocks in a row.*plan="),
    no_such_module: (2, r"no module called block.\*.up.*names of its own"),
    whole_with_divided: (
        2,
        r"in a Placed \(aten.add.Tensor, test_tensor_parallel.py.*sequence_parallel=false",
    ),
    place_counting: (2, r"heads are 2 wide with a part of its matrices, and 4.*unflatten\(-1, \(-1, head_width\)\)"),
    place_counting_by_hand: (2, r"heads are 2 wide with a part of its matrices, and 4"),
    place_four_wide: (2, r"forward pass fails: shape .*unflatten"),
    no_style: (2, r"'blocks.\*.down': 'rowwise', which is no style.*a style is an object"),
    not_for_norms: (2, r"not support its module: ColwiseParallel currently only support.*SequenceParallel for norms"),
    multi_head_with_sequence: (2, r"layers.0.self_attn is an nn.MultiheadAttention.*sequence_parallel=false"),
    tied_in_two_ways: (2, r"share a parameter of shape \(24, 16\).*do not tie"),
}


@pytest.mark.parametrize("loop", REFUSED)
def test_unsupported_models_are_refused_on_every_process(tmp_path: Path, loop: Any) -> None:
    size, words = REFUSED[loop]
    parallel = ParallelSettings(tensor=size, sequence_parallel=loop in (whole_with_divided, multi_head_with_sequence))
    for message in run_ranks(attempt, size, tmp_path, loop, replace(CONFIG, parallel=parallel)):
        assert isinstance(message, str), message
        assert re.search(words, message, re.DOTALL), message


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


class BehindEmbedding(nn.Module):
    """Rows after an embedding, whose sum is still pending when the first row is called."""

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
        model = BehindEmbedding()
        parallelize(model, mesh, ParallelSettings(tensor=world.size, compile=True), None, MappedMemory())
        for row in model.rows:
            code: Any = row.forward
            code._code = torch.compile(code.forward, backend="aot_eager")  # no compiler takes time
        model(torch.arange(8)).square().sum().backward()
        found = model.embed.weight.grad
        assert found is not None
        gradient: torch.Tensor = gather_tensor(found)
        return list(gradient.flatten().tolist())


@pytest.mark.slow  # torch.compile takes seconds to trace, even without compiling
@pytest.mark.timeout(400)
def test_compiled_layers_pass_on_their_gradient() -> None:
    (alone,), parts = (run_ranks(gradient_of_an_embedding, size, seconds=180.0) for size in (1, 2))
    assert parts[0] == parts[1] == pytest.approx(alone, rel=1e-5)
