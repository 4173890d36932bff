"""An accelerator on a machine without one (standin.cpp), as torch's plug-in `standin`.

torch loads it by itself in every process that finds this folder, `environment`: it is what an accelerator's maker
would install. `plug_in` does it in a process that has torch already.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import zlib
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).parent
LIBRARY, NAME = "STANDIN_LIBRARY", "STANDIN_UUID"
"""The variables that name what `build` has made, and the accelerator itself: there may be several."""


class Module:
    """What torch.standin is, as torch.cuda is for CUDA."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def get_device_properties(device: object = None) -> object:
        return SimpleNamespace(uuid=os.environ.get(NAME, "0"))

    @staticmethod
    def get_device_name(device: object = None) -> str:
        return "stand-in"

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Its numbers are drawn by the processor's generator, which has its seed."""

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        """It has none of its own."""


def build(folder: Path) -> Path:
    """The library, compiled once for all who call it with this folder (six seconds)."""
    source, about = HERE / "standin.cpp", Path(torch.__file__).parent
    made = folder / f"libstandin-{zlib.crc32(source.read_bytes() + torch.__version__.encode()):08x}.so"
    with open(folder / "standin.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            draft = made.with_suffix(".draft")
            words = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", str(source), f"-I{about / 'include'}"]
            words += [f"-L{about / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(draft)]
            subprocess.run(words, check=True)
            draft.rename(made)
    return made


def missing() -> str:
    """What keeps this machine from having it, in words; nothing: it can."""
    return "" if shutil.which("g++") else "the stand-in for an accelerator is C++: apt install g++"


def environment(library: str) -> dict[str, str]:
    """Variables under which torch has one accelerator: this one, or of a machine's own the first."""
    return {LIBRARY: library, "PYTHONPATH": str(HERE)} if library else {"CUDA_VISIBLE_DEVICES": "0"}


HIDDEN = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
"""Variables under which it has none."""


def equip(library: str, *, equipped: bool) -> None:
    """From now on torch has an accelerator in this process, or has none."""
    if not equipped:
        os.environ.update(HIDDEN)
    elif library:
        plug_in(library)


def plug_in(library: str = "") -> None:
    """torch has a stand-in."""
    torch.ops.load_library(library or os.environ[LIBRARY])
    torch.utils.rename_privateuse1_backend("standin")
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module("standin", Module)
    torch.__future__.set_swap_module_params_on_conversion(True)  # else Module.to makes two of a weight that is tied
