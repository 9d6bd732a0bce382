"""Generated programs in a profile: each call, each compute segment, and collectives that do not record themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core.ir import Equation
from ...errors import Source
from ...runtime.recorder import Recorder, recorded, recorded_lines

__all__ = ["RecordedProgram", "SegmentParts", "collective_part"]

Part = Mapping[str, Any]
"""The definition of a part of a program, in the format of a profile."""


class SegmentParts:
    """A compute segment whose lines a profile records one by one.

    `parts` are its runs of operations of one user's line and one named scope. `counts` are the operations of each line. (Those
    of a group count as its first one's line.) `marked` makes the same function with one more parameter before the others: a
    function that is called at the beginning of each part. It is made on first use.
    """

    def __init__(
        self, sources: Sequence[Source | None], counts: Sequence[int], marked: Callable[[Sequence[int]], Callable[..., Any]]
    ):
        self.starts = [i for i, source in enumerate(sources) if not i or source != sources[i - 1]]
        """The number of each part's first operation."""
        ends = [*self.starts[1:], len(sources)]
        self.parts = [segment_part(sources[a], sum(counts[a:b])) for a, b in zip(self.starts, ends, strict=True)]
        self._marked = marked

    def recorded(self, recorder: Recorder, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return the recorded function in place of `plain`."""
        return recorded_lines(recorder, plain, lambda: self._function, self.parts)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return self._marked(self.starts)


class RecordedProgram:
    """A generated program whose functions are replaced by recorded ones, and put back.

    `parts` are those to record: where its code finds them, their names there, and definitions. `replace` exchanges the function
    of the whole program, `run`.
    """

    def __init__(
        self,
        label: str,
        parts: Sequence[tuple[dict[str, Any], str, Part | SegmentParts]],
        run: Callable[..., Any],
        replace: Callable[[Callable[..., Any]], None],
    ):
        self._label, self._run, self._replace = label, run, replace
        self._parts = [(namespace, name, namespace[name], part) for namespace, name, part in parts]

    def record(self, recorder: Recorder | None) -> None:
        """See `Recordable`."""
        if recorder is None:
            for namespace, name, function, _ in self._parts:
                namespace[name] = function
            self._replace(self._run)
            return
        for namespace, name, function, part in self._parts:
            if isinstance(part, SegmentParts):
                namespace[name] = part.recorded(recorder, function)
            else:
                namespace[name] = recorded(recorder, function, part)
        self._replace(recorded(recorder, self._run, {"kind": "program", "label": self._label}, line=True))


def segment_part(source: Source | None, count: int) -> Part:
    """Return the definition of `count` operations in a row of one of the user's lines."""
    label = f"compute: {count} operation{'' if count == 1 else 's'}"
    return {"kind": "segment", "label": label, "source": str(source or ""), "operations": count}


def collective_part(equations: Sequence[Equation]) -> Part:
    """Return the definition of collectives that are executed as one function."""
    first = equations[0]
    names = " and ".join(f"{eqn.primitive.name} over {', '.join(map(repr, eqn.axes()))}" for eqn in equations)
    combines = any("op" in eqn.params for eqn in equations)
    return {"kind": "collective", "label": names, "combines": combines, "source": str(first.source or "")}
