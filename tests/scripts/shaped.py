"""Layers for sequences [samples, places, width], signals [samples, channels, places] and images."""

from __future__ import annotations

from tests.scripts.draft import Draft, Net
from tests.scripts.flat import Layer, activation, dropout, linear, residual, stack

CHANNELS = (1, 3, 4, 7, 8)


# -- sequences: x [samples, places, width]


def recurrent(draft: Draft, net: Net, width: int) -> int:
    kind, out = draft.pick(["LSTM", "GRU", "RNN"]), draft.pick([3, 7, 8])
    more = draft.pick(["", ", num_layers=2", ", num_layers=2, dropout=0.2", ", bidirectional=True"])
    draft.traits.add("recurrent")
    layer = net.add("recurrent", f"nn.{kind}({width}, {out}{more}, batch_first=True)")
    net.then(f"x, _ = {layer}(x)")
    return 2 * out if "bidirectional" in more else out


def attention(draft: Draft, net: Net, width: int) -> int:
    width = even(net, width)
    heads = draft.pick([1, 2])
    kind = draft.often(module=1, encoder=1.5, function=1.5)
    if kind == "module":
        layer = net.add("attention", f"nn.MultiheadAttention({width}, {heads}, dropout=0.1, batch_first=True)")
        net.then(f"x = x + {layer}(x, x, x, need_weights={draft.pick([True, False])})[0]")
    elif kind == "encoder":
        more = draft.pick(["", ", norm_first=True", ', activation="gelu"'])
        made = f"nn.TransformerEncoderLayer({width}, {heads}, {2 * width}, 0.1, batch_first=True{more})"
        net.then(f"x = {net.add('encoder', made)}(x)")
    else:
        layer = net.add("qkv", f"nn.Linear({width}, {3 * width})")
        causal = ", is_causal=True" if draft.chance(0.5) else ""
        net.then(
            f"query, key, value = {layer}(x).unflatten(-1, (3, {heads}, -1)).permute(2, 0, 3, 1, 4)",
            f"x = x + F.scaled_dot_product_attention(query, key, value{causal}).transpose(1, 2).flatten(2)",
        )
    return width


def even(net: Net, width: int) -> int:
    if width % 2:
        layer = net.add("even", f"nn.Linear({width}, {width + 1})")
        net.then(f"x = {layer}(x)")
        return width + 1
    return width


def row_norm(draft: Draft, net: Net, width: int) -> int:
    made = draft.pick([f"nn.LayerNorm({width})", f"nn.RMSNorm({width})"])
    net.then(f"x = {net.add('norm', made)}(x)")
    return width


def mixing(draft: Draft, net: Net, width: int) -> int:
    layer = net.add("mixing", f"nn.Conv1d({width}, {width}, 3, padding=1{draft.pick(['', f', groups={width}'])})")
    net.then(f"x = x + {layer}(x.transpose(1, 2)).transpose(1, 2)")
    return width


def positions(draft: Draft, net: Net, width: int) -> int:
    places = net.add("places", f"nn.Embedding(40, {width})")
    net.then(f"x = x + {places}(torch.arange(x.shape[1]))")
    return width


SEQUENCE: tuple[Layer, ...] = (
    *(recurrent, attention, attention, row_norm, mixing, positions, dropout, linear, residual, stack),
)


# -- signals and images: x [samples, channels, places] or [samples, channels, rows, columns]


def convolution(dims: int) -> Layer:
    def add(draft: Draft, net: Net, width: int) -> int:
        out = draft.pick(CHANNELS)
        more = draft.pick(["", ", bias=False", ", stride=2", ", dilation=1", ', padding_mode="circular"'])
        if draft.chance(0.2):
            out, more = width, f", groups={width}"
        made = f"nn.Conv{dims}d({width}, {out}, 3, padding=1{more})"
        if draft.chance(0.1):
            made = f"nn.utils.parametrizations.weight_norm({made})"
        elif draft.chance(0.08):
            made = f"nn.utils.parametrizations.spectral_norm({made})"
            draft.traits.add("buffers")
        layer = net.add("conv", made)
        net.then(f"x = {layer}(x)")
        activation(draft, net)
        return out

    return add


def channel_norm(dims: int) -> Layer:
    def add(draft: Draft, net: Net, width: int) -> int:
        kind = draft.often(batch=3, group=2, instance=1)
        if kind == "batch":
            draft.traits.add("batch norm")
            made = f"nn.BatchNorm{dims}d({width}{draft.pick(['', ', momentum=0.3', ', track_running_stats=False'])})"
        elif kind == "group":
            groups = draft.pick([n for n in range(1, width + 1) if width % n == 0])
            made = f"nn.GroupNorm({groups}, {width})"
        else:
            more = draft.pick(["", ", affine=True", ", track_running_stats=True"])
            if "track" in more:
                draft.traits.add("batch norm")
            made = f"nn.InstanceNorm{dims}d({width}{more})"
        net.then(f"x = {net.add('norm', made)}(x)")
        return width

    return add


def resized(dims: int) -> Layer:
    def add(draft: Draft, net: Net, width: int) -> int:
        mode = ", mode='nearest'" if dims == 1 else draft.pick(["", ", mode='bilinear'"])
        made = draft.pick(
            [
                f"nn.MaxPool{dims}d(2, ceil_mode=True)",
                f"nn.AvgPool{dims}d(2, ceil_mode=True)",
                f"nn.AdaptiveMaxPool{dims}d(3)",
                f"nn.Upsample(scale_factor=2{mode})",
                f"nn.ConvTranspose{dims}d({width}, {width}, 2, stride=2)",
                f"nn.Dropout{dims}d(0.2)",
            ]
        )
        net.then(f"x = {net.add('resized', made)}(x)")
        return width

    return add


def conv_residual(dims: int) -> Layer:
    def add(draft: Draft, net: Net, width: int) -> int:
        parts = [f"nn.Conv{dims}d({width}, {width}, 3, padding=1)", f"nn.{draft.pick(['ReLU', 'GELU', 'SiLU'])}()"]
        if draft.chance(0.4):
            parts.insert(1, f"nn.BatchNorm{dims}d({width})")
            draft.traits.add("batch norm")
        layers = net.add("blocks", f"nn.ModuleList(nn.Sequential({', '.join(parts)}) for _ in range(2))")
        if draft.chance(0.25):
            draft.traits.add("checkpoint")
            call = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
        else:
            call = "block(x)"
        net.then(f"for block in {layers}:", f"    x = x + {call}")
        return width

    return add


def shaped(dims: int) -> tuple[Layer, ...]:
    """Return layers for this number of dims after the channels."""
    return (
        *(convolution(dims), convolution(dims), channel_norm(dims), channel_norm(dims)),
        *(resized(dims), conv_residual(dims), noise_like),
    )


def noise_like(draft: Draft, net: Net, width: int) -> int:
    net.then("if self.training:", "    x = x + 0.05 * torch.randn_like(x)")
    return width
