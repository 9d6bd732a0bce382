"""Fast paths of compiled programs, one for each signature. Each checks arguments, runs its program, and wraps the results.

With the C extension a fast path is an object of it. Without, it is a straight-line Python function, generated for the
signature. Both take flat arguments, and return NotImplemented if these do not fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout
from ..core.array_order import in_c_order
from ..core.c_extension import extension
from ..errors import hide_frames

if TYPE_CHECKING:
    import optree

__all__ = ["MOST_FAST_PATHS", "Dispatch", "FastPath", "make_fast_path"]

FastPath = Callable[[Sequence[Any]], Any]

MOST_FAST_PATHS = 8
"""The maximal number of fast paths that a jitted function tries one after the other; it finds others by a key."""
_MOST_IN_PYTHON = 64
"""The maximal number of arguments and results of a generated function. Longer ones take long to compile, and longer to call."""


class PythonDispatch:
    """A function that calls the first of its `fast_paths` that fits the arguments, or else `fallback(args, kwargs)`."""

    def __init__(self) -> None:
        self.fast_paths: list[FastPath] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call a fast path, or `fallback`."""
        try:
            if not kwargs:
                for fast_path in self.fast_paths:
                    result = fast_path(args)
                    if result is not NotImplemented:
                        return result
            return self.fallback(args, kwargs)
        except BaseException as error:  # this frame is funccoll's too
            hide_frames(error)
            raise

    def fallback(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it with arguments for which there is no fast path yet."""
        raise NotImplementedError


Dispatch: Any = PythonDispatch if extension is None else extension.Dispatch


def make_fast_path(
    leaves: Sequence[Any],
    layouts: Sequence[ArrayLayout],
    run: Callable[..., Any],
    out_layouts: Sequence[ArrayLayout],
    out_tree: optree.PyTreeSpec,
    failed: Callable[[BaseException], object],
    packed: Callable[[tuple[Any, ...]], Any] | None = None,
) -> FastPath | None:
    """Return the fast path of a program for flat arguments like `leaves`; None for arguments that take more work.

    Numbers, Arrays that hold their copies in another way, and arrays whose dtype is not the machine's own object take more
    work.

    Args:
        leaves: The flat arguments.
        layouts: Their layouts.
        run: The compiled program.
        out_layouts: The layouts of the results.
        out_tree: The structure of the results.
        failed: It is called with the exceptions of the program.
        packed: `run` as a function of a tuple of its arguments, or None.
    """
    expected = [_expected(leaf, layout) for leaf, layout in zip(leaves, layouts, strict=True)]
    if None in expected:
        return None
    single = out_tree.is_leaf()
    if extension is not None:
        unflatten = None if single else out_tree.unflatten
        return extension.FastPath(tuple(expected), Array, run, tuple(out_layouts), unflatten, failed)
    if len(expected) + len(out_layouts) > _MOST_IN_PYTHON:
        return None
    return _generate(expected, run, packed, out_layouts, None if single else out_tree.unflatten, failed)


def _expected(leaf: Any, layout: ArrayLayout) -> Any:
    """Return the layout of an Array.

    For a NumPy array return (dtype, shape, True for one block, its index, the maker of copies).
    """
    if type(leaf) is Array:
        return leaf.layout if leaf.layout.holds_as(layout) else None
    if type(leaf) is np.ndarray and leaf.dtype is layout.dtype:
        is_block = len(layout.indices) == 1
        index = layout.indices[0] if layout.sharding.varying and is_block else None
        return leaf.dtype, leaf.shape, is_block, index, in_c_order if is_block else layout.split
    return None


def _generate(
    expected: Sequence[Any],
    run: Callable[..., Any],
    packed: Callable[[tuple[Any, ...]], Any] | None,
    out_layouts: Sequence[ArrayLayout],
    unflatten: Callable[[list[Any]], Any] | None,
    failed: Callable[[BaseException], object],
) -> FastPath:
    """Return the straight-line function of a signature. It takes half the time of loops over arguments and results."""
    names: dict[str, Any] = {
        "Array": Array,
        "ndarray": np.ndarray,
        "run": run,
        "failed": failed,
        "unflatten": unflatten,
        "new": Array.__new__,
        "ref": weakref.ref,
    }
    checks, taken = [f"len(leaves) == {len(expected)}"], []
    for i, what in enumerate(expected):
        if type(what) is ArrayLayout:
            names[f"layout{i}"] = what
            # Another thread that donates it drops its copies first, and then its layout.
            kind = f"type(x{i} := leaves[{i}]) is Array and (c{i} := x{i}._copies) is not None"
            checks.append(f"{kind} and x{i}.layout is layout{i}")
            taken.append(f"c{i}")
        else:
            names[f"dtype{i}"], names[f"shape{i}"], _, names[f"index{i}"], names[f"arrange{i}"] = what
            # As `guard` in _native.c: no other thread can resize it now, and the view keeps its shape.
            kind = f"type(x{i} := leaves[{i}]) is ndarray and (g{i} := ref(x{i}))"
            checks.append(f"{kind} and (v{i} := x{i}[...]).dtype is dtype{i} and v{i}.shape == shape{i}")
            taken.append(f"arrange{i}(v{i})" if what[3] is None else f"arrange{i}(v{i}[index{i}])")
    made = [f"a{i}" for i in range(len(out_layouts))]
    lines = []
    for i, layout in enumerate(out_layouts):
        names[f"out{i}"] = layout
        lines.append(f"a{i} = new(Array); a{i}.layout = out{i}; a{i}._copies = r{i}")  # half the time of Array(layout, copies)
    results = "".join(f"r{i}, " for i in range(len(out_layouts)))
    if packed is not None:
        names["run"] = packed
    call = "run(*given)" if packed is None else "run(given)"
    steps = [f"{results}= {call}" if results else call, *lines]
    source = f"""
def call(leaves):
    if not ({" and ".join(checks)}):
        return NotImplemented
    given = ({"".join(f"{t}, " for t in taken)})
    try:
        {"; ".join(steps)}
        return {made[0] if unflatten is None else f"unflatten([{', '.join(made)}])"}
    except BaseException as error:
        failed(error)
        raise
"""
    exec(compile(source, "<funccoll fast_path>", "exec"), names)
    return names.pop("call")  # no cycle: an unused one returns its memory at once
