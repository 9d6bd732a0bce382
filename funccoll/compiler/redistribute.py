"""redistribute: an Array with another partition spec, by collectives."""

from __future__ import annotations

from typing import Any

from ..arrays.array import Array
from ..arrays.array_layout import layout_of
from ..core.interpreter import Traced, current_interpreter
from ..core.mesh import Sharding
from ..core.partition_spec import P
from ..errors import TraceError, current_source, user_frames
from ..tracing.trace import sharding_of
from .program_calls import moved
from .stages import redistribution

__all__ = ["redistribute"]


def redistribute(x: Array, spec: P) -> Array:
    """Return the value of `x`, split over its mesh as `spec` says: `redistribute(x, P("data"))`.

    It runs a program of collectives over the mesh's axes (`own_slice`, `all_to_all`, `permute`, and `all_gather` where an
    axis disappears), proved like any other and compiled once for each shape, dtype, pair of specs and line of the caller.
    In a job all processes must call it. In a gradient around jitted functions with a mesh it takes their results. A jitted
    function does the same to an Array that is split in another way than its `in_specs` say, and `.lower(x).collectives()`
    lists it. For a pytree of Arrays use `fc.tree.map`.

    Args: `x` is an Array of any sharding; it stays as it is. `spec` is a partition spec of the same mesh.
    Returns: an Array of the same global shape and dtype; `x` itself where it has this spec.
    Raises: ShardingError when a dimension does not divide, or `spec` does not fit `x`; MeshError for an axis that the
    mesh does not have; TraceError when `x` is not an Array.
    """
    with user_frames():
        split = sharding_of(x) if isinstance(x, Traced) else None
        if split is not None:
            given = layout_of(x.shape, x.dtype, split)
            return moved(given, Sharding(split.mesh, spec), current_source()).bind((x,))[0]
        _check_array(x)
        wanted = Sharding(x.sharding.mesh, spec)
        wanted.shard_shape(x.shape, "redistribute: x")
        if wanted == x.sharding:
            return x.block_until_ready()  # raises for a donated Array
        given = layout_of(x.shape, x.dtype, x.sharding)
        return redistribution(given, layout_of(x.shape, x.dtype, wanted, x.weak), current_source()).execute((x,))


def _check_array(x: Any) -> None:
    if isinstance(x, Traced) and current_interpreter().calls_meshes:
        raise TraceError(
            f"redistribute: x is a traced array of type {x.type}, which is whole, and on no mesh. In a gradient around jitted "
            "functions with a mesh it takes what is split: such a function's result, or an Array. A whole array is split by "
            "the function that it is passed to, as its in_specs say."
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
