"""The floating-point environment in which programs run: the default one, whichever the caller's thread has.

A thread can have zeros in the place of subnormal numbers (`torch.set_flush_denormal`), and another rounding (`fesetround`). One
rank of a job would then compute other bits than the others. Kernels set and restore it by themselves (`kernels.object_cache`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextvars import Context
from typing import Any

from ..core.c_extension import extension

__all__ = ["run_in_context"]

_HALF, _ONE, _LEAST_NORMAL, _LARGE, _LITTLE = 0.5, 1.0, 2.0**-1022, 2.0**1000, 2.0**-60


def _is_default(
    half: float = _HALF, one: float = _ONE, least: float = _LEAST_NORMAL, large: float = _LARGE, little: float = _LITTLE
) -> bool:
    """True where Python's floats are rounded to the nearest, and are not flushed to zero: 0.05 µs, a call of C takes 0.4."""
    return least * half * large > 0.0 and one + little == one and one - little == one


def _run_in_context(context: Context, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a copy of a context, and in the default environment."""
    if _is_default():
        return context.copy().run(function, *arguments)
    library, saved = ctypes.CDLL(None), (ctypes.c_int64 * 64)()  # a fenv_t has 16 or 32 bytes
    library.feholdexcept(saved)  # the flags of exceptions that have occurred are the thread's again afterwards
    default = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
    library.fesetenv(default)
    try:
        return context.copy().run(function, *arguments)
    finally:
        library.fesetenv(saved)


run_in_context: Callable[..., Any] = _run_in_context if extension is None else extension.run_in_context
"""`run_in_context(context, function, *arguments)`: call a function in a copy of a context, and in the default environment."""
