"""Lines that a program has printed."""

from __future__ import annotations


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()
