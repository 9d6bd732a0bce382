"""Diagnosis of failed collectives between processes: their errors, with the position of every rank."""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import get_ident
from types import MappingProxyType
from typing import Any

import numpy as np

from ... import config
from ...core.program_difference import ProgramRow
from ...core.types import dtype_name
from ...errors import (
    CollectiveTimeout,
    FunccollError,
    PeerFailure,
    ProgramMismatch,
    RendezvousError,
    Source,
    current_source,
)
from ...job.calling_thread import calling_thread
from ...job.failure import Failure
from ...runtime.collective_call import CollectiveCall, Operand
from ...runtime.transport import ONE_BY_ONE
from ..plans.control_block import Communicator
from .communicators import Communicators
from .decision_log import Decided, Events
from .passed_arguments import PassedArguments, other_types
from .plan import DESCRIPTION
from .progress_engine import ProgressThread
from .thread_ownership import ThreadOwnership, freed_mesh

__all__ = ["Diagnosis", "job_is_over", "require_turn", "wrong_argument", "wrong_count"]


_OPTION = re.compile(r"\b(\w+)=([^,\s]+)")  # of a collective: root=0
_SHOWN = "shapes", "dtypes", "axes"  # of a call's description, the options whose values stand in the first line
_SAME = "the program, or the place in it"  # what differs if the collectives are the same
_FOUND = re.compile(
    r"ProgramMismatch: ranks (\d+) and (\d+) [^:\n]*: their programs differ, (first in .*)\.\n  rank .*\n  rank .*\n(.*)$",
    re.MULTILINE,
)
"""Patterns of the ranks, the difference and the remedy of an error about programs, in the text of a rank's failure."""
_FINGERPRINT = 64  # characters of a program's identity that tell it from others
_AFTER_LEAVING = " If only some ranks called this function, call it on all of them and print on one."
_LISTED = 8  # the most ranks that are named one by one


