"""The first place at which two pytrees differ, in words."""

from __future__ import annotations

from collections.abc import Mapping

import optree

from .pytree_paths import path_names

__all__ = ["classes_at_difference", "first_difference", "prefix_difference"]

_MANY = 8
"""The most keys in a message."""


def prefix_difference(prefix: optree.PyTreeSpec, tree: optree.PyTreeSpec, name: str, what: str) -> str:
    """Describe where a tree is not a prefix of another: `specs[0] is a tuple of 2, and the arguments have a list there`."""
    return _words(_first(prefix, tree, "", False), name, what)


def classes_at_difference(prefix: optree.PyTreeSpec, tree: optree.PyTreeSpec) -> list[type]:
    """Return the classes of the nodes of `tree` at and below the place where `prefix` is not its prefix."""
    place = _first(prefix, tree, "", False)
    nodes = [] if place is None else [place[2]]
    for node in nodes:  # grows
        nodes += node.children()
    return [node.type for node in nodes if node.type is not None]


def first_difference(found: optree.PyTreeSpec, wanted: optree.PyTreeSpec, name: str, what: str) -> str:
    """Describe where the structures of two trees differ. `name` is the first one's, and `what` is a phrase for the second."""
    return _words(_first(found, wanted, "", True), name, what)


def _words(place: tuple[str, optree.PyTreeSpec, optree.PyTreeSpec] | None, name: str, what: str) -> str:
    if place is None:  # their static fields differ
        return f"{name} differs from {what} in what its classes hold besides arrays"
    path, one, other = place
    return f"{name}{path} is {_node(one, other)}, and {what} {_node(other, one)} there"


def _first(
    one: optree.PyTreeSpec, other: optree.PyTreeSpec, path: str, whole: bool
) -> tuple[str, optree.PyTreeSpec, optree.PyTreeSpec] | None:
    """Return the path and nodes of the first difference. With `whole` a leaf stands for a leaf alone, not for a subtree."""
    if one.is_leaf():
        return None if other.is_leaf() or not whole else (path, one, other)
    same = _kind(one) == _kind(other) and one.num_children == other.num_children and one.entries() == other.entries()
    if other.is_leaf() or not same:
        return path, one, other
    for here, a, b in zip(path_names(path, _of_its_children(one)), one.children(), other.children(), strict=True):
        if (found := _first(a, b, here, whole)) is not None:
            return found
    return None


def _of_its_children(node: optree.PyTreeSpec) -> optree.PyTreeSpec:
    """Return the tree whose leaves are a node's children."""
    found = node.one_level()
    assert found is not None  # it is not a leaf
    return found


def _kind(node: optree.PyTreeSpec) -> type | None:
    """Return a node's class. All kinds of dicts count as one."""
    return dict if node.type is not None and issubclass(node.type, Mapping) else node.type


def _node(node: optree.PyTreeSpec, beside: optree.PyTreeSpec) -> str:
    """Describe a node next to another one. Of many keys, it lists those that the other lacks."""
    if node.is_leaf():
        return "one value"
    kind = node.type or tuple
    if kind is type(None):
        return "None"
    entries = node.entries()
    if issubclass(kind, Mapping):
        shown = ", ".join(map(repr, entries))
        if len(entries) > _MANY:
            other = beside.entries() if beside.type is not None and issubclass(beside.type, Mapping) else entries
            own = ", ".join([repr(key) for key in entries if key not in other][:_MANY])
            return f"a {kind.__name__} with {len(entries)} keys" + f" ({own} among them)" * bool(own)
        return f"a {kind.__name__} with the key{'s' if len(entries) > 1 else ''} {shown}" if entries else "an empty dict"
    if kind in (tuple, list):
        return f"a {kind.__name__} of {node.num_children}"
    return f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__} with {node.num_children} children"
