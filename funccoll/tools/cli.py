"""The command `funccoll`. It finds the named command, and loads only its module."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .._version import __version__
from .commands.standard_output import run_command_line

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "run": "start a script in several processes",
    "explain": "run a script on virtual devices; show the algorithms and costs of each compiled program, and why",
    "schedule": "show, prove, draw or export the schedule of a collective",
    "profile": "merge the recorded profile of a job; show where time went and what caused waiting",
    "tune": "measure this machine for the cost model and the choice of algorithms",
    "doctor": "report what this machine has, and what is missing or wrong",
}
"""Command -> its line in the help. Each command is the function `main` of `tools/commands/<command>_command.py`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, and return the exit code.

    Without `arguments` it is the command line of this process. Its standard output may then be in any state
    (`commands.standard_output`).
    """
    if arguments is not None:
        return _run(list(arguments))
    name = " ".join(["funccoll", *(word for word in sys.argv[1:2] if word in COMMANDS)])
    return run_command_line(name, lambda: _run(sys.argv[1:]))


def _run(words: list[str]) -> int:
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
    return importlib.import_module(f".commands.{command}_command", __package__).main(words[1:])
