"""Kernels that CuPy lacks: Philox's random words, additions to rows in the order of the updates, and copies of many blocks.

All arguments are int64: addresses in the memory of a GPU, and counts. Any number of blocks does the work. No thread waits for
another one, and no element is written by two.
"""
# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import reductions
from .block import MOVED_AS, copy_range
from .cuda_compiler import Kernel, Operations, compile_template, kept_kernel
from .variants import variant

__all__ = ["PIECE_BYTES", "compile_compute_kernel", "compute_template", "load_compute_kernel", "pieces_of"]

_ROUNDS = 10
_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_KEY_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
PIECE_BYTES = 1 << 14
"""The most bytes of a piece of `copy_blocks`. The threads of one block copy each piece."""
_IN_FLIGHT = 8  # values of one destination that a thread loads before it adds the first of them


def _first_of_grid() -> Any:
    return thread_count() * block_number() + thread_number()


def _philox(counter: Any, number: Any, purpose: Any, first_key: Any, second_key: Any) -> Any:
    """A block of Philox4x64-10: four words for the counter [counter, 0, number, purpose]."""
    a, b, c, d = counter, np.uint64(0), number, purpose
    for _ in range(_ROUNDS):
        high, low = multiply_high(_FACTORS[0], a), _FACTORS[0] * a
        a, b = multiply_high(_FACTORS[1], c) ^ b ^ first_key, _FACTORS[1] * c
        c, d = high ^ d ^ second_key, low
        first_key += _KEY_STEPS[0]
        second_key += _KEY_STEPS[1]
    return a, b, c, d


def _random_words(out: Any, count: Any, key: Any, number: Any, purpose: Any) -> None:
    """Write what `primitives.randomness` takes from NumPy's Philox: `count` words. Each thread writes whole blocks of four.

    `number` is the address of a 64-bit integer, or 0 for the number 0. NumPy counts before each block, so the first one is 1.
    """
    first_key, second_key = load_element(key, np.uint64), load_element(key + 8, np.uint64)
    third = load_element(number, np.uint64) if number != 0 else np.uint64(0)
    whole = count // 4 if out & 15 == 0 else 0
    for block in range(first_of_grid(), (count + 3) // 4, thread_count() * block_count()):
        words = philox(np.uint64(block + 1), third, np.uint64(purpose), first_key, second_key)
        place = out + 32 * block
        if block < whole:
            store_lanes(place, 16, words)
        else:
            left = count - 4 * block
            store_element(place, words[0])
            if left > 1:
                store_element(place + 8, words[1])
            if left > 2:
                store_element(place + 16, words[2])
            if left > 3:
                store_element(place + 24, words[3])


def _scatter_add(out: Any, rows: Any, order: Any, values: Any, count: Any, width: Any) -> None:
    """Add rows of values, `width` elements each, to the rows of `out` that `rows` names, as `np.add.at` does.

    `rows` is sorted and stable: `order` has the numbers of the updates, and those of one row are in their own order. The thread
    with the first update of a row adds all of them, for one column. A 16-bit float is rounded by each addition.
    """
    stride = ITEMSIZE * width
    for task in range(first_of_grid(), count * width, thread_count() * block_count()):
        at = task // width
        row = load_element(rows + 8 * at, np.int64)
        if at == 0 or load_element(rows + 8 * (at - 1), np.int64) != row:
            column = ITEMSIZE * (task - at * width)
            place = out + stride * row + column
            total = load_element(place, STORED)
            while at + _IN_FLIGHT <= count and load_element(rows + 8 * (at + _IN_FLIGHT - 1), np.int64) == row:
                for i in range(at, at + _IN_FLIGHT):
                    value = load_element(values + stride * load_element(order + 8 * i, np.int64) + column, STORED)
                    total = narrow(accumulate(widen(total), value))
                at += _IN_FLIGHT
            while at < count and load_element(rows + 8 * at, np.int64) == row:
                value = load_element(values + stride * load_element(order + 8 * at, np.int64) + column, STORED)
                total = narrow(accumulate(widen(total), value))
                at += 1
            store_element(place, total)


def _copy_blocks(table: Any, pieces: Any, count: Any) -> None:
    """Copy pieces of arrays. Each block of threads copies some.

    A row of `table` is the address of an array and that of its copy. A row of `pieces` is the number of a row of `table`, the
    place of the first byte, and the number of bytes.
    """
    for number in range(block_number(), count, block_count()):
        piece = pieces + 24 * number
        row, begin = table + 16 * load(piece), load(piece + 8)
        copy_range(load(row + 8) + begin, load(row) + begin, load(piece + 16))


_TEMPLATES = {"random_words": _random_words, "scatter_add": _scatter_add, "copy_blocks": _copy_blocks}
_HELPERS = {"first_of_grid": _first_of_grid, "philox": _philox, "copy_range": copy_range}


def pieces_of(nbytes: Sequence[int], most: int = PIECE_BYTES) -> np.ndarray:
    """The pieces, of `most` bytes, of arrays of these sizes in bytes: int64 of shape (n, 3), for `copy_blocks`."""
    pieces = [(row, begin, min(most, size - begin)) for row, size in enumerate(nbytes) for begin in range(0, size, most)]
    return np.array(pieces, np.int64).reshape(-1, 3)


def compute_template(name: str, dtype: np.dtype | None, operations: Operations) -> Any:
    """A kernel as a function of int64 arguments: `random_words`, `copy_blocks`, or `scatter_add` for a dtype."""
    names = {**operations.memory, **MOVED_AS}
    for name_, helper in _HELPERS.items():
        names[name_] = operations.machine.compile(variant(helper, name_, **names))
    if dtype is not None:
        names |= reductions.meanings("or" if dtype == np.bool_ else "sum", dtype, operations.machine)
    return variant(_TEMPLATES[name], name, **names)


def load_compute_kernel(name: str, dtype: np.dtype | None, cc: tuple[int, int]) -> tuple[str, bytes]:
    """A kernel's function and its machine code for a compute capability, compiled once on a machine."""
    what = [] if dtype is None else [dtype.name]
    return kept_kernel(name, what, cc, lambda: compile_compute_kernel(name, dtype, cc))


def compile_compute_kernel(name: str, dtype: np.dtype | None, cc: tuple[int, int]) -> Kernel:
    """Compile a kernel for a compute capability. It needs numba-cuda with NVVM and nvJitLink, and no GPU."""
    arguments = _TEMPLATES[name].__code__.co_argcount
    return compile_template(functools.partial(compute_template, name, dtype), arguments, cc)
