"""Set before anything is imported: every pass is checked, JAX (the oracle of test_vs_jax) has 8 devices, and costs are the
presets', whatever machine profile the user has."""

import gc
import os
import signal
from pathlib import Path

os.environ["FUNCCOLL_CHECK"] = "1"
os.environ["FUNCCOLL_MACHINE_PROFILE"] = "none"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("FUNCCOLL_FUSE", "0")  # compiling kernels of a thousand small programs takes minutes: see `FUSED`
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()

# A shell's background jobs ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

import funccoll as fc
from funccoll.config import FUSE
from tests.support import python_path
from tests.support.example_counts import register_profiles
from tests.support.worker_reports import leave_out_reports

os.environ["PYTHONPATH"] = python_path()

TESTS = Path(__file__).parent
FUSED = ("docs", "unit/compiler", "unit/kernels", "unit/nn", "unit/parallel")
"""Folders whose tests compute in fused kernels in `make test`, too."""
PROCESSES = ("gpu_check", "jobs", "torch")
"""Folders whose tests start processes, all of them or nearly all."""

register_profiles()


def pytest_addoption(parser):
    parser.addoption("--waiting-worker", action="store_true", help="the last worker has the tests that mostly wait, alone")


def pytest_configure(config):
    leave_out_reports(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.option.waiting_worker:
        from tests.support.waiting_worker import WaitingWorkerScheduling

        return WaitingWorkerScheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def _shared_folder(tmp_path_factory):
    """Tell `case_jobs` where several workers meet."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.support.ranks import case_jobs

        case_jobs.shared_folder.append(tmp_path_factory.getbasetemp().parent)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not choose
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.relative_to(TESTS).parts[0] in PROCESSES:
            item.add_marker("processes")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All that collecting makes stays: the garbage collector need not go through it, neither meanwhile nor later.

    Tests make much garbage without cycles: looking for them every 700 objects takes 4 % of their time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="module")
def small_collections():
    """For tests that collect garbage: what there is before them is left out, which takes half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mesh():
    return fc.make_mesh({"data": 4, "model": 2})


@pytest.fixture
def line():
    return fc.make_mesh({"data": 4})


@pytest.fixture(autouse=True)
def _fused_compute(request, monkeypatch):
    """Programs compute in fused kernels, in the folders where that is tested."""
    folder = request.path.relative_to(TESTS).parent.as_posix()
    if folder in FUSED:
        monkeypatch.setenv(FUSE, "1")


@pytest.fixture
def numpy_compute(monkeypatch, _fused_compute):
    """Compiled programs have NumPy's bits: no fused kernels."""
    monkeypatch.setenv(FUSE, "0")


@pytest.fixture
def registered():
    """Registers schedules; algorithms that a test registers, or deletes, are as before after it."""
    from funccoll.schedules import registry

    before = {kind: dict(known) for kind, known in registry._ALGORITHMS.items()}
    yield fc.schedules.register
    for kind, known in before.items():
        registry._ALGORITHMS[kind].clear()
        registry._ALGORITHMS[kind].update(known)