@dataclass
class Diagnosis:
    """Errors of a rank in the middle of a collective. It waits for `peer`."""

    registry: Communicators
    call: CollectiveCall
    communicator: Communicator
    peer: int

    @property
    def name(self) -> str:
        """The collective, its ranks, and the line that calls it."""
        where = f" ({self.call.source})" if self.call.source else ""
        group = self.call.schedule.collective.group_of(self.communicator.rank)
        members = [self.communicator.members[rank] for rank in group]
        ranks = f"ranks {members}" if len(members) <= _LISTED else f"{len(members)} ranks"
        return f"{self.call.kind} among {ranks}{where}"

    @cached_property
    def others(self) -> dict[int, dict[str, Any]]:
        """The reports of other ranks, in a job on several hosts."""
        return self.registry.reports(self.communicator)

    @property
    def table(self) -> str:
        """Positions of all ranks, one line each."""
        return self.registry.table(self.communicator, self.others)

    @property
    def culprit(self) -> int:
        """The rank at the end of the waits: `peer`, or the rank that it waits for, and so on."""
        rank, seen = self.peer, {self.registry.world.rank}
        while rank not in seen and (waits := self.others.get(rank, {}).get("waits", -1)) >= 0:
            seen.add(rank)
            rank = waits
        return self.peer if rank in seen else rank

    def _reported(self, rank: int, what: str, here: Callable[[], Any]) -> Any:
        """The value of that name in a rank's report, or `here` for a rank of this host."""
        return self.others[rank][what] if rank in self.others else here()

    def after(self, failure: Failure, waits: bool) -> FunccollError:
        """The error of a peer's failure, with the position of this rank then, and those of all ranks."""
        waiting = f" and waited for rank {self.peer}" if waits else ""
        decided, own = "", self.registry.world.rank
        if self.peer != own and self.peer in self.communicator.members:
            counts = {rank: self._events(rank).decisions for rank in sorted((self.peer, own))}
            decided = self._other_decision(counts, only_certain=True)
        remedy = _AFTER_LEAVING if failure.kind == "left" and not decided else ""
        return failure.error(
            f"Rank {own} was in {self.name}{waiting}{f': {decided}' if decided else ''}.{remedy}\n{self.table}"
        )

    def decided_differently(self, told: Mapping[int, dict[str, Any]]) -> bool:
        """True if the peer has certainly decided differently from this rank, whether it is ahead or behind. `told` is its
        report."""
        self.others, own = dict(told), self.registry.world.rank
        counts = {rank: self._events(rank).decisions for rank in sorted((self.peer, own))}
        (number, _), (call, _) = told[self.peer]["call"], self.registry.own_call(self.communicator)
        is_behind = number > call and counts[self.peer] < counts[own]  # and has decided less often until a later call
        return bool(self._other_decision(counts, only_certain=not is_behind))

    def mismatch(self, told: Mapping[int, dict[str, Any]] = MappingProxyType({})) -> ProgramMismatch:
        """The error of a peer that has entered something else, or has not had the same exceptions.

        `told` are earlier reports of ranks on other hosts. Those ranks may have ended since.
        """
        self.others = {**self.others, **told}
        ranks = [self.peer, self.registry.world.rank]
        first_difference = self._first_difference(ranks) if not self.communicator.hosts else {}
        # A peer that is ahead may have had exceptions since, as this rank will.
        had = {rank: events for rank, (events, _) in first_difference.items()} or {r: self._events(r) for r in ranks}
        if had[self.peer].exceptions != had[ranks[1]].exceptions:
            return self._other_exceptions()
        if decided := self._other_decision({rank: events.decisions for rank, events in sorted(had.items())}):
            return ProgramMismatch(
                f"ranks {min(ranks)} and {max(ranks)} decided differently about collectives: {decided}. What they call next "
                f"does not fit together, although it may be the same collective, {self.name}. Let all ranks decide by one "
                "value: reduce a bound or a predicate with fc.all_reduce first, and pass equal values if a spec is P() "
                "(FUNCCOLL_DEBUG=detail compares them).",
                self.call.source,
            )
        entered = self.registry.descriptions(self.communicator)
        entered |= {rank: report["said"] for rank, report in self.others.items()}
        entered |= {rank: said for rank, (_, said) in first_difference.items()} or self._eager_call_of_peer()
        alike = Counter(tuple(said.items()) for said in entered.values())
        ranks.sort(key=lambda rank: alike[tuple(entered[rank].items())])  # the rank that agrees with few others comes first
        first, second = (entered[rank] for rank in ranks)
        differ = [name for name in DESCRIPTION if first.get(name) != second.get(name)]
        which = " and ".join(name for name in differ if name not in ("line", "program", "arguments"))
        unseen = "how the arrays are cut, or in a small collective some calls before"
        if which == "collective":
            which = _differing_options(first["collective"], second["collective"]) or which
        if which in _SHOWN:
            which += f" ({first.get(which)} and {second.get(which)})"
        which = which or (_SAME if "program" in differ else unseen)
        calls = "\n".join(f"  rank {rank}: {_call_text(entered[rank])}" for rank in ranks)
        did, why, remedy = (
            "entered different collectives at the same time",
            f"they differ in {which}",
            (
                "Every process must run the same steps in the same order: look for branches on the rank, and "
                "for data of different "
                "sizes, such as a shorter last batch, or blocks of fc.from_local."
            ),
        )
        source = self.call.source
        one, other = sorted(ranks, key=lambda rank: ONE_BY_ONE not in entered[rank].get("program", ""))
        if ONE_BY_ONE in entered[one].get("program", "") and ONE_BY_ONE not in entered[other].get("program", ""):
            why = f"rank {one} runs operations one by one, in {ONE_BY_ONE}, and rank {other} is in a compiled program"
            remedy = f"Use {ONE_BY_ONE} on all ranks, or on none."
        elif passed := self._other_types(ranks, entered):
            did, source, why, remedy = (
                "pass different arguments",
                current_source(),
                passed,
                (
                    "All ranks pass arrays of one shape and dtype, and fc.from_local takes blocks of one shape from all, or "
                    "the global shape as shape=: pad or drop a shorter last batch, or iterate over fc.uneven_batches."
                ),
            )
        elif which == _SAME and (found := self._other_row(entered)):
            rows = dict(zip((self.registry.world.rank, self.peer), found, strict=True))
            texts = dict(zip(rows, found[0].told(found[1]), strict=True))
            why = f"their programs differ, first in rank {ranks[0]}: {texts[ranks[0]]}; rank {ranks[1]}: {texts[ranks[1]]}"
            if found[0].form == found[1].form:
                remedy = (
                    "The operation is the same, and a value that each rank had when it traced is not: a number such as a "
                    "learning rate, what np.random gave, or a captured array. Make it equal on all ranks, or pass it as an "
                    "argument, as fc.from_local(x, mesh, P(...)) where each rank has its own."
                )
        elif which == _SAME:
            remedy += " Values that a rank had when it traced must be equal, too: learning rates, np.random, captured arrays."
            why, remedy = self._told_by_first_failure(ranks) or (why, remedy)
        return ProgramMismatch(
            f"ranks {ranks[0]} and {ranks[1]} {did}: {why}.\n{calls}\n{remedy}"
            + (f"\n{self.table}" if config.DEBUG.read() else ""),
            source,
        )

    def _first_difference(self, ranks: Sequence[int]) -> dict[int, tuple[Events, dict[str, str]]]:
        """The first eager collective that two ranks have not entered alike, as far as mailboxes still show.

        For each rank: the events in its sequence hash before, and the description.
        """
        one, other = (self.registry.published(self.communicator, rank) for rank in ranks)
        differ = [number for number in one.keys() & other.keys() if one[number][0] != other[number][0]]
        return dict(zip(ranks, (one[min(differ)][1:], other[min(differ)][1:]), strict=True)) if differ else {}

    def _eager_call_of_peer(self) -> dict[int, dict[str, str]]:
        """The description of the eager collective that the peer has entered instead of this rank's call, and has left."""
        call, _ = self.registry.own_call(self.communicator)
        mailboxes = self.registry.published(self.communicator, self.peer) if not self.communicator.hosts else {}
        return {self.peer: mailboxes[call + 1][2]} if call + 1 in mailboxes else {}

    def _other_exceptions(self) -> ProgramMismatch:
        notes = {self.registry.world.rank: self.registry.note(self.registry.world.rank)}
        notes[self.peer] = tuple(self._reported(self.peer, "note", lambda: self.registry.note(self.peer)))
        (last, (more, text)), (other, (fewer, else_text)) = sorted(notes.items(), key=lambda note: note[1], reverse=True)
        did = "did not" if more > fewer else f"at another place: {else_text}"
        return ProgramMismatch(
            f"rank {last} left a program after a collective of it by an exception, and went on; rank {other} {did}. It was "
            f"{text}. What the ranks call next does not fit together, although it may be the same collective, {self.name}. "
            "Let such an exception end the process, or make all ranks raise it at the same place.\n"
            f"{self.table}",
            self.call.source,
        )

    def _events(self, rank: int) -> Events:
        """The exceptions and decisions in a rank's sequence hash."""
        return Events(*self._reported(rank, "events", lambda: self.registry.events(rank, self.communicator)))

    def _other_decision(self, counts: Mapping[int, int], only_certain: bool = False) -> str:
        """The decision in which two ranks differ, in words. They had decided `counts` times. Empty if nothing shows one.

        A rank that has decided less often may still get there. `only_certain`: only if this rank is in an iteration of its loop
        that the other did not have.
        """
        read = {
            rank: self._reported(rank, "decisions", lambda r=rank: self.registry.decisions(r, self.communicator).items())
            for rank in counts
        }
        logs = {rank: {number: Decided(*decided) for number, decided in found} for rank, found in read.items()}
        (one, first), (other, second) = logs.items()
        least = min(counts.values())
        differ = [n for n in first.keys() & second.keys() if n < least and first[n] != second[n]]
        if differ:
            n = min(differ)
            alike = first[n].kind == second[n].kind and first[n].where == second[n].where
            and_other = _value_text(second[n], other) if alike else f"and {_decision_text(second[n], other)}"
            return f"{_decision_text(first[n], one)}, {and_other}"
        ahead = max(counts, key=lambda rank: counts[rank])
        if counts[ahead] == least or least not in logs[ahead]:
            return ""
        behind, found = (other if ahead == one else one), logs[ahead][least]
        iteration = _iteration(found) if behind == self.registry.world.rank else 0
        if only_certain and iteration <= found.value:
            return ""
        did = f"is in iteration {iteration} of it" if iteration else "is still in it, or took another way"
        return f"{_decision_text(found, ahead)}, and rank {behind} {did}"

    def _other_types(self, ranks: Sequence[int], entered: Mapping[int, Mapping[str, str]]) -> str:
        """The first argument with different types in the programs of two ranks, in words; else empty."""
        programs = {rank: said.get("program", "")[:_FINGERPRINT] for rank, said in entered.items()}
        known = [rank for rank, program in programs.items() if len(program) == _FINGERPRINT]
        if not set(ranks) <= set(known):
            return ""
        notes = self.registry.notes
        wanted = [rank for rank in known if rank in ranks or notes.is_here(rank)]
        return other_types({r: PassedArguments.of(notes.arguments_of(r, programs[r])) for r in wanted}, ranks)

    def _other_row(self, entered: Mapping[int, Mapping[str, str]]) -> tuple[ProgramRow, ProgramRow] | None:
        """The first rows that differ between the programs of this rank and of the peer, in that order."""
        mine, theirs = (entered[r].get("program", "")[:_FINGERPRINT] for r in (self.registry.world.rank, self.peer))
        return self.registry.programs.row_that_differs(mine, self.peer, theirs) if mine != theirs else None

    def _told_by_first_failure(self, ranks: Sequence[int]) -> tuple[str, str] | None:
        """The difference of programs that the first failed rank has found, and the remedy. By now the peer may have ended."""
        failure = self.registry.world.watch.failure()
        found = None if failure is None else _FOUND.search(failure.text)
        if found is None:
            return None
        one, other, difference, remedy = found.groups()
        those = "" if {int(one), int(other)} == set(ranks) else f"as those of ranks {one} and {other} do, "
        return f"their programs differ, {those}{difference}", remedy

    def deadlock(self, cycle: Sequence[int]) -> ProgramMismatch:
        """The error of ranks that wait for each other. Collectives over different axes have no control line in common."""
        ring = " for ".join(f"rank {rank}" for rank in [*cycle, cycle[0]])
        return ProgramMismatch(
            f"ranks wait for each other: {ring}. They are in collectives over different axes or meshes, or in another order. "
            "Every process must make the same meshes, and run the same steps, in the same order: look for branches on the "
            f"rank.\n{self.table}",
            self.call.source,
        )

    def unreadable(self, error: int) -> FunccollError:
        """The error of a peer whose argument cannot be read, by the system's error number."""
        said = f"{os.strerror(error)} ({errno.errorcode.get(error, error)})"
        why = {
            errno.EFAULT: "The array has no memory there any more: leave it and its file as they are until the call returns.",
            errno.ESRCH: "That process has ended.",
            errno.ESTALE: "Another process has its number now, or its memory was overwritten.",
        }.get(
            error,
            f"Something forbids it since the job began: set {config.DIRECT_READS}=0 on all ranks, and arguments are copied.",
        )
        return FunccollError(f"{self.name}: an argument of rank {self.peer} cannot be read by this rank: {said}. {why}")

    def timed_out(self, seconds: float) -> CollectiveTimeout:
        """The error of a peer that has not arrived in time."""
        culprit = self.culprit
        stack = self.registry.world.watch.stack_of(culprit)
        which = "" if culprit == self.peer else f", which waits, itself or through others, for rank {culprit}"
        silent = "does not answer: it is stopped by a signal, or in C code that does not let Python run."
        where = f"is now at\n{textwrap.indent(stack, '    ')}" if stack else silent
        error = CollectiveTimeout(
            f"rank {self.registry.world.rank} waited {seconds:.1f} s in {self.name} for rank {self.peer}{which}. "
            f"fc.init(timeout=) or FUNCCOLL_TIMEOUT sets the seconds.\n{self.table}\n  rank {culprit} {where}",
            self.call.source,
        )
        error.rank = culprit
        return error


