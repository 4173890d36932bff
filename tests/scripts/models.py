"""Choose the model of a script: a sequence of layers and a head."""

from __future__ import annotations

from tests.scripts.data import Task, vocabulary
from tests.scripts.draft import Draft, Net
from tests.scripts.flat import FLAT, Layer
from tests.scripts.shaped import SEQUENCE, shaped

TYPES = {"float64": "torch.float64", "bfloat16": "torch.bfloat16"}


def draw_model(draft: Draft, task: Task) -> str:
    """Define class Net, and return the expression that builds it."""
    net = Net(draft, "Net")
    if draft.dtype != "float32" and task.inputs not in ("texts", "lines", "words"):
        net.then(f"x = x.to({TYPES[draft.dtype]})")
    if task.inputs == "points":
        width = layers(draft, net, task.shape[0], FLAT, draft.pick([1, 2, 3, 4]))
        head(draft, net, task, width)
    elif task.inputs == "words":
        words(draft, net, task)
    elif task.inputs in ("images", "signals"):
        dims = len(task.shape) - 1
        width = layers(draft, net, task.shape[0], shaped(dims), draft.pick([1, 2, 3]))
        if task.target == "labels":
            net.then("x = x.transpose(1, 2)")
        else:
            net.then(f"x = x.{draft.pick(['mean', 'amax'])}({tuple(range(2, 2 + dims))})")
            width = layers(draft, net, width, FLAT, draft.pick([0, 1]))
        head(draft, net, task, width)
    else:
        sequences(draft, net, task)
    if draft.dtype == "bfloat16":
        net.then("x = x.float()")
    draft.define(net.source())
    return f"Net().to({TYPES[draft.dtype]})" if draft.dtype != "float32" else "Net()"


def layers(draft: Draft, net: Net, width: int, kinds: tuple[Layer, ...], count: int) -> int:
    for _ in range(count):
        width = draft.pick(kinds)(draft, net, width)
    return width


def head(draft: Draft, net: Net, task: Task, width: int) -> None:
    bias = ", bias=False" if draft.chance(0.2) else ""
    outputs = 1 if task.target == "binary" else task.classes
    net.then(f"x = {net.add('head', f'nn.Linear({width}, {outputs}{bias})')}(x)")


def words(draft: Draft, net: Net, task: Task) -> None:
    width = draft.pick([3, 8, 13])
    mode = draft.pick(["mean", "sum", "max"])
    sparse = ", sparse=True" if mode != "max" and draft.may("sparse", 0.4) else ""
    made = f'nn.EmbeddingBag({vocabulary(task)}, {width}, mode="{mode}"{sparse})'
    net.then(f"x = {net.add('embed', made)}(x)")
    width = layers(draft, net, width, FLAT, draft.pick([0, 1, 2]))
    head(draft, net, task, width)


def sequences(draft: Draft, net: Net, task: Task) -> None:
    tied = False
    if task.inputs == "bags":
        width = task.shape[0]
    else:
        width = draft.pick([6, 8, 12, 13])
        more = draft.pick(["", "", ", padding_idx=0", ", max_norm=1.0"] if draft.chance(0.5) else [""])
        more += ", sparse=True" if draft.may("sparse", 0.08) else ""
        draft.traits |= {"max_norm"} if "max_norm" in more else set()
        embed = net.add("embed", f"nn.Embedding({vocabulary(task)}, {width}{more})")
        net.then(f"x = {embed}(x)")
        tied = task.target == "tokens" and not more and draft.chance(0.3)
    start = width
    width = layers(draft, net, width, SEQUENCE, draft.pick([1, 2, 3]))
    if tied:
        draft.traits.add("tied")
        if width != start:
            net.then(f"x = {net.add('back', f'nn.Linear({width}, {start})')}(x)")
        name = net.add("head", f"nn.Linear({start}, {task.classes}, bias=False)")
        net.init.append(f"{name}.weight = {embed}.weight")
        net.then(f"x = {name}(x)")
        return
    if task.target != "tokens":
        net.then(f"x = {draft.pick(['x.mean(1)', 'x.amax(1)', 'x[:, -1]', 'x.sum(1)'])}")
        width = layers(draft, net, width, FLAT, draft.pick([0, 0, 1]))
    head(draft, net, task, width)
