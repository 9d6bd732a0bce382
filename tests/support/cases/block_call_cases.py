"""Cases of `test_block_calls.py`, run by its ranks: compiled functions of blocks that are called with other arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.compiler.compile_spmd import compile_spmd
from funccoll.errors import FunccollError
from funccoll.transports.shm.shared_memory_executable import SharedMemoryExecutable

F4 = np.dtype(np.float32)
X = np.arange(6, dtype=F4).reshape(2, 3)
Y = np.array([0.5, 1.0], F4)


class Sub(np.ndarray):
    """A subclass of NumPy's array."""


def one_group(x, y):
    return [fc.all_reduce(x, "d"), fc.all_reduce(y, "d", op="max")]


def with_compute(x, y):
    return [fc.all_reduce(x * 2, "d") / 2, fc.all_reduce(y + 0, "d", op="max")]


def only_memory(x, y):
    """Large arrays, which are staged or read directly."""
    return [fc.all_reduce(x, "d"), fc.broadcast(y, "d")]


WRONG: dict[str, Any] = {
    "fewer": (X,),
    "none": (),
    "more": (X, Y, Y),
    "None": (X, None),
    "an object": (X, object()),
    "a list": (X, [0.5, 1.0]),
    "a str": (X, "ab"),
    "float64": (X, Y.astype(np.float64)),
    "int32 of the same bytes": (X, Y.view(np.int32)),
    "another byte order": (X, Y.astype(">f4")),
    "complex of the same bytes": (X, Y.view(np.complex64)),
    "grown": (X, np.zeros(3, F4)),
    "shrunk": (X, Y[:1]),
    "empty": (X, Y[:0]),
    "a scalar": (X, F4.type(1)),
    "another shape of the same size": (X.reshape(3, 2), Y),
    "flat": (X.reshape(6), Y),
    "what broadcasts": (X[:1], Y),
    "swapped": (Y, X),
}


def wrong_calls(which: str) -> list[str]:
    """The errors of one rank's wrong calls, each before a right one of all ranks."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    fn = {"one group": one_group, "compute": with_compute}[which]
    program = compile_spmd(fn, [(X.shape, F4), (Y.shape, F4)], mesh, "the blocks' function")
    told = []
    for name, blocks in WRONG.items():
        right(program, X, Y)
        if fc.rank() == 1:
            try:
                program(*blocks)
            except (TypeError, ValueError, FunccollError) as error:
                told.append(f"{name}: {type(error).__name__}: {error}".partition("\n")[0])
            else:
                told.append(f"{name}: was taken")
        right(program, X, Y)
    return told


def right(program: Callable[..., Any], x: Any, y: Any) -> None:
    total, largest = program(x, y)
    assert np.array_equal(total, fc.world_size() * X), total
    assert np.array_equal(largest, Y), largest
    assert total.dtype == largest.dtype == F4 and total.shape == X.shape


def equal_calls() -> None:
    """Arrays that have the right values in other memory than the quick call takes."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    unaligned = np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(F4).reshape(2, 3)
    read_only = X.copy()
    read_only.flags.writeable = False
    shapes = [X.copy(order="F"), X[::-1][::-1], np.repeat(X, 2, axis=1)[:, ::2], X.view(Sub), pickle.loads(pickle.dumps(X))]
    for fn in (one_group, with_compute):
        program = compile_spmd(fn, [(X.shape, F4), (Y.shape, F4)], mesh, "the blocks' function")
        for x in (X, *shapes, unaligned, read_only, np.flip(np.flip(X, 1).copy(), 1), np.ma.array(X)):
            right(program, x, Y)
            right(program, x, Y[::-1][::-1])
    scalar = compile_spmd(lambda x: [fc.all_reduce(x, "d")], [((), F4)], mesh, "a scalar's function")
    for value in (np.array(3, F4), F4.type(3)):
        assert scalar(value)[0] == 3 * fc.world_size()
    empty = compile_spmd(lambda x: [fc.all_gather(x, "d")], [((0, 3), F4)], mesh, "a function of nothing")
    assert empty(np.zeros((0, 3), F4))[0].shape == (0, 3)


def wrong_arguments_of_a_group(nbytes: int) -> list[str]:
    """The group itself, without the check of blocks: what does not fit is refused before it is read or published."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    size = nbytes // 4
    fn = only_memory if nbytes > 1 << 14 else one_group
    program = compile_spmd(fn, [((size,), F4), ((size,), F4)], mesh, "memory")
    executable: SharedMemoryExecutable = program.run
    assert isinstance(executable, SharedMemoryExecutable)
    x = np.ones(size, F4)
    told = []
    for wrong in ((), (x,), (x, x, x), (x, None), (x, x[:-1].copy()), (x, x.astype(np.float64)), (x, x.view(np.int32))):
        executable(x, x)
        if fc.rank() == 0:
            try:
                executable(*wrong)
            except FunccollError as error:
                told.append(str(error).partition("\n")[0])
        executable(x, x)
    return told
