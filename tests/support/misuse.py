"""How the error tests state a case: the call that is wrong, and what its message must hold."""

from __future__ import annotations

import functools
import inspect
import os
import re

import numpy as np
import pytest

import funccoll as fc
from funccoll import P

LINE = fc.make_mesh({"data": 4})
X = np.arange(8, dtype=np.float32)


def run(body, x=X, *, spec=P("data"), out=P("data"), mesh=LINE, **options):
    """`body` on a mesh, jitted and called."""
    return fc.jit(body, mesh=mesh, in_specs=(spec,), out_specs=out, **options)(x)


def first_line(function):
    """(file, first line, number of lines) of a function's source."""
    lines, start = inspect.getsourcelines(function)
    return os.path.basename(function.__code__.co_filename), start, len(lines)


def wrong(kind, call, *parts, line=None):
    """`call()` raises `kind`; its message holds every part, and names a line of the caller's own file.

    `line` is the number of the user's wrong line, counted from the first line of `call`'s source (default: anywhere
    in it).
    """
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    message = str(error)
    assert isinstance(error, fc.FunccollError), f"{type(error).__name__} is no FunccollError: {message}"
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    file, start, count = first_line(call)
    assert error.source is not None, message
    assert f"{error.source.file}:{error.source.line} in " in message
    assert len(message) < 900, f"too long to read: {message}"
    if error.source.function == "run" and line is None:
        return message  # raised by the call of the jitted function, which stands above
    assert os.path.basename(error.source.file) == file, message
    if line is None:
        assert start <= error.source.line < start + count, f"line {error.source.line} is outside {start}+{count}"
    else:
        assert error.source.line == start + line, f"line {error.source.line - start} of the call, not {line}"
    return message


def check_paths(hint):
    """Assert that what a hint names exists."""
    for path in re.findall(r"\bfc((?:\.\w+)+)", hint):
        functools.reduce(getattr, path[1:].split("."), fc)
