"""Jobs whose ranks run all cases of a module in turn: one for each number of ranks, also where several workers run tests."""

from __future__ import annotations

import fcntl
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import rank_end
from tests.support.ranks.ranks import JOIN, OVERLAP, TORCH, Ranks

RANKS = [2, pytest.param(3, marks=pytest.mark.slow)]
"""Numbers of ranks, for `parametrize`, of jobs whose sums have more than two terms with a third rank."""

ALIKE = [2, pytest.param(3, marks=pytest.mark.exhaustive)]
"""Numbers of ranks of jobs in which a third one does what the second does."""

SLOW_ALIKE = [pytest.param(2, marks=pytest.mark.slow), *ALIKE[1:]]
"""The same, of jobs that take seconds on two ranks."""

FINALIZED = ("torch_ddp_cases",)
"""Modules of cases whose two ranks delete their modules at their end; three always do. To delete torch takes 0.3 s."""

shared_folder: list[Path] = []
"""The folder of all workers of this run; `conftest.py` puts it here, where there are several."""

SCRIPT = """
import importlib, json, traceback, warnings
cases = importlib.import_module("tests.support.cases." + os.environ["CASES"])
begin, end = (getattr(cases, name, lambda: None) for name in ("begin", "end"))
begin()
warnings.simplefilter("error")
for name, function in cases.CASES.items():
    try:
        say(json.dumps([name, "", function()]))
    except BaseException as error:
        say(json.dumps([name, "".join(traceback.format_exception(error)), None]))
        break
else:
    end()
"""


def results(module: str, name: str, n: int, overlap: bool = False) -> list[Any]:
    """Each rank's result of a case on n ranks; a case that raised fails the test, with its traceback.

    overlap: buckets of torch modules travel in backward passes, as between hosts.
    """
    found = _outcomes(module, n, overlap)
    failed = "".join(error for case in found.values() for error, _ in case)
    assert name in found, f"a case before {name} failed: {failed}"
    for error, _ in found[name]:
        assert not error, error
    return [result for _, result in found[name]]


@functools.cache
def _outcomes(module: str, n: int, overlap: bool) -> dict[str, list[Any]]:
    """Case -> each rank's error and result. The first worker that asks runs the job, and the others wait."""
    if not shared_folder:
        return _run(module, n, overlap)
    file = shared_folder[0] / f"{module} on {n}{', overlapped' * overlap}.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(_run(module, n, overlap)))
        return json.loads(file.read_text())


def _run(module: str, n: int, overlap: bool) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = {"GLOO_FILE": f"{folder}/gloo", "TORCH_STORE": f"{folder}/store"}
        if module in FINALIZED or n > 2:
            files[rank_end.VARIABLE] = "1"
        with Ranks(
            JOIN + OVERLAP * overlap + SCRIPT, range(n), imports=TORCH, CASES=module, GLOO_SOCKET_IFNAME="lo", **files
        ) as ranks:
            assert set(ranks.lines().values()) == {"in"}
            ended = False
            while not ended:
                for line in ranks.lines().values():
                    if not line:
                        ended = True
                        continue
                    name, error, result = json.loads(line)
                    found.setdefault(name, []).append((error, result))
    return found
