"""The optional C extension `_native` for quicker calls. Without it Python does the same."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from ..config import NATIVE

__all__ = ["extension", "why_not"]


def _load() -> tuple[ModuleType | None, str]:
    """Return the extension, or None with the reason."""
    if NATIVE.read() == "0":
        return None, f"{NATIVE}=0"
    try:
        from .._native import array_fits
    except ModuleNotFoundError:
        return None, "it was not built when funccoll was installed: there was no C compiler"
    except ImportError as error:
        return None, str(error)
    from .. import _native

    if not hasattr(_native, "RaggedCall"):
        return None, "it was built from older sources; install funccoll again (make)"
    _native.use_arrays(np.ndarray)
    for array in (np.zeros((2, 3)), np.zeros((4, 4), np.int32)[1:, ::2]):  # it reads arrays where NumPy's ABI has their fields
        address = array.__array_interface__["data"][0]
        if not array_fits(array, address, array.dtype, array.shape, array.flags.c_contiguous):
            return None, f"NumPy {np.__version__} has other arrays than it expects"
    return _native, ""


extension, why_not = _load()
"""The module and "", or None and the reason why it is not used."""
