"""Collectives between processes with a GPU each. Every rank launches its blocks, and they read and write segments of its peers.

A call of a collective is a barrier of the host, in which the ranks compare what they run, and then one launch per rank. So a
mismatch, a dead peer or a missing one raises before anything is launched, in the words of the host. Tests run it in several
processes with a simulated GPU each.

Launches in a row are safe without a rule between them, for this reason. A rank's peers touch its segment only between its
*enter* and its *leave*: an instruction that touches a place of rank r waits, directly or through others, for r's enter of this
launch, and r's leave waits for it (`schedules.streams`, verified for every schedule). A block of r signals the enter after it
has copied its part of the inputs into the segment, and ends after its leave. All launches of a rank are on one stream. So the
copies of the next launch begin after every block of this one has left, for any collective over any axes. By then no peer
touches the segment any more, and none touches it for the next launch before that has entered. Blocks of different channels
touch different bytes. The counters never go back: a peer that is ahead only has larger ones, and it cannot have left what this
rank still needs. A block's base stays in its own memory and advances by the same span on all ranks at the end of every launch.
A launch that ends early does not advance it, and no later launch of that rank begins (`ENDED` in `kernels.kernel_context`). So
no counter ever stands for work that was not done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.mesh import Mesh
from ...errors import FunccollError
from ...kernels.block import MAX_OPERANDS
from ...kernels.kernel_context import LINE_BYTES, WORD
from ...platforms.device import GpuDevice
from ...runtime.collective_call import CollectiveCall
from ...runtime.transport import AgreedExecutable, AgreedTransport
from ..shm.host_barrier import Entry
from ..shm.shm_transport import SharedMemoryTransport
from .block_contexts import block_contexts
from .launch_reports import LaunchedName, LaunchReports
from .peer_plan import PeerPlan, build_peer_plan
from .peer_segments import MAX_CHANNELS, PeerGpu, PeerSegments
from .peer_shutdown import shutdown_of
from .virtual_devices import CHANNEL_BYTES

__all__ = ["PeerMemoryTransport"]

_NOTICE_S = 0.5
"""Seconds for this process to notice that another one has ended."""


class PeerMemoryTransport(AgreedTransport):
    """One mesh of a job in which each process has a GPU, or a share of one.

    A GPU that several processes share without MPS runs them in turn: correct, and slow.
    """

    name = "cuda peer memory"

    def __init__(self, host: SharedMemoryTransport, gpu: PeerGpu):
        super().__init__(host)
        self.gpu = gpu
        self.device = GpuDevice(gpu, self.check, self.settle)
        assert host.job.world is not None
        self.world = host.job.world
        words = host.job.failure_words()
        self._words = words.ctypes.data
        self.failure = gpu.map_host(self._words, words.nbytes)
        """The address of the job's failure word, for kernels."""
        self.segments = PeerSegments(gpu, self.world.rank, host.gather_whole)
        self.reports = LaunchReports(gpu)
        self._over: Callable[[], FunccollError] | None = None
        self._is_unmapped = False
        shutdown_of(self.world).add(self)

    def settle(self) -> None:
        """Wait for the GPU. Raises PeerFailure if it has failed because a peer's memory is gone."""
        try:
            self.gpu.wait()
        except RuntimeError as error:  # the driver's, by CuPy
            found = self.explained(error)
            self.host.job.communicators.abandon(found, self, "a launch")
            if found is error:
                raise
            raise found from found.__cause__

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False) -> Iterator[AgreedExecutable]:
        """See `Transport`. Each collective is a launch. All ranks together make segments for it in its first call.

        So a program that only some ranks compile does not block the others.
        """
        for call in calls:
            entry = Entry(call, self.host.agree([call]))
            yield PeerBarrier(self, entry) if call.is_barrier else PeerLaunch(self, call, mesh, entry)

    def check(self) -> None:
        """Raise the error of a launch that ended in the middle. Every call does so before it launches.

        After the stream was synchronised, all that was launched before has reported.

        Raises: PeerFailure if a rank died, raised or left; CollectiveTimeout if one did not come; PeerFailure at every later
        call.
        """
        if self._over is not None:
            raise self._over()
        report = self.reports.found()
        if report is not None:
            entry: Entry = report.launch.owner
            error = entry.failed(report.peer, self.world.timeout if report.waited else None)
            self._over = entry.over
            try:
                raise error
            except FunccollError:  # with its traceback, which the others get
                entry.abandon(error, self)
                raise

    def explained(self, error: RuntimeError) -> Exception:
        """Return an error of this rank's GPU as its cause: the end of a rank whose memory launches read.

        A GPU that reads memory of a dead process may fail, with an error of the driver.
        """
        if isinstance(error, FunccollError):
            return error
        until = time.monotonic() + _NOTICE_S
        while (failure := self.world.watch.failure()) is None and time.monotonic() < until:
            time.sleep(_NOTICE_S / 100)
        if failure is None:
            return error
        found = failure.error(f"The GPU of rank {self.world.rank}, which maps its memory, failed then: {error}")
        found.__cause__ = found.__cause__ or error
        return found

    def unmap(self) -> None:
        """Unmap other ranks' memory once no launch needs it any more. See `peer_shutdown`."""
        self.segments.unmap()
        if not self._is_unmapped:
            self._is_unmapped = True
            self.gpu.unmap_host(self._words)

    def free(self) -> None:
        """Free this rank's segments. No peer maps them any more."""
        self.segments.free()


