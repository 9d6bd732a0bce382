"""The programs whose collectives a process has compiled, and in what the program of another rank differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.ir import Program
from ...core.program_difference import HASH_CHARACTERS, ProgramRow, program_rows
from ...core.weak_values import WeakValues
from ...job.failure_detector import FailureDetector

__all__ = ["CompiledPrograms"]

_ROWS_TIMEOUT = 1.0
"""Seconds in which a rank answers about its program, whose constants it may have to read."""
_MOST_ROWS = 12_000
"""Rows of a program that are compared: their hashes are one answer."""


class CompiledPrograms:
    """The programs whose collectives this process has compiled; those keep them."""

    def __init__(self, watch: FailureDetector):
        self._programs: WeakValues[str, Program] = WeakValues()  # by fingerprint
        self._rows: tuple[str, Sequence[ProgramRow]] = "", ()
        self._watch = watch
        watch.answer_with("program", self._answer)

    def add(self, program: Program) -> None:
        """Know a program, as long as something else keeps it."""
        self._programs[program.fingerprint] = program

    def rows(self, fingerprint: str) -> Sequence[ProgramRow]:
        """The rows of a program whose collectives this process has compiled; none where it is not known. They cost a pass over
        its constants."""
        known, rows = self._rows
        if known != fingerprint:
            program = self._programs.get(fingerprint)
            rows = program_rows(program) if program is not None else ()
            self._rows = fingerprint, rows
        return rows

    def row_that_differs(self, mine: str, rank: int, theirs: str) -> tuple[ProgramRow, ProgramRow] | None:
        """The first rows that differ between a program of this process and one of another rank, by their fingerprints.

        It asks that rank, on the path of an error alone. None where that does not answer, or the programs do not tell.
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
