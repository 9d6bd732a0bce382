"""The programs that a process has compiled, and the difference from another rank's program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.ir import Program
from ...core.program_difference import HASH_CHARACTERS, ProgramRow, program_rows
from ...core.weak_values import WeakValues
from ...job.failure_detector import FailureDetector

__all__ = ["CompiledPrograms"]

_ROWS_TIMEOUT = 1.0
"""Seconds for a rank to answer about its program. It may have to read the program's constants."""
_MOST_ROWS = 12_000
"""Rows of a program that are compared. Their hashes fit into one answer."""


class CompiledPrograms:
    """The compiled programs of this process that have collectives. The collectives keep them alive."""

    def __init__(self, watch: FailureDetector):
        self._programs: WeakValues[str, Program] = WeakValues()  # by fingerprint
        self._rows: tuple[str, Sequence[ProgramRow]] = "", ()
        self._watch = watch
        watch.answer_with("program", self._answer)

    def add(self, program: Program) -> None:
        """Remember a program for as long as something else keeps it alive."""
        self._programs[program.fingerprint] = program

    def rows(self, fingerprint: str) -> Sequence[ProgramRow]:
        """The rows of a program that this process has compiled; none if it is unknown. They cost a pass over its constants."""
        known, rows = self._rows
        if known != fingerprint:
            program = self._programs.get(fingerprint)
            rows = program_rows(program) if program is not None else ()
            self._rows = fingerprint, rows
        return rows

    def row_that_differs(self, mine: str, rank: int, theirs: str) -> tuple[ProgramRow, ProgramRow] | None:
        """The first rows that differ between a program of this process and one of another rank, by their fingerprints.

        Asks that rank, on the path of an error only. Returns None if it does not answer, or if the programs do not show a
        difference.
        """
        rows = self.rows(mine)
        ask = lambda **which: self._watch.ask(rank, {"kind": "program", "program": theirs, **which}, _ROWS_TIMEOUT)
        if not rows or not (answer := ask(row=None)):
            return None
        hashes, n = str(answer["hashes"]), HASH_CHARACTERS
        other = [hashes[i : i + n] for i in range(0, len(hashes), n)]
        first = next((i for i, (row, hash) in enumerate(zip(rows, other, strict=False)) if row.hash != hash), None)
        if first is None or not (answer := ask(row=first)):
            return None
        return rows[first], ProgramRow(*answer["row"])

    def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """The hashes of a program's rows, or one row, for a rank that runs another program."""
        rows = self.rows(question["program"])
        if not rows:
            return None
        if question["row"] is not None:
            return {"row": rows[question["row"]]}
        return {"hashes": "".join(row.hash for row in rows[:_MOST_ROWS])}
