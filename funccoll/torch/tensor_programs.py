"""Compiled collectives of torch tensors. Their mesh keeps one for each call site, options, shape and dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch._C._functorch as _functorch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as frames_are_traced
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..collectives import functions as collectives
from ..collectives.argument_checks import Axes
from ..compiler.codegen.generated_program import require_devices
from ..compiler.compile_spmd import SpmdFunction, compile_spmd
from ..core.mesh import Mesh
from ..errors import DeviceError, MeshError, TraceError, UnsupportedError
from .tensors import as_array, as_tensor, dtype_of, reader_of

__all__ = ["Options", "Program", "breaks_graph", "check_tensor", "program_of", "programs_of", "refuse_transforms"]

KEPT = 512
"""The number of most recently used programs that a mesh keeps. Each has some shared memory."""

Options = tuple[Any, ...]
"""The keyword arguments of a collective, in the order of its signature."""
Program = Callable[[torch.Tensor], torch.Tensor]
"""A collective of tensors of one shape and dtype, without a gradient."""
Params = ParamSpec("Params")
R = TypeVar("R")

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, axis, op: collectives.all_reduce(x, axis, op=op),
    "all_gather": lambda x, axis, dim: collectives.all_gather(x, axis, dim=dim),
    "reduce_scatter": lambda x, axis, dim, op: collectives.reduce_scatter(x, axis, dim=dim, op=op),
    "all_to_all": lambda x, axis, split, concat: collectives.all_to_all(x, axis, split_dim=split, concat_dim=concat),
    "permute": lambda x, axis, pairs: collectives.permute(x, axis, pairs=pairs),
    "broadcast": lambda x, axis, root: collectives.broadcast(x, axis, root=root),
    "reduce": lambda x, axis, root, op: collectives.reduce(x, axis, root=root, op=op),
    "gather": lambda x, axis, root, dim: collectives.gather(x, axis, root=root, dim=dim),
    "scatter": lambda x, axis, root, dim: collectives.scatter(x, axis, root=root, dim=dim),
    "inclusive_scan": lambda x, axis, reverse, op: collectives.inclusive_scan(x, axis, op=op, reverse=reverse),
    "exclusive_scan": lambda x, axis, reverse, op: collectives.exclusive_scan(x, axis, op=op, reverse=reverse),
    "barrier": collectives.barrier,
}
"""Name -> the function of a traced block, the axis and the options."""


def program_of(name: str, x: torch.Tensor, mesh: Mesh, axis: Axes, options: Options, site: Any) -> Program:
    """Check a call, and return its compiled collective."""
    check_tensor(x, name)
    programs = programs_of(mesh, name)
    axis = tuple(axis) if isinstance(axis, list) else axis
    try:
        hash((axis, options))
    except TypeError:  # it raises the right error
        return programs.__wrapped__(name, axis, options, x.shape, x.dtype, site)
    return programs(name, axis, options, x.shape, x.dtype, site)


def _program(name: str, compiled: SpmdFunction, dtype: torch.dtype) -> Program:
    """Return a compiled collective as a function of tensors of this dtype, and of the shape that it was compiled for."""
    run, read = compiled.run, reader_of(dtype)
    write: Callable[[Any], torch.Tensor] = as_tensor if dtype is torch.bfloat16 else torch.from_numpy

    def call(x: torch.Tensor) -> torch.Tensor:
        try:
            array = read(x if x.is_contiguous() else x.contiguous())
        except (TypeError, RuntimeError, BufferError):  # an invalid tensor: the check below names the reason
            array = None
        if array is None:
            array = _read(x, name)
        try:
            (out,) = run(array)
            if isinstance(out.base, np.ndarray):  # zeros that all calls share, on ranks that receive nothing
                out = np.array(out)
            out.setflags(write=True)  # small results of collectives are read-only
            return write(out)
        except BaseException as error:
            compiled.note_exception(error)
            raise

    return call


def _read(x: torch.Tensor, name: str) -> np.ndarray:
    check_tensor(x, name)
    refuse_transforms(x, name)
    try:
        return as_array(x.contiguous())
    except (TypeError, RuntimeError, BufferError) as error:
        raise TraceError(f"{name}: x is a {type(x).__name__} whose memory NumPy cannot read: {error}") from error


def check_tensor(x: Any, name: str) -> None:
    """Raise an error for anything but a dense tensor in host memory with a supported dtype."""
    if not isinstance(x, torch.Tensor):
        raise TraceError(
            f"{name}: x is a {type(x).__name__}, and must be a torch tensor: torch.as_tensor(x) makes one. NumPy arrays and "
            "funccoll's own have the collectives of fc, inside functions that are traced by fc.jit."
        )
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"of layout {str(x.layout).removeprefix('torch.')}"
        dense = "x.to_padded_tensor(0.0)" if x.is_nested else "x.to_dense()"
        raise TraceError(f"{name}: x is {kind}, and collectives are of dense tensors: use {dense}.")
    if x.device.type != "cpu":
        raise DeviceError(
            f"{name}: x of shape {tuple(x.shape)} is on device {str(x.device)!r}, and collectives of torch tensors are of "
            "those in host memory: use x.cpu()."
        )
    dtype_of(x.dtype, f"{name}: x")


def refuse_transforms(x: Any, name: str) -> None:
    """Raise UnsupportedError for a tensor inside torch.func's transforms, and in a trace of make_fx.

    NumPy cannot read the first, or reads zeros (functionalize). make_fx would record the result as a constant.
    """
    if not isinstance(x, torch.Tensor):
        return
    what = f"{name}: x of shape {tuple(x.shape)}"
    if _functorch.is_batchedtensor(x) or _functorch.is_legacy_batchedtensor(x):
        whole = f", of shape {tuple(_functorch.get_unwrapped(x).shape)}" if _functorch.is_batchedtensor(x) else ""
        raise UnsupportedError(
            f"{what} is one example of a batch of vmap, and a collective of tensors has no rule for batches. Call it outside "
            f"of vmap on the whole batch{whole}, with dimensions counted in that. In a backward pass leave out "
            "is_grads_batched=True and vectorize=True."
        )
    if _functorch.is_functionaltensor(x):
        raise UnsupportedError(
            f"{what} is a tensor of torch.func.functionalize, and collectives cannot read its memory. Call {name} outside of "
            "the functionalized code."
        )
    if _functorch.is_functorch_wrapped_tensor(x) or (x.requires_grad and _functorch.peek_interpreter_stack() is not None):
        raise UnsupportedError(
            f"{what} is differentiated inside of one of torch.func's transforms (grad, vjp, jvp, jacrev, vmap), and a "
            "collective of tensors has no rule for them. Use torch.autograd: y.backward(), torch.autograd.grad, or forward_ad."
        )
    if torch._C._len_torch_dispatch_stack() and get_proxy_mode() is not None:
        raise UnsupportedError(
            f"{what} is traced by make_fx, and the graph would hold the collective's result as a constant. Call {name} outside "
            "of the traced code, or use torch.compile, which calls it between two graphs."
        )


def programs_of(mesh: Mesh, name: str) -> Any:
    """Return the function that compiles and keeps the collectives of this very mesh: equal meshes may be of two jobs."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"{name}: mesh must be one from fc.make_mesh({{...}}), not {mesh!r:.60}.")
    known = mesh.programs.get("torch")
    if known is not None:
        return known
    require_devices(mesh)
    if mesh.is_fully_addressable and mesh.size > 1:
        raise MeshError(
            f"{name}: this process plays all {mesh.size} devices of {mesh!r}, and a tensor is the block of one. Run one "
            f"process for each device: `funccoll run -n {mesh.size} script.py`, or torchrun."
        )
    if mesh.device_type != "cpu":
        raise DeviceError(f"{name}: {mesh!r} is a mesh of GPUs, and collectives of torch tensors are over one of CPUs.")

    @functools.lru_cache(maxsize=KEPT)
    def program(name: str, axis: Axes, options: Options, shape: Any, dtype: torch.dtype | None, site: Any) -> Any:
        types = [] if dtype is None else [(tuple(shape), dtype_of(dtype, f"{name}: x"))]

        def traced(*blocks: Any) -> list[Any]:
            result = _FUNCTIONS[name](*blocks, axis, *options)
            return [] if result is None else [result]

        compiled = compile_spmd(traced, types, mesh, f"funccoll.torch.{name}")
        return compiled if dtype is None else _program(name, compiled, dtype)

    return mesh.programs.setdefault("torch", program)


def breaks_graph(fn: Callable[Params, R]) -> Callable[Params, R]:
    """Decorate a function so that torch.compile calls it between two graphs.

    Dynamo must not trace the search for NumPy's memory, nor the frames that it leaves to Python. The first call of `outside`
    is in a trace; `_disable_dynamo` imports Dynamo then.
    """
    outside = _disable_dynamo(fn)

    @functools.wraps(fn)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> R:
        return outside(*args, **kwargs) if is_dynamo_compiling() or frames_are_traced() else fn(*args, **kwargs)

    return call
