"""A worker of pytest-xdist for tests that often wait, so that the others, one for each core, need not wait with them."""

from __future__ import annotations

from xdist.scheduler import WorkStealingScheduling
from xdist.scheduler.worksteal import MIN_PENDING
from xdist.workermanage import WorkerController

WAITING = "tests/jobs/"
"""The folder of tests which wait for processes half of their time: for timeouts under test, for mpirun, for who is to die."""


class WaitingWorkerScheduling(WorkStealingScheduling):
    """`--dist worksteal`, but the last worker has the tests of `WAITING`, and no others: those take some of them in the end.

    So it imports nothing of what other tests need: JAX, torch, kernels. A worker without others has all tests.
    """

    waiting: WorkerController | None = None

    def schedule(self) -> None:
        """Hand all tests out at first: the last worker's and, in equal shares, the others'."""
        if self.collection is None and len(self.nodes) > 1:
            tests = next(iter(self.node2collection.values()))
            if not self._check_nodes_have_same_collection():
                return
            self.collection, self.waiting = tests, max(self.nodes, key=lambda node: node.gateway.id)
            self.pending[:] = sorted(range(len(tests)), key=lambda i: not tests[i].startswith(WAITING))
            self._send_tests(self.waiting, sum(test.startswith(WAITING) for test in tests))
        super().schedule()

    def check_schedule(self) -> None:
        """Let the last worker end when its tests are done."""
        waiting = self.waiting
        if waiting and not waiting.shutting_down and len(self.node2pending.get(waiting, ())) < MIN_PENDING:
            waiting.shutdown()
        super().check_schedule()
