"""Ragged collectives: blocks of rows whose numbers differ between devices.

In traced functions and outside of them. It imports `compiler`, for those outside.

Rows are those of the first dimension. All arrays of a call, of all devices, have the same further dimensions. `axis` is a mesh
axis or a tuple of axes, and p is the number of devices along it.

**In traced functions** x has as many rows on all devices, and the first ones count. Their number is an integer that the program
computes, so another one compiles nothing. A result has `result_rows` rows, a number that is fixed when the function is
traced. Those that no device has sent are 0.

**Outside**, `mesh=` says on which mesh it runs. x is this process's block, a NumPy array, with exactly the rows that count; a
process that plays several devices passes a list with the block of each. Results are NumPy arrays of exactly the received rows,
read-only, or lists of them.

**Groups.** In traced functions `groups=[[0, 1], [2, 3, 4]]` lets only the devices of a group exchange rows. They are positions
along `axis`, as in other collectives, and may have any sizes. p is then the number of ranks of the largest group, and ranks are
those in a group, in the order in which it lists them. Sizes for ranks that a smaller group lacks do not count, and are 0 in
results.

Sizes that do not fit, or that devices have told differently, raise ShapeError on all devices before anything moves.
"""

from typing import TYPE_CHECKING

from ..core.public_names import directory
from .row_collectives import all_gather, all_to_all, gather, ragged_all_to_all, reduce_scatter, scatter

__all__ = ["all_gather", "all_to_all", "gather", "ragged_all_to_all", "reduce_scatter", "scatter"]


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(
        globals(),
        {
            "Allgatherv": "fc.ragged.all_gather(block, axis, mesh=mesh)",
            "Alltoallv": "fc.ragged.all_to_all(rows, axis, sizes=sizes, mesh=mesh)",
            "Gatherv": "fc.ragged.gather(block, axis, root=0, mesh=mesh)",
            "Scatterv": "fc.ragged.scatter(rows, axis, sizes=sizes, root=0, mesh=mesh)",
            "Reduce_scatter": "fc.ragged.reduce_scatter(rows, axis, sizes=sizes, mesh=mesh)",
            "all_to_all_single": "fc.ragged.all_to_all(rows, axis, sizes=input_split_sizes, mesh=mesh)",
        },
    )
