"""Control flow in traced functions: scan, fori_loop, while_loop, cond, switch, with JAX's signatures.

A body is traced once. It is traced again only while the `varying` of a carry grows, or if a carry turns out not to be a Python
scalar. In a program the body is a program of its own, so compilation takes as long for 5,000 iterations as for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import Traced, bind, current_interpreter
from ..core.ir import Equation, Program, Var
from ..core.pytree_differences import first_difference
from ..core.pytree_paths import path_name, path_names
from ..core.types import ArrayType
from ..errors import ConcretizationError, DTypeError, PytreeError, ShapeError, TraceError, VaryingError, current_source
from ..ops.elementwise import astype, scalar_type
from ..ops.registry import as_traceable
from ..primitives.control_flow import cond_p, require_same_decision, scan_p, while_p
from ..tracing import batched_control as batched_control
from ..tracing.closed_programs import closed, with_same_operands
from ..tracing.trace import flatten_outputs, label_of, require_function, stage, value_type
from ..tracing.tracer import Tracer
from .autodiff import control_rules as control_rules  # gradients of loops
from .autodiff import control_tangents as control_tangents
from .autodiff.backward import pvary_to

__all__ = ["cond", "fori_loop", "scan", "switch", "while_loop"]


class _Carry:
    """The carry of a loop: its leaves, and the types with which they enter an iteration."""

    def __init__(self, what: str, name: str, init: Any):
        self.what, self.name = what, name
        self.init = "init" if what == "scan" else "init_val"
        leaves, self.tree = flatten_outputs(init, f"{what}: init", given=True)
        self.weak = [scalar_type(x) for x in leaves]
        self.values = [as_traceable(x) for x in leaves]
        self.types = [value_type(x) for x in self.values]

    def flatten(self, result: Any) -> list[Any]:
        """Return the leaves of the body's result. Raises PytreeError if its structure is not that of init."""
        leaves, tree = flatten_outputs(result, self.name)
        if tree != self.tree:
            raise PytreeError(
                f"{self.what}: the carry that {self.name} returns and init must have one structure: "
                f"{first_difference(tree, self.tree, 'carry', 'init has')}."
            )
        return leaves

    def settle(self, outs: list[Any], varying: frozenset[str]) -> tuple[list[Any], bool]:
        """Return the results of the body in the types of the carry, and whether these grew: then the body is traced again."""
        settled, before = [], (list(self.types), list(self.weak))
        for k, out in enumerate(outs):
            found, type, weak = value_type(out), self.types[k], scalar_type(out)
            if found.shape != type.shape or found.dtype != type.dtype:
                if found.shape != type.shape or not _takes(found.dtype, self.weak[k]):
                    raise self._changed(k, type, found)
                type = ArrayType(type.shape, found.dtype, type.varying)
            self.weak[k] = weak if self.weak[k] else None
            self.types[k] = type.vary(type.varying | found.varying | varying)
            settled.append(pvary_to(as_traceable(out), self.types[k]))
        return settled, before != (self.types, self.weak)

    def _changed(self, k: int, type: ArrayType, found: ArrayType) -> Exception:
        where = path_name("the carry", self.tree, k)
        kind = ShapeError if found.shape != type.shape else DTypeError
        convert = f"Convert one of them, for example x.astype(np.{type.dtype})"
        remedy = "Make init of that shape" if kind is ShapeError else convert
        return kind(
            f"{self.what}: {where} enters {self.name} as {type} and leaves it as {found}: an iteration must return "
            f"what the next one takes. {remedy}."
        )

    def begins_equal(self, error: VaryingError, entering: Sequence[Any]) -> VaryingError:
        """Return the error about a collective's equal operand in words for an operand from the carry, which begins equal."""
        comes_from = {x.variable for x in error.operands if isinstance(x, Tracer)}
        recorded: Sequence[Equation] = entering[0].frame.equations if entering else ()
        for eqn in reversed(recorded):
            if eqn.primitive.kind != "collective" and not comes_from.isdisjoint(eqn.outputs):
                comes_from.update(a for a in eqn.inputs if isinstance(a, Var))
        found = [k for k, x in enumerate(entering) if x.variable in comes_from]
        if error.equal_operand is None or not found:
            return error
        (stated, over), init = error.equal_operand, path_name(self.init, self.tree, found[0])
        told = VaryingError(
            f"{stated}: it comes from {init} of {self.what}, which is equal on all those devices. If each device has its own "
            f"after an iteration, begin with fc.pvary({init}, {over}); if not, drop the collective.",
            error.source,
        )
        told.equal_operand = error.equal_operand
        return told.with_traceback(error.__traceback__)

    def next_state(self, result: Any) -> Any:
        """Return the next carry from what the body returns, in a trace with values."""
        outs, _ = self.settle(self.flatten(result), frozenset())
        return self.unflatten(_with_values(outs, self.weak))

    def entering(self) -> list[Any]:
        """Return the values of init in the types that the body takes."""
        pairs = zip(self.values, self.types, self.weak, strict=True)
        return [pvary_to(x if x.dtype == t.dtype and weak else _converted(self.what, x, t.dtype), t) for x, t, weak in pairs]

    def unflatten(self, results: Sequence[Any]) -> Any:
        """The pytree of final values."""
        return self.tree.unflatten(_as_scalars(results, self.weak))


