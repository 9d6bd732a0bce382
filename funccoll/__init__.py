"""funccoll: pure collectives over meshes, traced into typed programs and compiled."""

from . import nn, random, tree
from ._version import __version__
from .arrays import Array, device_put, from_local, process_allgather
from .autodiff import custom_vjp, grad, grad_hook, stop_gradient, value_and_grad, vjp
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
from .errors import FunccollError
from .mesh import Mesh, P, Sharding, abstract_mesh
from .ops.indexing import at
from .parallel import data_parallel
from .runtime.world import make_mesh, rank, world_size
from .types import ArrayType, bfloat16
