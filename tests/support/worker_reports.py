"""What the workers of pytest-xdist tell its controller: without what it would throw away."""

from __future__ import annotations

from typing import Any

import pytest

SHOWN = 0.005
"""Seconds from which `--durations` shows a setup or a teardown."""


def says_nothing(name: str, told: dict[str, Any]) -> bool:
    """True of the start of a test, and of a setup or a teardown that passed, took no time, and printed nothing."""
    if name != "testreport":
        return name == "logstart"
    report = told["data"]
    return report["when"] != "call" and report["outcome"] == "passed" and report["duration"] < SHOWN and not report["sections"]


def leave_out_reports(config: pytest.Config) -> None:
    """In a worker, send three messages for a test instead of six: 0.3 ms of processor time a test.

    A file of JUnit's needs all of them.
    """
    worker = next((p for p in config.pluginmanager.get_plugins() if type(p).__name__ == "WorkerInteractor"), None)
    if worker is None or config.option.xmlpath:
        return
    send = worker.sendevent

    def send_what_is_needed(name: str, **told: Any) -> None:
        if not says_nothing(name, told):
            send(name, **told)

    worker.sendevent = send_what_is_needed
