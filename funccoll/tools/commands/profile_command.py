"""`funccoll profile`: merge the ranks of a measured profile, and show where their time went."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...core.display import seconds_text
from ...errors import ProfileError, system_reason
from ...profiling import SPLIT, Profile, runs_of

__all__ = ["main"]

_MOST_RANKS = 16
"""The most ranks for which a table has one column each."""


def main(words: Sequence[str]) -> int:
    """Print the tables, and write the trace. Return 1 if there is nothing to read."""
    parser = argparse.ArgumentParser(
        prog="funccoll profile",
        allow_abbrev=False,
        description="Merge the ranks' profiles from FUNCCOLL_PROFILE=DIRECTORY or fc.profile(DIRECTORY). Print each rank's "
        "time and the ranks that it waited for. Write a trace for ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument("directory", help="the directory of the profile, or of one of its runs")
    parser.add_argument("--run", metavar="NAME", help="the run to read (default: the newest one)")
    parser.add_argument("--list", action="store_true", help="list the runs in the directory, and end")
    parser.add_argument("--perfetto", metavar="FILE", help="the trace (default: perfetto.json beside the ranks' files)")
    parser.add_argument("--every-instruction", action="store_true", help="trace instructions that move no data, too")
    parser.add_argument("--causes", type=int, default=8, metavar="N", help="lines in the table of causes (default: 8)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(words)
    try:
        if options.list:
            names = [folder.name for folder in runs_of(options.directory)]
            print(json.dumps(names) if options.json else "\n".join(names))
            return 0
        profile = Profile.load(options.directory, options.run)
        path = _write_trace(profile, options.perfetto, options.every_instruction)
    except ProfileError as error:
        print(f"funccoll profile: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({**profile.as_dict(), "perfetto": path}))
    else:
        _print(profile, path, max(0, options.causes), runs_of(options.directory))
    return 0


def _write_trace(profile: Profile, given: str | None, every: bool) -> str | None:
    """Return the path of the trace; None if the profile's own folder is read-only. Raise ProfileError for another path."""
    path = Path(given) if given else Path(profile.name) / "perfetto.json"
    try:
        profile.to_perfetto(path, every)
    except OSError as error:
        if given:
            raise ProfileError(f"cannot write {path}: {system_reason(error)}.") from None
        return None
    return str(path)


def _print(profile: Profile, path: str | None, causes: int, runs: Sequence[Path]) -> None:
    console = Console(highlight=False)
    blame = profile.blame
    ranks = f"{profile.nranks} rank{'' if profile.nranks == 1 else 's'}"
    console.print(Text(f"{profile.name}: {ranks}, {seconds_text(profile.seconds)}", style="bold"))
    for note in profile.notes:
        console.print(Text(f"! {note}", style="yellow"))
    console.print("\nWhere each rank's time went", style="italic")
    table = _table("rank", *SPLIT, "caused waiting")
    for row in profile.split_rows()[:_MOST_RANKS]:
        table.add_row(*row, style="bold red" if row[0] == str(blame.named) else "")
    console.print(table)
    if profile.nranks > _MOST_RANKS:
        console.print(f"... and {profile.nranks - _MOST_RANKS} more ranks (--json has all)")
    if blame.waited.any() and profile.nranks <= _MOST_RANKS:
        console.print("\nHow long each rank waited for each", style="italic")
        console.print(_matrix(profile))
    _print_parts(console, profile, causes)
    rows = [cause for cause in blame.causes if not cause.machine][:causes]
    if rows:
        console.print("\nWhat caused waiting", style="italic")
        table = _table("waiting", "rank")
        table.add_column("while it was", overflow="fold")
        table.add_column("where", overflow="fold")
        for cause in rows:
            table.add_row(seconds_text(cause.seconds), str(cause.rank), cause.doing, cause.source)
        console.print(table)
    console.print(Text(f"\n{profile.verdict()}", style="bold"))
    if blame.machine:
        console.print(f"Ranks that were ready and had no processor caused another {seconds_text(blame.machine)}.")
    if blame.unknown:
        console.print(f"Another {seconds_text(blame.unknown)} was for ranks without a record here.")
    if path:
        console.print(Text(f"Trace: {path} (open it in ui.perfetto.dev)"))
    if len(runs) > 1:
        console.print(Text(f"{len(runs)} runs are in this directory: --list names them, --run chooses one."))


def _print_parts(console: Console, profile: Profile, most: int) -> None:
    """Print the lines that computed longest, the compilations, and the time of each named scope."""
    lines, scopes = profile.lines, profile.scopes
    if lines:
        console.print("\nWhat computed (all ranks together)", style="italic")
        table = _table("time", "share", "operations")
        table.add_column("where", overflow="fold")
        total = sum(line.seconds for line in lines) or 1.0
        for line in lines[:most]:
            share = f"{100 * line.seconds / total:.0f} %"
            table.add_row(seconds_text(line.seconds), share, f"{line.operations:,}", line.source)
        console.print(table)
        if len(lines) > most:
            rest = sum(line.seconds for line in lines[most:])
            console.print(f"... and {len(lines) - most:,} more lines, {seconds_text(rest)} (--causes N shows more)")
    if profile.compiled:
        console.print("\nWhat was compiled (all ranks together)", style="italic")
        table = _table("time", "times")
        table.add_column("what", overflow="fold")
        table.add_column("where", overflow="fold")
        for function in profile.compiled[:most]:
            table.add_row(seconds_text(function.seconds), f"{function.times:,}", function.label, function.source)
        console.print(table)
    if any(scopes):
        console.print("\nNamed scopes (all ranks together)", style="italic")
        table = _table(*SPLIT[:4])
        table.add_column("scope", overflow="fold")
        for name, row in scopes.items():
            table.add_row(*map(seconds_text, row.tolist()), name or "(none)")
        console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _matrix(profile: Profile) -> Table:
    table = _table("rank", *(f"for {r}" for r in range(profile.nranks)))
    for rank, row in enumerate(profile.blame.waited.tolist()):
        if rank not in profile.missing:
            table.add_row(str(rank), *(seconds_text(s) if s else "-" for s in row))
    return table
