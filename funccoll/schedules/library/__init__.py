"""The algorithms: short generator functions, registered when this package is imported.

An algorithm imports `registry`, `moves` and what stands beside it here.

The first one that a module registers for a collective is the default.
"""

from . import all_reduce, all_to_all, gathering, permute_and_barrier, rooted, scans, several_hosts

__all__ = ["all_reduce", "all_to_all", "gathering", "permute_and_barrier", "rooted", "scans", "several_hosts"]
