"""The thread for which collectives are called. It is the calling thread, unless that works for another one that waits for
it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calling_thread", "works_for"]


class _OnBehalfOf(threading.local):
    """The identifier of the thread that waits for this one; None if no thread does."""

    thread: int | None = None


_on_behalf_of = _OnBehalfOf()


def calling_thread() -> int:
    """Return the identifier of the thread whose collectives this thread calls."""
    return _on_behalf_of.thread or threading.get_ident()


@contextmanager
def works_for(thread: int) -> Iterator[None]:
    """Call collectives in place of another thread. That thread must wait until this block has ended.

    So their order is that of the waiting thread. On a GPU, for example, autograd runs the backward pass of a module in its own
    thread, while the thread that called `backward` waits for it.
    """
    before, _on_behalf_of.thread = _on_behalf_of.thread, thread
    try:
        yield
    finally:
        _on_behalf_of.thread = before
