"""Calls of kernels from Python: a function of arrays, in LLVM's language, which calls a kernel with their addresses.

Such a call takes 0.05 µs more than the kernel. By ctypes it would take 0.6, and 3 if Python read the addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..builtin_functions import METH_FASTCALL, define, new_definition, new_function
from . import machine_code
from .group import GroupKernel

__all__ = ["call_text", "function_of", "functions_of", "module_of"]

_TYPE, _DATA, _FLAGS = 8, 16, 64
"""Where an object has its type, and an array the address of its elements and its flags (NumPy's PyArrayObject_fields)."""
_CONTIGUOUS, _ALIGNED, _WRITEABLE = 0x1, 0x100, 0x400
_API = """\
declare void @Py_IncRef(ptr)
declare i32 @PyErr_BadArgument()
declare ptr @PyEval_SaveThread()
declare void @PyEval_RestoreThread(ptr)
"""


def call_text(kernel: str, operands: int, results: int, elements: int, releases_gil: bool) -> str:
    """Return the text of `<kernel>_call`, a function with METH_FASTCALL that takes arrays and returns the last one.

    The arrays are those of the operands, then those of the results. The caller knows their shapes and dtypes, and that the last
    one is an array. Anything else that is not an array, such as a NumPy scalar, raises TypeError. So does an array that is
    not contiguous or not aligned, and a result that is read-only. The caller runs in the default floating-point environment
    (`platforms/float_environment`).

    Args:
        kernel: The kernel's name. The module has its text, too.
        operands: The number of operands.
        results: The number of results, one or more.
        elements: The number of elements, which the kernel gets after the addresses.
        releases_gil: Other threads run meanwhile. It takes 0.05 µs.
    """
    count = operands + results
    lines = [f"define ptr @{kernel}_call(ptr %self, ptr %arrays, i64 %given) {{"]
    lines.append(f"  %fits = icmp eq i64 %given, {count}\n  br i1 %fits, label %begin, label %bad\nbegin:")
    lines.append(f"  %last = getelementptr ptr, ptr %arrays, i64 {count - 1}\n  %result = load ptr, ptr %last")
    lines.append(f"  %typed = getelementptr i8, ptr %result, i64 {_TYPE}\n  %type = load ptr, ptr %typed\n  br label %array0")
    for k in range(count):
        wanted = _CONTIGUOUS | _ALIGNED | (_WRITEABLE if k >= operands else 0)
        lines += [
            f"array{k}:",
            f"  %place{k} = getelementptr ptr, ptr %arrays, i64 {k}",
            f"  %object{k} = load ptr, ptr %place{k}",
            f"  %typed{k} = getelementptr i8, ptr %object{k}, i64 {_TYPE}",
            f"  %type{k} = load ptr, ptr %typed{k}",
            f"  %array.like{k} = icmp eq ptr %type{k}, %type",
            f"  br i1 %array.like{k}, label %flags.of{k}, label %bad",
            f"flags.of{k}:",
            f"  %flagged{k} = getelementptr i8, ptr %object{k}, i64 {_FLAGS}",
            f"  %flags{k} = load i32, ptr %flagged{k}",
            f"  %known{k} = and i32 %flags{k}, {wanted}",
            f"  %good{k} = icmp eq i32 %known{k}, {wanted}",
            f"  br i1 %good{k}, label %{f'array{k + 1}' if k + 1 < count else 'run'}, label %bad",
        ]
    lines.append("run:")
    for k in range(count):
        lines.append(f"  %pointed{k} = getelementptr i8, ptr %object{k}, i64 {_DATA}")
        lines.append(f"  %data{k} = load ptr, ptr %pointed{k}")
    call = f"  call void @{kernel}({', '.join(f'ptr %data{k}' for k in range(count))}, i64 {elements})"
    if releases_gil:
        call = f"  %state = call ptr @PyEval_SaveThread()\n{call}\n  call void @PyEval_RestoreThread(ptr %state)"
    lines += [call, "  call void @Py_IncRef(ptr %result)\n  ret ptr %result"]
    lines.append("bad:\n  %ignored = call i32 @PyErr_BadArgument()\n  ret ptr null\n}")
    return _API + "\n".join(lines) + "\n"


def function_of(kernel: str, text: str, cpu: str | None = None) -> Callable[..., Any]:
    """Return the Python function `<kernel>_call` of a text. It is compiled now, or was by an earlier process."""
    name = f"{kernel}_call"
    return new_function(define(name, machine_code.address_of(text, name, cpu), METH_FASTCALL, "A compiled kernel of arrays."))


_LONG = 200_000
"""Instructions on elements, about 20 microseconds, from which a kernel gives up Python's lock."""


def module_of(kernels: Sequence[GroupKernel]) -> str:
    """Return the text of a module with these kernels, and a function that calls each (`functions_of`)."""
    shared: dict[str, str] = {}
    for kernel in kernels:
        shared.update(kernel.declarations)
        shared[kernel.name] = kernel.definition  # perhaps it is a part of a loop, too
    parts = [_API.rstrip("\n"), "@_Py_TrueStruct = external global i8", "@_Py_FalseStruct = external global i8"]
    return "\n".join([*parts, *shared.values(), *map(_group_call, kernels)]) + "\n"


def _group_call(kernel: GroupKernel) -> str:
    """Return the text of `<kernel>_call`: it returns False for an array that the kernel cannot take, else True."""
    operands, count = kernel.inputs, kernel.inputs + kernel.outputs + bool(kernel.workspace_bytes)
    lines = [f"define ptr @{kernel.name}_call(ptr %self, ptr %arrays, i64 %given) {{"]
    lines.append("  br label %array0")
    for k in range(count):
        wanted = (0 if kernel.strided else _CONTIGUOUS) | _ALIGNED | (_WRITEABLE if k >= operands else 0)
        lines += [
            f"array{k}:",
            f"  %place{k} = getelementptr ptr, ptr %arrays, i64 {k}",
            f"  %object{k} = load ptr, ptr %place{k}",
            f"  %flagged{k} = getelementptr i8, ptr %object{k}, i64 {_FLAGS}",
            f"  %flags{k} = load i32, ptr %flagged{k}",
            f"  %known{k} = and i32 %flags{k}, {wanted}",
            f"  %good{k} = icmp eq i32 %known{k}, {wanted}",
            f"  br i1 %good{k}, label %{f'array{k + 1}' if k + 1 < count else 'run'}, label %bad",
        ]
    lines.append("run:")
    for k in range(count):
        lines.append(f"  %pointed{k} = getelementptr i8, ptr %object{k}, i64 {_DATA}")
        lines.append(f"  %data{k} = load ptr, ptr %pointed{k}")
    call = f"  call void @{kernel.name}({', '.join(f'ptr %data{k}' for k in range(count))})"
    if kernel.cost >= _LONG:
        call = f"  %state = call ptr @PyEval_SaveThread()\n{call}\n  call void @PyEval_RestoreThread(ptr %state)"
    lines += [call, "  call void @Py_IncRef(ptr @_Py_TrueStruct)\n  ret ptr @_Py_TrueStruct"]
    lines.append("bad:\n  call void @Py_IncRef(ptr @_Py_FalseStruct)\n  ret ptr @_Py_FalseStruct\n}")
    return "\n".join(lines)


def functions_of(names: Sequence[str], text: str, cpu: str | None = None) -> dict[str, Callable[..., Any]]:
    """Return the functions `<name>_call` of a text, by name. The text is compiled now, or was by an earlier process.

    The machine code is freed with the last of the functions, as that of a program which `fc.clear_caches` drops.
    """
    engine = machine_code.engine_of(text, cpu)
    found = {}
    for name in names:
        symbol = f"{name}_call"
        address = engine.get_function_address(symbol)
        definition = new_definition(symbol, address, METH_FASTCALL, "A compiled group of operations.")
        found[name] = new_function(definition, (engine, definition))  # `self`: it keeps them
    return found