class PeerBarrier(AgreedExecutable):
    """A barrier: wait for this rank's launches, then, on the host, for the other ranks."""

    def __init__(self, transport: PeerMemoryTransport, entry: Entry):
        super().__init__(entry.executable)
        self.transport, self.entry = transport, entry

    def __call__(self, *copies: Any) -> tuple[()]:
        """Wait for all ranks of the group."""
        self.begin()
        self.transport.device.wait()
        return self.entry()


class PeerLaunch(AgreedExecutable):
    """One collective: a function from this rank's inputs to its outputs."""

    def __init__(self, transport: PeerMemoryTransport, call: CollectiveCall, mesh: Mesh, entry: Entry):
        super().__init__(entry.executable)
        self.transport, self.gpu, self.mesh, self.entry, self.call = transport, transport.gpu, mesh, entry, call
        self.inputs, self.outputs = zip(*(operand.variables for operand in call.operands), strict=True)
        self._rank = entry.members.index(transport.world.rank)
        self._written = bool(call.schedule.collective.has_output(self._rank))
        self._plan: PeerPlan | None = None
        self._patience_s = 0.0

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """This rank's outputs."""
        self.begin()
        transport, gpu = self.transport, self.gpu
        transport.check()
        blocks = [gpu.contiguous(value) for value in values]
        make = gpu.allocate if self._written else gpu.zeros
        outs = [make(operand.out_shape, operand.dtype) for operand in self.call.operands]
        before = self.entry.count
        try:
            self.entry()
            plan = self._prepared()
            for slots, arrays in ((plan.inputs, blocks), (plan.outputs, outs)):
                self._addresses[slots] = np.array([gpu.address(array) for array in arrays])[:, None]
            gpu.upload(self._table, self._addresses)
            gpu.launch(plan.combines, len(plan.codes), self._contexts, self._table, "sys")
        except BaseException as error:
            found = transport.explained(error) if isinstance(error, RuntimeError) else error
            if self.entry.count != before:  # peers launch, and would wait for this rank
                self.entry.abandon(found, (blocks, outs, self))
            if found is error:
                raise
            raise found from found.__cause__
        return tuple(outs)

    def _prepared(self) -> PeerPlan:
        """The plan, once it has a segment, and the tables that kernels read."""
        plan, timeout = self._plan, self.transport.world.timeout
        if plan is None:
            plan = self._plan = self._make_plan()
        if self._patience_s != timeout:
            self._patience_s, self._contexts = timeout, self._make_contexts(plan, timeout)
        return plan

    def _make_plan(self) -> PeerPlan:
        segments, members, mesh = self.transport.segments, self.entry.members, self.mesh
        self._bases, counters = segments.counters(self.call.groups, mesh)
        nbytes = sum(max(o.nbytes, o.out_nbytes) for o in self.call.operands)
        channels = max(1, min(segments.max_blocks, MAX_CHANNELS, -(-nbytes // CHANNEL_BYTES)))
        of_channels = [[counters[m] + LINE_BYTES * c for m in members] for c in range(channels)]
        plan = build_peer_plan(self.call, self._rank, of_channels, members)
        assert plan.max_operands <= MAX_OPERANDS, f"{plan.max_operands} operands of one combine"
        memory = segments.of(plan.segment_bytes, mesh)
        self._addresses = np.zeros(max(plan.slots, 1), np.int64)
        for slot, (rank, offset) in plan.places.items():
            self._addresses[slot] = memory[members[rank]] + offset
        self._table = self.gpu.allocate(self._addresses.shape, self._addresses.dtype)
        self._words = self.transport.reports.words(LaunchedName(self.call.name, self.call.source, channels, self.entry))
        return plan

    def _make_contexts(self, plan: PeerPlan, timeout: float) -> Any:
        words = self._words | {
            WORD.failure: self.transport.failure,
            WORD.bases: [self._bases + 8 * c for c in range(len(plan.codes))],
            WORD.patience: int(timeout * 1e9),
        }
        return block_contexts(self.gpu, plan.codes, words)
