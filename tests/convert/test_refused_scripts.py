"""Scripts that `unisono convert` does not understand: the message names the line, and what to do."""

from __future__ import annotations

import pytest

from tests.convert.snippets import SCRIPT, refused, script

pytest.importorskip("libcst", reason="needs libcst: pip install 'unisono[convert]'")

REFUSED = {
    "two losses": (
        ("loss.backward()", "loss.backward()\n            model(x).sum().backward()"),
        "model(x).sum()",
        "a second call of backward",
    ),
    "a while loop": (("for epoch in range(3):", "while True:"), "while True", "is a while loop"),
    "a break": (
        ("            optimizer.step()", "            optimizer.step()\n            break"),
        "break",
        "left before",
    ),
    "no loader": (("in loader:", "in [(1, 2)]:"), "[(1, 2)]", "does not iterate over a DataLoader"),
    "a condition": (
        ("            optimizer.step()", "            if epoch:\n                optimizer.step()"),
        "if epoch:",
        "under a condition",
    ),
    "a sampler": (("shuffle=True", "sampler=mine"), "mine", "a sampler of its own, mine"),
    "a batch sampler": (("batch_size=16, shuffle=True", "batch_sampler=mine"), "mine", "a batch sampler"),
    "an unknown collective": (
        ("    model =", "    dist.scatter(data)\n    model ="),
        "dist.scatter",
        "does not know torch.distributed.scatter",
    ),
    "another library": (("import os", "import deepspeed"), "deepspeed", "scripts for deepspeed are not converted"),
    "a loop over seeds": (
        ("    for epoch in range(3):\n", "    for seed in range(2):\n     for epoch in range(3):\n"),
        "for seed",
        "in another loop",
    ),
    "processes": (
        ("    main()\n", "    torch.multiprocessing.Process(target=main).start()\n"),
        "Process(",
        "starts processes itself",
    ),
    "a data set without an index": (
        ("TensorDataset(torch.randn(64, 4), torch.randn(64, 1))", "Endless()"),
        "DataLoader(data,",
        "the data set Endless has no index",
    ),
}
ENDLESS = "import torch\nclass Endless(torch.utils.data.IterableDataset):\n    pass\n"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_with_its_line(name: str) -> None:
    change, at, error = REFUSED[name]
    source = script(change, head=ENDLESS)
    line = next(i for i, text in enumerate(source.splitlines(), 1) if at in text)
    message = refused(source)
    assert message.startswith(f"Line {line}: "), message
    assert error in message
    assert "Next: " in message


def test_files_that_are_no_training_scripts() -> None:
    assert refused("def f(:\n").startswith("Line 1: this is not valid Python.")
    assert "calls no backward" in refused("import torch\n")
    assert "is a script of Unisono already" in refused("import unisono\n" + SCRIPT)