def _call_text(said: Mapping[str, str]) -> str:
    """A call's description in words."""
    get = lambda name: said.get(name, "?")
    op = f" ({said['op']})" if said.get("op") else ""
    where = f" at {said['line']}" if said.get("line") else ""
    where += f", in a program of {said['arguments']}" if said.get("arguments") else ""
    return f"{get('collective')}{op} of {get('dtypes')}, shape {get('shapes')}, over {get('axes')} by {get('algorithm')}{where}"


def _decision_text(decided: Decided, rank: int) -> str:
    """A rank's decision in words."""
    return f"the {decided.kind} at {decided.where} {'ended ' if decided.kind == 'loop' else ''}{_value_text(decided, rank)}"


def _differing_options(first: str, second: str) -> str:
    """The options in which descriptions of one collective differ, as in "root (0 and 1)"; "" if more differs."""
    if _OPTION.sub("", first) != _OPTION.sub("", second):
        return ""
    one, other = (dict(_OPTION.findall(text)) for text in (first, second))
    return " and ".join(f"{name} ({one[name]} and {other.get(name)})" for name in one if one[name] != other.get(name))


def _value_text(decided: Decided, rank: int) -> str:
    if decided.kind == "loop":
        return f"after {decided.value} iteration{'s' * (decided.value != 1)} on rank {rank}"
    return f"took number {decided.value} on rank {rank}"


