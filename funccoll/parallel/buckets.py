"""Buckets: gradients that are reduced together, and how parameters are assigned to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..collectives.argument_checks import Axes
from ..collectives.functions import all_reduce
from ..core.types import ArrayType
from ..errors import ShapeError
from ..ops.registry import as_traceable
from ..tracing.trace import value_type

__all__ = ["Bucket", "BucketAssignment", "CommHook", "assign_buckets"]


@dataclass(frozen=True)
class Bucket:
    """Gradients of one dtype that are reduced together, as a communication hook gets them.

    In the backward pass each device has its own addends, and the hook returns their sum over `axis`. A mean is divided
    before, so that 16-bit floats do not overflow.

    Args:
        gradients: Traced arrays, in the order in which the backward pass completes them.
        names: The places of the parameters in `params`, such as "['w'][0]".
        index: 0 for the bucket that is reduced first.
        axis: The mesh axis, or a tuple of axes.
    """

    gradients: tuple[Any, ...]
    """Traced arrays, in the order in which the backward pass completes them."""
    names: tuple[str, ...]
    """The parameters' places in `params`, such as "['w'][0]"."""
    index: int
    """0 for the bucket that is reduced first."""
    axis: Axes

    @property
    def dtype(self) -> np.dtype:
        """The gradients' dtype."""
        return value_type(self.gradients[0]).dtype

    def buffer(self) -> Any:
        """Return all gradients as one array of one dimension, in their order."""
        flat = [as_traceable(g).reshape(-1) for g in self.gradients]
        return flat[0] if len(flat) == 1 else np.concatenate(flat)

    def from_buffer(self, buffer: Any) -> Bucket:
        """Return a bucket with the gradients of such an array, which may have another dtype.

        Raises:
            ShapeError: If the array has another size than the bucket.
        """
        types = [value_type(g) for g in self.gradients]
        size = sum(t.size for t in types)
        if value_type(buffer).shape != (size,):
            raise ShapeError(
                f"bucket {self.index} has {size} elements, and its buffer shape ({size},); it was given one of shape "
                f"{value_type(buffer).shape}."
            )
        ends = np.cumsum([t.size for t in types])
        return self.replace([buffer[end - t.size : end].reshape(t.shape) for t, end in zip(types, ends, strict=True)])

    def replace(self, gradients: Sequence[Any]) -> Bucket:
        """Return a bucket with other gradients."""
        return replace(self, gradients=tuple(gradients))

    def all_reduce(self) -> Bucket:
        """Return the bucket with the sums over the axis, from one call of `fc.all_reduce`."""
        return self.replace(all_reduce(list(self.gradients), self.axis, op="sum"))


class CommHook(NamedTuple):
    """A communication hook with state, for `fc.data_parallel(comm_hook=...)`.

    The state is kept for each parameter, so it does not depend on the assignment of parameters to buckets. Each device has its
    own, such as the errors that it feeds back.

    Args:
        init: `init(gradient)` returns the first state for a gradient, an array (of zeros) in a trace: a pytree of arrays.
        reduce: `reduce(states, bucket)` returns `(states, bucket)`. It is pure; `states` is a tuple with the state of each
            gradient of the bucket.
    """

    init: Callable[[Any], Any]
    """`init(gradient)`: the first state of a gradient, an array (of zeros) in a trace: a pytree of arrays."""
    reduce: Callable[[Any, Bucket], tuple[Any, Bucket]]
    """`reduce(states, bucket) -> (states, bucket)`: pure; `states` is a tuple with the state of each gradient of the bucket."""


@dataclass(frozen=True)
class BucketAssignment:
    """The assignment of parameters to buckets, in the order in which buckets are reduced. `assign_buckets` makes it."""

    buckets: tuple[tuple[int, ...], ...]
    """The numbers of each bucket's parameters, in the order of their gradients in it."""
    dtypes: tuple[np.dtype, ...]
    """The dtype of each bucket's gradients."""
    nbytes: tuple[int, ...]
    """The bytes of each bucket's gradients on one device."""

    def is_last(self, number: int) -> bool:
        """True for the number of the bucket that is reduced last."""
        return number == len(self.buckets) - 1


def assign_buckets(
    types: Sequence[ArrayType], order: Sequence[int], caps: Sequence[float], alone: Collection[int] = (), least: float = 0
) -> BucketAssignment:
    """Assign parameters to buckets of one dtype.

    Args:
        types: The types of all parameters, by number.
        order: The numbers of those that are reduced, in the order in which their gradients become ready.
        caps: Sizes in bytes: one for each bucket in turn, the last for all that follow. A bucket is closed if the next
            parameter would make it larger than its cap. A parameter over the cap has a bucket of its own.
        alone: The numbers of parameters that have a bucket of their own each, after all others.
        least: The part of its cap below which a bucket is not closed: it takes the next parameter, however large.
    """
    buckets: list[list[int]] = []
    nbytes: list[int] = []
    filling: dict[np.dtype, tuple[int, float]] = {}  # dtype -> its open bucket, and that bucket's cap

    def begin(i: int) -> None:
        buckets.append([i])
        nbytes.append(types[i].nbytes)

    for i in order:
        if i in alone:
            continue
        number, cap = filling.get(types[i].dtype, (-1, 0.0))
        if number < 0 or (nbytes[number] + types[i].nbytes > cap and nbytes[number] >= least * cap):
            filling[types[i].dtype] = len(buckets), caps[min(len(buckets), len(caps) - 1)]
            begin(i)
        else:
            buckets[number].append(i)
            nbytes[number] += types[i].nbytes
    for i in order:
        if i in alone:
            begin(i)
    return BucketAssignment(tuple(map(tuple, buckets)), tuple(types[b[0]].dtype for b in buckets), tuple(nbytes))