def _rank(dtype: np.dtype) -> int:
    """The position of a dtype among bool, int, float, complex; bfloat16's kind is not "f"."""
    return {"b": 0, "i": 1, "u": 1, "c": 3}.get(dtype.kind, 2)


def _takes(dtype: np.dtype, weak: type | None) -> bool:
    """True if a Python scalar of type `weak` takes this dtype when they meet (NEP 50)."""
    return weak is not None and _rank(np.dtype(weak)) <= _rank(dtype)


def _converted(what: str, x: Any, dtype: np.dtype) -> Any:
    """Return a value that stands for a Python scalar, in the dtype that it meets. Raises DTypeError if it does not fit."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu" and dtype.kind in "iu" and np.any(x.astype(dtype) != x):
        raise DTypeError(f"{what}: the Python integer {x} does not fit {dtype}, the dtype of the arrays that it meets.")
    return astype(x, dtype)


def _as_scalars(results: Sequence[Any], weak: Sequence[type | None]) -> Sequence[Any]:
    """Return results; traced ones stand for Python scalars of these types."""
    for x, kind in zip(results, weak, strict=True):
        if kind and isinstance(x, Traced):
            x.weak = kind
    return results


def _length(xs: Any, length: int | None) -> tuple[int, list[Any], Any]:
    leaves, tree = flatten_outputs(xs, "scan: xs", given=True)
    leaves, sizes = [as_traceable(x) for x in leaves], {}
    if length is not None and (isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 0):
        raise TraceError(f"scan: length={length!r} must be a number of iterations, known while tracing.")
    for where, leaf in zip(path_names("xs", tree), leaves, strict=True):
        if not leaf.ndim:
            raise ShapeError(f"scan: {where} is a scalar of type {value_type(leaf)}: it scans the first dimension of arrays.")
        sizes[where] = int(leaf.shape[0])
    if length is None and not sizes:
        raise TraceError("scan: xs is None. Pass length=, the number of iterations.")
    wanted = next(iter(sizes.values())) if length is None else int(length)
    if any(size != wanted for size in sizes.values()):
        shown = ", ".join(f"{where} has {size}" for where, size in sizes.items())
        raise ShapeError(f"scan: first dimensions differ: {shown}{'' if length is None else f', length is {length}'}.")
    return wanted, leaves, tree


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """Scan a function over the first dimension of arrays while carrying state.

    The body is traced and compiled once, and has gradients. You may call collectives in it; each runs in every iteration.

    Args:
        f: `f(carry, x)` returns `(carry, y)`, where `x` has one element of each array of `xs`, and `y` may be None. The carry
            keeps its structure, shapes and dtypes.
        init: The first carry, a pytree of arrays.
        xs: A pytree of arrays with equal first dimensions, or None.
        length: The number of iterations; needed if `xs` is None.
        reverse: True goes from the last element to the first. `ys` stay in the order of `xs`.
        unroll: Accepted as in JAX; it changes nothing.

    Returns:
        `(carry, ys)`: the last carry, and all `y` stacked along a new first dimension.

    Raises:
        ShapeError: If the carry changes its shape, or the lengths of `xs` differ.
        DTypeError: If the carry changes its dtype.
        PytreeError: If the carry changes its structure.

    Example:
        >>> def add(total, x):
        ...     return total + x, total
        >>> total, before = fc.scan(add, 0, np.arange(4))
        >>> print(total, before)
        6 [0 0 1 3]

    References:
        JAX's `scan`.
    """
    require_function("scan", f)
    if not isinstance(reverse, (bool, np.bool_)):
        raise TraceError(f"scan: reverse={reverse!r} must be True or False, known while tracing.")
    if not isinstance(unroll, (bool, int, np.integer)) or unroll < (0 if isinstance(unroll, bool) else 1):
        raise TraceError(f"scan: unroll={unroll!r} must be a positive integer, or True or False.")
    return _scan("scan", f, init, xs, length, reverse)


def _scan(
    what: str,
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None,
    reverse: bool,
    weak: type | None = None,
) -> tuple[Any, Any]:
    """A scan, or another loop that is one (`what`); elements of `xs` stand for Python scalars of type `weak`."""
    name, carry = label_of(f), _Carry(what, label_of(f), init)
    length, leaves, xs_tree = _length(xs, length)
    if length and current_interpreter().unrolls:
        rows = (xs_tree.unflatten(_with_values([x[i] for x in leaves], [weak] * len(leaves))) for i in range(length))
        return _python_scan(carry, f, list(rows), reverse)
    elements = [ArrayType(t.shape[1:], t.dtype, t.varying) for t in map(value_type, leaves)]
    count, info = len(carry.values), {}

    def flat(*values: Any) -> list[Any]:
        try:
            result = f(carry.tree.unflatten(values[:count]), xs_tree.unflatten(values[count:]))
        except VaryingError as error:
            raise carry.begins_equal(error, values[:count]) from None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TraceError(f"scan: {name} must return (carry, y), not {type(result).__name__}; y may be None.")
        outs, info["grown"] = carry.settle(carry.flatten(result[0]), frozenset())
        ys, info["tree"] = flatten_outputs(result[1], name)
        return [*outs, *map(as_traceable, ys)]

    while True:
        kinds = [*carry.weak, *(weak for _ in elements)]
        program, captured = stage(flat, [*carry.types, *elements], weak=kinds, label=name)
        if not info["grown"]:
            break
    body, consts = closed(program, captured)
    results = bind(
        scan_p,
        *consts,
        *carry.entering(),
        *leaves,
        body=body,
        consts=len(consts),
        carry=count,
        length=length,
        reverse=bool(reverse),
    )
    return carry.unflatten(results[:count]), info["tree"].unflatten(results[count:])


def _with_values(values: Sequence[Any], weak: Sequence[type | None]) -> list[Any]:
    """Return traced arrays in a trace with values; some stand for Python scalars of these types."""
    trace: Any = current_interpreter()
    return [
        x if isinstance(x, Traced) else trace.constant(as_traceable(x), x, kind) for x, kind in zip(values, weak, strict=True)
    ]


def _python_scan(carry: _Carry, f: Callable[[Any, Any], tuple[Any, Any]], rows: list[Any], reverse: bool) -> Any:
    """A scan as a Python loop, in a trace with values."""
    state, found = carry.tree.unflatten(_with_values(carry.values, carry.weak)), []
    for row in reversed(rows) if reverse else rows:
        result = f(state, row)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TraceError(f"scan: {carry.name} must return (carry, y), not {type(result).__name__}; y may be None.")
        state = carry.next_state(result[0])
        found.append(result[1])
    stacked = optree.tree_map(lambda *ys: np.stack([as_traceable(y) for y in ys]), *(reversed(found) if reverse else found))
    return state, stacked


def _decided(value: Any) -> Any:
    """Return the decision that all devices share, in a trace with values; None if devices differ."""
    leaf = as_traceable(value)
    try:
        return int(leaf)
    except ConcretizationError:
        return None


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Run a function on a carry as long as a condition holds.

    If the condition varies between devices, so does the result, and you may not call collectives over these axes inside. A
    while_loop has no reverse-mode gradient, because the number of iterations is unknown when memory for them is needed: use
    `fc.scan`, or `fc.fori_loop` with static bounds.

    Args:
        cond_fun: A function from the carry to a boolean scalar.
        body_fun: A function from the carry to the next one, of the same structure, shapes and dtypes.
        init_val: The first carry, a pytree of arrays.

    Returns:
        The last carry.

    Raises:
        ShapeError: If the carry changes its shape, or the condition is not a scalar.
        DTypeError: If the carry changes its dtype.
        PytreeError: If the carry changes its structure.
        VaryingError: If a collective is called over an axis over which the condition varies.

    Example:
        >>> print(fc.while_loop(lambda x: x < 100, lambda x: 2 * x, 3))
        192

    References:
        JAX's `while_loop`.
    """
    require_function("while_loop(cond_fun, ...)", cond_fun)
    require_function("while_loop(..., body_fun, ...)", body_fun)
    name, carry, info = label_of(body_fun), _Carry("while_loop", label_of(body_fun), init_val), {}
    varying: frozenset[str] = frozenset()
    if current_interpreter().unrolls:
        init_val = carry.tree.unflatten(_with_values(carry.values, carry.weak))
        while (goes := _decided(_predicate("while_loop", label_of(cond_fun), cond_fun(init_val)))) is not None:
            if not goes:
                return init_val
            init_val = carry.next_state(body_fun(init_val))
        carry = _Carry("while_loop", name, init_val)  # devices decide differently from here on

    def test(*values: Any) -> list[Any]:
        return [_predicate("while_loop", label_of(cond_fun), cond_fun(carry.tree.unflatten(values)))]

    def flat(*values: Any) -> list[Any]:
        try:
            result = body_fun(carry.tree.unflatten(values))
        except VaryingError as error:
            raise carry.begins_equal(error, values) from None
        outs, info["grown"] = carry.settle(carry.flatten(result), varying)
        return outs

    while True:
        condition, for_test = stage(test, carry.types, weak=carry.weak, label=label_of(cond_fun))
        varying = condition.outputs[0].type.varying
        program, captured = stage(flat, carry.types, weak=carry.weak, label=name)
        if not info["grown"]:
            break
    condition, for_test = closed(condition, for_test)
    body, for_body = closed(program, captured)
    require_same_decision([condition, body], condition.outputs[0].type.varying, "while_loop whose condition")
    results = bind(
        while_p,
        *for_test,
        *for_body,
        *carry.entering(),
        test=condition,
        body=body,
        test_consts=len(for_test),
        body_consts=len(for_body),
    )
    return carry.unflatten(results)


