"""The communicators of one job: their control blocks and counters, and the position of every rank."""

from __future__ import annotations

import hashlib
import os
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import numpy as np

from ...core.mesh import ReplicaGroups, number_hosts
from ...core.weak_values import WeakValues
from ...errors import FunccollError, MeshError, RendezvousError
from ...job import host
from ...job.calling_thread import calling_thread
from ...job.failure import Failure
from ...job.membership import Membership
from ...kernels.kernel_context import LINE_BYTES, MAILBOX, RECORD
from ...runtime.transport import is_part
from ..plans.control_block import MAILBOXES, MAILBOXES_ON_SHARED_CORES, Communicator, ControlBlock, Mailboxes
from .compiled_programs import CompiledPrograms
from .decision_log import Decided, DecisionLog, Events, read_log
from .heap import Heap
from .memory_file import HEADER
from .peer_access import PeerAccess
from .plan import DESCRIPTION, DESCRIPTION_BYTES, Plan
from .process_notes import ProcessNotes
from .progress_engine import ProgressEngine
from .remote_waits import Progress, Wait
from .thread_ownership import ThreadOwnership, freed_mesh
from .wait_graph import NO_OTHERS, WaitGraph, threads_alive

__all__ = ["Communicators"]

_MAX_COMMUNICATORS = 4096
"""The most pairs of a mesh and some of its axes over which one job communicates."""
_ENTRY_WORDS = 6
"""Words of an entry of the table: a hash of mesh and axes, begin and end of the control blocks, bytes of the caches, the mesh's
number, and how many processes of this host have freed it. The hash of a free entry is 0."""
_MAILBOXES: tuple[Mailboxes, ...] = (), MAILBOXES, MAILBOXES_ON_SHARED_CORES
_ANSWER_TIMEOUT = 0.2
"""Seconds for ranks of other hosts to report their positions. Soon after a rank was killed, mpirun ends the others, too."""
_IN_THE_MIDDLE, _AFTER_ONE = 1, 2
"""Where a rank has ended its collectives."""
_NOWHERE = "has not entered any collective of this group"
_TOLD = 8
"""Decisions that a rank reports to those of other hosts."""
_NOTE_BYTES = 512
"""Bytes in which a rank publishes how many exceptions have left its programs, and the last of them."""
_UNNOTED = FunccollError("an exception left a program, and another one came before it was noted")


