"""Values as Arrays: device_put, from_local; asarray, without a mesh; and spec_like, the specs of existing Arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_layout import NO_MESH, layout_of
from ..arrays.array_like import device_type_of, to_numpy
from ..core.block_ranges import block_sizes
from ..core.interpreter import Traced, current_interpreter
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.sharding import Sharding
from ..core.types import check_dtype, dtype_name
from ..errors import DTypeError, MeshError, ShapeError, ShardingError, TraceError, user_frames
from ..job.job_context import on_device, transport_of
from ..ops.elementwise import astype, scalar_type
from ..ops.registry import as_operand, has_traced
from ..tracing.trace import Trace, sharding_of

__all__ = ["asarray", "device_put", "from_local", "spec_like"]


def _sharding(mesh: Mesh | Sharding, spec: P | None) -> Sharding:
    if isinstance(mesh, Sharding):
        if spec is not None:
            raise ShardingError(f"{mesh!r} has a spec already: leave out {spec!r}.")
        return mesh
    if not isinstance(mesh, Mesh):
        raise ShardingError(f"expected a mesh (fc.make_mesh({{...}})) or a Sharding, not {mesh!r}.")
    if spec is not None and not isinstance(spec, P):
        inside = ", ".join(map(repr, spec)) if isinstance(spec, tuple) else repr(spec)
        raise ShardingError(f"expected a partition spec, not {spec!r}: write fc.P({inside if spec else ''}).")
    return Sharding(mesh, P() if spec is None else spec)


def _concrete_mesh(sharding: Sharding) -> Sharding:
    if sharding.mesh.is_abstract:
        raise MeshError(f"{sharding.mesh!r} has no devices to hold an array: use fc.make_mesh({dict(sharding.mesh.shape)}).")
    return sharding


def _on(sharding: Sharding, device: str | None, x: Any) -> Sharding:
    """Return the sharding on the devices that `device` names, else on GPUs if `x` is on one."""
    if device is None and device_type_of(x) == "cuda":
        device = "cuda"
    return sharding if device is None else Sharding(on_device(sharding.mesh, device), sharding.spec)


def _value(x: Any, mesh: Mesh, what: str) -> Any:
    """Return a value as an array: on a GPU if it is there and the mesh is of GPUs, else in host memory."""
    if device_type_of(x) != "cuda":
        return to_numpy(x, what)
    if mesh.device_type == "cuda":
        return transport_of(mesh).device.library.asarray(x, what)
    return np.asarray(x) if type(x) is Array else transport_of(on_device(NO_MESH, "cuda")).device.library.asarray(x, what).get()


@user_frames()
def device_put(x: Any, mesh: Mesh | Sharding, spec: P | None = None, *, device: str | None = None) -> Array:
    """Put a global value onto a mesh, split as `spec` says.

    If the devices do not divide a dimension, the last blocks are smaller, or empty: 5 over 4 is 2, 2, 1, 0, as in torch.chunk.
    You can redistribute, gather and save such an Array. A jitted function takes it if its own spec splits it evenly, or not at
    all.

    In a job every process passes the same value; for a process's own block use `fc.from_local`. `device_put` sends nothing. The
    first program that takes the Array compares hashes of what the processes put, and so does `fc.process_allgather`. If they
    differ, it raises ShardingError. The hash of a value of more than 128 KiB reads 128 places of it.

    Args:
        x: A NumPy array, an Array that this process holds whole, a number, or anything with `__array__`, `__array_interface__`,
            `__dlpack__` or `__cuda_array_interface__`. It is copied. For a pytree use `fc.tree.map`.
        mesh: The mesh, or a `Sharding`, which has a mesh and a spec.
        spec: A `P`, with an entry for each dimension of `x` that is split. None puts `x` whole on every device.
        device: "cuda" puts it into the memory of GPUs, "cpu" into host memory. None leaves an array on a GPU there, and puts
            anything else where the mesh's devices are.

    Returns:
        An Array with the shape and dtype of `x`.

    Raises:
        ShardingError: If `spec` has more entries than `x` has dimensions.
        MeshError: If the mesh lacks an axis of the spec, or other processes hold a part of the Array `x`; `fc.redistribute`
            changes an Array's spec.
        DeviceError: If no GPU can be used.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> x = fc.device_put(np.arange(4), mesh, P("data"))
        >>> x
        Array([0, 1, 2, 3], i64[4], P('data') on Mesh({'data': 2}))
        >>> x.shards
        (array([0, 1]), array([2, 3]))
        >>> [block.shape for block in fc.device_put(np.arange(5), fc.make_mesh({"data": 4}), P("data")).shards]
        [(2,), (2,), (1,), (0,)]
    """
    sharding = _concrete_mesh(_sharding(mesh, spec))
    if isinstance(x, dict):
        raise TraceError(
            "device_put takes one array, and x is a dict. For a pytree of arrays, with specs that may be a prefix of it: "
            "fc.tree.map(lambda spec, part: fc.tree.map(lambda a: fc.device_put(a, mesh, spec), part), specs, x)."
        )
    sharding = _on(sharding, device, x)
    value = _value(x, sharding.mesh, "device_put: x")
    sharding.padded_shard_shape(value.shape, "device_put: x")
    layout, new_block = layout_of(value.shape, value.dtype, sharding), transport_of(sharding.mesh).device.new_block
    copies = [new_block(value[i]) for i in layout.indices]
    array = Array(layout, copies if len(copies) > 1 else copies[0])
    if not sharding.mesh.is_fully_addressable:
        array.note_given(value)
    return array


@user_frames()
def from_local(
    x: Any, mesh: Mesh | Sharding, spec: P | None = None, *, shape: Sequence[int] | None = None, device: str | None = None
) -> Array:
    """Make an Array of blocks that are already split.

    In a job nothing is sent. Processes that hold the same part are compared later, as for `fc.device_put`.

    Args:
        x: This process's block. A process that plays several devices passes a list of blocks, one for each device in device
            order. Devices that hold the same part need blocks with equal bits.
        mesh: The mesh, or a `Sharding`, which has a mesh and a spec.
        spec: A `P` that says which part of the global value each block is.
        shape: The global shape, equal on all processes. You need it if blocks differ in shape. Their sizes are those of
            `fc.device_put`: ceil(n / p) rows, and at the end fewer or none.
        device: "cuda", "cpu" or None, as in `fc.device_put`.

    Returns:
        An Array of the blocks' dtype, whose shape is that of all blocks together.

    Raises:
        MeshError: If the number of blocks is not that of the devices which this process plays.
        ShapeError: If blocks differ in dtype, or a block has another shape than its device holds.
        ShardingError: If blocks of the same part differ.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> print(fc.from_local([np.array([1, 2]), np.array([3, 4])], mesh, P("data")))
        [1 2 3 4]
        >>> print(fc.from_local([np.array([1, 2]), np.array([3])], mesh, P("data"), shape=(3,)))
        [1 2 3]
    """
    sharding = _concrete_mesh(_sharding(mesh, spec))
    sharding = _on(sharding, device, x[0] if isinstance(x, (list, tuple)) and x else x)
    size, new_block = sharding.mesh.size, transport_of(sharding.mesh).device.new_block
    given = None if shape is None else _global_shape(shape, sharding)
    if not sharding.mesh.is_fully_addressable:
        block = new_block(_value(x, sharding.mesh, "from_local: x"))
        if given is None:
            given = sharding.global_shape(block.shape, "from_local: a block")
        else:
            _check_block("x", sharding.mesh.local_devices[0], block, given, sharding)
        array = Array(layout_of(given, block.dtype, sharding), block)
        if sharding.equal_along:
            array.note_given_block()
        return array
    if size == 1 and not isinstance(x, (list, tuple)):
        x = [x]
    if not isinstance(x, (list, tuple)) or len(x) != size:
        what = f"a list of {len(x)}" if isinstance(x, (list, tuple)) else f"one {type(x).__name__}"
        raise MeshError(
            f"from_local: this process plays all {size} devices of {sharding.mesh!r}, so it takes a list of {size} blocks "
            f"in device order, and {what} was given. For a global value use fc.device_put."
        )
    blocks = [_value(b, sharding.mesh, f"from_local: block {i}") for i, b in enumerate(x)]
    first = blocks[0]
    for i, block in enumerate(blocks):
        if (given is None and block.shape != first.shape) or block.dtype != first.dtype:
            raise ShapeError(
                f"from_local: block {i} is {block.dtype}{list(block.shape)} and block 0 {first.dtype}{list(first.shape)}: "
                "all devices have one shape and dtype, unless you pass the global shape, as shape=(...), for an axis that does "
                "not divide it."
            )
        if given is not None:
            _check_block(f"block {i}", i, block, given, sharding)
    if given is None:
        given = sharding.global_shape(first.shape, "from_local: a block")
    layout = layout_of(given, first.dtype, sharding)
    copies: list[Any] = [None] * len(layout.indices)
    for position, (block, copy) in enumerate(zip(blocks, layout.copy_of_device, strict=True)):
        if copies[copy] is None:
            copies[copy] = new_block(block)
        elif copies[copy].tobytes() != block.tobytes():
            raise ShardingError(
                f"from_local: {sharding.spec!r} says that device {position} holds the same block as another device, and "
                "their values differ. Name the axis along which they differ in the spec."
            )
    return Array(layout, copies if len(copies) > 1 else copies[0])


def _global_shape(shape: Any, sharding: Sharding) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        sizes = (-1,)
    if any(n < 0 for n in sizes):
        raise ShapeError(f"from_local: shape={shape!r:.60} must be the sizes of the global array, such as (5, 3).")
    sharding.padded_shard_shape(sizes, "from_local: the global array")
    return sizes


def _check_block(name: str, device: int, block: Any, shape: tuple[int, ...], sharding: Sharding) -> None:
    """Raise ShapeError unless a block has the shape of this device's part of a global array of `shape`."""
    wanted = sharding.shard_shape(shape, sharding.mesh.coordinates(device))
    if block.shape == wanted:
        return
    sizes = [
        f"blocks of {block_sizes(shape[d], sharding.parts(d))} along dimension {d}"
        for d, rows in enumerate(wanted)
        if sharding.parts(d) > 1 and block.shape[d : d + 1] != (rows,)
    ]
    told = f" into {' and '.join(sizes)}" if sizes else ""
    raise ShapeError(
        f"from_local: {name} is {dtype_name(block.dtype)}{list(block.shape)}, and device {device} holds {list(wanted)} of a "
        f"global array of shape {shape}, which {sharding.spec!r} splits{told}. Pass blocks of these sizes; shape= is that of "
        "all blocks together."
    )