def _predicate(what: str, name: str, value: Any) -> Any:
    """Return a boolean scalar, or raise an error that says what it is instead."""
    leaves, tree = flatten_outputs(value, name)
    if not tree.is_leaf():
        raise PytreeError(f"{what}: {name} must return one boolean, not a pytree of structure {tree}.")
    found = value_type(leaf := as_traceable(leaves[0]))
    if found.shape:
        raise ShapeError(f"{what}: the predicate has type {found}, and must be a scalar: reduce it with np.all or np.any.")
    return leaf if found.dtype == np.bool_ else astype(leaf, np.bool_)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[Any, Any], Any], init_val: Any) -> Any:
    """Run `val = body_fun(i, val)` for i from `lower` to `upper` - 1.

    If both bounds are known while tracing, it is a `fc.scan` and has gradients; if one is traced, it is a `fc.while_loop`.

    Args:
        lower: The first `i`, an integer scalar.
        upper: The end of `i`, an integer scalar.
        body_fun: A function from `(i, val)` to the next `val`, of the same structure, shapes and dtypes. Like a Python integer,
            `i` takes the dtype of the arrays that it meets, unless a bound has a dtype.
        init_val: The first `val`, a pytree of arrays.

    Returns:
        The last `val`.

    Raises:
        ShapeError: If `val` changes its shape.
        DTypeError: If `val` changes its dtype, or a bound is not an integer scalar.
        PytreeError: If `val` changes its structure.

    Example:
        >>> print(fc.fori_loop(1, 5, lambda i, product: i * product, 1))
        24

    References:
        JAX's `fori_loop`.
    """
    require_function("fori_loop(..., body_fun, ...)", body_fun)
    bounds = [lower, upper]
    for which, bound in zip(("lower", "upper"), bounds, strict=True):
        found = value_type(as_traceable(bound))
        if found.shape or found.dtype.kind not in "iu":
            raise DTypeError(f"fori_loop: {which} has type {found}, and must be an integer scalar.")
    weak = all(map(scalar_type, bounds))
    dtype = np.result_type(*(value_type(as_traceable(b)).dtype for b in bounds))
    if all(isinstance(b, (int, np.integer)) for b in bounds):

        def body(val: Any, i: Any) -> tuple[Any, None]:
            return body_fun(i, val), None

        body.__name__ = label_of(body_fun)
        numbers = np.arange(int(lower), max(int(lower), int(upper)), dtype=dtype)
        return _scan("fori_loop", body, init_val, numbers, None, False, int if weak else None)[0]

    def step(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        i, val = carry
        return i + 1, body_fun(i, val)

    step.__name__ = label_of(body_fun)
    start = lower if weak else astype(as_traceable(lower), dtype)
    return while_loop(lambda carry: carry[0] < upper, step, (start, init_val))[1]


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """Compute `true_fun(*operands)` if `pred` is true, else `false_fun(*operands)`; the other branch does not run.

    If the predicate varies between devices, each takes its own branch, and you may not call collectives over these axes inside.

    Args:
        pred: A boolean scalar.
        true_fun: A function of the operands.
        false_fun: A function of the operands that returns the same structure, shapes and dtypes.
        *operands: Pytrees of arrays.

    Returns:
        The result of the branch.

    Raises:
        PytreeError: If the branches return different structures.
        ShapeError: If they return different shapes.
        DTypeError: If they return different dtypes.
        VaryingError: If a collective is called over an axis over which the predicate varies.

    Example:
        >>> print(fc.jit(lambda x: fc.cond(x > 0, np.sqrt, np.negative, x))(-4.0))
        4.0

    References:
        JAX's `cond`.
    """
    require_function("cond(pred, true_fun, ...)", true_fun)
    require_function("cond(..., false_fun)", false_fun)
    index = astype(_predicate("cond", "pred", pred), np.int32)
    return _choose("cond", index, [false_fun, true_fun], operands)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Compute `branches[index](*operands)`; the other branches do not run.

    See `fc.cond` for indices that vary between devices.

    Args:
        index: An integer scalar. It is clamped to the branches that exist.
        branches: A list or tuple of functions that return the same structure, shapes and dtypes.
        *operands: Pytrees of arrays.

    Returns:
        The result of the branch.

    Raises:
        PytreeError: If the branches return different structures.
        ShapeError: If they return different shapes.
        DTypeError: If they return different dtypes, or the index is not an integer scalar.

    Example:
        >>> print(fc.switch(1, [np.sin, np.square, np.exp], 3.0))
        9.0

    References:
        JAX's `switch`.
    """
    if not isinstance(branches, Sequence):
        raise TraceError(f"switch: branches is a list or tuple of functions, not {branches!r:.60}.")
    if not branches:
        raise TraceError("switch: there are no branches.")
    for number, branch in enumerate(branches):
        require_function(f"switch(index, branches[{number}], ...)", branch)
    found = value_type(index := as_traceable(index))
    if found.shape or found.dtype.kind not in "iu":
        raise DTypeError(f"switch: the index has type {found}, and must be an integer scalar.")
    return _choose("switch", astype(np.clip(index, 0, len(branches) - 1), np.int32), branches, operands)


def _choose(what: str, index: Any, branches: Sequence[Callable[..., Any]], operands: Any) -> Any:
    leaves, tree = flatten_outputs(operands, f"{what}: operands", given=True)
    weak, leaves = [scalar_type(x) for x in leaves], [as_traceable(x) for x in leaves]
    index = as_traceable(index)
    if current_interpreter().unrolls and (decided := _decided(index)) is not None:
        chosen = branches[decided]
        outs, out_tree = flatten_outputs(chosen(*tree.unflatten(_with_values(leaves, weak))), label_of(chosen))
        return out_tree.unflatten(_with_values(outs, [*map(scalar_type, outs)]))
    wanted: list[ArrayType] | None = None
    trees: list[Any] = []
    found: list[list[tuple[ArrayType, Any]]] = []

    def flat(branch: Callable[..., Any]) -> Callable[..., list[Any]]:
        def call(*values: Any) -> list[Any]:
            outs, out_tree = flatten_outputs(branch(*tree.unflatten(values)), label_of(branch))
            trees.append(out_tree)
            found.append([(value_type(x), scalar_type(x)) for x in outs])
            outs = [as_traceable(x) for x in outs]
            if wanted is None:
                return outs
            pairs = zip(outs, wanted, strict=True)
            return [pvary_to(x if x.dtype == t.dtype else _converted(what, x, t.dtype), t) for x, t in pairs]

        return call

    def traced() -> list[tuple[Program, list[Any]]]:
        types = [value_type(x) for x in leaves]
        return [stage(flat(branch), types, weak=weak, label=label_of(branch)) for branch in branches]

    programs = traced()
    names = [label_of(branch) for branch in branches]
    written = -1 if what == "cond" else 1  # the order in which the user wrote them
    for name, out_tree in zip(names[::written], trees[::written], strict=True):
        if out_tree != trees[::written][0]:
            raise PytreeError(
                f"{what}: branches must return one structure: "
                f"{first_difference(out_tree, trees[::written][0], f'result of {name}', f'that of {names[::written][0]} has')}."
            )
    agreed = [
        _common(what, names[::written], where, outs, value_type(index).varying)
        for where, outs in zip(path_names("result", trees[0]), zip(*found[::written], strict=True), strict=True)
    ]
    wanted, kinds = [type for type, _ in agreed], [weak for _, weak in agreed]
    if any([a.type for a in program.outputs] != wanted for program, _ in programs):
        programs = traced()
    bodies, consts = with_same_operands(programs)
    require_same_decision(bodies, value_type(index).varying, f"{what} whose {'predicate' if what == 'cond' else 'index'}")
    results = bind(cond_p, index, *consts, *leaves, branches=tuple(bodies))
    return trees[0].unflatten(_as_scalars(results, kinds))


def _common(
    what: str, names: Sequence[str], where: str, outs: Sequence[tuple[ArrayType, Any]], varying: frozenset[str]
) -> tuple[ArrayType, type | None]:
    """Return the type of a result of several branches. Python scalars take the type of the others; alone they stay scalars."""
    widest = max(outs, key=lambda out: _rank(out[0].dtype))
    first, kind = next(((type, None) for type, weak in outs if not weak), widest)
    for name, (type, weak) in zip(names, outs, strict=True):
        if type.shape != first.shape or (type.dtype != first.dtype and not _takes(first.dtype, weak)):
            raise (ShapeError if type.shape != first.shape else DTypeError)(
                f"{what}: {where} is {first} of {names[[t for t, _ in outs].index(first)]} and {type} of {name}: branches must "
                "return the same shapes and dtypes.",
                current_source(),
            )
    return first.vary(first.varying.union(varying, *(type.varying for type, _ in outs))), kind
