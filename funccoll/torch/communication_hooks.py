"""Registration of communication hooks: torch's take (state, bucket), those of `funccoll.comm_hooks` take a bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import ModuleError, ProgramMismatch
from ..job.process_allgather import gather_text
from ..parallel import comm_hooks
from ..parallel.buckets import CommHook
from ..parallel.gradient_reducer import hook_name
from .functional_hook import FunctionalHook
from .future_hook import FutureHook
from .parameters import GradientSlot
from .slot_reducer import SlotReducer
from .tensor_memory import HostMemory

__all__ = ["communication_hook"]

_BY_NAME: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: comm_hooks.all_reduce,
    "float16": comm_hooks.float16,
    "bfloat16": comm_hooks.bfloat16,
    "int8": comm_hooks.int8,
    "power_sgd": comm_hooks.power_sgd,
}


def communication_hook(
    state: Any, hook: Any, slots: Sequence[GradientSlot], memory: HostMemory, label: str, find_unused: bool, flags: int
) -> SlotReducer:
    """Return the reducer with a hook. All ranks call it. Raise ModuleError or ProgramMismatch."""
    if isinstance(hook, str):
        if hook not in _BY_NAME:
            raise ModuleError(
                f"register_comm_hook: {hook!r} is not the name of a hook. Names are {', '.join(map(repr, _BY_NAME))}."
            )
        hook = _BY_NAME[hook]()
    functional = isinstance(hook, CommHook)
    if not functional and not callable(hook):
        raise ModuleError(
            f"register_comm_hook: {hook!r:.60} is not a hook. Give a function hook(state, bucket), one of "
            "funccoll.comm_hooks, or its name."
        )
    if sparse := [slot.name for slot in slots if slot.sparse]:
        raise ModuleError(
            f"register_comm_hook: gradients of {', '.join(map(repr, sparse))} are sparse, and hooks take dense ones. Give the "
            "embedding sparse=False, or leave out the hook."
        )
    given: Any = hook
    has_state = not functional and _takes_state(given)
    if state is not None and not has_state:
        raise ModuleError(
            f"register_comm_hook: {hook_name(hook)} is a function of the bucket alone, and the wrapper keeps its state. The "
            f"given state is {state!r:.60}. Give state=None."
        )
    names = gather_text(memory.host, hook_name(hook))
    if len(set(names)) > 1:  # the mismatch of another library's collectives would not name the hooks
        raise ProgramMismatch(
            f"register_comm_hook: the hooks of the ranks differ: {', '.join(names)}, in their order. Register one and the "
            "same on all."
        )
    if has_state:
        return FutureHook(state, given, slots, memory, label, flags)
    return FunctionalHook(hook, slots, memory, label, find_unused, flags)


def _takes_state(hook: Callable[..., Any]) -> bool:
    """True if the function takes (state, bucket), False if it takes the bucket alone."""
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # of C code
        return True
    for count in (2, 1):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return count == 2
    raise ModuleError(
        f"register_comm_hook: {hook_name(hook)}{signature} takes neither (state, bucket), as torch's hooks do, nor the bucket "
        "alone, as those of funccoll.comm_hooks do."
    )
