"""Layers for vectors x [samples, width]. Each function adds a layer to a Net, and returns the new width."""

from __future__ import annotations

from collections.abc import Callable

from tests.scripts.draft import Draft, Net

WIDTHS = (1, 3, 7, 8, 13, 16, 20, 33)

Layer = Callable[[Draft, Net, int], int]

SQUARE = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.abs()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * x.abs()
"""

SWISH = """
@torch.jit.script
def swish(x):
    return x * torch.sigmoid(x)
"""

PLAIN = (
    *("F.relu(x)", "F.gelu(x)", "torch.tanh(x)", "F.silu(x)", "F.elu(x)", "F.softplus(x)", "F.mish(x)", "F.selu(x)"),
    *("F.leaky_relu(x, 0.1)", "F.hardswish(x)", 'F.gelu(x, approximate="tanh")', "x.sin()", "F.logsigmoid(x)"),
)
MODULES = ("nn.PReLU()", "nn.RReLU()", "nn.Softsign()", "nn.Hardtanh()", "nn.GELU()", "nn.Threshold(-0.1, 0.0)")


def activation(draft: Draft, net: Net) -> None:
    """Add an activation of torch, or a custom one."""
    if draft.may("jit", 0.05):
        draft.define(SWISH)
        net.then("x = swish(x)")
    elif draft.chance(0.08):
        draft.define(SQUARE)
        net.then("x = Square.apply(x)")
    elif draft.chance(0.3):
        net.then(f"x = {net.add('act', draft.pick(MODULES))}(x)")
    else:
        net.then(f"x = {draft.pick(PLAIN)}")


def linear(draft: Draft, net: Net, width: int) -> int:
    out = draft.pick(WIDTHS)
    bias = ", bias=False" if draft.chance(0.25) else ""
    made = f"nn.Linear({width}, {out}{bias})"
    if draft.chance(0.12):
        made = f"nn.utils.parametrizations.weight_norm({made})"
    elif draft.chance(0.1):
        made = f"nn.utils.parametrizations.spectral_norm({made})"
        draft.traits.add("buffers")
    elif draft.chance(0.04):
        made = f"nn.utils.parametrizations.orthogonal({made})"
    net.then(f"x = {net.add('linear', made)}(x)")
    activation(draft, net)
    return out


def norm(draft: Draft, net: Net, width: int) -> int:
    kind = draft.often(layer=3, rms=2, batch=1.5, group=1.0 if width > 1 else 0.0, l2=0.5)
    if kind == "batch":
        draft.traits.add("batch norm")
        more = draft.pick(["", ", momentum=0.3", ", momentum=None", ", affine=False"])
        net.then(f"x = {net.add('norm', f'nn.BatchNorm1d({width}{more})')}(x)")
    elif kind == "group":
        groups = draft.pick(
            [1, *(n for n in range(2, width) if width % n == 0)]
        )  # a group of one value would be constant
        net.then(f"x = {net.add('norm', f'nn.GroupNorm({groups}, {width})')}(x)")
    elif kind == "l2":
        net.then("x = F.normalize(x, dim=-1)")
    else:
        made = f"nn.LayerNorm({width})" if kind == "layer" else f"nn.RMSNorm({width})"
        net.then(f"x = {net.add('norm', made)}(x)")
    return width


def dropout(draft: Draft, net: Net, width: int) -> int:
    kind = draft.pick(["nn.Dropout(0.1)", "nn.Dropout(0.5)", "nn.AlphaDropout(0.1)", "nn.FeatureAlphaDropout(0.2)"])
    if draft.chance(0.25):
        net.then("x = F.dropout(x, 0.2, self.training)")
    else:
        net.then(f"x = {net.add('dropout', kind)}(x)")
    return width


def noise(draft: Draft, net: Net, width: int) -> int:
    drawn = draft.pick(["torch.randn_like(x)", "torch.rand_like(x)", "np.random.randn()", "random.gauss(0, 1)"])
    net.then("if self.training:", f"    x = x + 0.1 * {drawn}")
    return width


def residual(draft: Draft, net: Net, width: int) -> int:
    hidden = draft.pick(WIDTHS)
    act = draft.pick(["nn.GELU()", "nn.ReLU()", "nn.Tanh()"])
    parts = [f"nn.Linear({width}, {hidden})", act, f"nn.Linear({hidden}, {width})"]
    if draft.chance(0.5):
        parts.insert(0, f"nn.LayerNorm({width})")
    if draft.chance(0.4):
        parts.append("nn.Dropout(0.1)")
    block = net.add("block", f"nn.Sequential({', '.join(parts)})")
    if draft.chance(0.25):
        draft.traits.add("checkpoint")
        net.then(f"x = x + torch.utils.checkpoint.checkpoint({block}, x, use_reentrant=False)")
    elif draft.chance(0.3):
        scale = net.add("scale", f"nn.Parameter(torch.full(({width},), 0.1))")
        net.then(f"x = x + {scale} * {block}(x)")
    else:
        net.then(f"x = x + {block}(x)")
    return width


def stack(draft: Draft, net: Net, width: int) -> int:
    """Add several layers of one class, which FSDP shards one by one."""
    count = draft.pick([2, 3])
    made = f"nn.Sequential(nn.Linear({width}, {width}), nn.{draft.pick(['GELU', 'ReLU', 'Tanh', 'SiLU'])}())"
    layers = net.add("layers", f"nn.ModuleList({made} for _ in range({count}))")
    net.then(f"for layer in {layers}:", "    x = x + layer(x)")
    return width


def shared(draft: Draft, net: Net, width: int) -> int:
    """Add a layer that is used twice."""
    layer = net.add("shared", f"nn.Linear({width}, {width})")
    net.then(f"x = torch.tanh({layer}(x))", f"x = x + {layer}(x)")
    return width


def gate(draft: Draft, net: Net, width: int) -> int:
    if width > 1 and draft.chance(0.4):
        layer = net.add("gate", f"nn.Linear({width}, {2 * width})")
        net.then(f"x = F.glu({layer}(x), dim=-1)")
    else:
        layer = net.add("gate", f"nn.Linear({width}, {width})")
        net.then(f"x = x * torch.sigmoid({layer}(x))")
    return width


def experts(draft: Draft, net: Net, width: int) -> int:
    """Add a mixture of experts, of which a micro-batch may leave some unused."""
    count = draft.pick([2, 3, 5])
    draft.traits.add("branches")
    router = net.add("router", f"nn.Linear({width}, {count})")
    ways = net.add("experts", f"nn.ModuleList(nn.Linear({width}, {width}) for _ in range({count}))")
    net.then(
        f"weights, chosen = {router}(x).softmax(-1).max(-1)",
        "mixed = torch.zeros_like(x)",
        f"for i, expert in enumerate({ways}):",
        "    rows = (chosen == i).nonzero().flatten()",
        "    if len(rows):",
        "        mixed = mixed.index_add(0, rows, (expert(x[rows]) * weights[rows, None]).to(mixed.dtype))",
        "x = x + mixed",
    )
    return width


def running_mean(draft: Draft, net: Net, width: int) -> int:
    """Add a buffer that forward updates."""
    draft.traits.add("buffers")
    name = draft.name("mean")
    net.init.append(f'self.register_buffer("{name}", torch.zeros({width}))')
    net.then("if self.training:")
    update = draft.pick(
        [
            f"self.{name}.lerp_(x.detach().mean(0).to(self.{name}.dtype), 0.1)",
            f"self.{name} = 0.9 * self.{name} + 0.1 * x.detach().mean(0).to(self.{name}.dtype)",
        ]
    )
    net.then(f"    {update}", f"x = x - self.{name}.to(x.dtype)")
    return width


def counter(draft: Draft, net: Net, width: int) -> int:
    """Add a buffer that counts forward passes, on which the output depends."""
    draft.traits.add("buffers")
    name = draft.name("calls")
    net.init.append(f'self.register_buffer("{name}", torch.tensor(0{draft.pick(["", ".0"])}))')
    net.then("if self.training:", f"    self.{name} += 1", f"x = x * (1 + 0.01 * torch.sin(self.{name}.float()))")
    return width


def remembers(draft: Draft, net: Net, width: int) -> int:
    """Add a Python attribute that keeps the largest input."""
    if not draft.may("remembers", 0.5):
        return gate(draft, net, width)
    name = draft.name("largest")
    net.init.append(f"self.{name} = 0.0")
    net.then(f"self.{name} = max(self.{name}, float(x.detach().abs().max()))", f"x = x / (1 + self.{name})")
    return width


def shift(draft: Draft, net: Net, width: int) -> int:
    """Add a parameter without a module, and an unused one."""
    bias = net.add("shift", f"nn.Parameter(torch.randn({width}) * 0.1)")
    if draft.chance(0.4):
        net.add("unused", "nn.Linear(3, 3)")
    net.then(f"x = x + {bias}")
    return width


def sometimes(draft: Draft, net: Net, width: int) -> int:
    """Add a branch that is skipped at random (stochastic depth)."""
    draft.traits.add("branches")
    layer = net.add("sometimes", f"nn.Linear({width}, {width})")
    drawn = draft.pick(["torch.rand(()) < 0.5", "random.random() < 0.5", "np.random.rand() < 0.5"])
    net.then(f"if not self.training or {drawn}:", f"    x = x + F.relu({layer}(x))")
    return width


FLAT: tuple[Layer, ...] = (
    *(linear, linear, linear, norm, norm, dropout, noise, residual, residual, stack, shared, gate, experts),
    *(running_mean, counter, remembers, shift, sometimes),
)
