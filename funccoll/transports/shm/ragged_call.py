"""The call of a ragged collective: by the C extension, or in Python."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.c_extension import extension

__all__ = ["GAPS", "IS_WRITTEN", "RaggedCall", "gaps_of", "new_state", "set_gaps", "state_table"]

IS_WRITTEN, GAPS, _HEAD = range(3)
"""Words of a call's state: 1 if the plan has the table's blocks, and the number of gaps. From _HEAD on come the rows of the
result that no rank sends, as (first, behind the last), then the table."""


def new_state(nranks: int, table_words: int) -> np.ndarray:
    """Return the state of a call that has written nothing."""
    return np.zeros(_HEAD + 2 * (nranks + 1) + table_words, np.int64)


def state_table(state: np.ndarray, table_words: int) -> np.ndarray:
    """Return the table in a state: a view."""
    return state[len(state) - table_words :]


def set_gaps(state: np.ndarray, places: list[int], sizes: list[int], rows: int) -> None:
    """Note the rows of a result that no rank has sent."""
    gaps, end = list[tuple[int, int]](), 0
    for place, size in sorted(zip(places, sizes, strict=True)):
        if size:
            gaps.append((end, place))
            end = max(end, place + size)
    gaps = [gap for gap in (*gaps, (end, rows)) if gap[0] < gap[1]]
    state[GAPS] = len(gaps)
    state[_HEAD : _HEAD + 2 * len(gaps)] = np.ravel(np.array(gaps, np.int64))


def gaps_of(state: np.ndarray) -> list[tuple[int, int]]:
    """Return the gaps in a state."""
    begin = _HEAD
    pairs = state[begin : begin + 2 * int(state[GAPS])].tolist()
    return list(zip(pairs[::2], pairs[1::2], strict=True))


class PythonRaggedCall:
    """The Python version of `RaggedCall` in `_native.c`, used without the extension."""

    def bind(self, *_: Any) -> None:
        """Set what a call uses: here `fallback` does all."""

    def __call__(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """This rank's result, as a tuple."""
        return self.fallback(arrays)

    def fallback(self, arrays: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """See `RaggedExecutable`."""
        raise NotImplementedError


RaggedCall: Any = PythonRaggedCall if extension is None else extension.RaggedCall
