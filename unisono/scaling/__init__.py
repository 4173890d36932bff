"""Learning rates for another batch size and another width, and a warm-up.

    widths = unisono.scaling.WidthScaling(lambda: Net(width=1024), base=lambda: Net(width=128))
    model = run.place(lambda: widths.apply_init(Net(width=1024)))
    lr = unisono.scaling.sqrt_scaling(3e-3, batch=512, base_batch=64)
    optimizer = torch.optim.AdamW(widths.groups(model, lr=lr, weight_decay=0.1))
    schedule = unisono.scaling.warmup_cosine(optimizer, warmup=100, total=run.total_steps)

All of it is arithmetic before the first step. So it does not depend on the number of processes or on shards.
"""

from unisono.scaling.batch_scaling import linear_scaling, sqrt_scaling, sqrt_scaling_adam
from unisono.scaling.coordinate_check import CoordinateCheck, coordinate_check
from unisono.scaling.warmup_schedule import warmup_cosine
from unisono.scaling.width_scaling import ParameterWidth, WidthScaling, attention_scale, output_scale

__all__ = [
    "CoordinateCheck",
    "ParameterWidth",
    "WidthScaling",
    "attention_scale",
    "coordinate_check",
    "linear_scaling",
    "output_scale",
    "sqrt_scaling",
    "sqrt_scaling_adam",
    "warmup_cosine",
]
