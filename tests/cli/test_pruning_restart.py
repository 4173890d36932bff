"""A pruned run whose processes hold shards, restarted by the launcher after a process was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recipes.training import assert_same_run, train_recipe

SCRIPT = """
import os, signal
from pathlib import Path
import torch
import unisono

def main(run):
    model = run.place(lambda: torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    pruning = unisono.pruning.{method}, sparsity=0.6, begin=2, end=8, every=2)
    run.track(model=model, optimizer=optimizer, pruning=pruning)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    mark = Path(__file__).with_name("killed")
    for step in run.steps(data):
        step.run(model, lambda out, x, y: (torch.nn.functional.cross_entropy(out, y, reduction="sum"), len(y)))
        if step.number == 5 and run.size > 1 and run.rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        step.update(optimizer, pruning)
        run.log(sparsity=pruning.sparsity)

if __name__ == "__main__":
    unisono.main(main)
"""

METHODS = ["MagnitudePruning(model", "MovementPruning(model, optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=["magnitude", "movement"])
def test_a_restart_with_shards_changes_nothing(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{method}", method), encoding="utf-8")
    sets = {"steps": 10, "batch": 16, "checkpoint.every": 1}
    alone, _ = train_recipe(str(script), tmp_path / "alone", 1, sets=sets)
    killed, _ = train_recipe(str(script), tmp_path / "run", 2, sets={**sets, "parallel.shard": 2})
    assert (tmp_path / "killed").exists()
    assert_same_run(killed, alone, "sparsity")
    assert alone["sparsity"] == (round(0.6 * 96) + round(0.6 * 36)) / 132
