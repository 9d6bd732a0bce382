"""The number of threads of NumPy's BLAS. It decides the order in which products are summed, and so their bits."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..config import BLAS_THREADS
from ..errors import MeshError

__all__ = ["keep_threads", "one_thread", "threads"]

# (function that returns the number of threads, function that sets it), by threadpoolctl's `internal_api`.
_FUNCTIONS = {
    "mkl": [("MKL_Get_Max_Threads", "MKL_Set_Num_Threads")],
    "blis": [("bli_thread_get_num_threads", "bli_thread_set_num_threads")],
    "flexiblas": [("flexiblas_get_num_threads", "flexiblas_set_num_threads")],
    "openblas": [
        (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
        for prefix in ("", "scipy_")
        for suffix in ("", "64_", "_64")
    ],
}
_OPENMP = [("omp_get_max_threads", "omp_set_num_threads")]


def threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the BLAS threads of each device of a mesh of more than one: FUNCCOLL_BLAS_THREADS, by default 1.

    Raise MeshError if it is not a whole number of 1 or more.
    """
    text = BLAS_THREADS.read(environment)
    if not text.isdecimal() or not int(text):
        raise MeshError(f"{BLAS_THREADS}={text!r} must be a whole number of threads, 1 or more; leave it unset for 1.")
    return int(text)


@functools.lru_cache(maxsize=1)
def _controls() -> list[tuple[Callable[[], int], Callable[[int], Any]]]:
    """Return (the function that returns the number of threads, the one that sets it) for NumPy's BLAS.

    They are called as C functions. `LibController.get_num_threads` takes four times as long. Its counterpart does nothing,
    except in the first thread that called it.
    """
    from threadpoolctl import ThreadpoolController  # here, because only programs that multiply matrices need it

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    bundled = [library for library in found if "numpy" in library.filepath]  # SciPy may have another one
    controls = []
    for library in bundled or found:
        names = _FUNCTIONS.get(library.internal_api, [])
        if getattr(library, "threading_layer", "") == "openmp":
            names = _OPENMP
        both = [names for names in names if hasattr(library.dynlib, names[0])]
        if both:
            controls.append(tuple(getattr(library.dynlib, name) for name in both[0]))
    return controls


def keep_threads() -> Callable[[], None] | None:
    """Return a function to call before products of matrices. It sets the number of threads if that has changed.

    Return None if NumPy's BLAS has no threads. The number stays set, also for other code of this process: setting it back
    after each call would change it under other Python threads.
    """
    count = threads()
    controls = _controls()
    if not controls:
        return None

    def keep() -> None:
        for tell, change in controls:
            if tell() != count:  # 0.2 µs; other code may have changed it
                change(count)

    return keep


def one_thread(devices: int) -> bool:
    """True if a program on a mesh of `devices` devices multiplies matrices in one thread. One device has the threads of now."""
    return threads() == 1 if devices > 1 else all(tell() == 1 for tell, _ in _controls())
