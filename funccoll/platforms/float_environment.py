"""The floating-point environment of programs: the default one, whatever the caller's thread has.

A thread may flush subnormal numbers to zero (`torch.set_flush_denormal`), or round in another way (`fesetround`). Then one
rank of a job would compute other bits than the others. Kernels set and restore the environment themselves
(`kernels.object_cache`).
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
    """True if Python's floats are rounded to nearest, and not flushed to zero. It takes 0.05 µs; a call of C takes 0.4."""
    return least * half * large > 0.0 and one + little == one and one - little == one


def _run_in_context(context: Context, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a copy of a context, and in the default environment."""
    if _is_default():
        return context.copy().run(function, *arguments)
    library, saved = ctypes.CDLL(None), (ctypes.c_int64 * 64)()  # a fenv_t has 16 or 32 bytes
    library.feholdexcept(saved)  # restores the thread's exception flags, too
    default = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
    library.fesetenv(default)
    try:
        return context.copy().run(function, *arguments)
    finally:
        library.fesetenv(saved)


run_in_context: Callable[..., Any] = _run_in_context if extension is None else extension.run_in_context
"""`run_in_context(context, function, *arguments)`: call a function in a copy of a context, and in the default environment."""
