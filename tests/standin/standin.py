"""A simulated accelerator (standin.cpp) as the torch extension `standin`, for machines without one.

torch loads the extension in each process with this folder on its path (see `environment`), like that of a hardware
vendor. `plug_in` loads it in a process that has already imported torch.
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
"""Environment variables: the path of the library, and the UUID of the accelerator."""


class Module:
    """The module torch.standin, like torch.cuda."""

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
        """Do nothing: random numbers come from the CPU generator, which has its own seed."""

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        """Do nothing: there is no generator."""


def build(folder: Path) -> Path:
    """Compile the library once per folder (half a minute on one core), and return its path."""
    source, torch_folder = HERE / "standin.cpp", Path(torch.__file__).parent
    library = folder / f"libstandin-{zlib.crc32(source.read_bytes() + torch.__version__.encode()):08x}.so"
    with open(folder / "standin.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            draft = library.with_suffix(".draft")
            words = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", str(source), f"-I{torch_folder / 'include'}"]
            words += [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(draft)]
            subprocess.run(words, check=True)
            draft.rename(library)
    return library


def missing() -> str:
    """Return why the library cannot be built here; "" if it can."""
    return "" if shutil.which("g++") else "the simulated accelerator needs a C++ compiler: apt install g++"


def environment(library: str) -> dict[str, str]:
    """Return environment variables that give torch one accelerator: the stand-in, or the first real one."""
    return {LIBRARY: library, "PYTHONPATH": str(HERE)} if library else {"CUDA_VISIBLE_DEVICES": "0"}


HIDDEN = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables that hide all accelerators."""


def equip(library: str, *, equipped: bool) -> None:
    """Give torch in this process an accelerator, or hide it."""
    if not equipped:
        os.environ.update(HIDDEN)
    elif library:
        plug_in(library)


def plug_in(library: str = "") -> None:
    """Register the stand-in in torch."""
    torch.ops.load_library(library or os.environ[LIBRARY])
    torch.utils.rename_privateuse1_backend("standin")
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module("standin", Module)
    torch.__future__.set_swap_module_params_on_conversion(True)  # otherwise Module.to splits tied weights
