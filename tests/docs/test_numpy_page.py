"""docs/guides/numpy.md says what the table of functions holds."""

import re

import numpy as np
import pytest

from funccoll.ops import FUNCTIONS
from funccoll.ops.registry import qualified_name
from tests.docs.numpy_page import PAGE, left_out, page

pytestmark = pytest.mark.covers("numpy")


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m tests.docs.numpy_page"


def test_every_function_has_its_row():
    rows = re.findall(r"^\| `(np\.[\w.]+)` \|", PAGE.read_text().split("## Functions")[1].split("## Ufuncs")[0], re.M)
    assert rows == sorted(qualified_name(f) for f in FUNCTIONS)


def test_an_argument_that_is_left_out_is_named():
    assert left_out(np.pad, lambda array, pad_width: array) == []  # NumPy's own takes any
    assert left_out(np.mean, lambda a, axis: a) == ["dtype", "keepdims", "where"]
