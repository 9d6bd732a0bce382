"""funccoll: pure collectives over meshes, traced into typed programs and compiled."""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors, nn, random, tree
from ._version import __version__
from .arrays import Array
from .autodiff import grad, value_and_grad, vjp
from .collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    barrier,
    broadcast,
    gather,
    own_slice,
    permute,
    pvary,
    reduce,
    reduce_scatter,
    scatter,
)
from .compile import jit
from .custom_rules import custom_vjp, grad_hook, stop_gradient
from .errors import FunccollError, PlannedError
from .mesh import Mesh, P, Sharding, abstract_mesh
from .ops.indexing import at
from .ops.registry import supported_functions
from .parallel import data_parallel
from .placement import device_put, from_local
from .runtime.world import finalize, init, make_mesh, process_allgather, rank, world_size
from .types import ArrayType, bfloat16

if TYPE_CHECKING:
    from . import schedules
    from .runtime.launch import launch

__all__ = [
    # meshes and arrays
    "make_mesh", "abstract_mesh", "Mesh", "P", "Sharding", "Array", "ArrayType", "bfloat16",
    "device_put", "from_local", "process_allgather", "launch", "init", "finalize", "rank",
    "world_size",
    # functions
    "jit", "grad", "value_and_grad", "vjp", "custom_vjp", "grad_hook", "stop_gradient", "data_parallel", "at",
    "supported_functions",
    # collectives
    "all_gather", "all_reduce", "all_to_all", "axis_index", "axis_size", "barrier", "broadcast", "gather",
    "own_slice", "permute", "pvary", "reduce", "reduce_scatter", "scatter",
    # modules and errors
    "nn", "random", "schedules", "tree", "errors", "FunccollError", "PlannedError", "PlannedNameError",
    "__version__",
]  # fmt: skip

_UNROLL = "choose with np.where, and write loops in Python, which tracing unrolls"
_PLANNED = {
    # name: (what it will be, what to do today)
    "distributed": ("torch.distributed's surface", "use the collectives inside fc.jit"),
    "redistribute": ("changing an Array's sharding by collectives", "use fc.device_put(array, mesh, P(...))"),
    "optim": ("optimisers", "write the update with fc.tree.map, as notebooks/digits.py does"),
    "cond": ("control flow", _UNROLL),
    "scan": ("control flow", _UNROLL),
    "torch": ("the PyTorch adapter", "pass tensors as NumPy arrays"),
    "jax": ("the JAX adapter", "pass arrays as NumPy arrays"),
}
_ELSEWHERE = {
    # names that users of JAX and PyTorch type first: what they are here
    "shard_map": "fc.jit(fn, mesh=..., in_specs=..., out_specs=...)",
    "pmap": "fc.jit(fn, mesh=..., in_specs=..., out_specs=...)",
    "psum": "fc.all_reduce(x, axis)",
    "pmean": 'fc.all_reduce(x, axis, op="mean")',
    "pmax": 'fc.all_reduce(x, axis, op="max")',
    "psum_scatter": "fc.reduce_scatter(x, axis)",
    "ppermute": "fc.permute(x, axis, pairs=...)",
    "PartitionSpec": "fc.P",
    "NamedSharding": "fc.Sharding",
    "tree_map": "fc.tree.map",
    "no_grad": "fc.stop_gradient(x)",
}


class PlannedNameError(PlannedError, AttributeError):
    """A planned public name that was asked for; being an AttributeError, `hasattr` is False."""


if not TYPE_CHECKING:  # a type checker shall still find misspelt names

    def __getattr__(name: str) -> Any:
        if name == "schedules":  # its import takes 40 ms, and happens when it is first needed
            return importlib.import_module(f"{__name__}.schedules")
        if name == "launch":  # so does cloudpickle's, which takes 10 ms
            return importlib.import_module(f"{__name__}.runtime.launch").launch
        if name in _PLANNED:
            what, today = _PLANNED[name]
            raise PlannedNameError(f"fc.{name} ({what}) is planned, not in this version; today {today}.")
        here = f"; here it is {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{here}")