class Communicators:
    """The communicators of one job.

    A table in the heap has the offsets of their control blocks. The first rank that uses one writes it.
    """

    def __init__(
        self, world: Membership, heap: Heap, access: PeerAccess, notes: ProcessNotes, parts: Mapping[int, tuple[int, ...]]
    ):
        """`parts` has the ranks of meshes of some of the job's processes, by their numbers, until such a mesh is freed."""
        self._parts = parts
        self._count, self._unused = (
            0,
            list[int](),
        )  # numbers of communicators: how many were given, and those that are free again
        self.world, self.heap, self.access, self.notes = world, heap, access, notes
        self.bases = np.zeros(_MAX_COMMUNICATORS, np.int64)
        self.sequence_hashes = np.zeros(_MAX_COMMUNICATORS, np.int64)
        """By communicator, a hash of this process's eager collectives, of exceptions that left programs after a collective, and
        of decisions that enclose collectives."""
        self.low_water_marks = np.zeros(_MAX_COMMUNICATORS, np.int64)
        """By communicator, a count that the counters of all its ranks have reached. See RESERVE."""
        self.contention = np.zeros(2, np.int64)
        """The waits' record of other processes that want this one's core. See `contention` in `kernels.kernel_context`."""
        self._no_failure = np.zeros(1, np.int64)
        self.no_failure = self._no_failure.ctypes.data
        """The address of a failure word that is never set: for a call that goes on after the failure of a rank outside."""
        self.busy = bytearray(_MAX_COMMUNICATORS)
        """By communicator, 1 while one of its calls runs. A call from inside it raises, for example by a signal handler."""
        self.plans: WeakValues[int, Plan] = WeakValues()
        """By the hashes that this rank publishes when it enters. Collective groups keep them."""
        self.programs = CompiledPrograms(world.watch)
        self._scratch: dict[frozenset[int], np.ndarray] = {}
        self._broken: FunccollError | None = None
        self._known: dict[tuple, tuple[Communicator, list[tuple[tuple[int, ...], ControlBlock]]]] = {}  # with all groups
        start = HEADER + ProcessNotes.nbytes(world.world)
        self._abandoned = heap.view(start, (world.world,), np.int64)
        start += self._abandoned.nbytes
        self._notes = heap.view(start, (world.world, _NOTE_BYTES), np.uint8)
        start += self._notes.nbytes
        self.waits = WaitGraph(heap, world.rank, world.world, _MAX_COMMUNICATORS, start)
        table = start + self.waits.nbytes
        self._table = heap.view(table, (_MAX_COMMUNICATORS, _ENTRY_WORDS), np.int64)
        self._first = -(-(table + self._table.nbytes) // LINE_BYTES) * LINE_BYTES
        self._lock = threading.Lock()
        self._ownerships: dict[frozenset[int], ThreadOwnership] = {}
        self._owners: dict[int, int] = {}  # threads, by communicator
        self._engines: dict[int, ProgressEngine] = {}  # by thread
        self._logs: dict[int, DecisionLog] = {}
        self._left_behind: list[object] = []
        self.waiting_for: dict[int, Wait] = {}
        """The waits of this rank's threads that take longer than a moment, by the numbers of communicators, in their order."""
        self.across_hosts = bool(number_hosts(world.hosts))
        """True in a job on several hosts."""
        world.watch.answer_with("call", self._answer)
        world.watch.answer_with("progress", lambda question: {"progress": self.progress(question["communicator"]).told()})

    @property
    def broken(self) -> FunccollError | None:
        """The error that ended all collectives of this process. Once it is set, no ownership has an owner any more."""
        return self._broken

    @broken.setter
    def broken(self, error: FunccollError) -> None:
        self._broken = error
        self._disown()

    def _disown(self) -> None:
        """Make all calls look why none may run any more."""
        for ownership in list(self._ownerships.values()):
            ownership.thread = None

    def communicator(self, groups: ReplicaGroups, number: int) -> Communicator:
        """This process's communicator among these groups of the `number`-th mesh. The groups have positions in the mesh.

        Its first use places the control blocks of all groups.
        """
        key = number, groups
        with self._lock:
            if key not in self._known:
                part = self._parts.get(number)
                if part is None and is_part(number):
                    raise freed_mesh()
                ranks = groups.ranks if part is None else tuple(tuple(part[i] for i in group) for group in groups.ranks)
                own = self.world.rank if part is None else part.index(self.world.rank)
                members = ranks[groups.ranks.index(groups.of(own))]
                tag = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little")
                entry, start, mailboxes, cache_bytes = self._place(tag | 1, number, [len(group) for group in ranks])
                blocks = []
                for group in ranks:
                    blocks.append((group, ControlBlock(start, len(group), mailboxes=mailboxes)))
                    start += blocks[-1][1].nbytes
                rank, hosts, control = members.index(self.world.rank), self._hosts(members), dict(blocks)[members]
                of_machine = tag, self._piece_bytes(), cache_bytes, self.access.bounds
                if not self._unused:
                    self._unused.append(self._count)
                    self._count += 1
                mine = Communicator(self._unused.pop(), members, rank, control, entry, hosts, *of_machine)
                self._known[key] = mine, blocks
            return self._known[key][0]

    def _hosts(self, members: Sequence[int]) -> tuple[int, ...]:
        """The hosts of a group's ranks, if there are several."""
        return number_hosts(self.world.hosts[m] for m in members)

    def _piece_bytes(self) -> int:
        library = self.world.transport.message_library
        return library.piece_bytes if library is not None else Communicator.piece_bytes

    def _cache_bytes(self) -> int:
        return host.cache_bytes(self.world.processes_here) or Communicator.cache_bytes

    def free(self, number: int) -> None:
        """Free the communicators of the mesh of some processes with that number. A later use raises MeshError.

        Their entries and memory are used again when all of the mesh's processes on this host have freed them.
        """
        with self._lock:
            mine = [mine for key, (mine, _) in self._known.items() if key[0] == number]
            numbers = {c.number for c in mine}
            for ownership in self._ownerships.values():  # a call of another thread asks `take` then, and waits for the lock
                if ownership.numbers & numbers:
                    ownership.thread = None
            engines = [self._engines[owner] for n in numbers if (owner := self._owners.get(n)) in self._engines]
            if any(self.busy[n] for n in numbers) or any(engine.is_active for engine in engines):
                raise MeshError("a group was freed in the middle of one of its collectives: free it after the call.")
            here = sum(map(self.notes.is_here, self._parts.get(number, ())))
            for key in [key for key in self._known if key[0] == number]:
                del self._known[key]
            for owned in [owned for owned in self._ownerships if owned & numbers]:
                self._ownerships.pop(owned).end()
                self._scratch.pop(owned, None)
            for n in numbers:
                self.bases[n] = self.sequence_hashes[n] = self.low_water_marks[n] = 0
                self._owners.pop(n, None)
                self._logs.pop(n, None)
                self.waiting_for.pop(n, None)
            self.waits.disown([c.entry for c in mine])
            self._unused += numbers
            with self.heap.exclusive(self.world.timeout):
                (entries,) = np.nonzero(self._table[:, 4] == number)
                self._table[entries, 5] += 1
                self._table[entries[self._table[entries, 5] >= here], 0] = 0

    def _place(self, hash: int, number: int, sizes: Sequence[int]) -> tuple[int, int, Mailboxes, int]:
        """The entry and the offset of the control blocks along some axes, their mailboxes, and the bytes of the host's caches.

        They are the same in all processes, whichever asks first. Later ones get fewer mailboxes, so that more of them get some.
        Once half of the room is used up, the rest is for lines.
        """
        nbytes_with = lambda mailboxes: sum(ControlBlock(0, size, mailboxes=mailboxes).nbytes for size in sizes)
        with self.heap.exclusive(self.world.timeout):
            (found,) = np.nonzero(self._table[:, 0] == hash)
            if found.size:
                start, end, cache_bytes = self._table[found[0], 1:4].tolist()
                mailboxes = next(mailboxes for mailboxes in _MAILBOXES if nbytes_with(mailboxes) == end - start)
                return int(found[0]), start, mailboxes, cache_bytes
            used = int(np.count_nonzero(self._table[:, 2]))
            start = int(self._table[used - 1, 2]) if used else self._first
            room = (self._first + self.access.start) // 2 - start
            share_cores = self.world.processes_here > (os.cpu_count() or 1)
            if share_cores and 2 * nbytes_with(MAILBOXES_ON_SHARED_CORES) <= room:
                mailboxes = MAILBOXES_ON_SHARED_CORES
            else:
                mailboxes = MAILBOXES if nbytes_with(MAILBOXES) <= room else ()
            nbytes, cache_bytes = nbytes_with(mailboxes), self._cache_bytes()
            free = (self._table[:used, 0] == 0) & (self._table[:used, 2] - self._table[:used, 1] == nbytes)
            entry = int(np.argmax(free)) if free.any() else used
            if entry < used:
                start = int(self._table[entry, 1])
                self.heap.view(start, (nbytes,), np.uint8)[...] = 0
            if entry < _MAX_COMMUNICATORS and start + nbytes <= self.access.start:
                self._table[entry] = hash, start, start + nbytes, cache_bytes, number if is_part(number) else 0, 0
                return entry, start, mailboxes, cache_bytes
        raise FunccollError(
            f"this job has {used:,} communicators, one for each mesh and the axes over which its programs communicate, and no "
            f"room for another: make each mesh once, with fc.make_mesh, and use it in all functions."
        )

    def end(self, why: str) -> None:
        """Leave the job: no collective of this process runs any more."""
        error = RendezvousError(why)
        error.args = (why,)  # without the source line, which is not the one that will be wrong
        self.broken = error

    def abandon(self, error: BaseException, memory: object, name: str) -> None:
        """Leave the named collective in the middle because of an error. No collective runs any more, on any rank.

        `memory` is kept for good: a stopped rank may still write there when it continues, and so may messages.
        """
        self._left_behind.append(memory)
        if self.broken is None:
            ours = isinstance(error, FunccollError)
            self.broken = error if ours else FunccollError(f"{type(error).__name__} in the middle of {name}")
            self._abandoned[self.world.rank] = _IN_THE_MIDDLE
            text = "".join(traceback.format_exception(error))  # an error of another thread may not have been raised here
            head = "" if error.__traceback__ is not None else "Traceback (most recent call last):\n"
            self.world.watch.report(head + text)

    def lose_progress(self) -> None:
        """See `Transport`. Without the note of an exception no later collective can be trusted.

        It calls no Python function: the recursion depth may be exhausted.
        """
        self._broken = self._broken or _UNNOTED
        for ownership in list(self._ownerships.values()):
            ownership.view[0] = 0

    def counts(self, mesh: int) -> dict[int, int]:
        """The counts of the communicators of the `mesh`-th mesh, by number. They grow with each collective."""
        with self._lock:
            numbers = [mine.number for key, (mine, _) in self._known.items() if key[0] == mesh]
        return {number: int(self.bases[number]) for number in numbers}

    def note_exception(self, numbers: Collection[int], place: str, text: str) -> None:
        """Record an exception that left a program at `place`. Peers that do not continue from there raise ProgramMismatch.

        `numbers` are those of the program's communicators.
        """
        count, _ = self.note(self.world.rank)
        note = f"{count + 1} {text}".encode()[:_NOTE_BYTES]
        self._notes[self.world.rank] = np.frombuffer(note.ljust(_NOTE_BYTES, b"\0"), np.uint8)
        with self._lock:
            known = {mine.number: mine for mine, _ in self._known.values()}
        for number in numbers:
            word = self._record(known[number].control, known[number].rank, RECORD.events)
            events, sequence_hash = Events.of(int(word)), self.sequence_hashes[number : number + 1]
            sequence_hash[...] = _mixed(sequence_hash.item(), place, 7)
            word[...] = events._replace(exceptions=_mixed(events.exceptions, place, 5)).word

    def note(self, rank: int) -> tuple[int, str]:
        """The number of exceptions that left programs of a rank of this host after a collective, and the last one."""
        number, _, text = self._notes[rank].tobytes().rstrip(b"\0").decode(errors="replace").partition(" ")
        return int(number or 0), text

    def events(self, rank: int, communicator: Communicator) -> Events:
        """The exceptions and decisions in the sequence hash of a rank of this host."""
        return Events.of(int(self._record(communicator.control, communicator.members.index(rank), RECORD.events)))

    def decisions(self, rank: int, communicator: Communicator) -> dict[int, Decided]:
        """The last decisions in the sequence hash of a rank of this host, by number."""
        return read_log(self.heap, communicator.control.record(communicator.members.index(rank)))

    def decision_log(self, communicator: Communicator) -> DecisionLog:
        """The log of this rank's decisions over a communicator."""
        with self._lock:
            number = communicator.number
            if number not in self._logs:
                record = communicator.control.record(communicator.rank)
                self._logs[number] = DecisionLog(self.heap, record, self.sequence_hashes, number)
            return self._logs[number]

    def _record(self, control: ControlBlock, rank: int, word: int) -> np.ndarray:
        return self.heap.view(control.record(rank) + word, (), np.int64)

    def published(self, communicator: Communicator, rank: int) -> dict[int, tuple[int, Events, dict[str, str]]]:
        """A rank's mailboxes, on this host. By the number of the call, the sequence hash, its events, and the description."""
        found = {}
        for ring in communicator.control.rings:
            shape = (ring.mailboxes, ring.mailbox_bytes // 8)
            mailboxes = self.heap.view(ring.of(communicator.members.index(rank)), shape, np.int64)
            for words in mailboxes[mailboxes[:, MAILBOX.number // 8] > 0].tolist():
                text = self._description(words[MAILBOX.text // 8])
                sequence_hash, events = words[MAILBOX.sequence_hash // 8], Events.of(words[MAILBOX.events // 8])
                found[words[MAILBOX.number // 8]] = sequence_hash, events, text
        return found

    def descriptions(self, communicator: Communicator) -> dict[int, dict[str, str]]:
        """The call that each rank of this host entered last over the communicator's axes, by the names of DESCRIPTION."""
        (blocks,) = (blocks for mine, blocks in self._known.values() if mine is communicator)
        records = {rank: control.record(i) for members, control in blocks for i, rank in enumerate(members)}
        texts = {rank: int(self.heap.view(record + RECORD.text, (), np.int64)) for rank, record in records.items()}
        return {rank: self._description(text) for rank, text in texts.items() if self.notes.is_here(rank)}

    def _description(self, start: int) -> dict[str, str]:
        length = min(DESCRIPTION_BYTES, self.heap.size - start) if start else 0
        text = self.heap.view(start, (length,), np.uint8).tobytes().partition(b"\0")[0].decode(errors="replace")
        return dict(zip(DESCRIPTION, text.split("\x1f"), strict=False)) if text else {}

    def is_intact(self, members: Sequence[int]) -> bool:
        """True if no member has left a collective while peers could read its arrays. A killed rank has not left."""
        return not any(self._abandoned[m] == _IN_THE_MIDDLE for m in members)

    def outlive(self, failure: Failure, name: str) -> None:
        """End the collectives of this rank after the named one, which has ended well. A rank outside of it had failed."""
        if self.broken is None:
            self._abandoned[self.world.rank] = _AFTER_ONE
            self.broken = failure.error(f"Rank {self.world.rank} was in {name}, which ended: that rank takes no part in it.")

    def has_ended(self, rank: int) -> bool:
        """True if a rank of this host has ended its collectives, so that it enters no other one."""
        return bool(self._abandoned[rank])

    # ------------------------------------------------------------ where every rank is

    def table(self, communicator: Communicator, others: Mapping[int, Mapping[str, Any]]) -> str:
        """Positions of all ranks of the job, one line each. `communicator` is the one that this rank waits in.

        `others` are the reports of other ranks.
        """
        silent = {"where": "has not said where it is"}
        lines = []
        for rank in self.world.ranks:
            where = self._where(rank, communicator) if self.notes.is_here(rank) else others.get(rank, silent)["where"]
            lines.append(f"  rank {rank} {where}")
        return "\n".join(lines)

    def reports(self, communicator: Communicator) -> dict[int, dict[str, Any]]:
        """The reports of other ranks that answer at once: position, call, and the rank they wait for.

        A job on one host has none: its memory shows the positions.
        """
        if not self.across_hosts:
            return {}
        asked = [rank for rank in self.world.ranks if rank != self.world.rank]
        return self.world.watch.ask_all(asked, self.question_about(communicator), _ANSWER_TIMEOUT)

    def look(self, tag: int, ranks: Collection[int]) -> dict[int, Progress]:
        """By rank, the progress in the communicator with that tag: of the ranks that answer at once, and of this one."""
        own = self.world.rank
        asked = [rank for rank in ranks if rank != own]
        answers = self.world.watch.ask_all(asked, {"kind": "progress", "communicator": tag}, _ANSWER_TIMEOUT)
        found = {rank: Progress.of(answer["progress"]) for rank, answer in answers.items()}
        return {**found, own: self.progress(tag)} if own in ranks else found

    @staticmethod
    def question_about(communicator: Communicator) -> dict[str, Any]:
        """The question for another rank's report. The members of a communicator ask it."""
        return {"kind": "call", "communicator": communicator.tag}

    def own_call(self, communicator: Communicator) -> tuple[int, int]:
        """(number, hash with the sequence hash) of the call that this rank entered last over a communicator.

        The hash is 0 until the rank has entered: number and hash are written one after the other.
        """
        counter, call, hash = self.heap.view(communicator.control.line(communicator.rank), (3,), np.int64).tolist()
        return call, hash if counter > call else 0

    def counter(self, communicator: Communicator, rank: int) -> int:
        """The counter of a rank; 0 for one of another host."""
        line = communicator.control.line(communicator.members.index(rank))
        return int(self.heap.view(line, (), np.int64)) if self.notes.is_here(rank) else 0

    def progress(self, tag: int) -> Progress:
        """This rank's progress in the communicator with that tag. See `WaitGraph` about threads."""
        mine, alive, waits = self._with_tag(tag), threads_alive(), list(self.waiting_for.copy().items())
        owner = None if mine is None else self._owners.get(mine.number)
        if owner in alive:
            waits = [(number, wait) for number, wait in waits if self._owners.get(number) == owner]
        elif len(alive) > NO_OTHERS:
            waits = []
        wait = waits[-1][1] if waits else None  # read before the counter
        return Progress(0 if mine is None else self.counter(mine, self.world.rank), wait)

    def _with_tag(self, tag: int) -> Communicator | None:
        return next((mine for mine, _ in list(self._known.values()) if mine.tag == tag), None)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """This rank's report, for a rank of another host that waits for it."""
        tag = question["communicator"]
        mine, progress = self._with_tag(tag), self.progress(tag).told()
        waits = next((wait.rank for wait in reversed(self.waiting_for.copy().values())), -1)
        if mine is None:
            nothing = {"events": [0, 0], "decisions": [], "note": [0, ""]}
            return {"where": _NOWHERE, "call": [0, 0], "said": {}, "waits": waits, "progress": progress, **nothing}
        if (wait := self.waiting_for.get(mine.number)) is not None:
            waits = wait.rank
        return {
            "where": self._where(self.world.rank, mine).removesuffix(" (this rank)"),
            "call": self.own_call(mine),
            "said": self.descriptions(mine)[self.world.rank],
            "events": self.events(self.world.rank, mine),
            "decisions": list(self.decisions(self.world.rank, mine).items())[-_TOLD:],
            "note": self.note(self.world.rank),
            "waits": waits,
            "progress": progress,
        }

    def _where(self, rank: int, waiting: Communicator) -> str:
        last = ""
        # The communicator that this rank waits in comes last: its entry counts most for a rank that is in no collective.
        for communicator, blocks in sorted([*self._known.values()], key=lambda known: known[0] is waiting):
            for members, control in blocks:
                if rank in members:
                    done, hash, counter = self._line(control, members.index(rank))
                    plan = self.plans.get(hash)
                    name = "a collective that this rank has not compiled" if plan is None else plan.name(hash)
                    found = None if plan is None else plan.entered[hash][0]
                    if hash and found is not None and done >= found.span:
                        part = "" if len(found.segments) == 1 else " or a segment of it"
                        last = f"has finished {name}{part}, and has entered nothing since"
                        if (awaited := self.waits.awaited(rank, communicator.entry)) is not None:
                            last = f"has finished {name}{part}, and waits for rank {awaited} to enter the next"
                    elif hash and done > 0:
                        sent = f"{done} of {found.span} signals" if found is not None else f"{done} signal{'s' * (done > 1)}"
                        return f"is in {name}: {sent} sent" + (" (this rank)" * (rank == self.world.rank))
                    elif communicator is waiting and not counter:
                        last = _NOWHERE
        return last or "has not entered any collective"

    def _line(self, control: ControlBlock, rank: int) -> tuple[int, int, int]:
        """(signals since it entered, hash, counter) of a rank's control line."""
        counter, number, hash = self.heap.view(control.line(rank), (3,), np.int64).tolist()
        return counter - number, hash ^ int(self._record(control, rank, RECORD.sequence_hash)), counter

    # ------------------------------------------------------------ threads

    def ownership(self, communicators: Sequence[Communicator]) -> ThreadOwnership:
        """The ownership of these communicators: one object for all that use the same ones."""
        numbers = frozenset(c.number for c in communicators)
        return self._ownerships.setdefault(numbers, ThreadOwnership(numbers, tuple({c.entry for c in communicators})))

    def take(self, ownership: ThreadOwnership) -> int | None:
        """Give the communicators to the calling thread. Those of an ended thread are free.

        If several threads of a rank called collectives over one communicator, other ranks would not know their order, and
        contributions would be mixed. Returns the identifier of another live thread that has called one, else None.
        """
        mine, alive = calling_thread(), threads_alive()
        for engine in self._engines_of(ownership.numbers):
            if engine.thread != mine and engine.thread not in alive:  # what the ended thread started comes first
                engine.drain()
        with self._lock:
            if ownership.has_ended:
                return None
            for number in ownership.numbers:
                owner = self._owners.get(number, mine)
                if owner != mine and owner in alive:
                    return owner
            self._owners.update(dict.fromkeys(ownership.numbers, mine))
            for other in self._ownerships.values():
                if other.numbers & ownership.numbers and other.thread != mine:
                    other.thread = None
            self.waits.own(ownership.entries)
            engine = self._engines.get(mine)
            ownership.thread = mine if engine is None or not engine.is_active else None
        if self.broken is not None:  # after this call has looked
            ownership.thread = None
        return None

    # ------------------------------------------------------------ started calls

    def engine(self) -> ProgressEngine:
        """The progress engine of the calling thread."""
        mine = calling_thread()
        with self._lock:
            if mine not in self._engines:
                if not self._engines:
                    self.world.at_leave.callback(self._drain_all)
                library = self.world.transport.message_library
                own_thread = library is None or library.allows_threads
                self._engines[mine] = ProgressEngine(self, mine, self.has_idle_core, own_thread)
            return self._engines[mine]

    @property
    def has_idle_core(self) -> bool:
        """True if a thread that runs started calls takes no other rank's core, or it mostly waits, as between hosts."""
        return self.across_hosts or self.world.processes_here < (os.cpu_count() or 1)

    def wait_for_started(self) -> None:
        """Wait until the calls that this thread has started have ended, unless it runs one of them.

        Raises what one of them did, if nothing has yet.
        """
        if self._engines:
            engine = self._engines.get(calling_thread())
            if engine is not None and engine.driver != get_ident() and not engine.is_forked:
                engine.drain()

    def end_started(self, error: BaseException) -> None:
        """End the calls that this thread has started, because an exception leaves a program. Raises nothing of theirs."""
        engine = self._engines.get(calling_thread())
        if engine is not None and engine.driver != get_ident():
            engine.end_started(error)

    def runs_for(self, ownership: ThreadOwnership) -> bool:
        """True in a thread that runs a started call of the thread that owns these communicators."""
        engines = self._engines_of(ownership.numbers) if self._engines else ()
        return any(engine.driver == get_ident() for engine in engines)

    def pause(self, thread: int) -> None:
        """Make the next plain calls of a thread look whether its started calls have ended."""
        with self._lock:
            for ownership in list(self._ownerships.values()):
                if ownership.thread == thread:
                    ownership.thread = None

    def resume(self, thread: int) -> None:
        """Let a thread's plain calls run at once again: its started calls have ended."""
        with self._lock:
            for ownership in list(self._ownerships.values()):
                owners = {self._owners.get(number) for number in ownership.numbers}
                if owners == {thread} and not ownership.has_ended and self.broken is None:
                    ownership.thread = thread
        if self.broken is not None:  # after this thread has looked
            self._disown()

    def _engines_of(self, numbers: Collection[int]) -> list[ProgressEngine]:
        """The engines of the threads that own these communicators."""
        owners = {self._owners.get(number) for number in numbers}
        return [engine for thread, engine in list(self._engines.items()) if thread in owners]

    def _drain_all(self) -> None:
        """Wait for all started calls before this process leaves the job. After a failure of its own it abandons them."""
        try:
            for engine in list(self._engines.values()):
                if engine.is_active and self.world.watch.has_reported:
                    engine.abandon(self.broken or _UNNOTED)
                else:
                    engine.drain()
        finally:
            for engine in self._engines.values():
                engine.close(FunccollError("this process has left the job before the call had ended."))

    @contextmanager
    def left_free(self) -> Iterator[None]:
        """Leave the communicators that this thread calls first in the block to the thread that calls them next.

        So a mesh belongs to no thread yet if its transport communicates when it is made.
        """
        with self._lock:
            before = {*self._owners}
        yield
        mine = calling_thread()
        with self._lock:
            freed = {number for number, owner in self._owners.items() if owner == mine} - before
            for number in freed:
                del self._owners[number]
            for ownership in self._ownerships.values():
                if ownership.numbers & freed:
                    ownership.thread = None

    def scratch(self, ownership: ThreadOwnership, nbytes: int) -> np.ndarray:
        """Memory that all calls over the communicators of an ownership use in turn. After a call it is free."""
        with self._lock:
            found = self._scratch.get(ownership.numbers)
            if found is None or found.nbytes < nbytes:
                found = self._scratch[ownership.numbers] = self.heap.array((nbytes,), np.dtype(np.uint8))
            return found


def _mixed(hash: int, place: str, nbytes: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{hash} {place}".encode()).digest()[:nbytes], "little")
