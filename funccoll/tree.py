"""Pytrees: nested tuples, named tuples, lists, dicts and None, and classes registered with optree.

These are optree's functions.
"""

from optree import tree_flatten as flatten
from optree import tree_leaves as leaves
from optree import tree_map as map
from optree import tree_reduce as reduce
from optree import tree_structure as structure
from optree import tree_unflatten as unflatten

__all__ = ["flatten", "leaves", "map", "reduce", "structure", "unflatten"]
