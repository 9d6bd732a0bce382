"""Uncaught exceptions of a rank: the report to the launcher, and one line in place of a traceback that follows from another."""

from __future__ import annotations

import os
import sys
import traceback

from ..errors import CollectiveTimeout, PeerFailure, raised_at
from .reports import report

__all__ = ["print_folded", "report_exception", "shortened"]

_LONGEST = 300  # characters of a message


def shortened(text: str) -> str:
    """The text, or as many of its words as fill a line."""
    if len(text) <= _LONGEST:
        return text
    cut = text[: _LONGEST - 3]
    return f"{cut.rpartition(' ')[0] or cut}..."


def _words(error: BaseException) -> str:
    """An exception's type, and the first line of its message."""
    text = "".join(traceback.format_exception_only(error)).partition("\n")[0]
    module = f"{type(error).__module__}."
    return shortened(text.removeprefix(module))


def report_exception(rank: int, error: BaseException, first: bool) -> None:
    """Report the exception that ends this rank to the launcher, if there is one, and the rank that caused it, if known.

    `first`: whether no other rank has failed before.
    """
    kind, cause = "raised", None
    if isinstance(error, PeerFailure):
        kind, cause = "followed", error.rank
    elif isinstance(error, CollectiveTimeout):
        kind, cause = "waited", error.rank
    source = raised_at(error)
    report(os.environ, rank, kind, cause=cause, error=_words(error), where=str(source) if source else "", first=first)


def print_folded(error: BaseException) -> None:
    """Print an exception in one line."""
    print(f"{_words(error)} (traceback folded; funccoll run --tracebacks all shows it)", file=sys.stderr, flush=True)
