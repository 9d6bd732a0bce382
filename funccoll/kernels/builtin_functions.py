"""Python functions whose code is machine code at an address. Calling one takes 0.05 µs; ctypes takes 0.4 or more."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

__all__ = ["METH_FASTCALL", "METH_NOARGS", "MethodDefinition", "define", "new_definition", "new_function"]

METH_NOARGS, METH_FASTCALL = 0x04, 0x80

_new: Any = ctypes.pythonapi["PyCFunction_NewEx"]  # this object of it, so that other users' argument types stay theirs
_new.argtypes, _new.restype = [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p], ctypes.py_object


class MethodDefinition(ctypes.Structure):
    """Python's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_DEFINITIONS: list[MethodDefinition] = []
"""Kept as long as the process lives: builtin functions point to them. (Two threads may make one at the same time.)"""


def define(name: str, address: int, flags: int, doc: str) -> MethodDefinition:
    """Describe the function of Python's C API at an address, for as long as the process lives."""
    made = new_definition(name, address, flags, doc)
    _DEFINITIONS.append(made)
    return made


def new_definition(name: str, address: int, flags: int, doc: str) -> MethodDefinition:
    """Describe the function of Python's C API at an address. `flags` are its calling convention."""
    return MethodDefinition(name.encode(), address, flags, doc.encode())


def new_function(definition: MethodDefinition, self: Any = None) -> Callable[..., Any]:
    """Return a Python function. Its code gets `self` as its first argument, and the function keeps it.

    The definition must live as long as the function: `self` may keep it. (Python reads neither after it has released `self`.)
    """
    return _new(ctypes.byref(definition), self, None)
