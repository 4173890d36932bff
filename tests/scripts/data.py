"""Choose the task, data set and collate function of a script."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.scripts.draft import Draft

COUNTS = (33, 40, 53, 64)


@dataclass
class Task:
    """Inputs and targets of the model.

    inputs   points, signals, images, texts, words (no order), lines (tokens of any number), bags (rows of any number)
    shape    of one sample's x; of lines and bags, of one row
    target   class, binary, real, soft, tokens (one class a place), labels (CTC)
    classes  or numbers to be predicted
    data     the expression of the data set in `main`; None: run.steps() without data
    collate  the name of the collating function; "": torch's
    mapping  a batch is a dict with x and y
    """

    inputs: str
    shape: tuple[int, ...]
    target: str
    classes: int
    data: str | None = ""
    collate: str = ""
    mapping: bool = False
    count: int = 40
    weighted: bool = False
    before: list[str] = field(default_factory=list)
    """Lines of `main` before the model."""


def draw_task(draft: Draft) -> Task:
    inputs = draft.often(points=5, images=2.5, signals=1.5, texts=2.5, lines=2, words=0.8, bags=1.2)
    classes = draft.pick([2, 3, 5, 7])
    if inputs == "points":
        target = draft.often(**{"class": 4, "binary": 1, "real": 2, "soft": 1})
        task = Task(inputs, (draft.pick([1, 5, 11, 13, 16]),), target, classes)
    elif inputs == "images":
        shape = (draft.pick([1, 3]), draft.pick([8, 9]), draft.pick([8, 11]))
        task = Task(inputs, shape, draft.pick(["class", "class", "real"]), classes)
    elif inputs == "signals":
        task = Task(inputs, (draft.pick([1, 2, 5]), draft.pick([12, 17])), draft.pick(["class", "labels"]), classes)
    elif inputs == "texts":
        task = Task(inputs, (draft.pick([4, 7, 9]),), draft.pick(["class", "tokens"]), draft.pick([11, 13, 20]))
    elif inputs == "words":
        task = Task(inputs, (draft.pick([5, 6, 12]),), "class", classes)
    elif inputs == "lines":
        task = Task(inputs, (), draft.pick(["tokens", "class"]), draft.pick([11, 13, 20]))
    else:
        task = Task(inputs, (draft.pick([3, 8, 13]),), "class", classes)
    task.count = draft.pick(COUNTS)
    return task


def draw_data(draft: Draft, task: Task) -> None:
    """Define the data set, and set the expression that builds it."""
    if task.inputs in ("lines", "bags"):
        ragged(draft, task)
        return
    if task.inputs == "points" and task.target in ("class", "real") and draft.chance(0.08):
        task.data = None
        draft.traits.add("no data")
        return
    draft.define(arrays(draft, task))
    kind = draft.often(tensors=3, own=4, subset=1, split=0.7, concat=0.8, stream=0.8, iterable=0.08)
    draft.traits.add(f"data: {kind}")
    if kind in ("tensors", "subset", "split"):
        made = f"torch.utils.data.TensorDataset(*make({task.count}))"
        if kind == "subset":
            picked = draft.pick([f"range({task.count - 7})", f"list(range(3, {task.count}))"])
            made = f"torch.utils.data.Subset({made}, {picked})"
        elif kind == "split":
            halves = f"[{task.count - 9}, 9], torch.Generator().manual_seed(3)"
            task.before.append(f"train_set, _ = torch.utils.data.random_split({made}, {halves})")
            made = "train_set"
        task.data = made
    elif kind == "stream":
        draft.define(stream(draft))
        task.data = f"unisono.Stream(Shards(), window={draft.pick([1, 5, 100])}{augmenting_map(draft, task)})"
    elif kind == "iterable":
        draft.define(ITERABLE)
        task.data = f"Endless({task.count})"
    else:
        draft.define(own(draft, task))
        task.data = f"Samples({task.count})"
        if kind == "concat":
            task.data = f"torch.utils.data.ConcatDataset([Samples({task.count - 20}), Samples(20)])"


def arrays(draft: Draft, task: Task) -> str:
    """Return the function make(count) -> x, y."""
    lines = ["def make(count):", f"    g = torch.Generator().manual_seed({draft.random.randrange(100)})"]
    shape = "".join(f", {n}" for n in task.shape)
    if task.inputs in ("texts", "words"):
        width = task.shape[0] + (task.target == "tokens")
        lines.append(f"    x = torch.randint(0, {vocabulary(task)}, (count, {width}), generator=g)")
    else:
        lines.append(f"    x = torch.randn(count{shape}, generator=g)")
    score = "x.float().flatten(1).sum(1)"
    if task.target == "class":
        lines.append(f"    return x, {score}.abs().mul(2).long() % {task.classes}")
    elif task.target == "binary":
        lines.append(f"    return x, ({score} > 0).float()[:, None]")
    elif task.target == "real":
        lines.append(f"    return x, torch.stack([{score} * (i + 1) / 4 for i in range({task.classes})], 1).sin()")
    elif task.target == "soft":
        lines.append(f"    return x, torch.rand(count, {task.classes}, generator=g).softmax(-1)")
    elif task.target == "tokens":
        lines.append("    return x[:, :-1].contiguous(), x[:, 1:].contiguous()")
    else:
        lines.append(f"    return x, torch.randint(1, {task.classes}, (count, 3), generator=g)")
    return "\n".join(lines)


def vocabulary(task: Task) -> int:
    return task.classes if task.target == "tokens" or task.inputs == "lines" else 17


def own(draft: Draft, task: Task) -> str:
    """Define a custom data set."""
    lines = ["class Samples(torch.utils.data.Dataset):", "    def __init__(self, count):"]
    numpy = draft.chance(0.4)
    if numpy:
        draft.traits.add("numpy")
        lines += ["        x, y = make(count)", "        self.x, self.y = x.numpy(), y.numpy()"]
    else:
        lines.append("        self.x, self.y = make(count)")
    lines += ["", "    def __len__(self):", "        return len(self.x)", "", "    def __getitem__(self, i):"]
    x, y = ("torch.from_numpy(self.x[i])", "torch.as_tensor(self.y[i])") if numpy else ("self.x[i]", "self.y[i]")
    lines.append(f"        x, y = {x}, {y}")
    if task.inputs not in ("texts", "words"):
        lines += [f"        {line}" for line in augmenting(draft, task)]
    elif draft.chance(0.3):
        lines += ["        if random.random() < 0.3:", "            x = x.flip(0)"]
    if draft.chance(0.2):
        task.mapping = True
        lines.append('        return {"x": x, "y": y}')
    elif task.target == "class" and draft.chance(0.2):
        task.weighted = True
        lines.append(f"        return x, y, 0.5 + (i % 7) / {draft.pick([4, 7])}")
    else:
        lines.append("        return x, y")
    return "\n".join(lines)


def augmenting(draft: Draft, task: Task) -> list[str]:
    """Return lines that change a sample at random."""
    found = []
    if draft.chance(0.3):
        found += [f"x = x + {draft.pick(['0.1 * torch.randn_like(x)', '0.1 * random.random()'])}"]
    if draft.chance(0.2):
        found += [
            f"if {draft.pick(['np.random.rand()', 'torch.rand(())', 'random.random()'])} < 0.5:",
            "    x = x.flip(-1)",
        ]
    if draft.chance(0.1):
        found += ["x = x * float(np.random.uniform(0.8, 1.2))"]
    return found


def augmenting_map(draft: Draft, task: Task) -> str:
    if task.inputs in ("texts", "words") or not draft.chance(0.5):
        return ""
    draft.define("def noisy(sample):\n    x, y = sample\n    return x + 0.1 * torch.randn_like(x), y")
    return ", map=noisy"


def stream(draft: Draft) -> str:
    sizes = draft.pick([(11, 20, 9), (7, 7, 7, 7, 7), (40,), (1, 30, 13)])
    return f"""
