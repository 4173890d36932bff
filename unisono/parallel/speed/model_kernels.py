"""Apply the section `speed` of the settings to the models of a run, around their layout over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.errors import SettingsError
from unisono.parallel.speed.convolution_format import store_channels_last
from unisono.parallel.speed.float8_linear import use_float8

if TYPE_CHECKING:
    import torch
    from torch import nn

    from unisono.config import SpeedSettings


class ModelKernels:
    """The kernels of the models of one run.

    Args:
        speed: The settings.
        device: The device of this process.
    """

    def __init__(self, speed: SpeedSettings, device: torch.device) -> None:
        self.speed, self.device = speed, device
        self.convolutions = 0
        """Number of convolutions in channels_last, in all models."""
        self.float8_layers = 0
        """Number of linear layers in float8, in all models."""

    def before_layout(self, model: nn.Module) -> nn.Module:
        """Prepare a model that was built and is not divided yet. Return it, or what replaces it.

        Raises:
            SettingsError: This process cannot compute in float8.
        """
        if self.speed.channels_last:
            self.convolutions += store_channels_last(model)
        if self.speed.float8 != "none":
            model, layers = use_float8(model, self.speed.float8, self.device)
            self.float8_layers += layers
        return model

    def after_layout(self, model: nn.Module) -> None:
        """Compile a model that is on its device."""
        if self.speed.compile_model:
            from unisono.parallel.compile import compile_model  # the import takes a second

            compile_model(model)

    def check_used(self) -> None:
        """Raise SettingsError for a setting that no placed model can use."""
        if self.speed.channels_last and not self.convolutions:
            raise SettingsError(
                "speed.channels_last = true has no effect.",
                "No placed model has a convolution with 2 or 3 dimensions.",
                "--set speed.channels_last=false",
            )
        if self.speed.float8 != "none" and not self.float8_layers:
            raise SettingsError(
                f"speed.float8 = {self.speed.float8} has no effect.",
                "No placed model has a torch.nn.Linear whose sizes are multiples of 16.",
                "--set speed.float8=none",
            )
