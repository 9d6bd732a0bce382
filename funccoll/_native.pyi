from collections.abc import Callable, Sequence
from typing import Any

def use_arrays(type: type, /) -> None: ...
def use_mapping(type: type, /) -> None: ...
def read_only(block: Any, /) -> Any: ...
def guard_memory(start: int, nbytes: int, /) -> None: ...
def array_fits(array: Any, address: int, dtype: Any, shape: tuple[int, ...], contiguous: bool, /) -> bool: ...

class PlanFastPath:
    is_fast: bool
    is_complete: bool
    def bind(
        self,
        kernel: Callable[[], object],
        context: int,
        words: tuple[int, int, int],
        owner: int,
        busy: bytearray,
        communicators: tuple[int, ...],
        kept: list[Any],
        others: Callable[[], tuple[Any, ...]],
        nargs: int,
        nresults: int,
        /,
    ) -> None: ...
    def __call__(self, *arrays: Any) -> tuple[Any, ...]: ...

class FastPath:
    def __new__(
        cls,
        expected: tuple[Any, ...],
        array_type: type,
        run: Callable[..., Any],
        out_layouts: tuple[Any, ...],
        unflatten: Callable[[list[Any]], Any] | None,
        failed: Callable[[BaseException], object],
        /,
    ) -> FastPath: ...
    def __call__(self, leaves: Sequence[Any], /) -> Any: ...

class Dispatch:
    fast_paths: list[Any]
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class ArrayBase:
    layout: Any
    _copies: Any
    @property
    def local(self) -> Any: ...
