"""Names of torch's DistributedDataParallel that libraries use on ours. Those that need torch's reducer raise errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModuleError
from ..job.job_context import rank

if TYPE_CHECKING:
    from .distributed_data_parallel import DistributedDataParallel
    from .reducer import Reducer

__all__ = ["BufferSwitch", "ReducerInterface", "logging_data", "refuse_other_names"]

INHERITED = frozenset(
    {
        "scatter",
        "to_kwargs",
        "gather",
        "train",
        "join_device",
        "join_process_group",
        "_active_ddp_module",
        "_get_active_ddp_module",
        "_inside_ddp_forward",
        "_get_data_parallel_params",
        "_set_params_and_buffers_to_ignore_for_model",
        "_register_fused_optim",
    }
)
"""Attributes of torch's class that are right here, too: they use no reducer, logger or process group of torch's."""


class BufferSwitch(int):
    """The value of `broadcast_buffers`, 1 or 0. A call broadcasts the buffers now, with either value."""

    broadcast: Callable[[], None]

    def __call__(self) -> None:
        """Broadcast rank 0's buffers. All ranks call it."""
        self.broadcast()

    def __repr__(self) -> str:
        return str(bool(self))


class ReducerInterface:
    """Methods of torch's reducer that libraries call. Lightning, Accelerate and torch's pipelines begin reductions by hand.

    In a single process (`reducer` is None) there is nothing to reduce.
    """

    def __init__(self, reducer: Reducer | None):
        self._reducer = reducer

    def prepare_for_forward(self) -> None:
        """Do nothing: torch's reducer times the pass."""

    def prepare_for_backward(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Let the next backward pass average the gradients, even if its forward pass was in `no_sync`.

        Torch searches the graph of `tensors`, with which the pass begins, for unused parameters. Here the engine knows them.
        """
        if self._reducer is not None:
            self._reducer.expect()

    def _rebuild_buckets(self) -> bool:
        """Return False: buckets are rebuilt automatically at the end of a backward pass."""
        return False

    def _set_static_graph(self) -> None:
        if self._reducer is not None:
            self._reducer.static_graph = True

    def _check_reducer_finalized(self) -> None:
        """Raise ModuleError if an exception has ended a backward pass that had begun to reduce gradients."""
        if self._reducer is not None and self._reducer.is_interrupted():
            raise ModuleError(
                "the last backward pass ended before its gradients were reduced: an exception has left it. End the step on all "
                "ranks, or raise there."
            )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"funccoll's DistributedDataParallel has no torch reducer, and so no reducer.{name}. Use the wrapper's own methods."
        )


def refuse_other_names(wrapper: type[torch.nn.Module]) -> None:
    """Make torch's methods raise ModuleError with their name if `wrapper` neither overrides nor can inherit them.

    So none reads an attribute that torch's constructor would have made, in any version of torch.
    """
    for name, value in vars(torch.nn.parallel.DistributedDataParallel).items():
        function = getattr(value, "__func__", value)
        if callable(function) and not name.startswith("__") and name not in INHERITED and name not in vars(wrapper):
            setattr(wrapper, name, _refusal(name))


def _refusal(name: str) -> Callable[..., Any]:
    def refused(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ModuleError(
            f"DistributedDataParallel.{name} belongs to torch's reducer, and funccoll's wrapper has its own. "
            "Use a public method, or wrap the module by torch's class."
        )

    refused.__name__ = refused.__qualname__ = name
    return refused


def logging_data(module: DistributedDataParallel, reducer: Reducer | None, nranks: int) -> dict[str, Any]:
    """Return facts and times (nanoseconds, of the last passes) of this process, under torch's names."""
    parameters = [p for p in module.module.parameters() if p.requires_grad]
    sizes = () if reducer is None else reducer.assignment.nbytes
    rebuilt = reducer is not None and reducer.rebuilt
    return {
        "world_size": nranks,
        "module_name": type(module.module).__name__,
        "rank": rank(),
        "backend_name": "funccoll",
        "comm_hook": "" if reducer is None else reducer.gradient_reducer.name,
        "iteration": 0 if reducer is None else reducer.iterations,
        "bucket_cap_bytes": module.bucket_bytes_cap,
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(p.nbytes for p in parameters),
        "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
        "bucket_sizes": ", ".join(map(str, sizes)),
        "rebuilt_bucket_sizes": ", ".join(map(str, sizes)) if rebuilt else "",
        "has_rebuilt_buckets": rebuilt,
        "num_buckets_reduced": len(sizes),
        "broadcast_buffers": module.forward_sync_buffers,
        "find_unused_parameters": module.find_unused_parameters,
        "gradient_as_bucket_view": module.gradient_as_bucket_view,
        "static_graph": module.static_graph,
        "forward_compute_time": 0 if reducer is None else reducer.forward_ns,
        "backward_compute_time": 0 if reducer is None else reducer.backward_ns - reducer.communication_ns,
        "backward_comm_time": 0 if reducer is None else reducer.communication_ns,
    }
