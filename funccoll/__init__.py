"""funccoll: pure collectives over meshes, traced into typed programs and compiled.

The public names are in `api.py`. They are imported when the first of them is used: the command
`funccoll run`, which needs none of them, starts its processes 0.1 s sooner.
"""

import importlib.machinery
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .core import public_names

if TYPE_CHECKING:  # a type checker sees all names, and finds misspelt ones
    from .api import *
    from .api import __all__

_PLANNED = {
    # name: (description, the way to do it today)
    "distributed": ("torch.distributed's surface", "use the collectives inside fc.jit"),
    "jax": ("the JAX adapter", "pass arrays as NumPy arrays"),
}
_FSDP = "fc.all_gather(w, axis) in the step, of parameters that in_specs split: its gradient is a reduce_scatter"
_ELSEWHERE = {
    # a name in JAX or PyTorch: its equivalent here. Names of NumPy and of public modules need no entry.
    "shard_map": "fc.jit(fn, mesh=..., in_specs=..., out_specs=...)",
    "pmap": "fc.jit(fn, mesh=..., in_specs=..., out_specs=...)",
    "psum": "fc.all_reduce(x, axis)",
    "pmean": 'fc.all_reduce(x, axis, op="mean")',
    "pmax": 'fc.all_reduce(x, axis, op="max")',
    "pmin": 'fc.all_reduce(x, axis, op="min")',
    "psum_scatter": "fc.reduce_scatter(x, axis)",
    "ragged_all_to_all": "fc.ragged.ragged_all_to_all(operand, output, ..., axis)",
    "pbroadcast": "fc.broadcast(x, axis, root=...)",
    "pcast": "fc.pvary(x, axis)",
    "pjit": "fc.jit(fn, mesh=..., in_specs=..., out_specs=...)",
    "pshuffle": "fc.permute(x, axis, pairs=...)",
    "ppermute": "fc.permute(x, axis, pairs=...)",
    "send": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "recv": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "isend": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "irecv": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "sendrecv": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "bcast": "fc.broadcast(x, axis, root=...)",
    "allreduce": "fc.all_reduce(x, axis)",
    "allgather": "fc.all_gather(x, axis)",
    "all_gather_into_tensor": "fc.all_gather(x, axis)",
    "all_gather_object": "fc.process_allgather(x), of arrays",
    "all_to_all_single": "fc.all_to_all(x, axis, split_dim=..., concat_dim=...)",
    "reduce_scatter_tensor": "fc.reduce_scatter(x, axis)",
    "ReduceOp": 'the argument op, such as fc.all_reduce(x, axis, op="max")',
    "alltoall": "fc.all_to_all(x, axis, split_dim=..., concat_dim=...)",
    "MPI": "fc itself: fc.rank(), fc.world_size(), and collectives over a mesh axis inside fc.jit",
    "COMM_WORLD": "fc itself: fc.rank(), fc.world_size(), and collectives over a mesh axis inside fc.jit",
    "Allreduce": "fc.all_reduce(x, axis)",
    "Allgather": "fc.all_gather(x, axis)",
    "Alltoall": "fc.all_to_all(x, axis, split_dim=..., concat_dim=...)",
    "Barrier": "fc.barrier(axis)",
    "Bcast": "fc.broadcast(x, axis, root=...)",
    "Reduce": "fc.reduce(x, axis, root=...)",
    "Gather": "fc.gather(x, axis, root=...)",
    "Scatter": "fc.scatter(x, axis, root=...)",
    "Scan": "fc.inclusive_scan(x, axis)",
    "MAXLOC": "fc.arg_reduce(x, axis)",
    "MINLOC": 'fc.arg_reduce(x, axis, op="min")',
    "Exscan": "fc.exclusive_scan(x, axis)",
    "exscan": "fc.exclusive_scan(x, axis)",
    "Send": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "Recv": "fc.permute(x, axis, pairs=[(source, destination), ...])",
    "Get_rank": "fc.rank()",
    "Get_size": "fc.world_size()",
    "get_rank": "fc.rank()",
    "get_world_size": "fc.world_size()",
    "init_process_group": "fc.init(), which the first fc.make_mesh calls",
    "destroy_process_group": "fc.finalize()",
    "new_group": "fc.group(ranks); or a mesh with several axes, of which collectives name some: fc.make_mesh({'a': 2, 'b': 2})",
    "FSDP": _FSDP,
    "FullyShardedDataParallel": _FSDP,
    "fsdp": _FSDP,
    "DistributedDataParallel": "fc.DataParallel(model, loss_fn, optimizer), or funccoll.torch's for a torch module",
    "save": "np.savez of fc.process_allgather(params), or the method save of an fc.DataParallel",
    "load": "np.load, or the method load of an fc.DataParallel",
    "PartitionSpec": "fc.P",
    "NamedSharding": "fc.Sharding",
    "PRNGKey": "fc.random.key(seed)",
    "manual_seed": "fc.random.key(seed), a key that you pass to each function",
    "device_get": "np.asarray(x)",
    "make_array_from_process_local_data": "fc.from_local(block, mesh, spec)",
    "make_jaxpr": "fc.jit(fn).lower(*args).as_text()",
    "with_sharding_constraint": "fc.redistribute(x, spec), outside of fc.jit",
    "jacobian": "fc.jacrev(fn)",
    "detach": "fc.stop_gradient(x)",
    "compile": "fc.jit(fn)",
    "cat": "np.concatenate",
    "tensor": "np.array",
    "Tensor": "np.array",
    "tree_map": "fc.tree.map",
    "remat": "fc.checkpoint(fn)",
    "no_grad": "fc.stop_gradient(x)",
    "Join": "fc.uneven_batches(batches, mesh=mesh)",
    "lax": "fc itself: fc.scan, fc.cond, fc.while_loop, fc.fori_loop; fc.all_reduce for lax.psum",
    "numpy": "NumPy: fc.jit traces np's functions",
    "jnp": "NumPy: fc.jit traces np's functions",
    "tree_util": "fc.tree: fc.tree.map, fc.tree.flatten, fc.tree.register",
    "block_until_ready": "np.asarray(x), or nothing: on CPUs a call returns when its results are there",
    "io_callback": "fc.debug.callback(fn, *args), or fc.pure_callback(fn, result_types, *args) for a result",
    "process_index": "fc.rank()",
    "process_count": "fc.world_size()",
    "ShapeDtypeStruct": "fc.ArrayType(shape, dtype)",
    "Topology": "fc.schedules.Topology",
    "SyncBatchNorm": "fc.nn.sync_batch_norm(x, scale, bias)",
}


if not TYPE_CHECKING:

    def __dir__() -> list[str]:
        shown = importlib.import_module(".api", __name__).__all__  # and no module of the implementation
        return sorted({*shown, *(name for name in globals() if name.startswith("__"))})

    def __getattr__(name: str) -> Any:
        # A submodule is imported directly: importing api.py while one of its own imports runs would be a cycle.
        if importlib.machinery.PathFinder.find_spec(f"{__name__}.{name}", globals()["__path__"]):
            return importlib.import_module(f".{name}", __name__)
        api = importlib.import_module(".api", __name__)
        if name in api.__all__ or name == "__all__":
            globals()[name] = value = getattr(api, name)
            return value
        if name in _PLANNED:
            what, today = _PLANNED[name]
            planned = f"fc.{name} ({what}) is planned, not in this version; today {today}."
            error = ImportError(planned, name=__name__) if public_names.in_an_import() else api.PlannedNameError(planned)
        else:
            here = _ELSEWHERE.get(name) or public_names.in_numpy_or(api, name)
            error = public_names.missing_name(__name__, name, here)
        try:
            raise error
        except (AttributeError, ImportError) as raised:
            raised.__traceback__ = None  # of this frame: a bare raise adds none
            raise