class Shards:
    names = {[f"part-{i}" for i in range(len(sizes))]}
    sizes = {list(sizes)}

    def open(self, shard):
        x, y = make({sum(sizes)})
        first = sum(self.sizes[:shard])
        return [(x[i], y[i]) for i in range(first, first + self.sizes[shard])]

    def decode(self, raw):
        return raw
"""


ITERABLE = """
class Endless(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.rows = list(zip(*make(count)))

    def __iter__(self):
        yield from self.rows
"""


def ragged(draft: Draft, task: Task) -> None:
    """Define samples of several lengths, and the function that pads them."""
    seed, longest = draft.random.randrange(100), draft.pick([6, 9, 14])
    lines = ["class Samples(torch.utils.data.Dataset):", "    def __init__(self, count):"]
    lines += [f"        g = torch.Generator().manual_seed({seed})"]
    lines += [f"        lengths = torch.randint(2, {longest}, (count,), generator=g).tolist()"]
    if task.inputs == "lines":
        lines += [f"        self.rows = [torch.randint(0, {task.classes}, (n + 1,), generator=g) for n in lengths]"]
    elif draft.may("slices", 0.4):
        lines += [f"        self.all = torch.randn(sum(lengths), {task.shape[0]}, generator=g).numpy()"]
        lines += ["        ends = np.cumsum(lengths)"]
        lines += ["        self.rows = [torch.from_numpy(self.all[e - n : e]) for e, n in zip(ends, lengths)]"]
    else:
        lines += [f"        self.rows = [torch.randn(n, {task.shape[0]}, generator=g) for n in lengths]"]
    lines += ["", "    def __len__(self):", "        return len(self.rows)", "", "    def __getitem__(self, i):"]
    if task.inputs == "lines" and draft.chance(0.3):
        lines += ["        first = random.randrange(max(1, len(self.rows[i]) - 3))"]
        lines += ["        return self.rows[i][first:]"]
    elif task.inputs == "lines":
        lines += ["        return self.rows[i]"]
    else:
        lines += [f"        return self.rows[i], torch.tensor(i % {task.classes})"]
    draft.define("\n".join(lines))
    draft.define(collating(task))
    task.data, task.collate = f"Samples({task.count})", "padded"
    draft.traits.add("ragged")


def collating(task: Task) -> str:
    if task.inputs == "bags":
        return """
def padded(samples):
    rows, y = zip(*samples)
    if len(rows) == 1:
        return rows[0][None], torch.stack(y)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack(y)
"""
    if task.target == "tokens":
        return """
def padded(rows):
    x = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    y = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
    return x, y
"""
    return """
def padded(rows):
    y = torch.tensor([int(row.sum()) % CLASSES for row in rows])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), y
""".replace("CLASSES", str(task.classes))
