"""Layouts of Arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..core.array_order import in_c_order
from ..core.mesh import Mesh, copy_coordinates
from ..core.sharding import Sharding
from ..core.types import ArrayType
from ..core.weak_values import WeakValues

__all__ = ["NO_MESH", "ArrayLayout", "layout_of"]

NO_MESH = Mesh({}, (0,))
"""The mesh of Arrays that are not split: of functions that are jitted without a mesh, and of `fc.asarray`."""


@dataclass(frozen=True, eq=False)
class ArrayLayout:
    """Global shape, dtype and sharding: everything about an Array except its data.

    Layouts are compared by identity, so the cache lookup of a call is cheap. `layout_of` returns one object for equal layouts.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    weak: type | None = None
    """int, float or complex if it stands for a Python scalar, such as a counter that a training step returns: NEP 50."""

    def __reduce__(self) -> Any:
        return layout_of, (self.shape, self.dtype, self.sharding, self.weak)  # a copy is the same object

    def same(self, other: ArrayLayout) -> bool:
        """True when shape, dtype and sharding are equal."""
        return self is other or (self.shape, self.dtype, self.sharding) == (other.shape, other.dtype, other.sharding)

    def holds_as(self, other: ArrayLayout) -> bool:
        """True when an Array of this layout holds its copies as one of `other` would: the same, or the whole array once."""
        if self.same(other):
            return True
        mine, wanted = self.sharding.mesh, other.sharding.mesh
        fits = (self.shape, self.dtype, mine.device_type) == (other.shape, other.dtype, wanted.device_type)
        return fits and mine != wanted and self._is_one_copy and other._is_one_copy

    @cached_property
    def _is_one_copy(self) -> bool:
        """True if an Array holds one array, the global value."""
        return self.is_whole or self.sharding.mesh.size == 1

    @cached_property
    def type(self) -> ArrayType:
        """The type of one device's shard inside a program, where all blocks have the shape of the largest."""
        return ArrayType(self.sharding.padded_shard_shape(self.shape), self.dtype, self.sharding.varying)

    @cached_property
    def is_even(self) -> bool:
        """True if all blocks have one shape."""
        return self.sharding.is_even(self.shape)

    @cached_property
    def of_deleted(self) -> ArrayLayout:
        """An equal layout as another object, for Arrays without data: no call cache contains it, so using them raises."""
        return ArrayLayout(self.shape, self.dtype, self.sharding, self.weak)

    @cached_property
    def indices(self) -> tuple[tuple[slice, ...], ...]:
        """For each distinct copy, the part of the global array it holds."""
        coordinates = copy_coordinates(self.sharding.mesh, self.sharding.varying)
        return tuple(self.sharding.index(self.shape, c) for c in coordinates)

    @cached_property
    def is_one_block(self) -> bool:
        """True if this process plays one device."""
        return len(self.sharding.mesh.local_devices) == 1

    @cached_property
    def is_whole(self) -> bool:
        """True if all devices have the global value, so that this process has it as one block."""
        return not self.sharding.varying

    @cached_property
    def copy_of_device(self) -> tuple[int, ...]:
        """For each device position, the number of the distinct copy it holds."""
        mesh, varying = self.sharding.mesh, self.sharding.varying
        position = {tuple(c.items()): i for i, c in enumerate(mesh.walk(a for a in mesh.axis_names if a in varying))}
        return tuple(position[tuple((a, n) for a, n in mesh.coordinates(d).items() if a in varying)] for d in range(mesh.size))

    def split(self, value: Any) -> Any:
        """Return the copies of a global NumPy or CuPy value: one array, or a list of blocks, in C order."""
        if not self.sharding.varying:
            return in_c_order(value)
        blocks = [in_c_order(value[i]) for i in self.indices]
        return blocks if len(blocks) > 1 else blocks[0]

    def padded(self, copies: Any, allocate: Callable[[tuple[int, ...], np.dtype], Any]) -> Any:
        """Return copies with blocks of one shape, that of the largest. Smaller ones end in zeros, in memory from `allocate`."""

        def pad(block: Any) -> Any:
            if block.shape == self.type.shape:
                return block
            out = allocate(self.type.shape, self.dtype)
            out[...] = 0
            out[tuple(map(slice, block.shape))] = block
            return out

        return [*map(pad, copies)] if type(copies) is list else pad(copies)

    def cut(self, copies: Any, new_block: Callable[[Any], Any]) -> Any:
        """Return padded copies without their padding. Blocks that have some are copied by `new_block`."""

        def part(block: Any, index: tuple[slice, ...]) -> Any:
            shape = tuple(rows.stop - rows.start for rows in index)
            return block if shape == block.shape else new_block(block[tuple(map(slice, shape))])

        return [*map(part, copies, self.indices)] if type(copies) is list else part(copies, self.indices[0])


def layout_of(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, weak: type | None = None) -> ArrayLayout:
    """Return the only ArrayLayout of these fields. Raises ShardingError if the spec has more entries than the shape."""
    transport = sharding.mesh.transport
    if transport is None or transport.part is None:
        return _layout_of(shape, dtype, sharding, weak, transport)
    key = shape, dtype, sharding.spec, weak, transport.part
    found = _OF_PARTS.get(key)
    if found is None:
        with WeakValues.lock:
            found = _OF_PARTS.get(key) or _new_layout(shape, dtype, sharding, weak)
            _OF_PARTS[key] = found
    return found


_OF_PARTS: WeakValues[tuple[Any, ...], ArrayLayout] = WeakValues()
"""The layouts of meshes of some of a job's processes. They end with their Arrays and programs, and keys have no mesh: a group
may be dropped."""


def _new_layout(
    shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding, weak: type | None, transport: Any = None
) -> ArrayLayout:
    # The transport is in the key of the cache because equal meshes of two jobs have different transports.
    layout = ArrayLayout(shape, dtype, sharding, weak)
    _ = layout.type
    return layout


_layout_of = lru_cache(maxsize=8192)(_new_layout)
