"""`unisono convert`, one rule at a time: what becomes of a line, and what gets a note."""

from __future__ import annotations

import ast

import pytest

pytest.importorskip("libcst", reason="needs libcst: pip install 'unisono[convert]'")

from tests.convert.conversions import CASES, Case
from tests.convert.snippets import HEAD, SCRIPT, converted, lines, script
from unisono.convert.script_conversion import convert
from unisono.convert.syntax import notes_in


def test_a_plain_loop() -> None:
    code = converted(SCRIPT).code
    assert code.endswith(
        """

@dataclass(frozen=True, kw_only=True)
class Settings(unisono.Settings):
    seed: int = 3
    batch: int = 16
    epochs: int | None = 3


def main(run: unisono.Run[Settings]):
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = run.place(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for x, y in step:
            loss = F.mse_loss(model(x), y)
            step.backward(loss, weight=len(y), mean=True)
        step.update(optimizer)
        run.log(loss=step.loss)


if __name__ == "__main__":
    unisono.main(main, Settings)
"""
    )
    assert "import DataLoader" not in code
    assert "import torch.distributed" in code  # it was unused before, too
    assert converted(SCRIPT).code == code


def test_the_batch_is_that_of_all_processes() -> None:
    wrapped = script(("nn.Linear(4, 1)", "DDP(nn.Linear(4, 1))"))
    assert "batch: int = 64" in lines(wrapped, 4)
    assert "batch: int = 16" in lines(wrapped)
    assert "--set batch=16*N" in converted(wrapped).notes[0][1]
    divided = script(
        ("batch_size=16", "batch_size=64 // dist.get_world_size()"), ("nn.Linear(4, 1)", "DDP(nn.Linear(4, 1))")
    )
    assert "batch: int = 64" in lines(divided, 4)


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ("batch_size=size", 24),
        ("batch_size=args.batch_size", 48),
        ("batch_size=config['bs']", 12),
        ("**kwargs", 20),
        ("16 * 2", 32),
    ],
)
def test_the_batch_size_is_found(given: str, batch: int) -> None:
    before = "parser.add_argument('--batch-size', type=int, default=48)\nconfig = {'bs': 12}\nsize = 24\n"
    source = script(
        ("batch_size=16, shuffle=True", given), ("def main", f"{before}kwargs = {{'batch_size': 20}}\ndef main")
    )
    source = source.replace("parser.", "import argparse\nparser = argparse.ArgumentParser()\nparser.", 1)
    assert f"batch: int = {batch}" in lines(
        source.replace("    torch.manual_seed", "    args = parser.parse_args()\n    torch.manual_seed")
    )


def test_an_unknown_batch_size_gets_a_note() -> None:
    notes = converted(script(("batch_size=16", "batch_size=unknown()"))).notes
    assert "does not show its batch size. --set batch=64" in notes[0][1]


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ("shuffle=True", "run.steps(data)"),
        ("shuffle=False", "run.steps(data, shuffle=False)"),
        ("num_workers=0", "run.steps(data, shuffle=False)"),
        ("sampler=DistributedSampler(data)", "run.steps(data)"),
        ("sampler=DistributedSampler(data, shuffle=False)", "run.steps(data, shuffle=False)"),
        ("shuffle=True, collate_fn=pad", "run.steps(data, collate_fn=pad)"),
    ],
)
def test_the_order_of_samples(given: str, steps: str) -> None:
    assert f"for step in {steps}:" in lines(script(("shuffle=True", given)))


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("for epoch in range(5):", ["epochs: int | None = 5"]),
        ("for epoch in range(1, 5):", ["epochs: int | None = 4", "epoch = step.epoch + 1"]),
        ("for epoch in tqdm(range(2)):", ["epochs: int | None = 2"]),
    ],
)
def test_epochs(loop: str, expected: list[str]) -> None:
    body = ("            optimizer.step()\n", "            optimizer.step()\n        print(epoch)\n")
    found = lines(script(("for epoch in range(3):", loop), body))
    assert set(expected) <= set(found)
    assert found[found.index("if step.ends_epoch:") + 1] == "print(epoch)"


