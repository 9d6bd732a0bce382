"""Signature: the arguments and results of a compiled function, without its program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import optree

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout, layout_of
from ..core.dtype_promotion import Widening
from ..core.mesh import Mesh
from ..core.pytree_differences import first_difference
from ..core.pytree_paths import names_below
from ..core.sharding import Sharding
from ..errors import Source, current_source

__all__ = ["Signature"]


@dataclass(frozen=True)
class Signature:
    """Structure, layouts and donation of a compiled function's arguments, structure and layouts of its results."""

    name: str
    mesh: Mesh
    in_tree: optree.PyTreeSpec
    in_layouts: tuple[ArrayLayout, ...]
    parameters: tuple[str, ...]
    """The names of the arguments, the children of `in_tree`: `batch`, `rest[0]`."""
    out_tree: optree.PyTreeSpec
    out_layouts: tuple[ArrayLayout, ...]
    donated: tuple[bool, ...]
    source: Source | None = None
    """The line of the function's definition."""
    widenings: tuple[Widening, ...] = ()
    """The lines on which NumPy's promotion makes floats wider."""
    overlap: bool | None = None
    """See `fc.jit`."""

    def argument(self, i: int) -> str:
        """Return the name of the i-th argument in messages."""
        return f"{self.names[i]} of {self.name}"

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all arrays of the arguments: `batch['x']`."""
        return names_below(self.parameters, self.in_tree)

    def difference(self, given: optree.PyTreeSpec) -> str:
        """Return in words where the arguments of a call differ from those that it was compiled for."""
        wanted = "those that it was compiled for have"
        if given.num_children == self.in_tree.num_children:
            for name, one, other in zip(self.parameters, given.children(), self.in_tree.children(), strict=True):
                if one != other:
                    return first_difference(one, other, name, wanted)
        return first_difference(given, self.in_tree, "args", wanted)

    def redistributed(self, leaves: Sequence[Any]) -> list[tuple[int, ArrayLayout, Source | None]]:
        """Return the Arrays among flat arguments that are split over the mesh in another way than the function takes them.

        For each it returns the position, the layout, and the user's line, if any, with a note of what is redistributed.
        """
        found = []
        for i, (leaf, layout) in enumerate(zip(leaves, self.in_layouts, strict=True)):
            if type(leaf) is Array and leaf.sharding.mesh == self.mesh and leaf.sharding != layout.sharding:
                leaf.take_copies()  # raises for a donated Array
                # On this function's mesh: an equal one may have communicators of its own.
                given = layout_of(layout.shape, layout.dtype, Sharding(self.mesh, leaf.sharding.spec))
                line = current_source()
                note = f"{self.argument(i)}: {given.sharding.spec!r} -> {layout.sharding.spec!r}"
                found.append((i, given, line and Source(line.file, line.line, note)))
        return found
