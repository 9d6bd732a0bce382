"""Users' own gradient rules: custom_vjp, grad_hook, stop_gradient."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import optree

from ...collectives.argument_checks import Axes, mesh_axes
from ...core.interpreter import Traced, bind, current_interpreter
from ...core.pytree_differences import first_difference
from ...core.pytree_paths import parameter_names, signature_of
from ...core.types import ArrayType, is_inexact
from ...errors import PytreeError, ShapeError, TraceError, VaryingError
from ...ops.registry import as_traceable
from ...primitives.elementwise import stop_gradient_p
from ...primitives.higher_order import custom_vjp_p, grad_hook_p
from ...tracing.trace import Trace, as_bucket, flatten_outputs, label_of, require_function, stage, value_type
from .backward import pvary_to
from .reverse import flatten_function

__all__ = ["custom_vjp", "grad_hook", "stop_gradient"]


def _check_rule(found: ArrayType, wanted: ArrayType, what: str) -> None:
    """Raise unless a custom rule's value has the type of the value it stands for; it may vary over fewer axes."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise ShapeError(f"{what} of type {found} for a value of type {wanted}: shape and dtype must agree.")
    extra = sorted(found.varying - wanted.varying)
    if extra:
        raise VaryingError(
            f"{what} of type {found} for a value of type {wanted}, which does not vary over {', '.join(map(repr, extra))}: "
            "all_reduce it over that axis."
        )


def stop_gradient(x: Any) -> Any:
    """Return `x`, as a constant for gradients.

    Args:
        x: An array or a pytree of arrays.

    Returns:
        The same values; their gradient is zero.

    Example:
        >>> print(fc.grad(lambda x: x * fc.stop_gradient(x))(3.0))
        3.0
    """
    return optree.tree_map(lambda leaf: bind(stop_gradient_p, as_traceable(leaf)), x)


def grad_hook(xs: Any, hook: Callable[[Any], Any], axis: Axes) -> Any:
    """Apply your own reduction to the gradients of several parameters, as soon as the last of them is ready.

    Forwards it is `fc.pvary` of all arrays. Backwards your hook gets their local gradients as one bucket, so communication can
    start before the backward pass ends. `fc.data_parallel` is made of it.

    Args:
        xs: A pytree of arrays that do not vary over `axis`.
        hook: A function from the pytree of local gradients, which vary over `axis`, to the reduced ones, which do not, such as
            `lambda g: fc.all_reduce(g, axis)`.
        axis: A mesh axis, or a tuple of axes.

    Returns:
        The values of `xs`, which vary over `axis`.

    Raises:
        VaryingError: If an array varies over `axis` already.
        PytreeError: If `hook` returns another structure.
        ShapeError: If `hook` changes a shape or dtype.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> def loss(w, x):
        ...     w = fc.grad_hook(w, lambda g: fc.all_reduce(g, "data", op="mean"), "data")
        ...     return fc.all_reduce(np.sum(w * x), "data", op="mean")
        >>> step = fc.jit(fc.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        >>> print(step(1.0, np.array([2.0, 4.0])))
        1.5
    """
    axes = mesh_axes("grad_hook", axis)
    require_function("grad_hook(xs, hook, ...)", hook)
    leaves, treedef = optree.tree_flatten(xs)
    leaves = [as_traceable(leaf) for leaf in leaves]
    types = [value_type(leaf) for leaf in leaves]

    def flat_hook(cts: list[Any]) -> list[Any]:
        with as_bucket():
            out, out_tree = optree.tree_flatten(hook(treedef.unflatten(cts)))
        if out_tree != treedef:
            raise PytreeError(
                "a grad_hook must return one gradient for each value, in its bucket's structure: "
                f"{first_difference(out_tree, treedef, 'result', 'the bucket has')}."
            )
        for value, type in zip(out, types, strict=True):
            found = value_type(value)
            if found.shape != type.shape or found.dtype != type.dtype or found.varying - type.varying:
                raise VaryingError(
                    f"a grad_hook returned a gradient of type {found} for a value of type {type}: it must have that "
                    f"shape and dtype, and not vary over {axes}; all_reduce it."
                )
        return out

    flat_hook.__qualname__ = getattr(hook, "__qualname__", "hook")
    return treedef.unflatten(bind(grad_hook_p, *leaves, axes=axes, hook=flat_hook)) if leaves else xs


def _by_position(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any], name: str) -> tuple:
    """Return the arguments of a call by position, up to the last one that is given, with defaults for those left out."""
    try:
        signature = inspect.signature(fn)
        bound = signature.bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise TraceError(f"custom_vjp {name}: {error}.") from None
    kinds = inspect.Parameter
    by_name = [n for n in bound.arguments if signature.parameters[n].kind in (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)]
    if by_name:
        raise TraceError(f"custom_vjp {name}: {by_name[0]} can only be passed by keyword, and gradient rules take positions.")
    last = max([*signature.parameters].index(n) for n in bound.arguments)
    bound.apply_defaults()
    return bound.args[: last + 1]


