"""Loops and branches that are refused."""

from __future__ import annotations

import sys

import pytest


def refused(error, match, function, *args):
    """Let a function raise this error, which points into the caller's file."""
    with pytest.raises(error, match=match) as caught:
        function(*args)
    assert f"at {sys._getframe(1).f_code.co_filename}:" in str(caught.value)
