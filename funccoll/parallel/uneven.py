"""Uneven inputs: devices with different numbers of batches, or of rows in their last batch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_like import to_numpy
from ..collectives.argument_checks import Axes
from ..collectives.functions import all_gather
from ..compiler.jit import jit
from ..compiler.placement import from_local
from ..core.mesh import Mesh
from ..core.partition_spec import P
from ..core.pytree_differences import first_difference
from ..core.sharding import Sharding
from ..errors import FunccollError, MeshError, PytreeError, ShapeError, TraceError, UnevenBatchesError
from ..job.job_context import on_device

__all__ = ["uneven_batches"]

ENDED, ACTIVE, NOTHING = 0, 1, 2
"""States of a device before each step: its batches have ended, it has one, it never had one."""


def uneven_batches(
    batches: Iterable[Any] | Callable[[int], Iterable[Any]],
    *,
    mesh: Mesh,
    axis: Axes = "data",
    batch_size: int | None = None,
    like: Any = None,
    throw_on_early_termination: bool = False,
) -> Generator[tuple[Array, Any], None, None]:
    """Iterate over batches until all devices have ended, if devices along `axis` have different numbers of them.

    A device without a further batch continues with its last one, and its weight `active` is 0. Weight each example's loss by
    it. For `fc.data_parallel(loss_fn, reduction="weighted")`, `loss_fn` returns `np.sum(active * losses)` and
    `np.sum(active * np.ones_like(losses))`. `fc.nn.sync_batch_norm` takes `active` as `weights`.

    Before each step, one all_gather sends a byte for each device. All processes must stay in the loop until it ends, or leave
    it at the same step. If one leaves it alone, the others raise in their next collective.

    Args:
        batches: This process's batches, pytrees of blocks as `fc.from_local` takes them. A function from a position along
            `axis` to its batches also serves a process that plays several devices.
        mesh: The mesh. Devices at the same position along `axis` must have the same batches.
        axis: The mesh axis, or a tuple of axes, over which batches are split.
        batch_size: The rows of every block, if the last batch may have fewer. Such a batch is padded with its last row, so one
            compiled step fits all.
        like: A batch of real values for devices that have none at all.
        throw_on_early_termination: True makes all devices raise as soon as the first one ends.

    Yields:
        `(active, batch)`, Arrays that are split over `axis` in their first dimension. `active` is float32: 1 if the batch is
        data, 0 if it is padding. A device's block of it has shape (1,), with `batch_size` one number for each row.

    Raises:
        UnevenBatchesError: On all processes at the same step, if a device has no batch and `like` is missing, if only some
            devices of one position have ended, or with `throw_on_early_termination`.
        ShapeError: If a batch does not fit `batch_size`.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> data = [[np.array([1.0])], [np.array([2.0]), np.array([3.0])]]  # the batches of each device
        >>> for active, x in fc.uneven_batches(lambda device: data[device], mesh=mesh):
        ...     print(np.asarray(active), np.asarray(x))
        [1. 1.] [1. 2.]
        [0. 1.] [1. 3.]

    References:
        torch.distributed.algorithms.Join, which shadows the collectives of ranks that have ended. Here they run the same
        program.
    """
    if not isinstance(mesh, Mesh) or mesh.is_abstract:
        raise MeshError(f"uneven_batches takes a mesh with devices, from fc.make_mesh({{...}}), not {mesh!r:.60}.")
    axes = mesh.check_axes(axis)
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ShapeError(f"uneven_batches: batch_size={batch_size!r} must be the rows of a device's block, at least 1.")
    along = [_position(mesh, axes, device) for device in range(mesh.size)]
    played = sorted({along[device] for device in mesh.local_devices})
    if callable(batches) and not isinstance(batches, Iterable):
        sources = {i: _Batches(batches(i), batch_size, like) for i in played}
    elif len(played) == 1:
        sources = {played[0]: _Batches(batches, batch_size, like)}
    else:
        raise MeshError(
            f"uneven_batches: this process plays all {len(played)} positions along {axis!r} of {mesh!r}, and one iterable was "
            "given. Pass a function from a position to its batches, such as lambda i: loaders[i]."
        )
    return _steps(sources, mesh, axes, along, throw_on_early_termination)


def _position(mesh: Mesh, axes: Sequence[str], device: int) -> int:
    """Return the position of a device along `axes`, the first one outermost."""
    coordinates = mesh.coordinates(device)
    return functools.reduce(lambda index, a: index * mesh.shape[a] + coordinates[a], axes, 0)


class _Batches:
    """The batches of one position, with padding after the last of them."""

    def __init__(self, batches: Iterable[Any], batch_size: int | None, like: Any):
        if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
            raise TraceError(f"uneven_batches takes an iterable of batches, or a function to one, not {batches!r:.60}.")
        self.batches = batches
        self.iterator: Iterator[Any] | None = None
        self.batch_size = batch_size
        self.rows = 0
        self.padding = None if like is None else self._filled(like)
        """The last batch, or `like`."""

    def advance(self) -> int:
        """Take the next batch, and return ENDED, ACTIVE or NOTHING."""
        if self.iterator is None:
            self.iterator = iter(self.batches)
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.rows = 0
            return NOTHING if self.padding is None else ENDED
        self.padding = self._filled(batch)
        return ACTIVE

    def _filled(self, batch: Any) -> Any:
        """Return the batch with as many rows as `batch_size` says."""
        self.rows = 1
        size = self.batch_size
        if size is None:
            return batch
        shapes = [np.shape(leaf) for leaf in optree.tree_leaves(batch)]
        rows = {shape[:1] for shape in shapes}
        if len(rows) != 1 or not all(0 < n <= size for shape in shapes for n in shape[:1] or (0,)):
            raise ShapeError(
                f"uneven_batches(batch_size={size}): a batch has arrays of shapes {', '.join(map(str, shapes))}; all must "
                f"have the same number of rows, from 1 to {size}."
            )
        ((self.rows,),) = rows
        missing = size - self.rows
        if not missing:
            return batch
        return optree.tree_map(lambda leaf: _repeat_last_row(to_numpy(leaf, "uneven_batches: a batch"), missing), batch)

    def flat(self) -> tuple[list[Any], Any]:
        """The leaves and the structure of the next batch."""
        batch: Any = self.padding
        return optree.tree_flatten(batch)

    def active(self) -> np.ndarray:
        """The weights of the batch's rows, or its one weight."""
        return (np.arange(self.batch_size or 1) < self.rows).astype(np.float32)


