"""The command `funccoll`: finds the command that is named, and loads only its module."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from ._version import __version__

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "run": "start a script in several processes of this machine",
    "explain": "run a script on virtual devices, and show each program that it compiles: algorithms, costs, and why",
    "schedule": "show a collective's schedule: what it does and costs, its proof; draw it, write it to a file",
    "profile": "merge a profile that ranks have recorded: where their time went, and what caused waiting",
    "tune": "measure this machine, so that costs and choices of algorithms are its own",
    "doctor": "report what this machine has, and what is missing or wrong",
}
"""Command -> its line in the help. Each is the function `main` of `commands/<command>_command.py`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (sys.argv's by default); returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    description = "Collectives between the processes of a job."
    parser = argparse.ArgumentParser(prog="funccoll", allow_abbrev=False, description=description)
    parser.add_argument("--version", action="version", version=f"funccoll {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, add_help=False)
    command = parser.parse_args(words[:1]).command
    if command is None:
        parser.print_help()
        return 0
    try:
        code: int = importlib.import_module(f".commands.{command}_command", __package__).main(words[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # `funccoll ... | head`; rich's tables end so, too. Python would flush once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    return code
