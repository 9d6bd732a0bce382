"""Shardings: which block of an array each device of a mesh holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ShardingError
from .block_ranges import block_range, block_size, block_sizes
from .mesh import Mesh
from .partition_spec import P, normalize_axes

if TYPE_CHECKING:
    from ..draw.drawing import Drawing

__all__ = ["Sharding"]


@dataclass(frozen=True)
class Sharding:
    """The distribution of an array over a mesh: a mesh and a spec.

    n rows over p devices are blocks of ceil(n / p) rows. If p does not divide n, the last blocks are smaller, or empty.

    Args:
        mesh: The mesh.
        spec: A `P` that says which axes split which dimensions.

    Raises:
        ShardingError: If an argument is of another kind.
        MeshError: If the mesh lacks an axis of the spec.

    Example:
        >>> sharding = fc.Sharding(fc.make_mesh({"data": 4}), P("data"))
        >>> sharding.shard_shape((8, 3))
        (2, 3)
    """

    mesh: Mesh
    spec: P

    def __post_init__(self):
        if not isinstance(self.mesh, Mesh):
            raise ShardingError(f"Sharding(mesh, spec): expected a mesh from fc.make_mesh({{...}}), not {self.mesh!r}.")
        if not isinstance(self.spec, P):
            raise ShardingError(f"Sharding(mesh, spec): expected a spec such as fc.P('data'), not {self.spec!r}.")
        self.mesh.check_axes(self.spec.axes, what=f"axis in {self.spec!r},")

    @cached_property
    def varying(self) -> frozenset[str]:
        """The mesh axes along which devices hold different blocks."""
        return frozenset(self.spec.axes)

    @cached_property
    def equal_along(self) -> tuple[str, ...]:
        """The mesh axes along which several devices hold equal blocks."""
        return tuple(a for a in self.mesh.axis_names if a not in self.varying and self.mesh.shape[a] > 1)

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The mesh axes that split dimension `dim`."""
        entry = self.spec[dim] if dim < len(self.spec) else None
        return () if entry is None else normalize_axes(entry)

    def parts(self, dim: int) -> int:
        """Return the number of blocks into which dimension `dim` is split."""
        return math.prod(self.mesh.shape[a] for a in self.dim_axes(dim))

    def shard_shape(self, shape: Sequence[int], coordinates: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Return the shape of one device's block of a global array of `shape`.

        n rows over p devices are blocks of ceil(n / p) rows, as in torch.chunk. If p does not divide n, the last blocks are
        smaller, or empty: 5 over 4 is 2, 2, 1, 0.

        Args:
            shape: The global shape.
            coordinates: The device's place along mesh axes (missing axes count as 0), as `mesh.coordinates(device)` returns it.
                You need it only if blocks differ in shape.

        Raises:
            ShardingError: If the spec has more entries than `shape`, or blocks differ and no coordinates are given.

        Example:
            >>> sharding = fc.Sharding(fc.make_mesh({"data": 4}), P("data"))
            >>> [sharding.shard_shape((5, 3), {"data": i}) for i in range(4)]
            [(2, 3), (2, 3), (1, 3), (0, 3)]
        """
        shape = tuple(shape)
        if coordinates is not None:
            return tuple(rows.stop - rows.start for rows in self.index(shape, coordinates))
        dim = self._uneven_dim(shape)
        if dim is not None:
            raise ShardingError(
                f"{self.spec!r} splits an array of shape {shape} into blocks of {block_sizes(shape[dim], self.parts(dim))} "
                f"along dimension {dim}. Name the device, as in shard_shape(shape, mesh.coordinates(device))."
            )
        return self.padded_shard_shape(shape)

    def padded_shard_shape(self, shape: Sequence[int], what: str = "array") -> tuple[int, ...]:
        """Return the shape of the largest block, to which programs pad the others.

        `what` is the array's name in messages. Raises ShardingError if the spec has more entries than `shape`.
        """
        shape = tuple(shape)
        if len(self.spec) > len(shape):
            raise ShardingError(
                f"{what} has shape {shape}, {len(shape)} dimension(s), but {self.spec!r} has {len(self.spec)} entries, one "
                "for each dimension. Drop the entries of dimensions that do not exist."
            )
        return tuple(block_size(extent, self.parts(dim)) for dim, extent in enumerate(shape))

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a global array of `shape` that is padded at its end, so that all blocks have one shape."""
        return tuple(rows * self.parts(dim) for dim, rows in enumerate(self.padded_shard_shape(shape)))

    def is_even(self, shape: Sequence[int]) -> bool:
        """Return True if all blocks of a global array of `shape` have one shape."""
        return self._uneven_dim(shape) is None

    def _uneven_dim(self, shape: Sequence[int]) -> int | None:
        """Return the first dimension whose blocks differ in size."""
        return next((dim for dim, extent in enumerate(shape) if extent % self.parts(dim)), None)

    def check_even(self, shape: Sequence[int], what: str, given: str = "") -> None:
        """Raise ShardingError unless all blocks of a global array of `shape` have one shape, as inside a program.

        Args:
            shape: The global shape.
            what: The array's name in messages.
            given: "Array" for an Array; "value" for a global value that the user passes, which in a job may be a rank's own
                block by mistake.
        """
        shape = tuple(shape)
        self.padded_shard_shape(shape, what)
        dim = self._uneven_dim(shape)
        if dim is None:
            return
        parts, along = self.parts(dim), " x ".join(map(repr, self.dim_axes(dim)))
        sizes, padded = block_sizes(shape[dim], parts), self.padded_shape(shape)[dim]
        pad = "Pad it to"
        if given == "value" and not self.mesh.is_fully_addressable:
            pad = f"If it is this rank's own block, pass fc.from_local(x, mesh, {self.spec!r}). For a global value: pad it to"
        whole = ": fc.redistribute(x, fc.P()) returns such an Array" if given == "Array" else ""
        raise ShardingError(
            f"{what} of shape {shape} cannot be split as {self.spec!r}: dimension {dim} has size {shape[dim]}, which the "
            f"{parts} devices along {along} do not divide evenly (into {sizes}), and in a function all devices have one shape. "
            f"{pad} {padded}, or use None for that dimension (every device then holds it whole){whole}."
        )

    def global_shape(self, shard_shape: Sequence[int], what: str = "output") -> tuple[int, ...]:
        """Return the global shape of an array whose blocks all have `shard_shape`."""
        shape = tuple(shard_shape)
        if len(self.spec) > len(shape):
            stack = "" if shape else " To have one number from each device side by side, return x[None]."
            raise ShardingError(
                f"{what} has shape {shape} on each device, {len(shape)} dimension(s), but {self.spec!r} has "
                f"{len(self.spec)} entries, one for each dimension. Drop the entries of dimensions that do not exist.{stack}"
            )
        return tuple(n * self.parts(d) for d, n in enumerate(shape))

    def block_number(self, dim: int, coordinates: Mapping[str, int]) -> int:
        """Return which block along dimension `dim` the device at `coordinates` holds (missing axes count as 0)."""
        number = 0
        for axis in self.dim_axes(dim):
            number = number * self.mesh.shape[axis] + coordinates.get(axis, 0)
        return number

    def index(self, shape: Sequence[int], coordinates: Mapping[str, int]) -> tuple[slice, ...]:
        """Return the part of a global array of `shape` that the device at `coordinates` holds (missing axes count as 0)."""
        self.padded_shard_shape(shape)
        return tuple(
            block_range(extent, self.parts(dim), self.block_number(dim, coordinates)) for dim, extent in enumerate(shape)
        )

    def draw(self, shape: Sequence[int], **options: Any) -> Drawing:
        """Draw the blocks of a global array of `shape`, each with the devices that hold it, by `fc.draw.sharding`."""
        from ..draw import sharding

        return sharding(self, shape, **options)

    def __repr__(self) -> str:
        return f"Sharding({self.mesh!r}, {self.spec!r})"