@pytest.mark.parametrize("loop", ["range(args.epochs)", "range(1, args.epochs + 1)"])
def test_a_schedule_follows_the_number_of_epochs(loop: str) -> None:
    parse = "    args = SimpleNamespace(epochs=7)\n    torch.manual_seed(3)"
    schedule = "    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)\n    for epoch"
    source = script(("range(3)", loop), ("    torch.manual_seed(3)", parse), ("    for epoch", schedule))
    found = lines(source.replace("epochs=7", "epochs=epochs").replace("def main():", "epochs = 7\ndef main():"))
    assert "epochs: int | None = 7" in found
    assert "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=run.settings.epochs)" in found
    assert "args = SimpleNamespace(epochs=epochs)" in found


def test_a_name_of_another_scope_is_not_the_number_of_epochs() -> None:
    """A parameter and its default, a global statement, a function and a lambda with a variable of the same name."""
    before = """    epochs = 3
    def halved(epochs, other=2):
        return epochs // 2
    scaled = lambda epochs: epochs * 2
    torch.manual_seed(3)"""
    source = script(("    torch.manual_seed(3)", before), ("range(3)", "range(epochs)"))
    found = lines(source)
    assert {"def halved(epochs, other=2):", "return epochs // 2", "scaled = lambda epochs: epochs * 2"} <= {*found}
    found = lines(source.replace("def main():", "epochs = 3\ndef main(epochs=epochs):").replace("    epochs = 3\n", ""))
    assert not any("=run.settings.epochs" in line for line in found)
    found = lines(source.replace("    epochs = 3\n", "    global epochs\n    epochs = 3\n"))
    assert "global epochs" in found


def test_code_before_the_batches_runs_at_the_first_step_of_an_epoch() -> None:
    source = script(
        ("        for x, y", "        model.train()\n        total = 0.0\n        print(epoch)\n        for i, (x, y)"),
        ("in loader:", "in enumerate(loader):"),
        ("            optimizer.step()\n", "            optimizer.step()\n            total += loss.item() * len(x)\n"),
    )
    code = converted(source + "\n").code
    block = "            model.train()\n            total = 0.0\n            print(epoch)\n"
    assert f"        if step.number % steps_per_epoch == 0:\n{block}" in code
    assert "resets total" not in code
    assert code.index("    total = 0.0\n    steps_per_epoch") < code.index("run.track")
    assert "        total += step.loss * step.samples\n" in code


def test_a_sum_of_an_epoch_that_a_resume_loses_is_noted() -> None:
    source = script(
        ("        for x, y", "        total = 0.0\n        for x, y"),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n            total += loss.item()\n        print(total)\n",
        ),
    )
    done = converted(source)
    (line,) = [line for line, note in done.notes if "a resume in the middle of an epoch resets total" in note]
    assert "if step.number % steps_per_epoch == 0:" in "".join(done.code.splitlines()[line : line + 3])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("losses.append(loss.item())", "losses.append(step.loss)"),
        ("total += loss.detach()", "total += torch.tensor(step.loss)"),
        ("correct += (model(x) == y).sum().item()", 'correct += int(step.sum("correct"))'),
        ("seen += y.size(0)", "seen += step.samples"),
        ("if epoch > 0:\n                print(loss.item())", "print(step.loss)"),
        ("nn.utils.clip_grad_value_(model.parameters(), 1)", "nn.utils.clip_grad_value_(model.parameters(), 1)"),
    ],
)
def test_lines_after_backward_follow_the_inner_loop(old: str, new: str) -> None:
    code = converted(
        script(("            optimizer.step()\n", f"            optimizer.step()\n            {old}\n"))
    ).code
    assert new in code[code.index("step.backward") :].replace("            ", "        ")


def test_what_a_micro_batch_draws_stays_inside_and_counters_do_not() -> None:
    source = script(
        ("            loss = ", "            count += 1\n            noise = torch.randn_like(x)\n            loss = "),
        ("model(x)", "model(x + noise)"),
    )
    found = lines(source.replace("    for epoch", "    count = 0\n    for epoch"))
    inner = found.index("for x, y in step:")
    assert found.index("count += 1") < inner < found.index("noise = torch.randn_like(x)")


def test_a_value_of_one_micro_batch_gets_a_note() -> None:
    source = script(("            optimizer.step()\n", "            optimizer.step()\n            seen.append(y)\n"))
    assert "step.add(name, total, weight)" in converted(source).notes[0][1]