@user_frames()
def asarray(x: Any, dtype: Any = None) -> Any:
    """Make an array that you can index with traced values: `fc.asarray(table)[i]`, if NumPy cannot trace `table[i]`.

    Inside a traced function the result is a traced constant, a snapshot of `x` that is equal on all devices. Outside it is an
    Array on no mesh. You can make it once and use it in many traced functions.

    Args:
        x: Anything that `fc.device_put` takes, a traced array, or a list of such values. A traced array or an Array is returned
            as it is.
        dtype: Elements are converted to it. Without it a Python scalar stays weak, as in `jnp.asarray`.

    Returns:
        A traced array or an Array with the shape of `x`.

    Raises:
        DTypeError: If funccoll does not support the dtype.
        TraceError: If `x` is not an array.

    Example:
        >>> table = fc.asarray([10, 20, 30])
        >>> print(fc.jit(lambda i: table[i])(2))
        30
    """
    if dtype is not None:
        try:
            dtype = check_dtype(np.dtype(dtype), "asarray: dtype")
        except TypeError as error:
            if isinstance(error, DTypeError):
                raise
            raise DTypeError(f"asarray: dtype={dtype!r} is not an element type: use np.float32, fc.bfloat16, ...") from None
    if has_traced(x):
        x = as_operand(x)
        return x if dtype is None else astype(x, dtype)
    trace = current_interpreter()
    if isinstance(x, Array) and not isinstance(trace, Trace) and (dtype is None or dtype == x.dtype):
        return x
    mesh = on_device(NO_MESH, "cuda") if device_type_of(x) == "cuda" and not isinstance(trace, Trace) else NO_MESH
    value = _value(x, mesh, "asarray: x")
    weak = scalar_type(x) if dtype is None else None
    if dtype is not None:
        value = x = value.astype(dtype, copy=False)
    if isinstance(trace, Trace):
        return trace.constant(value, x, weak)
    return Array(layout_of(value.shape, value.dtype, Sharding(mesh, P()), weak), transport_of(mesh).device.new_block(value))


