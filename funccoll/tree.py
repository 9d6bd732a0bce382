"""Pytrees: nested tuples, named tuples, lists, dicts and None, and classes registered here or with optree.

`map`, `leaves`, `flatten`, `unflatten`, `structure` and `reduce` are optree's functions `tree_map`, `tree_leaves` and so on.
`dataclass` defines a class whose instances are pytrees, with `field` for what is static in it. `register` makes pytrees of the
instances of an existing class.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import numpy as np
import optree
import optree.registry
from optree import tree_flatten as flatten
from optree import tree_leaves as leaves
from optree import tree_map as map
from optree import tree_reduce as reduce
from optree import tree_structure as structure
from optree import tree_unflatten as unflatten

from .core.public_names import directory
from .errors import PytreeError

__all__ = ["dataclass", "field", "flatten", "leaves", "map", "reduce", "register", "structure", "unflatten"]

T = TypeVar("T")


def field(*, static: bool = False, **options: Any) -> Any:
    """Return a field of a `fc.tree.dataclass`.

    Args:
        static: True makes the field part of the structure instead of a subtree; its value needs a hash.
        **options: Options of `dataclasses.field`.

    Returns:
        A field for the class body.
    """
    metadata = {**(options.pop("metadata", None) or {}), "static": static}
    return dataclasses.field(metadata=metadata, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(field, dataclasses.field))
def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Define a frozen dataclass whose instances are pytrees, with a subtree for each field that is not static.

    Args:
        cls: The class. Without one the result is a decorator.
        **options: Options of `dataclasses.dataclass`.

    Returns:
        The dataclass.

    Example:
        >>> @fc.tree.dataclass
        ... class Dense:
        ...     weight: np.ndarray
        ...     bias: np.ndarray
        ...     name: str = fc.tree.field(static=True, default="dense")
        ...
        ...     def __call__(self, x):
        ...         return x @ self.weight + self.bias
        >>> layer = Dense(np.ones((3, 2)), np.zeros(2))
        >>> print(fc.jit(lambda layer, x: layer(x))(layer, np.ones(3)))
        [3. 3.]
    """
    if cls is None:
        return lambda cls: dataclass(cls, **options)
    return register(dataclasses.dataclass(**{"frozen": True, **options})(cls))


def register(
    cls: type[T],
    flatten: Callable[[T], tuple[Sequence[Any], Any]] | None = None,
    unflatten: Callable[[Any, Sequence[Any]], T] | None = None,
) -> type[T]:
    """Make pytrees of the instances of a class, but not of its subclasses. It is also a decorator.

    Without `flatten` and `unflatten`, the class has methods `tree_flatten(self)` and `tree_unflatten(cls, static, children)`,
    as for JAX, or is a dataclass or an attrs class, as equinox.Module and flax.struct.dataclass make. Each field of these is
    static or a child. It is static if its metadata have `static=True`, or `pytree_node=False` (equinox, flax), or if it holds a
    function, a string, a dtype or a member of an Enum. Instances are made again without `__init__`.

    Args:
        cls: The class.
        flatten: `flatten(instance)` returns `(children, static)`; `static` has a hash.
        unflatten: `unflatten(static, children)` returns the instance.

    Returns:
        The class.

    Raises:
        PytreeError: If the class is of another kind, or is registered already.

    Example:
        >>> class Range:
        ...     def __init__(self, low, high):
        ...         self.low, self.high = low, high
        >>> Range = fc.tree.register(Range, lambda r: ((r.low, r.high), None), lambda _, bounds: Range(*bounds))
        >>> fc.tree.leaves(Range(1, 2))
        [1, 2]
    """
    if not isinstance(cls, type):
        raise PytreeError(f"tree.register takes a class, not {cls!r:.60}.")
    if (flatten is None) != (unflatten is None):
        raise PytreeError(f"tree.register({cls.__name__}, ...): pass both flatten and unflatten, or neither.")
    entry: Any = optree.AutoEntry
    if flatten is None:
        if hasattr(cls, "tree_flatten") and hasattr(cls, "tree_unflatten"):
            flatten, unflatten = cls.tree_flatten, cls.tree_unflatten  # type: ignore[attr-defined]
        else:
            (flatten, unflatten), entry = _by_fields(cls), optree.GetAttrEntry
    try:
        add: Any = optree.register_pytree_node  # typed for classes that are collections
        add(cls, flatten, unflatten, path_entry_type=entry, namespace=getattr(optree.registry, "__GLOBAL_NAMESPACE"))
    except ValueError as error:
        raise PytreeError(f"tree.register({cls.__name__}): {cls.__qualname__} is registered already.") from error
    return cls


def _by_fields(cls: type) -> tuple[Any, Any]:
    """Return the two functions of a dataclass or an attrs class."""
    attributes = getattr(cls, "__attrs_attrs__", None)
    if attributes is None and not dataclasses.is_dataclass(cls):
        raise PytreeError(
            f"tree.register({cls.__name__}): it is neither a dataclass nor an attrs class. Pass flatten and unflatten, or "
            "define tree_flatten and tree_unflatten."
        )
    fields = dataclasses.fields(cls) if attributes is None else attributes
    names = [f.name for f in fields]
    stated = {f.name for f in fields if f.metadata.get("static") or f.metadata.get("pytree_node") is False}

    def take_apart(instance: Any) -> tuple[list[Any], tuple, tuple[str, ...]]:
        children: dict[str, Any] = {}
        static: dict[str, Any] = {}
        for name in names:
            value = getattr(instance, name)
            (static if name in stated or _belongs_to_structure(value) else children)[name] = value
        _require_hashes(cls, static)
        return [*children.values()], (tuple(children), tuple(static.items())), tuple(children)

    def put_together(static: tuple, children: Sequence[Any]) -> Any:
        instance = object.__new__(cls)
        for name, value in (*zip(static[0], children, strict=True), *static[1]):
            object.__setattr__(instance, name, value)  # the class may be frozen
        return instance

    return take_apart, put_together


def _belongs_to_structure(value: Any) -> bool:
    """True for a value that is never an array, such as a function or a string; not for a pytree with __call__."""
    tree: Any = value
    return isinstance(value, (str, bytes, enum.Enum, np.dtype)) or (callable(value) and optree.tree_is_leaf(tree))


def _require_hashes(cls: type, static: dict[str, Any]) -> None:
    for name, value in static.items():
        try:
            hash(value)
        except TypeError:
            raise PytreeError(
                f"{cls.__name__}.{name} is a static field and holds {value!r:.60}, which has no hash: a program is compiled "
                "for each value of a static field. Hold a tuple in place of a list, and arrays in fields that are not static."
            ) from None


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(
        globals(),
        {
            "tree_map": "fc.tree.map",
            "tree_flatten": "fc.tree.flatten",
            "tree_unflatten": "fc.tree.unflatten",
            "tree_leaves": "fc.tree.leaves",
            "tree_structure": "fc.tree.structure",
            "tree_reduce": "fc.tree.reduce",
            "register_pytree_node": "fc.tree.register(cls, flatten, unflatten)",
            "register_pytree_node_class": "fc.tree.register, a decorator",
            "register_dataclass": "fc.tree.register, or fc.tree.dataclass in place of the decorator",
        },
    )
