"""Fixtures of the tests of records."""

import runpy

import pytest

from tests.support.benchmark_records import ROOT


@pytest.fixture
def result_tables():
    return runpy.run_path(str(ROOT / "benchmarks" / "result_tables.py"))