def _repeat_last_row(x: np.ndarray, times: int) -> np.ndarray:
    return np.concatenate([x, np.broadcast_to(x[-1:], (times, *x.shape[1:]))])


def _steps(
    sources: dict[int, _Batches], mesh: Mesh, axes: tuple[str, ...], along: Sequence[int], throw: bool
) -> Generator[tuple[Array, Any], None, None]:
    own = [along[device] for device in mesh.local_devices]
    sharding = Sharding(mesh, P(axes))
    exchange = _exchange(on_device(mesh, "cpu"))  # the host decides, and waits for no GPU

    def split(blocks: Sequence[Any]) -> Array:
        return from_local(blocks if mesh.is_fully_addressable else blocks[0], sharding)

    for step in itertools.count():
        found = {i: source.advance() for i, source in sources.items()}
        states = exchange([found[i] for i in own])
        if ACTIVE not in states:
            return
        if states.count(ACTIVE) < mesh.size:
            _check(states, along, step, throw, mesh, axes)
        trees = [sources[i].flat() for i in own]
        for i, (_, treedef) in zip(own, trees, strict=True):
            if treedef != trees[0][1]:
                raise PytreeError(
                    f"uneven_batches: the batches of positions {i} and {own[0]} must have one structure: "
                    f"{first_difference(treedef, trees[0][1], 'batch', f'that of position {own[0]} has')}."
                )
        blocks = zip(*(leaves for leaves, _ in trees), strict=True)
        batch: Any = optree.tree_unflatten(trees[0][1], map(split, blocks))
        yield split([sources[i].active() for i in own]), batch


def _exchange(mesh: Mesh) -> Callable[[Sequence[int]], list[int]]:
    """Return a function from the states of this process's devices to those of all devices."""
    if mesh.is_fully_addressable:
        return list
    everywhere = P(mesh.axis_names)

    def which_have_batches(state: Any) -> Any:
        return all_gather(state, mesh.axis_names)

    gather = jit(which_have_batches, mesh=mesh, in_specs=everywhere, out_specs=P())

    @functools.cache
    def array(state: int) -> Array:
        return from_local(np.array([state], np.int8), mesh, everywhere)

    def exchange(states: Sequence[int]) -> list[int]:
        try:
            return np.asarray(gather(array(states[0]))).tolist()
        except FunccollError as error:
            error.add_note(
                "fc.uneven_batches asked which ranks still have batches, as before every step: a rank that left its loop "
                "early (break, return, an exception) does not answer. Leave the loop on all ranks at the same step."
            )
            raise

    return exchange


def _check(states: Sequence[int], along: Sequence[int], step: int, throw: bool, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Raise, on all processes alike, for the states of all devices if one is ACTIVE."""
    kind = "device" if mesh.is_fully_addressable else "rank"
    over = ", ".join(map(repr, axes))

    def named(devices: Sequence[int]) -> str:
        return f"{kind}{'s' * (len(devices) > 1)} {', '.join(map(str, devices))}"

    active = {along[device] for device, state in enumerate(states) if state == ACTIVE}
    ended = [device for device, state in enumerate(states) if state != ACTIVE]
    torn = [device for device in ended if along[device] in active]
    if torn:
        others = [d for d, state in enumerate(states) if state == ACTIVE and along[d] == along[torn[0]]]
        raise UnevenBatchesError(
            f"uneven_batches: after {step} batches {named(torn)} had no further one, but {named(others)} had, at the same "
            f"position along {over}. Devices that differ only in other axes must have the same batches."
        )
    without = [device for device in ended if states[device] == NOTHING]
    if throw and ended:
        raise UnevenBatchesError(
            f"uneven_batches(throw_on_early_termination=True): after {step} batches {named(ended)} had no further one, and "
            "others had. All have ended here."
        )
    if without:
        raise UnevenBatchesError(
            f"uneven_batches: {named(without)} had no batch at all, and others had, so there is nothing to continue with. "
            "Pass like=batch, a batch of real values with the shapes and dtypes of the others."
        )
