"""Started calls of compiled functions, from outside of them: `fc.start`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..core.interpreter import Eager, current_interpreter
from ..errors import TraceError
from ..job import job_context
from ..runtime.work import Work
from .jit import Jitted

__all__ = ["start"]


def start(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Work:
    """Start a call of a jitted function, and return a `Work`, whose `result()` is what the call returns.

    You compute meanwhile, while its collectives wait for other processes. Between hosts a thread of funccoll runs the call at
    once. On one host without an idle core the thread that waits for the call runs it, or that thread 10 ms later. Calls run in
    the order in which your thread starts them, and all end before the next plain call of a function with collectives begins:
    all processes must start them in one order. In one process, and on GPUs, the call has ended when `start` returns.

    Args:
        fn: A function that `fc.jit` returns. It must not donate arguments.
        args: Its arguments. NumPy arrays are copied, so you can write to them at once. Arrays are not.
        kwargs: Its keyword arguments.

    Returns:
        The started call. `work.result()` waits, and returns or raises what the call does; `work.wait(timeout)` raises
        TimeoutError, and the call goes on; `work.test()` never waits; `await work` waits in a coroutine. Any thread may wait.
        If you drop it, the call runs all the same, and the next call raises its exception.

    Raises:
        TraceError: If `fn` is not a jitted function, or donates arguments, or if this is called in a traced function.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> mean = fc.jit(lambda x: fc.all_reduce(x, "data", op="mean"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> work = fc.start(mean, np.array([1.0, 2.0, 3.0, 6.0]))
        >>> # other work of this process comes here
        >>> print(work.result())
        [3.]
    """
    if not isinstance(fn, Jitted):
        raise TraceError(f"fc.start takes a function that fc.jit returned, not {fn!r:.80}. Call it as fc.start(fn, *args).")
    if not isinstance(current_interpreter(), Eager):
        raise TraceError(
            f"fc.start({fn!r:.80}) was called in a traced function. There, start a collective with fc.all_reduce_start and its "
            "like, and take the result with fc.done."
        )
    if fn.donates:
        raise TraceError(
            f"fc.start({fn!r:.80}): it donates arguments, and could overwrite them while you read them. Call it as "
            "fn(*args), or jit it without donate_argnums."
        )
    is_on_gpu = False

    def keep(leaf: Any) -> Any:
        nonlocal is_on_gpu
        is_on_gpu = is_on_gpu or (isinstance(leaf, Array) and leaf.sharding.mesh.device_type != "cpu")
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    args, kwargs = optree.tree_map(keep, (args, kwargs))  # type: ignore[assignment]  # (the same tree)
    work, world = Work(args, f"the call of {fn.__name__}"), job_context.current()
    run = (lambda *given: fn(*given, **kwargs)) if kwargs else fn
    if world is None or is_on_gpu:
        work.run(run)
    else:
        world.transport.start(work, run)
    return work
