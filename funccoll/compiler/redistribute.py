"""redistribute: an Array with another partition spec, by collectives."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..arrays.array_layout import layout_of
from ..core.interpreter import Traced, current_interpreter
from ..core.partition_spec import P
from ..core.sharding import Sharding
from ..errors import TraceError, current_source, user_frames
from ..tracing.trace import sharding_of
from .program_calls import moved
from .stages import redistribution

__all__ = ["redistribute"]


def redistribute(x: Array, spec: P) -> Array:
    """Split an Array over its mesh as `spec` says, by collectives.

    It runs a proved program of `own_slice`, `all_to_all`, `permute` and, if an axis disappears, `all_gather`. The program is
    compiled once for each shape, dtype, pair of specs and line of the caller. In a job all processes must call it. A jitted
    function does the same to an Array that is split in another way than its `in_specs` say, and `.lower(x).collectives()` lists
    it. In a gradient around jitted functions with a mesh, `redistribute` takes their results.

    Blocks may differ in size before and after, as `fc.device_put` says. A dimension that both specs split, into blocks of other
    sizes, is then gathered in between.

    Args:
        x: An Array of any sharding. It stays as it is. For a pytree use `fc.tree.map`.
        spec: A `P` of the same mesh.

    Returns:
        An Array of the same global shape and dtype; `x` itself if it has this spec.

    Raises:
        ShardingError: If `spec` has too many entries.
        MeshError: If the mesh lacks an axis.
        TraceError: If `x` is not an Array.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> x = fc.device_put(np.arange(4).reshape(2, 2), mesh, P("data"))
        >>> fc.redistribute(x, P(None, "data")).shards
        (array([[0],
               [2]]), array([[1],
               [3]]))
    """
    with user_frames():
        split = sharding_of(x) if isinstance(x, Traced) else None
        if split is not None:
            given = layout_of(x.shape, x.dtype, split)
            return moved(given, Sharding(split.mesh, spec), current_source()).bind((x,))[0]
        _check_array(x)
        wanted = Sharding(x.sharding.mesh, spec)
        wanted.padded_shard_shape(x.shape, "redistribute: x")
        if wanted == x.sharding:
            return x.block_until_ready()  # raises for a donated Array
        given = layout_of(x.shape, x.dtype, x.sharding)
        return redistribution(given, layout_of(x.shape, x.dtype, wanted, x.weak), current_source()).execute((x,))


def _check_array(x: Any) -> None:
    if isinstance(x, Traced) and current_interpreter().calls_meshes:
        raise TraceError(
            f"redistribute: x is a traced array of type {x.type}, which is whole, and on no mesh. In a gradient around jitted "
            "functions with a mesh it takes split values: such a function's result, or an Array. A function that you pass a "
            "whole array splits it as its in_specs say."
        )
    if isinstance(x, Traced):
        raise TraceError(
            f"redistribute: x is a traced array of type {x.type}, one device's block. Inside a traced function use "
            "fc.all_gather, fc.own_slice or fc.all_to_all."
        )
    if type(x) is not Array:
        raise TraceError(
            f"redistribute: x is of type {type(x).__name__}, and has no sharding to change. Put a global value onto a mesh "
            "with fc.device_put(x, mesh, spec), a process's own block with fc.from_local."
        )
