"""Started collectives: `all_reduce_start` and its like return a `Future`, and `done` takes its result.

Each is made from the plain collective: it takes the same arguments, and records the same equations, which are marked as
started. The compiler lets compute run meanwhile (`compiler/passes/overlap.py`). Source: JAX's psum_start and done.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import optree

from ..core.interpreter import current_interpreter, starting
from ..core.keyword_errors import explains_keywords
from ..errors import MeshError, TraceError, current_source
from ..tracing.future import Future
from ..tracing.trace import Trace, value_type
from . import functions

__all__ = [
    "all_gather_start",
    "all_reduce_start",
    "all_to_all_start",
    "arg_reduce_start",
    "broadcast_start",
    "done",
    "exclusive_scan_start",
    "gather_start",
    "inclusive_scan_start",
    "permute_start",
    "reduce_scatter_start",
    "reduce_start",
    "scatter_start",
]

Params = ParamSpec("Params")
R = TypeVar("R")


def _started(plain: Callable[Params, Any]) -> Callable[Params, Future]:
    """Make the function that starts a plain collective."""
    name = plain.__name__

    def start(*args: Params.args, **kwargs: Params.kwargs) -> Future:
        trace = current_interpreter()
        if not isinstance(trace, Trace) or not trace.axis_sizes:
            raise MeshError(
                f"{name}_start was called outside a function that fc.jit traces with a mesh. Outside, fc.start(f, *args) "
                f"starts a call of a jitted function; inside, fc.{name}_start starts one collective."
            )
        with starting():
            result = plain(*args, **kwargs)
        return Future(name, result, [value_type(x) for x in optree.tree_leaves(result)], trace, current_source())

    functools.update_wrapper(start, plain)
    start.__name__ = start.__qualname__ = f"{name}_start"
    start.__signature__ = inspect.signature(plain).replace(return_annotation="Future")
    start.__doc__ = _documentation(name, plain.__doc__ or "")
    del start.__wrapped__  # type: ignore[attr-defined]
    return explains_keywords()(start)


def _documentation(name: str, of_plain: str) -> str:
    """Return the docstring of a start: the plain collective's arguments and errors."""
    _, _, rest = of_plain.partition("    Args:\n")
    arguments, _, rest = rest.partition("    Returns:\n")
    _, raises, errors = rest.partition("    Raises:\n")
    errors = errors.partition("    Example:\n")[0].rstrip()
    raises = raises or "    Raises:\n"
    return (
        f"Start `{name}`, and return a `Future` of its result, which `fc.done` takes.\n\n"
        "    Between hosts, operations that do not need the result run while the data travels. On one host it may be a\n"
        f"    plain call. Arguments and result are those of `{name}`, bit for bit. So is the gradient, whose collective is\n"
        "    started as well.\n\n"
        f"    Args:\n{arguments.rstrip()}\n\n"
        f"    Returns:\n        A `Future`; `fc.done(h)` gives what `{name}` returns.\n\n"
        f"{raises}{errors}\n        TraceError: If the future is used as an array, or is not done.\n    "
    )


all_reduce_start = _started(functions.all_reduce)
all_gather_start = _started(functions.all_gather)
reduce_scatter_start = _started(functions.reduce_scatter)
all_to_all_start = _started(functions.all_to_all)
permute_start = _started(functions.permute)
broadcast_start = _started(functions.broadcast)
reduce_start = _started(functions.reduce)
gather_start = _started(functions.gather)
scatter_start = _started(functions.scatter)
inclusive_scan_start = _started(functions.inclusive_scan)
exclusive_scan_start = _started(functions.exclusive_scan)
arg_reduce_start = _started(functions.arg_reduce)


@explains_keywords()
def done(h: Future) -> Any:
    """Finish a started collective, and return its result.

    The operations that need the result decide when the program waits for it, and not the place of `done`. Other operations run
    meanwhile, if the collective is in flight. Between hosts it is.

    Args:
        h: The future that `fc.all_reduce_start`, or another start, returned. It is done once.

    Returns:
        What the plain collective returns: an array, or a pytree of arrays.

    Raises:
        TraceError: If `h` is not a future, is done already, or was started in another traced function, loop body or branch.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> @fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        ... def fn(x):
        ...     h = fc.all_reduce_start(x, "data")
        ...     y = x * 2  # does not need the result
        ...     return y + fc.done(h)
        >>> print(fn(np.array([1, 2, 3, 4])))
        [12 14 16 18]
    """
    if not isinstance(h, Future):
        raise TraceError(f"fc.done takes what a start returned, such as fc.all_reduce_start, not a {type(h).__name__}.")
    return h.take(current_interpreter())
