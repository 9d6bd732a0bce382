"""The scheduling of `make test`: each test runs once, and the last worker has none but those that wait."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from tests.support.waiting_worker import WAITING, WaitingWorkerScheduling


class Worker:
    """A worker as its scheduler sees it, which gives back what is stolen from it, and does one test at a time."""

    def __init__(self, number: int):
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.queue: list[int] = []
        self.done: list[int] = []
        self.stolen: list[int] | None = None
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        assert not self.shutting_down
        self.queue += indices

    def send_steal(self, indices: list[int]) -> None:
        self.stolen = [i for i in indices if i in self.queue[1:]]
        self.queue = [i for i in self.queue if i not in self.stolen]

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.mark.parametrize(
    ("waiting", "others", "speeds"),
    [
        (40, 100, (1, 1, 1)),
        (100, 20, (3, 2, 1)),
        (5, 100, (1, 3, 9)),
        (0, 30, (1, 1, 1)),
        (30, 0, (1, 1, 1)),
        (1, 1, (1, 1, 1)),
        (50, 70, (1, 1)),
        (7, 9, (1,)),
    ],
)
def test_each_test_runs_once_and_the_last_worker_has_none_but_those_that_wait(waiting, others, speeds):
    tests = [f"tests/a.py::{i}" for i in range(others)] + [f"{WAITING}b.py::{i}" for i in range(waiting)]
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"] * len(speeds))
    scheduling, workers = WaitingWorkerScheduling(config), [Worker(i) for i in range(len(speeds))]
    for worker in workers:
        scheduling.add_node(worker)  # pyright: ignore[reportArgumentType]
        scheduling.add_node_collection(worker, tests)  # pyright: ignore[reportArgumentType]
    scheduling.schedule()
    while any(worker.queue for worker in workers):
        for worker, speed in zip(workers, speeds, strict=True):
            if worker.stolen is not None:
                stolen, worker.stolen = worker.stolen, None
                scheduling.remove_pending_tests_from_node(worker, stolen)  # pyright: ignore[reportArgumentType]
            for _ in range(speed):
                if len(worker.queue) > 1 or (worker.queue and worker.shutting_down):  # a worker knows which test follows
                    worker.done.append(worker.queue.pop(0))
                    scheduling.mark_test_complete(worker, worker.done[-1])  # pyright: ignore[reportArgumentType]
    assert scheduling.tests_finished and all(worker.shutting_down for worker in workers)
    assert sorted(i for worker in workers for i in worker.done) == list(range(len(tests)))
    assert len(workers) == 1 or all(tests[i].startswith(WAITING) for i in workers[-1].done)