class custom_vjp:
    """A function with your own gradient rule, as in JAX.

    Use it as a decorator, then set the rule with `f.defvjp(forward, backward)`:

    - `forward(*args)` returns `(result, residuals)`.
    - `backward(residuals, cotangent)` returns a cotangent for each argument: a pytree like the argument, or None for zero.

    Arguments that you pass by keyword reach the rules by position. Both rules run when a gradient is taken, after the enclosing
    function was traced. So a traced array of that function must reach them as an argument or a residual; through a closure it
    raises LeakedTracerError.

    Args:
        fn: The function of arrays and pytrees of arrays.
        nondiff_argnums: Positions of arguments that are not traced and have no cotangent: functions, strings, numbers that
            choose. `forward` gets them in their places, and `backward` before all others:
            `backward(*nondiff, residuals, cotangent)`.

    Raises:
        PytreeError: If a rule returns another structure than it must.
        ShapeError: If a cotangent has another shape or dtype than its argument.

    Example:
        >>> @fc.custom_vjp
        ... def clipped(x):
        ...     return x
        >>> clipped = clipped.defvjp(lambda x: (x, None), lambda _, ct: (np.clip(ct, -1, 1),))
        >>> print(fc.grad(lambda x: 5 * clipped(x))(2.0))
        1.0

    References:
        JAX's `custom_vjp`.
    """

    def __init__(self, fn: Callable[..., Any], nondiff_argnums: int | Sequence[int] = ()):
        require_function("custom_vjp", fn)
        functools.update_wrapper(self, fn)
        self.fn = fn
        positions = tuple(nondiff_argnums) if isinstance(nondiff_argnums, Sequence) else (nondiff_argnums,)
        if not all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in positions):
            raise TraceError(f"custom_vjp: nondiff_argnums={nondiff_argnums!r} must be positions of arguments, counted from 0.")
        self.nondiff_argnums = tuple(sorted(set(positions)))
        self.forward: Callable[..., Any] | None = None
        self.backward: Callable[..., Any] | None = None

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> custom_vjp:
        """Set the rule. Returns the function itself."""
        require_function("defvjp(forward, ...)", forward)
        require_function("defvjp(..., backward)", backward)
        self.forward, self.backward = forward, backward
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the function; in a trace, with its gradient rule."""
        name = label_of(self.fn)
        args = _by_position(self.fn, args, kwargs, name) if kwargs else args
        if self.forward is None or self.backward is None:
            raise TraceError(f"custom_vjp {name} has no rule yet: call {name}.defvjp(forward, backward).")
        if not isinstance(current_interpreter(), Trace):
            return self.fn(*args)
        forward, backward = self.forward, self.backward
        fixed = {p: args[p] for p in self.nondiff_argnums if p < len(args)}
        for position, value in fixed.items():
            if any(isinstance(leaf, Traced) for leaf in optree.tree_leaves(value)):
                which = parameter_names(signature_of(self.fn), len(args))[position]
                raise TraceError(
                    f"the argument {which} of {name} is in nondiff_argnums, and holds a traced array. Leave it out there, and "
                    "return None for its cotangent."
                )
        given = tuple(value for position, value in enumerate(args) if position not in fixed)

        def arguments(values: Sequence[Any]) -> list[Any]:
            rest = iter(values)
            return [fixed[position] if position in fixed else next(rest) for position in range(len(args))]

        leaves, treedef, flat, info = flatten_function(lambda *values: self.fn(*arguments(values)), given, False, name)
        program, captured = stage(flat, [value_type(v) for v in leaves], label=name, values=leaves)
        # Captured values become more inputs, without a gradient.
        closed = program.replace(constants=(), inputs=(*program.inputs, *(v for v, _ in program.constants)))
        out_tree = info["out_tree"]

        def flat_forward(*values: Any) -> tuple[list[Any], Any]:
            returned = forward(*arguments(treedef.unflatten(values[: len(leaves)])))
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TraceError(
                    f"the forward rule of {name} must return a tuple (result, residuals), not {type(returned).__name__}."
                )
            result, residuals = returned
            outs, found = flatten_outputs(result, name)
            if found != out_tree:
                difference = first_difference(found, out_tree, "result", f"{name} itself returns")
                raise PytreeError(f"the forward rule of {name} returns another structure than {name}: {difference}.")
            for out, atom in zip(outs, program.outputs, strict=True):
                _check_rule(value_type(out), atom.type, f"the forward rule of {name} returns a result")
            outs = [pvary_to(as_traceable(o), a.type) for o, a in zip(outs, program.outputs, strict=True)]
            return outs, residuals

        def flat_backward(residuals: Any, cts: Sequence[Any], unreduced: frozenset[str]) -> list[Any]:
            returned = backward(*fixed.values(), residuals, out_tree.unflatten(cts))
            if not isinstance(returned, tuple) or len(returned) != len(given):
                raise PytreeError(
                    f"the backward rule of {name} must return a tuple of {len(given)} cotangent(s), one for each argument "
                    f"{'that is not in nondiff_argnums ' if fixed else ''}(None for zero)."
                )
            flat_cts: list[Any] = []
            for arg, ct in zip(given, returned, strict=True):
                arg_leaves, arg_tree = optree.tree_flatten(arg)
                if ct is None:
                    flat_cts.extend([None] * len(arg_leaves))
                    continue
                ct_leaves, ct_tree = optree.tree_flatten(ct)
                if ct_tree != arg_tree:
                    difference = first_difference(ct_tree, arg_tree, "cotangent", "the argument has")
                    raise PytreeError(f"the backward rule of {name} returns a cotangent of another structure: {difference}.")
                flat_cts.extend(as_traceable(c) for c in ct_leaves)
            for ct, leaf in zip(flat_cts, leaves, strict=True):
                if ct is not None and is_inexact(value_type(leaf).dtype):
                    wanted = value_type(leaf)
                    wanted = wanted.vary(wanted.varying | unreduced)
                    _check_rule(value_type(ct), wanted, f"the backward rule of {name} returns a cotangent")
            return [*flat_cts, *(None for _ in captured)]

        flat_forward.__qualname__, flat_backward.__qualname__ = name + ".forward", name + ".backward"
        outs = bind(custom_vjp_p, *leaves, *captured, program=closed, forward=flat_forward, backward=flat_backward)
        return out_tree.unflatten(outs)
