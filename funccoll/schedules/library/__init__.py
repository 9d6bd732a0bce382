"""The algorithms: short generator functions, registered when this package is imported.

The first one that a module registers for a collective is the default.
"""

from . import all_reduce, all_to_all, gathering, other, rooted, several_hosts

__all__ = ["all_reduce", "all_to_all", "gathering", "other", "rooted", "several_hosts"]
