"""Gradients that accumulate in a backward pass that averages nothing, found if you did not ask for that."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from ..core.weak_values import WeakValues
from ..errors import user_source

__all__ = ["LocalGradients", "watched_parameters"]

_owners: WeakValues[int, LocalGradients] = WeakValues()
_current_task: Callable[[], int] = torch._C._current_graph_task_id


class LocalGradients:
    """A warning, once, of a backward pass that computes gradients of parameters but goes through no output of the wrapper.

    You ask for that by `no_sync`: in the block, and after a forward pass in it, until the next reduction. The pass is also
    harmless in two other cases. A forward pass of the wrapper may wait for its backward pass, which will average the sum. Or
    another wrapper of the parameters averages them.
    """

    def __init__(self, names: Sequence[str], parameters: Iterable[torch.Tensor]):
        self._names, self._ids = names, set(map(id, parameters))
        self.is_meant: Callable[[], bool] = bool
        """True inside `no_sync`."""
        self.follows_no_sync = False
        self.reduces_task = -1
        """The number of the last pass of autograd's engine that averages gradients."""
        self._waits = self._has_warned = False
        _owners[id(self)] = self

    def begin_reduction(self, task: int) -> None:
        """Note that a pass of autograd's engine averages gradients. They include those of earlier passes."""
        self.reduces_task = task
        self.follows_no_sync = self._waits = False

    def judge(self, task: int, first: int, expects: bool) -> None:
        """Check a pass that has ended. Gradients accumulated in it, the first one of parameter `first`."""
        if self._has_warned or self.follows_no_sync or self.is_meant():
            return
        if any(owner.reduces_task == task and not self._ids.isdisjoint(owner._ids) for owner in _owners.values()):
            return
        if expects and not self._waits:
            self._waits = True
            return
        self._has_warned = True
        source = user_source()
        text = (
            f"gradients of {self._names[first]!r} and perhaps of others were computed, and are not averaged over ranks: the "
            "backward pass goes through no forward pass of DistributedDataParallel. Call the wrapper, not its module, or use "
            "no_sync() if you mean it."
        )
        if source is None:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        else:
            warnings.warn_explicit(f"{text}\n{source.as_note}", RuntimeWarning, source.file, source.line)


def watched_parameters(module: torch.nn.Module, parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers of the first parameter of each part. They notice a backward pass through any part of a module."""
    numbers = {id(p): i for i, p in enumerate(parameters)}
    own = ([numbers[id(p)] for p in part._parameters.values() if id(p) in numbers] for part in module.modules())
    return sorted({found[0] for found in own if found})
