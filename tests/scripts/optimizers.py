"""Choose optimizers and schedules of a script, as expressions of `PARAMETERS` and `optimizer`."""

from __future__ import annotations

from tests.scripts.draft import Draft

FOREACH = ("", ", foreach=True", ", foreach=False")

PLAIN = (
    *(
        "SGD({p}, lr=0.05{f})",
        "SGD({p}, lr=0.05, momentum=0.9{f})",
        "SGD({p}, lr=0.02, momentum=0.9, nesterov=True{f})",
    ),
    *("SGD({p}, lr=0.05, momentum=0.5, dampening=0.1, weight_decay=0.01{f})", "Adam({p}, lr=0.01{f})"),
    *("Adam({p}, lr=0.01, amsgrad=True{f})", "AdamW({p}, lr=0.01{f})", "AdamW({p}, lr=0.01, betas=(0.8, 0.95){f})"),
    *("AdamW({p}, lr=0.01, amsgrad=True{f})", "NAdam({p}, lr=0.01{f})", "RAdam({p}, lr=0.01{f})"),
    *("Adagrad({p}, lr=0.05{f})", "Adadelta({p}, lr=0.5{f})", "Adamax({p}, lr=0.01{f})", "ASGD({p}, lr=0.02{f})"),
    *("RMSprop({p}, lr=0.005{f})", "RMSprop({p}, lr=0.005, momentum=0.9, centered=True{f})", "Rprop({p}, lr=0.01{f})"),
    *("Adam({p}, lr=0.01, maximize=False{f})", "Adam({p}, lr=0.01, weight_decay=0.1{f})"),
)
FUSED = (
    *("SGD({p}, lr=0.05, momentum=0.9, fused=True)", "Adam({p}, lr=0.01, fused=True)"),
    *("AdamW({p}, lr=0.01, fused=True)", "Adagrad({p}, lr=0.05, fused=True)"),
)

SIGNS = """
class Signs(torch.optim.Optimizer):
    by_element = True

    def __init__(self, params, lr=0.01, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    mean = state.setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 1 - group["beta"])
                    p.add_(mean.sign(), alpha=-group["lr"])
"""

SCALED = """
class Scaled(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)).clamp(max=1.0), alpha=-group["lr"])
"""

SCHEDULES = (
    *("StepLR({o}, 2, gamma=0.5)", "MultiStepLR({o}, [2, 3])", "ExponentialLR({o}, 0.8)", "ConstantLR({o}, 0.3, 2)"),
    *("LinearLR({o}, 0.2, 1.0, 3)", "CosineAnnealingLR({o}, run.total_steps)", "CosineAnnealingLR({o}, 10)"),
    *("CosineAnnealingWarmRestarts({o}, 2)", "PolynomialLR({o}, run.total_steps, 2.0)", "LambdaLR({o}, warm)"),
    *("OneCycleLR({o}, 0.05, total_steps=run.total_steps + 1, cycle_momentum=False)", "MultiplicativeLR({o}, slower)"),
    "CyclicLR({o}, 0.001, 0.05, step_size_up=2, cycle_momentum=False)",
)
ALL = "torch.optim.lr_scheduler."
PARTS = f"{ALL}LinearLR({{o}}, 0.1, 1.0, 2), {ALL}CosineAnnealingLR({{o}}, run.total_steps)"
SEQUENCE = f"{ALL}SequentialLR({{o}}, [{PARTS}], [2])"
CHAINED = f"{ALL}ChainedScheduler([{ALL}ConstantLR({{o}}, 0.5, 2), {ALL}ExponentialLR({{o}}, 0.9)], optimizer={{o}})"
PLATEAU = f"{ALL}ReduceLROnPlateau({{o}}, factor=0.5, patience=0)"


def draw_optimizer(draft: Draft, parameters: str) -> str:
    """Return an expression that builds an optimizer for these parameters."""
    kind = draft.often(plain=8, fused=1, groups=1.5, own=0.7, whole=0.6)
    if kind == "groups" and parameters == "model.parameters()":
        draft.define(
            "def groups(model):\n"
            "    flat = [p for p in model.parameters() if p.ndim < 2]\n"
            "    matrices = [p for p in model.parameters() if p.ndim >= 2]\n"
            '    return [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "lr": 0.002}]'
        )
        parameters = "groups(model)"
    if kind == "fused":
        draft.traits.add("fused")
        return f"torch.optim.{draft.pick(FUSED).format(p=parameters)}"
    if kind == "own":
        name, block = draft.pick([("Signs", SIGNS), ("Scaled", SCALED)])
        draft.define(block)
        draft.traits.add(f"optimizer: {name}")
        return f"{name}({parameters})"
    if kind == "whole":
        draft.traits.add("optimizer: Adafactor")
        return f"torch.optim.Adafactor({parameters}, lr=0.05)"
    made = draft.pick(PLAIN).format(p=parameters, f=draft.pick(FOREACH))
    draft.traits.add(f"optimizer: {made.partition('(')[0]}")
    return f"torch.optim.{made}"


def draw_schedule(draft: Draft, optimizer: str) -> tuple[str, bool] | None:
    """Return an expression that builds a schedule, and whether it needs a metric; None: no schedule."""
    kind = draft.often(none=3, plain=4, sequence=0.8, chained=0.5, plateau=0.8)
    if kind == "none":
        return None
    if kind == "plateau":
        return PLATEAU.format(o=optimizer), True
    if kind != "plain":
        return (SEQUENCE if kind == "sequence" else CHAINED).format(o=optimizer), False
    made = draft.pick(SCHEDULES)
    if "warm" in made:
        draft.define("def warm(step):\n    return min(1.0, (step + 1) / 3)")
    if "slower" in made:
        draft.define("def slower(step):\n    return 0.9")
    return ALL + made.format(o=optimizer), False
