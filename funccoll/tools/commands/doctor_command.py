"""`funccoll doctor`: report what this machine has, and what is missing or wrong."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...job import doctor

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Print the report. Return 1 if something that funccoll needs is wrong."""
    argparse.ArgumentParser(
        prog="funccoll doctor",
        allow_abbrev=False,
        description="Report what this machine has, and what is missing or wrong.",
    ).parse_args(words)
    marks = {"ok": ("ok", "green"), "absent": ("-", "dim"), "warning": ("!", "yellow"), "wrong": ("WRONG", "bold red")}
    findings = doctor.examine()
    console = Console(highlight=False)
    for section in dict.fromkeys(f.section for f in findings):
        table = Table.grid(padding=(0, 2))
        table.add_column(width=5, justify="right")
        table.add_column(width=13, no_wrap=True)
        table.add_column()
        for finding in (f for f in findings if f.section == section):
            mark, style = marks[finding.state]
            table.add_row(Text(mark, style=style), finding.name, Text(finding.value))
            if finding.advice:
                table.add_row("", "", Text(finding.advice, style=style))
        console.print(Text(section, style="bold"), table, sep="\n")
    wrong = [f.name for f in findings if f.state == "wrong"]
    console.print(Text(f"\nWrong: {', '.join(wrong)}." if wrong else "\nEverything that funccoll needs is there."))
    return 1 if wrong else 0
