"""Fixtures of the tests of records."""

import runpy

import pytest

from tests.support.benchmark_records import ROOT


@pytest.fixture
def readme_table():
    return runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))