@user_frames()
def spec_like(tree: Any) -> Any:
    """Return the partition spec of each array in a pytree.

    The spec of an Array is its own, `arr.sharding.spec`; anything else has `P()`. Nothing is sent, and the mesh is not part of
    the result. `fc.optim.state_specs` gives the specs of an optimizer's state before you have one.

    Args:
        tree: A pytree of arrays.

    Returns:
        A pytree of the same structure with a `P` for each array, as `in_specs` and `out_specs` take it.

    Raises:
        TraceError: If an array is traced for one device: the `in_specs` of its function say how it is split.

    Example:
        >>> mesh = fc.make_mesh({"model": 2})
        >>> fc.spec_like({"w": fc.device_put(np.ones((2, 2)), mesh, P(None, "model")), "b": np.ones(2)})
        {'w': P(None, 'model'), 'b': P()}
    """
    leaves, treedef = optree.tree_flatten(tree)
    specs = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Traced) and not current_interpreter().calls_meshes:
            raise TraceError(
                f"spec_like: {treedef.accessors()[i].codify('tree')} is a traced array, one device's part of a value, and has "
                "no spec. Call spec_like outside of the traced function, with the Arrays that are passed to it."
            )
        sharding = leaf.sharding if type(leaf) is Array else sharding_of(leaf)
        specs.append(P() if sharding is None else sharding.spec)
    return treedef.unflatten(specs)
