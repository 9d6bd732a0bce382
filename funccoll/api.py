"""The public names of funccoll; `funccoll/__init__.py` imports them when the first of them is used."""

import importlib
from typing import TYPE_CHECKING, Any

from . import debug, errors, linalg, nn, optim, random, special, tree
from ._version import __version__
from .arrays.array import Array
from .collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    arg_reduce,
    axis_index,
    axis_size,
    barrier,
    broadcast,
    exclusive_scan,
    gather,
    inclusive_scan,
    own_slice,
    permute,
    pvary,
    reduce,
    reduce_scatter,
    scatter,
)
from .collectives.started import (
    all_gather_start,
    all_reduce_start,
    all_to_all_start,
    arg_reduce_start,
    broadcast_start,
    done,
    exclusive_scan_start,
    gather_start,
    inclusive_scan_start,
    permute_start,
    reduce_scatter_start,
    reduce_start,
    scatter_start,
)
from .compiler.arguments import AUTO
from .compiler.background_calls import start
from .compiler.jit import clear_caches, jit
from .compiler.placement import asarray, device_put, from_local, spec_like
from .compiler.redistribute import redistribute
from .core.dtype_promotion import DTypePromotionWarning
from .core.mesh import Mesh, abstract_mesh
from .core.named_scopes import named_scope
from .core.partition_spec import P
from .core.sharding import Sharding
from .core.traced_ranks import TracedRankWarning
from .core.types import ArrayType, bfloat16
from .errors import FunccollError, PlannedError, PlannedNameError
from .job.job_context import finalize, init, make_mesh, rank, world_size
from .job.process_allgather import process_allgather
from .job.process_group import ProcessGroup, group
from .ops.creation import full
from .ops.indexing import at
from .ops.registry import supported_functions
from .ops.sorting import top_k, unique
from .parallel import DataParallel, comm_hooks, data_parallel, uneven_batches
from .profiling.recording import profile
from .runtime.work import Work
from .tracing.future import Future
from .tracing.global_draws import GlobalRandomWarning
from .tracing.result_types import eval_shape
from .transforms.autodiff import checkpoint_policies
from .transforms.autodiff.custom_rules import custom_vjp, grad_hook, stop_gradient
from .transforms.autodiff.forward import jvp, linearize
from .transforms.autodiff.jacobians import hessian, jacfwd, jacrev
from .transforms.autodiff.rematerialization import checkpoint, checkpoint_name
from .transforms.autodiff.reverse import grad, value_and_grad, vjp
from .transforms.batching import vmap
from .transforms.callbacks import pure_callback
from .transforms.control import cond, fori_loop, scan, switch, while_loop
from .transforms.custom_primitives import custom_primitive

if TYPE_CHECKING:
    from . import draw, ragged, schedules
    from .job.launch import launch

# fmt: off
__all__ = [
    # meshes and arrays
    "make_mesh", "abstract_mesh", "Mesh", "P", "Sharding", "Array", "ArrayType", "bfloat16",
    "asarray", "device_put", "from_local", "spec_like", "redistribute", "process_allgather",
    "group", "ProcessGroup", "launch", "init", "finalize",
    "rank", "world_size", "profile", "named_scope",
    # functions
    "jit", "start", "Work", "AUTO", "clear_caches", "grad", "value_and_grad", "vjp", "custom_vjp", "grad_hook", "stop_gradient",
    "scan", "fori_loop", "while_loop", "cond", "switch",
    "checkpoint", "checkpoint_name", "checkpoint_policies", "pure_callback", "custom_primitive",
    "vmap", "jvp", "linearize", "jacfwd", "jacrev", "hessian", "eval_shape",
    "data_parallel", "DataParallel", "uneven_batches", "at", "full", "top_k", "unique", "supported_functions",
    # collectives
    "all_gather", "all_reduce", "all_to_all", "arg_reduce", "axis_index", "axis_size", "barrier", "broadcast", "exclusive_scan",
    "gather", "inclusive_scan", "own_slice", "permute", "pvary", "reduce", "reduce_scatter", "scatter",
    # started collectives
    "all_gather_start", "all_reduce_start", "all_to_all_start", "arg_reduce_start", "broadcast_start", "exclusive_scan_start",
    "gather_start", "inclusive_scan_start", "permute_start", "reduce_scatter_start", "reduce_start", "scatter_start",
    "done", "Future",
    # modules and errors
    "comm_hooks", "debug", "draw", "linalg", "nn", "optim", "ragged", "random", "schedules", "special", "tree", "errors",
    "FunccollError", "PlannedError", "PlannedNameError", "DTypePromotionWarning", "GlobalRandomWarning",
    "TracedRankWarning", "__version__",
]
# fmt: on


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in ("draw", "ragged", "schedules"):  # imported on first use: schedules take 15 ms
            return importlib.import_module(f".{name}", __package__)
        if name == "launch":  # imported on first use: cloudpickle takes 10 ms
            return importlib.import_module(".job.launch", __package__).launch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
