"""Values of all processes: `process_allgather`, texts of all, and the check that they are equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_like import to_numpy
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.sharding import Sharding
from ..core.types import dtype_name
from ..errors import ProgramMismatch, user_frames
from .job_context import init, transport_of

__all__ = ["check_equal_lines", "gather_text", "is_equal_on_all", "process_allgather"]


@user_frames()
def process_allgather(arr: Any, tiled: bool = False) -> Any:
    """Gather what each process holds, on every process, as NumPy arrays.

    All processes must call it. An Array on a mesh gives its global value. Anything else (NumPy arrays, numbers, tensors, an
    Array on no mesh) is this process's own value, and the values of all processes are stacked in the order of ranks.

    Args:
        arr: An array, or a pytree of arrays, of which each leaf is gathered.
        tiled: True concatenates values along dimension 0 instead of stacking them.

    Returns:
        NumPy arrays. A value of shape `s` on each of n processes gives (n, *s), and with `tiled` (n * s[0], ...). Numbers give
        (n,) in both cases.

    Raises:
        ProgramMismatch: On all processes, if structures, shapes or dtypes differ.
        TraceError: If a leaf is not an array.
        DTypeError: If a dtype is not supported.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> fc.process_allgather(fc.device_put(np.arange(4), mesh, P("data")))
        array([0, 1, 2, 3])
        >>> fc.process_allgather(7)  # of one process
        array([7])

    References:
        `jax.experimental.multihost_utils.process_allgather`.
    """
    if arr is None:
        to_numpy(arr, "process_allgather: arr")
    given: Any = arr
    accessors, leaves, tree = optree.tree_flatten_with_accessor(given)
    names = [accessor.codify("arr") for accessor in accessors]
    values: list[Any] = [
        leaf if _is_on_mesh(leaf) else to_numpy(leaf, f"process_allgather: {name}")
        for name, leaf in zip(names, leaves, strict=True)
    ]
    own = [value for value in values if not _is_on_mesh(value)]
    gathered = iter(_gather_own(own, tree, accessors, values) if own else ())
    return tree.unflatten(
        [
            _global_value(value, name) if _is_on_mesh(value) else _joined(next(gathered)) if tiled else next(gathered)
            for name, value in zip(names, values, strict=True)
        ]
    )


def _is_on_mesh(value: Any) -> bool:
    return type(value) is Array and bool(value.sharding.mesh.axis_names)


def _global_value(arr: Array, name: str) -> np.ndarray:
    if arr.sharding.mesh.is_fully_addressable:
        return np.array(arr)
    layout, transport = arr.layout, transport_of(arr.sharding.mesh)
    if layout.is_even:
        return transport.gather_whole(arr.local, arr.shape, arr.sharding, (name, arr))
    block = layout.padded(arr.local, transport.device.allocate)
    padded = transport.gather_whole(block, arr.sharding.padded_shape(arr.shape), arr.sharding, (name, arr))
    return np.array(padded[tuple(map(slice, arr.shape))])


def _joined(rows: np.ndarray) -> np.ndarray:
    """Rows one after the other. Numbers are rows of one element."""
    return rows if rows.ndim == 1 else rows.reshape(-1, *rows.shape[2:])


def _described(value: Any) -> str:
    what = f"{dtype_name(value.dtype)}{list(value.shape)}"
    return f"Array {what}, {value.sharding.spec!r}" if type(value) is Array else what


def _gather_own(own: Sequence[np.ndarray], tree: Any, accessors: Sequence[Any], values: Sequence[Any]) -> list[np.ndarray]:
    """Return (processes, *shape) for each of some values of this process. The bytes of all of them travel at once."""
    world = init()
    if world is None:
        return [np.array(value)[None] for value in own]
    mesh = world.process_mesh
    lines = [f"{a.codify('arr')}: {_described(value)}" for a, value in zip(accessors, values, strict=True)]
    text = "\n".join([str(tree), *lines])
    digest = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint64)
    digests = _gather_rows(mesh, digest)
    if (digests != digest).any():  # on every rank: not all are equal
        check_equal_lines(mesh, [*lines, str(tree)], "the values of fc.process_allgather")
    packed = np.concatenate([np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in own])
    rows = _gather_rows(mesh, packed) if packed.size else np.empty((mesh.size, 0), np.uint8)
    starts = np.cumsum([0, *(value.nbytes for value in own)])
    return [
        np.array(rows[:, start : start + value.nbytes]).view(value.dtype).reshape(mesh.size, *value.shape)
        if value.nbytes
        else np.empty((mesh.size, *value.shape), value.dtype)
        for start, value in zip(starts, own, strict=False)
    ]


def _gather_rows(mesh: Mesh, row: np.ndarray) -> np.ndarray:
    """Return every process's row of one dimension, in the order of ranks. All must call it, with rows of one length."""
    sharding = Sharding(mesh, P(mesh.axis_names))
    return transport_of(mesh).gather_whole(row[None], (mesh.size, *row.shape), sharding)


def is_equal_on_all(mesh: Mesh, number: int) -> bool:
    """True if all processes pass the same number, of 63 bits. All must call it."""
    return len({int(found) for found in _gather_rows(mesh, np.array([number]))[:, 0]}) == 1


def gather_text(mesh: Mesh, text: str) -> list[str]:
    """Return every process's text, in the order of ranks. All must call it."""
    if mesh.is_fully_addressable:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = _gather_rows(mesh, np.array([len(own)]))[:, 0]
    width = 1 << int(lengths.max()).bit_length()  # few different ones, because each is compiled
    rows = _gather_rows(mesh, np.pad(own, (0, width - len(own))))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def check_equal_lines(mesh: Mesh, lines: Sequence[str], what: str) -> None:
    """Raise ProgramMismatch, on all ranks, unless all have the same lines. It names the first difference."""
    wanted, *others = (text.split("\n") for text in gather_text(mesh, "\n".join(lines)))
    for rank, found in enumerate(others, 1):
        for number in range(max(len(wanted), len(found))):
            one, other = (lines[number] if number < len(lines) else "nothing" for lines in (wanted, found))
            if one != other:
                raise ProgramMismatch(
                    f"{what} differ between ranks: number {number} is {one} on rank 0, and {other} on rank {rank}. All ranks "
                    "must have the same structure, shapes and dtypes, in the same order."
                )
