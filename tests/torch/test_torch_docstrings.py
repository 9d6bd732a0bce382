"""Examples in the docstrings of funccoll.torch, which `tests/docs/test_docstrings.py` does not import."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

import funccoll as fc
from tests.docs.test_docstrings import run_examples
from tests.support.lazy_modules import need

pytestmark = pytest.mark.covers("torch-collectives")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")


def test_examples_of_docstrings_run():
    import torch

    import funccoll.torch as public

    namespace, finder = {"np": np, "fc": fc, "P": fc.P, "torch": torch}, doctest.DocTestFinder()
    for name in public.__all__:
        run_examples(iter(finder.find(getattr(public, name), f"funccoll.torch.{name}", module=False, globs=namespace)))
