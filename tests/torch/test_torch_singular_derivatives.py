"""Derivatives of torch at kinks, ties and poles are what docs/guides/numpy.md says; the names of funccoll.torch."""

from __future__ import annotations

import importlib
import warnings

import pytest

from tests.support.cases.derivative_cases import ROWS, SECOND, equal
from tests.support.groups import in_groups
from tests.support.lazy_modules import lazily, need

pytestmark = pytest.mark.covers("torch-collectives")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")
torch = lazily("torch")


@in_groups("row", [row for row in ROWS if row.torch], str)
def test_what_the_page_says_of_torch(row):
    x = torch.tensor(row.x, requires_grad=True)
    row.torch(torch, x).backward()
    equal(x.grad.numpy(), row.ours if row.theirs is None else row.theirs)


@pytest.mark.parametrize("row", SECOND, ids=str)
def test_second_derivatives_of_torch(row):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.functional.hessian(lambda x: row.torch(torch, x), torch.tensor(row.x))
    equal(found.numpy(), row.ours if row.theirs is None else row.theirs)


def test_dir_lists_public_names_alone():
    package = importlib.import_module("funccoll.torch")
    shown = [name for name in dir(package) if not name.startswith("__")]
    assert shown == sorted(n for n in package.__all__ if not n.startswith("__"))
    assert all(hasattr(package, name) for name in shown)
