"""Buckets of gradients whose reductions have started, and travel while the backward pass goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..runtime.work import Work
from .parameters import GradientSlot

__all__ = ["StartedBuckets"]


class _StartedBucket(NamedTuple):
    """A bucket, its started reduction, and its parameters' gradients with the versions that were sent."""

    bucket: Sequence[int]
    work: Work
    gradients: Sequence[Any]
    versions: Sequence[int]


class StartedBuckets:
    """The buckets of one backward pass that have started, in their order. A bucket leaves when its result is taken."""

    def __init__(self, slots: Sequence[GradientSlot]):
        self._slots = slots
        self._started: list[_StartedBucket] = []

    def __len__(self) -> int:
        return len(self._started)

    def add(self, bucket: Sequence[int], start: Callable[..., Work], blocks: Sequence[Any]) -> None:
        """Start the reduction of a bucket, whose gradients are in `blocks`. Raises what ended an earlier one."""
        gradients = [self._slots[i].parameter.grad for i in bucket]
        versions = [0 if gradient is None else gradient._version for gradient in gradients]
        try:
            work = start(*blocks)
        except Exception:
            self._drain()
            raise
        self._started.append(_StartedBucket(bucket, work, gradients, versions))

    def call(self, reduction: Callable[..., Sequence[Any]], blocks: Sequence[Any]) -> Sequence[Any]:
        """Reduce a bucket that cannot be started. Raises what ended an earlier one."""
        try:
            return reduction(*blocks)
        except Exception:
            self._drain()
            raise

    def written(self, versions: Sequence[int]) -> Iterator[int]:
        """Yield the parameters that were written since their bucket started, or whose gradients were written or replaced.

        `versions` has each parameter's version when the backward pass began.
        """
        for one in self._started:
            for i, gradient, version in zip(one.bucket, one.gradients, one.versions, strict=True):
                parameter = self._slots[i].parameter
                now = parameter.grad
                is_same = now is gradient and (now is None or now._version == version)
                if not is_same or parameter._version != versions[i]:
                    yield i

    def results(self) -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
        """Yield each bucket with its result, as soon as it is there. After an exception, no bucket travels."""
        try:
            while self._started:
                yield self._started[0].bucket, self._next_result()
        except Exception:
            self._drain()
            raise

    def end(self) -> None:
        """Wait until no bucket travels, and drop the results. Raise the first exception.

        It ends a backward pass that an exception has left. Peers may still read the gradients, so their memory must stay.
        """
        if (error := self._drain()) is not None:
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    def _drain(self) -> Exception | None:
        """Wait until no bucket travels. Return the first exception."""
        first: Exception | None = None
        while self._started:
            try:
                self._next_result()
            except Exception as error:
                first = first or error
        return first

    def _next_result(self) -> Sequence[Any]:
        """Return the result of the first bucket, which then leaves. It stays if an interrupt ends the wait."""
        work = self._started[0].work
        try:
            return work.result()
        finally:
            if work.test():
                del self._started[0]
