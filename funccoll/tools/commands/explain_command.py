"""`funccoll explain`: run a script on virtual devices, and show each program that it compiles."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...compiler.choose_schedules import explain_choice, measured_seconds, predicted_seconds
from ...compiler.overlap_report import collectives_in_flight
from ...compiler.stages import Compiled, compile_observers
from ...core.display import seconds_text
from ...core.ir import Equation
from ...errors import FunccollError, Source, current_source, is_own
from ...job.job_context import world_size
from .standard_output import StdoutError

__all__ = ["main"]

_USAGE, _INTERRUPTED = 2, 130
_NAMED = "the program names it"


def main(words: Sequence[str]) -> int:
    """Run the script, and print its programs as they are compiled. Return the script's exit code (1 if it raises)."""
    parser = argparse.ArgumentParser(
        prog="funccoll explain",
        allow_abbrev=False,
        usage="funccoll explain [--json] script.py [arguments ...]",
        description="Run a script like `python script.py`, on virtual devices in this process. Show each program that it "
        "compiles: its collectives with their algorithms, bytes and predicted times, and the reasons for the choice.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end; the script's own output goes to stderr"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(words)
    if not os.path.isfile(options.script):
        parser.error(f"there is no file {options.script!r} in {os.getcwd()}.")
    try:
        processes = world_size()
    except FunccollError as error:
        parser.error(str(error).partition("\n  at ")[0])
    if processes > 1:
        parser.error(
            f"this is one of {processes} processes of a job, and a script is explained in one process, on virtual devices. Run "
            "funccoll explain without a launcher."
        )
    return _explained(options.script, options.arguments, options.json)


def _explained(script: str, arguments: Sequence[str], as_json: bool) -> int:
    programs: list[dict[str, Any]] = []
    out = sys.stdout

    def observe(compiled: Compiled) -> None:
        programs.append(_description(compiled))
        if not as_json:
            _print(len(programs), programs[-1])

    compile_observers.append(observe)
    try:
        with _printing_to_stderr() if as_json else contextlib.nullcontext():
            code, error = _run(script, arguments)
    finally:
        compile_observers.remove(observe)
    if as_json:
        print(json.dumps({"script": script, "programs": programs, "exit_code": code, "error": error}), file=out)
    elif not programs:
        print(
            f"{script} compiled no program in this process. Programs are compiled at the first call of what fc.jit returns; "
            "those of processes that fc.launch starts are compiled there."
        )
    out.flush()
    return code


@contextlib.contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """Redirect the stdout of the script, and of the processes that it starts, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run(script: str, arguments: Sequence[str]) -> tuple[int, str | None]:
    """Run the script as the main module. Return its exit code, and the exception that ended it in words."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        if exit.code is None or isinstance(exit.code, int):
            return int(exit.code or 0) & 0xFF, None
        print(exit.code, file=sys.stderr)
        return 1, None
    except StdoutError:  # from the script's output
        raise
    except KeyboardInterrupt:
        return _INTERRUPTED, "KeyboardInterrupt"
    except BaseException as error:
        sys.stdout.flush()
        _print_traceback(error, script)
        return 1, "".join(traceback.format_exception_only(error)).strip()
    finally:
        sys.argv[:], sys.path[:] = argv, path
    return 0, None


def _print_traceback(error: BaseException, script: str) -> None:
    """Print the traceback like Python, without the frames of this command."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


# ---------------------------------------------------------------- a program


def _description(compiled: Compiled) -> dict[str, Any]:
    """Return a program for JSON."""
    signature, program, line = compiled.signature, compiled.program, current_source()
    rows = (
        [
            {
                **_collective(eqn, compiled),
                "operands": row.operands,
                "dtype": row.dtype,
                "bytes": row.nbytes,
                "axes": list(row.axes),
                **({"groups": [list(group) for group in row.groups]} if row.groups else {}),
                "over": row.over,
                "devices": row.size,
                "collective": f"{row.kind} {row.op}".strip(),
                "source": str(row.source or ""),
            }
            for eqn, row in zip(program.collectives(), compiled.collectives().rows[-len(program.collectives()) :], strict=True)
        ]
        if program.collectives()
        else []
    )
    return {
        "name": signature.name,
        "defined": str(_users(signature.source)),
        "called": str(line or ""),
        "mesh": dict(compiled.mesh.shape),
        "equations": len(program.equations),
        "collectives": rows,
        "in_flight": _in_flight(compiled),
        "widenings": [str(w) for w in compiled.widenings],
        "predicted_seconds": sum(row["predicted_seconds"] or 0.0 for row in rows),
        "fingerprint": compiled.fingerprint,
    }


def _in_flight(compiled: Compiled) -> list[dict[str, Any]]:
    """Return the collectives that processes start, and what they compute meanwhile."""
    found = collectives_in_flight(compiled.program, compiled.mesh, compiled.signature.overlap)
    return [
        {
            "collective": row.equation.primitive.name,
            "source": str(row.equation.source or ""),
            "until": str(row.until or ""),
            "operations": row.operations,
            "share_of_arithmetic": row.share,
            "predicted_seconds": _collective(row.equation, compiled)["predicted_seconds"],
        }
        for row in found
    ]


def _users(source: Source | None) -> str:
    """Return the line of a function as text; empty for functions of this package."""
    return "" if source is None or is_own(source.file) else str(source)


def _collective(eqn: Equation, compiled: Compiled) -> dict[str, Any]:
    """Return the algorithm of a collective, its predicted time (and the one measured by `funccoll tune`), and the reason."""
    name = eqn.params["algorithm"]
    try:
        seconds, measured = predicted_seconds(eqn, compiled.mesh), measured_seconds(eqn, compiled.mesh)
    except FunccollError:  # no failure here may end the script
        seconds = measured = None
    return {"algorithm": name, "predicted_seconds": seconds, "measured_seconds": measured, "why": _reason(eqn, compiled)}


def _reason(eqn: Equation, compiled: Compiled) -> str:
    try:
        explanation = explain_choice(eqn, compiled.mesh)
    except FunccollError:
        return _NAMED
    chosen = explanation.chosen
    if chosen.algorithm.partition(" (")[0] != eqn.params["algorithm"]:
        mine = next((row for row in explanation if row.algorithm.partition(" (")[0] == eqn.params["algorithm"]), None)
        return f"{_NAMED}; else {chosen.algorithm}" + (f" ({mine.algorithm}: {mine.reason})" if mine and mine.seconds else "")
    others = sorted((row for row in explanation if not row.chosen and row.seconds is not None), key=lambda r: r.seconds or 0.0)
    if not others:
        return "the only one"
    free = next((row for row in others if "×" in row.reason or row.reason.startswith(("less than", "costs the same"))), None)
    reason = chosen.reason.removeprefix("chosen").lstrip(", ")
    if free is None:
        return reason or f"the only one that may be chosen; {others[0].algorithm}: {others[0].reason}"
    return "; ".join(filter(None, [reason, f"costs least; next {free.algorithm}: {free.reason}"]))


def _print(number: int, found: dict[str, Any]) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    mesh = " × ".join(f"{axis}={size}" for axis, size in found["mesh"].items()) or "one device"
    places = [f"{what} at {found[what]}" for what in ("defined", "called") if found[what]]
    head = Text(f"program {number}: {found['name']}", style="bold")
    count, rows = found["equations"], found["collectives"]
    detail = f"on {mesh}; {count} equation{'s' * (count != 1)}, {len(rows)} collective{'s' * (len(rows) != 1)}"
    if rows:
        detail += f", predicted {seconds_text(found['predicted_seconds'])} in all"
    console.print(head, Text(f"  {', '.join(places)}") if places else Text(""), Text(f"  {detail}"), sep="\n")
    if rows:
        console.print(_table(rows))
    for row in found["in_flight"]:
        seconds = "" if row["predicted_seconds"] is None else f", predicted {seconds_text(row['predicted_seconds'])},"
        count = row["operations"]
        console.print(
            Text(
                f"  {row['collective']} at {row['source']}{seconds} is in flight while {count} "
                f"operation{'s run' if count != 1 else ' runs'} ({row['share_of_arithmetic']:.0%} of the arithmetic), until "
                f"{row['until'] or 'the end'}"
            )
        )
    for widening in found["widenings"]:
        console.print(Text(f"  {widening}"))
    console.print()
    sys.stdout.flush()


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the collectives of a program as a table, with a column of measured times if there are any."""
    times = ["predicted", *(["measured"] if any(row["measured_seconds"] is not None for row in rows) else [])]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "collective", "axes", "bytes/device", "algorithm", *times, "from", "why"):
        table.add_column(name, justify="right" if name in ("bytes/device", *times) else "left", no_wrap=name != "why")
    for row in rows:
        seconds = [row[f"{name}_seconds"] for name in times]
        cells = (
            row["collective"],
            row["over"],
            f"{row['bytes']:,}",
            row["algorithm"],
            *("" if s is None else seconds_text(s) for s in seconds),
            row["source"],
            row["why"],
        )
        table.add_row("", *map(Text, cells))
    return table
