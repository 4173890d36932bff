"""Generate `main` of a script: set-up, the loop, and the code around it."""

from __future__ import annotations

from tests.scripts.broken import Break
from tests.scripts.data import Task
from tests.scripts.draft import Draft
from tests.scripts.losses import Loss
from tests.scripts.optimizers import draw_optimizer, draw_schedule


class Main:
    """Generates the lines of `main`."""

    def __init__(self, draft: Draft, task: Task, loss: Loss, build: str, breach: Break) -> None:
        self.draft, self.task, self.loss, self.build, self.breach = draft, task, loss, build, breach
        self.made: list[str] = []
        self.tracked: dict[str, str] = {"model": "model"}
        self.before: list[str] = []
        self.rounds: list[str] = []
        self.after_rounds: list[str] = []
        self.steppers: list[str] = []
        self.after: list[str] = []
        self.behind: list[str] = []

    def draw(self) -> str:
        self.optimizers()
        self.averages()
        if self.draft.chance(0.3) or self.task.data is None or self.breach.in_round:
            self.by_hand()
        elif not self.passes():
            self.at_once()
        self.changes()
        self.watches()
        return self.source()

    # -- set-up

    def optimizers(self) -> None:
        draft = self.draft
        if draft.chance(0.12):
            draft.traits.add("two optimizers")
            draft.define("def split(model, flat):\n    return [p for p in model.parameters() if (p.ndim < 2) == flat]")
            kinds = [draw_optimizer(draft, f"split(model, {flat})") for flat in (True, False)]
            if draft.chance(0.4):
                draft.traits.add("optimizer: Muon")
                draft.define("def matrices(model):\n    return [p for p in model.parameters() if p.ndim == 2]")
                draft.define("def others(model):\n    return [p for p in model.parameters() if p.ndim != 2]")
                kinds = ["torch.optim.Muon(matrices(model), lr=0.01)", draw_optimizer(draft, "others(model)")]
            names = ["first", "second"]
        else:
            parameters = "model.parameters()"
            if draft.chance(0.08):
                parameters = draft.pick(["list(model.parameters())[1:]", "[p for p in model.parameters()][::-1]"])
            kinds, names = [draw_optimizer(draft, parameters)], ["optimizer"]
        for name, made in zip(names, kinds, strict=True):
            self.make(name, made)
        self.steppers += names
        drawn = draw_schedule(draft, names[0])
        if drawn is not None:
            made, by_metric = drawn
            self.make("schedule", made)
            if by_metric:
                self.after.append("schedule.step(step.loss)")
            else:
                self.steppers.append("schedule")

    def make(self, name: str, made: str) -> None:
        self.made.append(f"{name} = {made}")
        self.tracked[name] = name

    def averages(self) -> None:
        draft = self.draft
        if draft.chance(0.15):
            draft.traits.add("average")
            how = draft.pick(
                [
                    "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)",
                    "multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True",
                    "avg_fn=lambda a, p, n: 0.8 * a + 0.2 * p",
                    "",
                ]
            )
            self.make("average", f"torch.optim.swa_utils.AveragedModel(model{', ' if how else ''}{how})")
            self.after.append("average.update_parameters(model)")
        if draft.chance(0.12):
            draft.traits.add("kept")
            self.make("kept", '{"best": float("inf"), "bad": 0}')
            self.before += ['if kept["bad"] == 3:', "    break"]
            self.after += ['kept["bad"] = 0 if step.loss < kept["best"] else kept["bad"] + 1']
            self.after += ['kept["best"] = min(kept["best"], step.loss)']

    # -- micro-batches

    def fields(self) -> str:
        return "batch" if self.task.mapping else "x, y, w" if self.task.weighted else "x, y"

    def x(self) -> str:
        return 'batch["x"]' if self.task.mapping else "x"

    def by_hand(self) -> None:
        draft, task = self.draft, self.task
        fields = self.fields()
        body = [f"out = model({self.x()})", f"loss, weight = loss_of(out, {fields})"]
        if task.data is None:
            width = task.shape[0]
            body.insert(0, f"x = torch.randn(len(numbers), {width})")
            goal = "x.sum(1).abs().mul(2).long() % CLASSES" if task.target == "class" else "x[:, :1].repeat(1, CLASSES)"
            body.insert(1, f"y = {goal}".replace("CLASSES", str(task.classes)))
            if draft.chance(0.3):
                body.insert(1, "x[:, 0] = torch.tensor(numbers) % 7")
        if draft.chance(0.15) and not self.loss.mean:
            draft.traits.add("penalty")
            body.append("loss = loss + 0.001 * weight * sum(p.float().pow(2).sum() for p in model.parameters())")
        if draft.chance(0.3):
            body.append('step.add("size", out.detach().abs().sum(), out.numel())')
            self.after.append('run.log(size=step.mean("size"))')
        body += self.breach.in_round
        body.append(f"step.backward(loss, weight=weight{', mean=True' if self.loss.mean else ''})")
        walk = "step"
        if draft.chance(0.1) and len(self.tracked) and "two optimizers" not in draft.traits:
            walk = "step.over(optimizer)"
        named = "numbers" if task.data is None else fields
        self.rounds += [f"for {named} in {walk}:", *(f"    {line}" for line in body)]

    def at_once(self) -> None:
        mean = ", mean=True" if self.loss.mean else ""
        forward = ', forward=lambda model, batch: model(batch["x"])' if self.task.mapping else ""
        self.rounds.append(f"step.run(model, loss_of{forward}{mean})")

    def passes(self) -> bool:
        """Return two passes. The second one is for other parameters, after the update of the first one."""
        draft = self.draft
        if "two optimizers" not in draft.traits or draft.chance(0.5):
            return False
        draft.traits.add("passes")
        fields, mean = self.fields(), ", mean=True" if self.loss.mean else ""
        for number, name in enumerate(("first", "second")):
            body = [f"loss, weight = loss_of(model({self.x()}), {fields})"]
            body.append(f"step.backward({'0.5 * ' * number}loss, weight=weight{mean})")
            self.rounds += [f"for {fields} in step.over({name}):", *(f"    {line}" for line in body)]
            if number == 0 and draft.chance(0.6):
                self.rounds.append("step.update(first)")
                self.steppers.remove("first")
        return True

    # -- between micro-batches and steps

    def changes(self) -> None:
        """Return lines that change gradients, weights and learning rates."""
        draft = self.draft
        kind = draft.often(none=6, noise=1, value=0.7, norm=1, own=0.7, update=0.7)
        if kind in ("noise", "norm", "value", "own"):
            draft.traits.add(f"gradients: {kind}")
        if kind == "noise":
            self.after_rounds += ["for p in model.parameters():", "    if p.grad is not None:"]
            self.after_rounds += ["        p.grad.add_(0.01 * torch.randn_like(p.grad))"]
        elif kind == "value":
            self.after_rounds.append("torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)")
        elif kind == "norm":
            self.after_rounds.append("torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)")
        elif kind == "own":
            self.after_rounds += ["for p in model.parameters():", "    if p.grad is not None:"]
            self.after_rounds += ["        p.grad.mul_(torch.where(p.grad.abs() > 0.05, 0.5, 1.0))"]
        self.clip = ", clip=0.2" if kind == "update" else ""
        if draft.chance(0.12):
            self.after += ["if step.number == 2:", f"    for group in {self.optimizer()}.param_groups:"]
            self.after += ['        group["lr"] *= 0.5']
        if draft.chance(0.1):
            self.after += ["with torch.no_grad():", "    for p in model.parameters():", "        p.clamp_(-1.0, 1.0)"]
        self.freezing()

    def optimizer(self) -> str:
        return "first" if "two optimizers" in self.draft.traits else "optimizer"

    def freezing(self) -> None:
        draft = self.draft
        if draft.may("unfrozen", 0.05):
            self.made.insert(0, "frozen = list(model.parameters())[:-2]")
            self.made.insert(1, "for p in frozen:")
            self.made.insert(2, "    p.requires_grad_(False)")
            self.before += ["if step.number == 2:", "    for p in frozen:", "        p.requires_grad_(True)"]
        elif draft.chance(0.1) and "passes" not in draft.traits:
            draft.traits.add("freezes")
            when = draft.pick(["step.number >= 2", "step.number < 2", "step.number % 2 == 0"])
            self.before += ["for p in list(model.parameters())[:-2]:", f"    p.requires_grad_({when})"]

    def watches(self) -> None:
        """Return lines that log and evaluate."""
        draft, task = self.draft, self.task
        if draft.chance(0.5):
            self.after.append("run.log(loss=step.loss)")
        if draft.chance(0.25) and "passes" not in draft.traits:
            self.after_rounds.append("run.log(norm=step.grad_norm)")
        if draft.chance(0.3) and task.data is not None and "data: iterable" not in draft.traits:
            self.evaluation()

    def evaluation(self) -> None:
        draft, task = self.draft, self.task
        data = "torch.utils.data.TensorDataset(*make(17))"
        more = ""
        if task.collate:
            data, more = "Samples(17)", ", collate_fn=padded"
        elif task.mapping:
            data, more = "Samples(17)", ', forward=lambda model, batch: model(batch["x"])'
        elif task.weighted:
            data = "Samples(17)"
        measured = draft.pick([name for name in ("model", "average") if name in self.tracked])
        line = f"run.log(run.evaluate({measured}, {data}, loss_of{more}))"
        if draft.chance(0.5):
            self.after += ["if step.every(2):", f"    {line}"]
        else:
            self.behind.append(line)

    # -- source code

    def source(self) -> str:
        draft, task = self.draft, self.task
        lines = [*task.before, f"model = run.place({draft.pick(['lambda: ' + self.build, self.build])})", *self.made]
        if self.build == "Net()" and draft.chance(0.3):
            lines[len(task.before)] = "model = run.place(Net)"
        lines += [*self.breach.made]
        lines.append(f"run.track({', '.join(f'{name}={value}' for name, value in self.tracked.items())})")
        words = [task.data] if task.data is not None else []
        words += ["shuffle=False"] if task.data is not None and draft.chance(0.15) else []
        words += [f"collate_fn={task.collate}"] if task.collate else []
        lines.append(f"for step in run.steps({', '.join(words)}):")
        updated = f"step.update({', '.join(self.steppers)}{self.clip})"
        inside = [*self.before, *self.rounds, *self.after_rounds, updated, *self.breach.after, *self.after]
        lines += [f"    {line}" for line in inside]
        return "\n".join(["def main(run):", *(f"    {line}" for line in (*lines, *self.behind))])
