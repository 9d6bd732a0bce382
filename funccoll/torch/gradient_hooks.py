"""Hooks of gradients, and the functions of autograd's engine that they call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .reducer import Reducer

__all__ = [
    "current_task",
    "first_gradient_hook",
    "leaf_nodes",
    "may_step",
    "node_hook",
    "queue_callback",
    "remove_hooks",
    "will_execute",
]

queue_callback = torch.autograd.Variable._execution_engine.queue_callback
current_task: Callable[[], int] = torch._C._current_graph_task_id
will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Autograd's engine in a backward pass: whether it will execute a node."""


def may_step(parameter: Any) -> bool:
    """True if the user's hooks run as soon as a parameter's gradient is complete."""
    if hasattr(parameter, "_in_backward_optimizers"):
        return True
    return any(getattr(hook, "__module__", "") != __name__ for hook in (parameter._post_accumulate_grad_hooks or {}).values())


def node_hook(reducer: weakref.ref[Reducer], i: int) -> Callable[..., None]:
    """Return a hook of the node that accumulates the gradient of parameter i."""

    def hook(*gradients: Any) -> None:
        if (found := reducer()) is not None:
            found.ready(i)

    return hook


def first_gradient_hook(reducer: weakref.ref[Reducer], i: int) -> Callable[[torch.Tensor], None]:
    """Return a hook of parameter i if outputs begin all reductions. It finds backward passes through no output."""

    def hook(parameter: torch.Tensor) -> None:
        if (found := reducer()) is not None:
            found.note_first(i)

    return hook


def remove_hooks(hooks: list[Any]) -> None:
    """Remove the hooks from their tensors and nodes, and from the list."""
    while hooks:
        hooks.pop().remove()


def leaf_nodes(root: Any) -> Iterator[Any]:
    """Yield the nodes below `root` that accumulate gradients."""
    seen, waiting = {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                if not node.next_functions:
                    yield node
