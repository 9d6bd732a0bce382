"""Libraries of a CUDA toolkit that is not a Python package: their places, and the compiler's libraries, loaded from there."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["find", "load_compilers"]

_VARIABLES = ("CUDA_PATH", "CUDA_HOME")
_USUAL = ("/usr/local/cuda",)
_COMPILERS = {"nvvm": "libnvvm.so", "nvJitLink": "libnvJitLink.so", "nvrtc": "libnvrtc.so", "cudart": "libcudart.so"}
"""The libraries that compile our kernels, and two whose versions numba-cuda asks for, by cuda-pathfinder's names."""
_FOLDERS = ("lib64", "nvvm/lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


def find(library: str) -> Path | None:
    """The file of a library, "libnvvm.so" for example, in the toolkit of CUDA_PATH or CUDA_HOME or in /usr/local/cuda.

    Loads nothing. Returns None if there is none.
    """
    for root in (*filter(None, map(os.environ.get, _VARIABLES)), *_USUAL):
        for folder in _FOLDERS:
            if found := sorted(Path(root, folder).glob(f"{library}*")):
                return found[0]
    return None


def load_compilers() -> None:
    """Load the compiler's libraries from a toolkit if cuda-pathfinder does not find them.

    It looks in Python packages, the dynamic linker's folders, CUDA_PATH and CUDA_HOME, and takes what is loaded already. NVVM
    is in a separate folder that the linker does not search. Raises: ImportError with what is missing.
    """
    from cuda import pathfinder

    for name, library in _COMPILERS.items():
        try:
            pathfinder.load_nvidia_dynamic_lib(name)
        except pathfinder.DynamicLibNotFoundError:
            path = find(library)
            if path is None:
                raise ImportError(f"{library} is neither installed with pip nor in a CUDA toolkit") from None
            try:
                ctypes.CDLL(str(path))
            except OSError as error:
                raise ImportError(str(error)) from error