@pytest.mark.parametrize(
    "body",
    [
        """
            loss = F.mse_loss(model(x), y) / 4
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
        """
            loss = F.mse_loss(model(x), y)
            (loss / k).backward()
            if i % k == k - 1 or i == len(loader) - 1:
                optimizer.step()
                optimizer.zero_grad()
""",
        """
            if i % 4 != 3:
                with model.no_sync():
                    loss = F.mse_loss(model(x), y) / 4
                    loss.backward()
            else:
                loss = F.mse_loss(model(x), y) / 4
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
""",
    ],
    ids=["every fourth", "the last, too", "no_sync"],
)
def test_accumulation(body: str) -> None:
    source = SCRIPT[: SCRIPT.index("            loss = ")] + body.lstrip("\n")
    source = source.replace("for x, y in loader", "for i, (x, y) in enumerate(loader)").replace(
        "def main", "k = 4\ndef main"
    )
    found = lines(source + "\nmain()\n")
    assert {"batch: int = 64", "micro_batch: int | None = 16", "loss = F.mse_loss(model(x), y)"} <= set(found)
    assert "step.backward(loss, weight=len(y), mean=True)" in found


def test_gradients_that_are_added_and_not_divided_stay_so() -> None:
    source = script(
        ("for x, y in loader", "for i, (x, y) in enumerate(loader)"),
        ("            optimizer.step()", "            if (i + 1) % 4 == 0:\n                optimizer.step()"),
    )
    assert "step.backward(loss * 4, weight=len(y), mean=True)" in lines(source)


@pytest.mark.parametrize(
    ("loss", "call"),
    [
        ('F.mse_loss(model(x), y, reduction="sum")', "step.backward(loss * step.samples, weight=len(y))"),
        ("((model(x) - y) ** 2).mean()", "step.backward(loss, weight=len(y), mean=True)"),
    ],
)
def test_sums_and_means(loss: str, call: str) -> None:
    assert call in lines(script(("F.mse_loss(model(x), y)", loss)))


def test_a_loss_of_unknown_kind_gets_a_note() -> None:
    assert "taken for a mean" in converted(script(("F.mse_loss(model(x), y)", "model(x).loss"))).notes[0][1]


def test_mixed_precision() -> None:
    source = script(
        (
            "            loss = F",
            "            with torch.autocast('cuda', dtype=torch.float16):\n                loss = F",
        ),
        ("loss.backward()", "scaler.scale(loss).backward()\n            scaler.unscale_(optimizer)"),
        ("optimizer.step()", "scaler.step(optimizer)\n            scaler.update()"),
        ("    for epoch", "    scaler = torch.amp.GradScaler()\n    for epoch"),
    )
    found = lines(source)
    assert {'precision: str = "fp16"', "with run.precision():", "step.update(optimizer)"} <= set(found)
    assert not any("scaler" in line for line in found)


@pytest.mark.parametrize(
    ("line", "clip"),
    [
        ("nn.utils.clip_grad_norm_(model.parameters(), 2.0)", "clip=2.0"),
        ("nn.utils.clip_grad_norm_(model.parameters(), max_norm=c)", "clip=c"),
        ("if c:\n                nn.utils.clip_grad_norm_(model.parameters(), c)", "clip=c if c else None"),
    ],
)
def test_clipping(line: str, clip: str) -> None:
    source = script(("            optimizer.step()", f"            {line}\n            optimizer.step()"))
    assert f"step.update(optimizer, {clip})" in lines(source)


def test_the_norm_of_the_gradient() -> None:
    line = "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    found = lines(script(("            optimizer.step()", f"            {line}\n            optimizer.step()")))
    assert found.index("step.update(optimizer, clip=1.0)") < found.index("norm = step.grad_norm")


def test_ranks_and_collectives() -> None:
    source = script(
        (
            "    torch.manual_seed(3)",
            "    dist.init_process_group('nccl')\n    rank = dist.get_rank()\n"
            "    torch.cuda.set_device(rank)\n    torch.manual_seed(3 + rank)",
        ),
        (
            "    model = nn.Linear(4, 1)",
            "    model = nn.Linear(4, 1).to(rank)\n    model = DDP(model, device_ids=[rank])",
        ),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n        if rank == 0:\n            print(epoch)\n"
            "            torch.save(model.module.state_dict(), 'a.pt')\n        total = loss.detach().clone()\n"
            "        dist.all_reduce(total)\n        total /= dist.get_world_size()\n        if rank == 0:\n"
            "            print(f'{rank}: {total.item()}', flush=True)\n    dist.destroy_process_group()\n",
        ),
    )
    found = lines(source, 2)
    assert {"torch.manual_seed(3)", "model = run.place(nn.Linear(4, 1))", "if run.is_main:"} <= set(found)
    assert {"torch.save(model.state_dict(), 'a.pt')", "run.print(f'{run.rank}: {total.item()}')"} <= set(found)
    assert not any("dist." in line or "DDP" in line for line in found)


@pytest.mark.parametrize("given", ["MASTER_ADDR='127.0.0.1', MASTER_PORT='29500'", "{'MASTER_ADDR': '127.0.0.1'}"])
def test_a_number_of_processes_that_spawn_passes(given: str) -> None:
    source = script(
        ("def main():", "def main(rank, count):"),
        (
            "    torch.manual_seed(3)",
            f"    os.environ.update({given})\n    dist.init_process_group('gloo', rank=rank, world_size=count)\n"
            "    torch.manual_seed(3)",
        ),
        ("    main()", "    torch.multiprocessing.spawn(main, args=(2,), nprocs=2)"),
    )
    found = lines(source)
    assert "def main(run: unisono.Run[Settings]):" in found
    assert not [line for line in found if "environ" in line or "count" in line]
    assert "batch: int = 32" in found


@pytest.mark.parametrize("given", ["MASTER_PORT='1', MY_DATA='x'", "{**os.environ, 'MASTER_PORT': '1'}"])
def test_variables_of_the_script_stay(given: str) -> None:
    update = f"    os.environ.update({given})\n    torch.manual_seed(3)"
    assert f"os.environ.update({given})" in lines(script(("    torch.manual_seed(3)", update)))


def test_a_function_for_one_epoch_becomes_part_of_the_loop() -> None:
    source = (
        HEAD
        + """
def train(net, batches, opt, criterion=F.mse_loss):
    losses = []
    for x, y in batches:
        loss = criterion(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    mean = train(model, loader, optimizer)
    print(epoch, mean)
"""
    )
    found = lines(source)
    assert "def train(net, batches, opt, criterion=F.mse_loss):" not in found
    assert {"for x_, y in step:", "step.update(optimizer)", "mean = sum(losses) / len(losses)"} <= set(found)
    assert "def main(run: unisono.Run[Settings]) -> None:" in found


def test_names_of_the_script_that_a_run_needs() -> None:
    source = script(
        ("for x, y in loader", "for step, (x, y) in enumerate(loader)"),
        ("            optimizer.step()\n", "            optimizer.step()\n            print(step)\n"),
    )
    found = lines(source)
    assert {"step_index = step.number % steps_per_epoch", "print(step_index)"} <= set(found)


def test_the_length_of_a_loader_is_known_before_it_is_used() -> None:
    """A schedule needs it before the loop: one loader alone, two in one line, and one that another loop reads, too."""
    schedule = "    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))\n    for epoch"
    for made, other in (
        ("loader = DataLoader(data, batch_size=16, shuffle=True)", ""),
        ("loader, test = DataLoader(data, batch_size=16), DataLoader(data)", ""),
        ("loader = DataLoader(data, batch_size=16)", "        for z, _ in loader:\n            model(z)\n"),
    ):
        source = script(
            ("loader = DataLoader(data, batch_size=16, shuffle=True)", made),
            ("    for epoch", schedule),
            ("            optimizer.step()\n", f"            optimizer.step()\n        print(len(loader))\n{other}"),
        )
        code = converted(source, 2).code
        used = next(line for line in code.splitlines() if "CosineAnnealingLR(" in line)
        if "steps_per_epoch" in used:
            assert code.index("steps_per_epoch = ") < code.index(used)
        else:
            assert "-(-len(data) // run.settings.batch)" in used
        assert "print(steps_per_epoch)" in code or "print((-(-len(data) // run.settings.batch)))" in code


def test_batch_norm() -> None:
    source = script(("nn.Linear(4, 1)", "DDP(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))"))
    assert "virtual_ranks: int = 2" in lines(source, 2)
    assert any("batch norm normalizes each micro-batch" in note for _, note in converted(source, 1).notes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_scripts_are_converted(case: Case) -> None:
    """The result is Python, has nothing of the other libraries, and its notes have the lines of their comments."""
    done = convert(case.source, f"{case.name}.py", "new.py", case.processes)
    tree = ast.parse(done.code)
    modules = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    assert not {
        name for name in modules if name and name.startswith(("torch.distributed", "accelerate", "torch.nn.parallel"))
    }
    assert done.code.count("unisono.main(") == 1
    assert done.notes == notes_in(done.code)
    assert done.diff.startswith(f"--- {case.name}.py\n+++ new.py\n")