def _iteration(decided: Decided) -> int:
    """The iteration of the calling thread's loop at that place, counted from 1; 0 if it is in none."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<funccoll "):
            place = getattr(frame.f_locals.get("decision"), "place", None)
            if place == (decided.kind, decided.where) and "iterations" in frame.f_locals:
                return frame.f_locals["iterations"] + 1
        frame = frame.f_back
    return 0


def require_turn(registry: Communicators, ownership: ThreadOwnership, source: Source | None) -> None:
    """Raise if the calling thread may not use the communicators of an ownership now. If they are free, it takes them.

    It first waits until the calls that this thread has started have ended.
    """
    registry.wait_for_started()
    require_ownership(registry, ownership, source)
    if any(registry.busy[number] for number in ownership.numbers):
        raise nested_call(source)


def require_ownership(registry: Communicators, ownership: ThreadOwnership, source: Source | None) -> None:
    """Raise if the calling thread may not use the communicators of an ownership, now or later."""
    if registry.broken is not None:
        raise job_is_over(registry.broken, source)
    if ownership.thread != get_ident():
        owner = registry.take(ownership)
        if owner is not None:
            raise other_thread(owner, source)
    if ownership.has_ended:  # asked last: another thread may free them until `take` returns
        raise freed_mesh(source)


def job_is_over(ended_by: FunccollError | None, source: Source | None) -> FunccollError:
    """The error of a call after a collective has failed, or after the process has left the job."""
    if isinstance(ended_by, RendezvousError):
        return RendezvousError(ended_by.args[0], source)
    return PeerFailure(
        "an earlier failure ended all collectives of this job, and no later one can be trusted. It was: "
        f"{str(ended_by).splitlines()[0].removesuffix(_AFTER_LEAVING)}",
        source,
    )


def nested_call(source: Source | None) -> FunccollError:
    """The error of a thread that calls a collective while it is in another over the same ranks."""
    return FunccollError(
        "a collective was called in the middle of another one over the same ranks, by the same thread: from a signal "
        "handler or a destructor. Only set a flag there, and call it in the loop that runs the steps.",
        source,
    )


def other_thread(owner: int, source: Source | None) -> FunccollError:
    """The error of a call over a mesh if another thread calls the mesh's collectives."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    current = threading.current_thread()
    ended = current.caller if isinstance(current, ProgressThread) else current.name  # what has started the call
    name, mine = names.get(owner, str(owner)), names.get(calling_thread(), ended)
    return FunccollError(
        f"thread {mine!r} called a collective over a mesh whose collectives belong to thread {name!r}, which called one before "
        "and is alive. Two threads would call in a different order on every rank, and mix their contributions: make one mesh "
        "per thread with fc.make_mesh, all of them in the main thread.",
        source,
    )


def wrong_argument(number: int, given: Any, operand: Operand, call: CollectiveCall) -> FunccollError:
    """The error of an argument for which the plan was not made."""
    is_array = isinstance(given, (np.ndarray, np.generic))
    what = f"{dtype_name(given.dtype)}{list(given.shape)}" if is_array else f"of type {type(given).__name__}"
    return FunccollError(
        f"argument {number} of {call.schedule.kind} is {what}, and the call was compiled for "
        f"{dtype_name(operand.dtype)}{list(operand.shape)}. Pass an array of that dtype and size.",
        call.source,
    )


def wrong_count(given: int, wanted: int, call: CollectiveCall) -> FunccollError:
    """The error of a call with more or fewer arguments than the plan has."""
    return FunccollError(
        f"{call.schedule.kind} was called with {given} arrays, and was compiled for {wanted}. Pass as many.", call.source
    )
