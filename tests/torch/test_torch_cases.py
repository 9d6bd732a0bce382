"""Every case of the modules of torch cases, on real processes; the test files of `MODULES` look at what cases return."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.lazy_modules import need
from tests.support.ranks import case_jobs

pytestmark = pytest.mark.covers("torch-ddp")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")

MODULES: dict[str, tuple[list[Any], str]] = {
    "torch_buffer_cases": (case_jobs.ALIKE, "test_torch_buffers.py"),
    "torch_ddp_cases": (case_jobs.RANKS, "test_torch_ddp.py"),
    "torch_pass_cases": (case_jobs.SLOW_ALIKE, "test_torch_passes.py"),
    "torch_interface_cases": ([2], "test_torch_interface.py"),
    "torch_hook_cases": (case_jobs.SLOW_ALIKE, "test_torch_comm_hooks.py"),
}
"""Module -> the numbers of ranks of its jobs, and the file whose tests look at what its cases return."""

PARTS = {
    "torch_ddp_cases": ("torch_gradient_cases", "torch_overlap_cases"),
    "torch_pass_cases": ("torch_change_cases",),
    "torch_hook_cases": ("torch_registration_cases",),
}
"""Module -> other files with cases that its job runs, too."""

UNLIKE = re.compile(r"'(forward|backward)_\w+_time': \d+|DistributedDataParallel \d+|0x[0-9a-f]+")
"""Times, numbers and addresses, which two runs of a case have of their own."""


def read(name: str) -> str:
    """The text of a file of the tests."""
    return next(Path(__file__).parents[1].rglob(name)).read_text()


def text_of(module: str) -> str:
    """The texts of the files that have the module's cases."""
    return "\n".join(read(f"{file}.py") for file in (*PARTS.get(module, ()), module))


def names(module: str) -> list[str]:
    """The module's cases, from their text: to import it takes seconds."""
    return re.findall(r"^@case\ndef (\w+)", text_of(module), re.MULTILINE)


@pytest.mark.parametrize(
    ("module", "n", "name"),
    [
        pytest.param(module, *n.values, name, marks=n.marks) if hasattr(n, "values") else (module, n, name)
        for module, (ranks, _) in MODULES.items()
        for n in ranks
        for name in names(module)
    ],
)
def test_a_case(module, n, name):
    """A case checks everything itself, or a test looks at what it returns."""
    found = case_jobs.results(module, name, n)
    assert found == [None] * n or f'results("{name}"' in read(MODULES[module][1])


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), [(module, name) for module in MODULES for name in names(module)])
def test_a_case_with_buckets_in_flight(module, name):
    """Buckets travel during backward passes: what cases return, errors among it, is as it is without."""
    plain, overlapped = ([UNLIKE.sub("", str(found)) for found in case_jobs.results(module, name, 2, o)] for o in (False, True))
    assert overlapped == plain


@pytest.mark.parametrize("module", MODULES)
def test_no_case_is_missed(module):
    """A case that two functions have, or that another decorator hides, would not run."""
    assert len(names(module)) == len(set(names(module))) == text_of(module).count("@case") > 8
