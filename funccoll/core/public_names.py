"""Directories of public modules: names for users, and hints for names of other libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

__all__ = ["directory", "in_an_import", "in_numpy_or", "missing_name"]


def directory(
    module: Mapping[str, Any], elsewhere: Mapping[str, str], lazy: Callable[[str], Any] | None = None
) -> tuple[Callable[[], Sequence[str]], Callable[[str], Any]]:
    """Return the functions `__dir__` and `__getattr__` of a module, from its globals.

    `dir()` lists the names of `__all__`; modules of the implementation stay importable. `elsewhere` maps a name of another
    library to its equivalent here. `lazy` is the module's own `__getattr__`, which raises AttributeError for other names.
    """

    def names() -> Sequence[str]:
        return sorted({*module["__all__"], *(name for name in module if name.startswith("__"))})

    def get(name: str) -> Any:
        if lazy is not None:
            try:
                return lazy(name)
            except AttributeError:
                pass
        try:
            raise missing_name(module["__name__"], name, elsewhere.get(name))
        except (AttributeError, ImportError) as error:
            error.__traceback__ = None  # of this frame: a bare raise adds none
            raise

    return names, get


def in_numpy_or(api: ModuleType, name: str) -> str | None:
    """Return the name's equivalent: NumPy's, or that of the first public module of `api` with this name."""
    import numpy as np

    if name in np.__all__:
        return f"np.{name}"
    modules = [module for shown in api.__all__ if isinstance(module := vars(api).get(shown), ModuleType)]
    return next((f"fc.{found.__name__.rpartition('.')[2]}.{name}" for found in modules if name in found.__all__), None)


def missing_name(module: str, name: str, here: str | None) -> Exception:
    """Make the error for a name that a module lacks; `here` is its equivalent in funccoll.

    If `__getattr__` raises AttributeError, `from module import name` raises an ImportError without its hint. So in an import,
    a name with a hint gets its ImportError here.
    """
    if here is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    if in_an_import(2):
        return ImportError(f"cannot import name {name!r} from {module!r}; here it is {here}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}; here it is {here}")


def in_an_import(depth: int = 1) -> bool:
    """True if `from module import name` asks for the name. getattr and hasattr do not, nor does an import's own hasattr.

    `depth` is the number of frames between the statement's and this function's.
    """
    import opcode

    frame = sys._getframe(depth).f_back
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]
