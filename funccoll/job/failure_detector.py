"""Detection of failures: a thread in each process that sleeps on the job's sockets.

A process that ends in any way closes its sockets. Before that, a process that ends well sends that it leaves, and one that ends
with an exception sends its traceback. Rank 0 introduces all ranks to each other when the job begins, so that each notices the
others' ends itself: rank 0 may be stopped, gone, or in C code that holds the GIL. In a large job a full mesh would take too
many sockets. There rank 0 receives all messages, and forwards them.

A failure is also written to shared memory, for loops in native code. Word 0 of the heap's header is 0, or 1 + the rank that
died or raised first. Word 8 + r is 1 once rank r has left well. Leaving is not a failure: others may continue without that
rank. So word 0 ends the job's collectives, and the word of a rank that left ends those that need it. Word 4096 + r is the phase
of rank r's end, for ranks that end together. The traceback of the rank that raised is there, too. Some ranks may not get the
message, because rank 0 forwards it and may be stopped.

In a job on several hosts the sockets are TCP's, made before. Each host has a header of its own, and its ranks also write there
what they learn of others. The kernel ends a connection over a link that is down. A rank whose connection ends in this way
reports it to all, because others may have other links.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from .. import config
from ..errors import PeerFailure, RendezvousError
from .coordinator import Coordinator
from .excepthook import print_folded, report_exception
from .failure import Failure
from .host import PEER_FAILURE_EXIT_CODE
from .packets import FramedSocket, receive, send
from .rpc import Question, Rpc

__all__ = ["FULL_MESH", "FailureDetector"]

FULL_MESH = 16
"""Largest number of ranks for which each rank gets a socket to each other."""
FAILED = 0
LEFT = 8
_TEXT = 2048  # word of the traceback: 1 + the rank, its bytes, and the text
_PHASES = 4096  # word of rank 0's phase: see `FailureDetector.arrive`
_MAX_TRACEBACK = 16_000  # characters of a traceback that are sent: its end
_INTRODUCTION_TIMEOUT = 5.0  # seconds that a rank waits to be introduced to all
_MESSAGE_TIMEOUT = 0.5  # seconds within which the message about a failure follows its word in shared memory
_STACK_TIMEOUT = 1.0  # seconds that a rank waits for another one's stack
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)


class FailureDetector:
    """The failure detector. It watches the other processes of a job, and reports to them how this one ends."""

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        header: np.ndarray,
        coordinator: Coordinator | None = None,
        connected: bool = False,
    ):
        """It owns `sockets`, by rank, and rank 0's `coordinator` from now on.

        `header` is an int64 view of the heap's header. `connected` is `JoinedJob`'s.
        """
        self.rank, self._coordinator = rank, coordinator
        self._header: np.ndarray | None = header
        self._sockets = dict(sockets)
        self._failure: Failure | None = None
        self._reported = self._disowned = False
        self._told, self._introduced = threading.Event(), threading.Event()
        self._present, self._is_last = set(self._sockets), threading.Event()
        self.grace = 0.0
        """Seconds that this rank stays after a failure while others have not left: its end may be theirs."""
        self._forwards = connected and rank == 0 and len(self._sockets) >= FULL_MESH
        self._rpc = Rpc(rank, self._pass_on)
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="funccoll-watch", daemon=True)
        self._hook: Any = None
        self._previous_hook: Any = None
        self.keeps_sockets, self.kept = False, dict[int, socket.socket]()
        """Whether TCP sockets stay open when this rank leaves, and those that do. They end with the process at the other
        end."""
        if rank == 0 and not connected:
            self._introduce(list(self._sockets))
        if rank == 0 or connected:
            self._introduced.set()
        try:
            self._thread.start()
        except RuntimeError as error:
            os.close(self._wake)
            raise RendezvousError(
                f"rank {rank} cannot start the thread that watches the others ({error}). `ulimit -u` limits the processes and "
                "threads of a user, and control groups those of a container (pids.max)."
            ) from None
        self._introduced.wait(_INTRODUCTION_TIMEOUT)

    # ------------------------------------------------------------ what the others did

    def failure(self, members: Iterable[int] = ()) -> Failure | None:
        """The first failure of a rank that died or raised, else of one of `members` that left; None while all is well.

        A rank that left may have done its part of a collective first. So ask *before* you wait in native code, and raise only
        if that wait was in vain.
        """
        header = self._header
        if header is None:
            return self._failure
        if self._failure is None and header[FAILED]:
            self._told.wait(_MESSAGE_TIMEOUT)
            if self._failure is None:
                rank, text = int(header[FAILED]) - 1, self._read_text(header)
                return Failure(rank, "raised", text) if text else Failure(rank, "died")
        return self._failure or next((Failure(r, "left") for r in members if header[LEFT + r]), None)

    def sees(self, rank: int) -> bool:
        """True if a rank has not ended, as this one's socket to it shows. False if it has none."""
        header = self._header
        return header is not None and (rank == self.rank or (rank in self._present and not header[LEFT + rank]))

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        late = -1 if self._coordinator is None else self._coordinator.fileno()
        if self._coordinator is not None:
            poll.register(late, select.POLLIN)
        ranks = {channel.fileno(): rank for rank, channel in self._sockets.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    return
                if descriptor == late:
                    self._refuse_late()
                elif not self._hear(ranks[descriptor]):
                    poll.unregister(descriptor)
            # Only after rank 0 has introduced all: it may die between sending the two ends of a pair.
            for rank, channel in self._sockets.items() if self._introduced.is_set() else ():
                if channel.fileno() not in ranks:
                    ranks[channel.fileno()] = rank
                    poll.register(channel, select.POLLIN)

    def _refuse_late(self) -> None:
        """Answer processes that come to the running job. One that could be a rank of it ends it."""
        header = self._header
        if header is not None and self._coordinator is not None:
            clash = self._coordinator.answer(lambda rank: header[LEFT + rank])
            if clash:
                self._record(Failure(0, "clash", clash))

    def _hear(self, rank: int) -> bool:
        """Read one message of a rank, or of rank 0 about one. Returns whether more can come."""
        try:
            message, descriptors = receive(self._sockets[rank])
        except BlockingIOError:
            return True
        except OSError as error:
            message, descriptors = None, []
            if error.errno in _UNREACHABLE:
                self._record(Failure(rank, "unreachable"), tell=True)
        if message is None:
            self._ended(rank)
            return False
        kind, about = message.get("kind"), int(message.get("rank", rank))
        if kind == "meet" and len(descriptors) == 1:
            channel = socket.socket(fileno=descriptors[0])
            channel.setblocking(False)
            self._sockets[about] = channel
            self._present.add(about)
        if kind == "met":
            self._introduced.set()
        if kind in ("ask", "answer"):
            self._rpc.hear(message)
        if kind in ("died", "raised", "unreachable", "clash"):
            self._record(Failure(about, kind, str(message.get("text", ""))))
        if kind == "left":
            self._note_left(about, bool(message.get("well")))
        return kind != "left" or about != rank

    def _note_left(self, rank: int, well: bool) -> None:
        """Note that a rank has left. On its own host it has written its word itself."""
        header = self._header
        if well and header is not None:
            header[LEFT + rank] = 1
        if self._forwards:
            self._tell({"kind": "left", "rank": rank, "well": well}, rank)
        self._note_absent(rank)

    def _note_absent(self, rank: int) -> None:
        """Stop waiting for a rank."""
        self._rpc.end(rank)
        self._present.discard(rank)
        if not self._present:
            self._is_last.set()

    def _pass_on(self, rank: int, message: dict[str, Any]) -> bool:
        """Send to a rank, through rank 0 if there is no socket to it. Returns False if that is impossible."""
        channel = self._sockets.get(rank) or self._sockets.get(0)
        return channel is not None and send(channel, message)

    def answer_with(self, kind: str, handler: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        """Answer other ranks' questions of a kind, in the detector's thread. See `Rpc`."""
        self._rpc.handlers[kind] = handler

    def ask(self, rank: int, question: dict[str, Any], timeout: float) -> dict[str, Any] | None:
        """Ask another rank. Its handler for the question's "kind" answers. Returns None if it does not within `timeout`
        seconds."""
        return self._rpc.ask([rank], question, timeout).get(rank)

    def ask_all(self, ranks: Iterable[int], question: dict[str, Any], timeout: float) -> dict[int, dict[str, Any]]:
        """Ask several ranks at once. Returns the answers that come within `timeout` seconds."""
        return self._rpc.ask(ranks, question, timeout)

    def open_question(self, ranks: Iterable[int], question: dict[str, Any]) -> Question:
        """A question to ranks, yet to be sent. It accepts late answers."""
        return self._rpc.open(ranks, question)

    def stack_of(self, rank: int) -> str:
        """Where another rank's threads are now; "" if it does not answer: it is stopped, or in C code that holds the GIL."""
        answer = self.ask(rank, {"kind": "where"}, _STACK_TIMEOUT)
        return str(answer["text"]) if answer else ""

    def _ended(self, rank: int) -> None:
        """Note that a socket has closed. A rank that left before it was introduced sent nothing on it, but set its word."""
        header = self._header
        if header is not None and not header[LEFT + rank]:
            self._record(Failure(rank, "died"))
        self._note_absent(rank)
        self._introduced.set()

    def _record(self, failure: Failure, tell: bool = False) -> None:
        """Publish the first failure. `tell`: whether others, which have other links, may not notice it themselves."""
        with self._lock:
            header = self._header
            if self._failure is not None or header is None:
                return
            # Only the first failure counts, and all must name the same one: later ones mostly follow from it. The first rank to
            # notice it writes the word. A rank that then notices a later one still gets the message about the first.
            if header[FAILED] not in (0, 1 + failure.rank):
                return
            if failure.kind == "raised" and failure.text and not header[FAILED]:
                self._write_text(header, failure)
            header[FAILED] = 1 + failure.rank
            self._failure = failure
            if tell or self.rank in (0, failure.rank):  # under the lock: before `leave`, after which no rank listens
                text = failure.text[-_MAX_TRACEBACK:]
                self._tell({"kind": failure.kind, "rank": failure.rank, "text": text}, failure.rank)
        self._told.set()

    def _write_text(self, header: np.ndarray, failure: Failure) -> None:
        data = failure.text.encode(errors="backslashreplace")[-_MAX_TRACEBACK:]
        area = header[_TEXT + 2 :].view(np.uint8)
        area[: len(data)] = np.frombuffer(data, np.uint8)
        header[_TEXT : _TEXT + 2] = 1 + failure.rank, len(data)

    def _read_text(self, header: np.ndarray) -> str:
        """The traceback of the failed rank; "" if it left none."""
        if header[_TEXT] != header[FAILED]:
            return ""
        return header[_TEXT + 2 :].view(np.uint8)[: header[_TEXT + 1]].tobytes().decode(errors="replace")

    # ------------------------------------------------------------ what this one does

    def _tell(self, message: dict[str, Any], but: int) -> None:
        """Send a message about a rank to all others."""
        for rank, channel in list(self._sockets.items()):
            if rank != but:
                send(channel, message)

    def report(self, text: str) -> None:
        """End the job's collectives: this process has an exception with the traceback `text`.

        When this returns no other process finishes a collective any more, so memory that they read may change.
        """
        self._reported = True
        self._record(Failure(self.rank, "raised", text))

    @property
    def has_reported(self) -> bool:
        """True if this process has ended the job's collectives by an exception of its own."""
        return self._reported

    def arrive(self, phase: int) -> None:
        """Note that this rank has come to a phase of its end, 1 or more."""
        if self._header is not None:
            self._header[_PHASES + self.rank] = phase

    def has_arrived(self, rank: int, phase: int) -> bool:
        """True if a rank of this host has come to a phase of its end, or has left, and this one has, too."""
        header = self._header
        return header is None or header[_PHASES + rank] >= phase or bool(header[LEFT + rank])

    def hook_exceptions(self) -> None:
        """Report an uncaught exception before Python prints it. A PeerFailure sets the exit code."""
        previous = sys.excepthook

        def report_first(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
            if self._disowned:  # this is a forked child, in which another hook has kept this one
                return previous(kind, error, where)
            self.report("".join(traceback.format_exception(kind, error, where)))
            report_exception(self.rank, error, self._is_first())
            if self._is_first() or config.TRACEBACKS.read() != "first":
                previous(kind, error, where)
            else:
                print_folded(error)
            if issubclass(kind, PeerFailure):
                raise SystemExit(PEER_FAILURE_EXIT_CODE)  # Python then ends with this code instead of 1

        self._previous_hook, self._hook = previous, report_first
        sys.excepthook = report_first

    def _is_first(self) -> bool:
        """True if no other rank has died or raised before this one."""
        header = self._header
        return header is None or header[FAILED] in (0, 1 + self.rank)

    def leave(self) -> None:
        """Send the others that this rank leaves, and stop watching. A second call does nothing.

        After a failure it waits for the others to leave, for `grace` seconds.
        """
        if self._hook is not None and sys.excepthook is not self._hook:  # another hook has replaced it
            error = getattr(sys, "last_value", None)  # Python sets it before it calls a hook
            if error is not None and not self._reported:
                self.report("".join(traceback.format_exception(error)))
                report_exception(self.rank, error, self._is_first())
        with self._lock:
            header, self._header = self._header, None
            if header is None:
                return
            well = self._failure is None and not self._reported
            if well:
                header[LEFT + self.rank] = 1
        self._tell({"kind": "left", "rank": self.rank, "well": well}, self.rank)
        if not well:
            self._is_last.wait(self.grace)  # a launcher may kill all as soon as one has failed: let the others report it
        os.eventfd_write(self._wake, 1)
        self._thread.join(5)
        for rank, channel in list(self._sockets.items()):
            if isinstance(channel, FramedSocket) and self.keeps_sockets:
                self.kept[rank] = self._sockets.pop(rank)
            elif isinstance(channel, FramedSocket):
                channel.finish()
        self._close()

    def _introduce(self, ranks: list[int]) -> None:
        """Give each two of the ranks a socket to each other. It shows each the other's end."""
        for one, two in itertools.combinations(ranks if len(ranks) <= FULL_MESH else (), 2):
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, other, end in ((one, two, ends[0]), (two, one, ends[1])):
                send(self._sockets[rank], {"kind": "meet", "rank": other}, [end.fileno()])
                end.close()
        for rank in ranks:
            send(self._sockets[rank], {"kind": "met"})

    def disown(self) -> None:
        """Close a forked child's copies of the sockets. Otherwise the others would not see this rank's end."""
        self._header, self._disowned = None, True
        self._close()

    def _close(self) -> None:
        for channel in self._sockets.values():
            channel.close()
        self._sockets.clear()
        self._rpc.handlers.clear()  # or they would keep their owner alive, the job's memory
        if self._coordinator is not None:
            self._coordinator.close()
        os.close(self._wake)
        if self._hook is not None and sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook
        self._hook = None
