"""Directories of public modules: the names that users should find, and hints for names of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["directory"]


def directory(
    module: Mapping[str, Any], elsewhere: Mapping[str, str], lazy: Callable[[str], Any] | None = None
) -> tuple[Callable[[], Sequence[str]], Callable[[str], Any]]:
    """The functions `__dir__` and `__getattr__` of a module, from its globals.

    `dir()` lists what its `__all__` has; modules of the implementation stay importable. elsewhere: what a name of another
    library is here. lazy: the module's own `__getattr__`, which raises AttributeError for other names.
    """

    def names() -> Sequence[str]:
        return sorted({*module["__all__"], *(name for name in module if name.startswith("__"))})

    def get(name: str) -> Any:
        if lazy is not None:
            try:
                return lazy(name)
            except AttributeError:
                pass
        here = f"; here it is {elsewhere[name]}" if name in elsewhere else ""
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}{here}")

    return names, get
