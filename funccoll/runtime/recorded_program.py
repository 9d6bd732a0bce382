"""Generated programs in a profile: each call, each compute segment, and collectives that do not record themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import Source
from ..ir import Equation
from .recorder import Recorder, recorded

__all__ = ["RecordedProgram", "collective_part", "segment_part"]

Part = Mapping[str, Any]
"""The definition of a part of a program, as a profile has it."""


class RecordedProgram:
    """A generated program whose functions are replaced by recorded ones, and put back.

    `parts` are those to record: where its code finds them, their names there, and definitions. `replace` exchanges the function
    of the whole program, `run`.
    """

    def __init__(
        self, label: str, parts: Sequence[tuple[dict[str, Any], str, Part]], run: Callable[..., Any],
        replace: Callable[[Callable[..., Any]], None],
    ):  # fmt: skip
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
            namespace[name] = recorded(recorder, function, part)
        self._replace(recorded(recorder, self._run, {"kind": "program", "label": self._label}, line=True))


def segment_part(sources: Sequence[Source | None]) -> Part:
    """The definition of a compute segment, from the user's line of each of its equations."""
    known = [source for source in sources if source is not None]
    first = str(known[0]) if known else ""
    lines = {source.line for source in known if source.file == known[0].file}
    many = f", lines {min(lines)} to {max(lines)}" if len(lines) > 1 else ""
    count = f"{len(sources)} operation{'' if len(sources) == 1 else 's'}"
    return {"kind": "segment", "label": f"compute: {count}{many}", "source": first}


def collective_part(equations: Sequence[Equation]) -> Part:
    """The definition of collectives that are executed as one function."""
    first = equations[0]
    names = " and ".join(f"{eqn.primitive.name} over {', '.join(map(repr, eqn.axes()))}" for eqn in equations)
    combines = any("op" in eqn.params for eqn in equations)
    return {"kind": "collective", "label": names, "combines": combines, "source": str(first.source or "")}
