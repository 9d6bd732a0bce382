"""Jobs whose ranks fail."""

import pytest


@pytest.fixture(scope="session")
def server():
    """The server that starts the ranks of `job`, and counts what they leave behind."""
    from tests.support.ranks.failure_jobs import Server

    with Server() as server:
        yield server


@pytest.fixture
def job(server, tmp_path):
    """Starts a job whose ranks fail in some way."""
    from tests.support.ranks.failure_jobs import starter

    with starter(server, tmp_path) as start:
        yield start
