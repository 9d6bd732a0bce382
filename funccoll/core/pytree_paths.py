"""Names of the leaves of pytrees in messages, as the user would write them: `batch['x']`, `params.layers[0].bias`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree

__all__ = ["argument_names", "names_below", "parameter_names", "path_name", "path_names"]


def path_names(name: str, tree: optree.PyTreeSpec) -> list[str]:
    """Return the names of all leaves of a tree called `name`."""
    return [name + path for path in _paths(tree)]


def path_name(name: str, tree: optree.PyTreeSpec, position: int) -> str:
    """Return the name of one leaf."""
    return name + _paths(tree)[position]


@functools.lru_cache(maxsize=256)
def _paths(tree: optree.PyTreeSpec) -> Sequence[str]:
    """Return the paths of all leaves. The tracer checks leaf by leaf, and each check names one leaf."""
    return tuple([accessor.codify("") for accessor in tree.accessors()])


def names_below(names: Sequence[str], tree: optree.PyTreeSpec) -> list[str]:
    """Return the names of a tree's leaves, given the names of its children."""
    return [leaf for name, child in zip(names, tree.children(), strict=True) for leaf in path_names(name, child)]


def parameter_names(signature: inspect.Signature | None, count: int) -> list[str]:
    """Return names of a call's `count` positional arguments: `x`, `rest[0]` for `*rest`, `args[0]` without a signature."""
    kinds = inspect.Parameter
    parameters = [] if signature is None else list(signature.parameters.values())
    names = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
    start = len(names) if rest is not None else 0  # without *rest, these are more than the function takes
    more = [f"{rest or 'args'}[{i - start}]" for i in range(len(names), count)]
    return [*names[:count], *more]


def argument_names(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    positions: Sequence[int] | None = None,
) -> list[str]:
    """Return the names of the leaves of a call's arguments, in optree's order; with `positions`, of these arguments alone."""
    chosen = range(len(args)) if positions is None else positions
    heads = parameter_names(signature_of(fn), len(args))
    keywords = sorted(kwargs or ())
    given: Any = (*(args[p] for p in chosen), *((kwargs or {})[k] for k in keywords))
    return names_below([*(heads[p] for p in chosen), *keywords], optree.tree_structure(given))


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return a function's Python signature, or None if it has none."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None
