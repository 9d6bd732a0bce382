"""Modules that are imported at their first use: every worker collects all tests, and imports nothing large for that."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


class LazyModule:
    """A module whose import waits until one of its attributes is read, set or deleted."""

    def __init__(self, load: Callable[[], ModuleType]):
        vars(self)["_load"] = functools.cache(load)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks for some of all that a module holds
            raise AttributeError(name)
        return getattr(self._load(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._load(), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._load(), name)


def lazily(name: str) -> Any:
    return LazyModule(lambda: importlib.import_module(name))


def need(name: str, reason: str) -> None:
    """Skip the module that calls this where the package is missing, without importing the package."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(reason, allow_module_level=True)
