"""Rules of the PTX ISA for the threads of a launch, checked while `cuda_simulation` executes them.

*Data races*: of two accesses to the same bytes, of which one is a write, one must happen before the other, by barriers of the
block and by releases that acquires read from, unless both are acquires or releases. The order of the simulation does not
matter: vector clocks (Flanagan and Freund, FastTrack, PLDI 2009) find the race also where the accesses come in the right order.
*Scope*: a `.gpu` access to memory of the host, or that another process maps, orders nothing.
"""

from __future__ import annotations

READ, WRITE, ACQUIRE, RELEASE = range(4)
_NAMES = "reads", "writes", "acquires", "releases"
_CONFLICTS = ((WRITE, RELEASE), (READ, WRITE, ACQUIRE, RELEASE), (WRITE,), (READ, WRITE))
"""By kind, those that it may not run beside."""
SHARED_WITH_OTHERS: dict[int, int] = {}
"""Begin and end of memory that the host or other processes use, too."""


class _Bytes:
    """Bytes next to each other that every access so far has had together."""

    def __init__(self, begin: int, end: int, seen: tuple[dict[int, int], ...]):
        self.begin, self.end, self.seen = begin, end, seen
        """`seen`: by kind, the threads' clocks at their last accesses. A write forgets all before it, which it comes after."""


class ThreadOrder:
    """The accesses of a launch, and which of them happen before others."""

    def __init__(self, blocks: int, threads: int):
        self.threads = threads
        self.clocks = [[int(i == j) for j in range(blocks * threads)] for i in range(blocks * threads)]
        self.released: dict[int, list[int]] = {}
        self.bytes: dict[int, _Bytes] = {}
        """By address. Of a word that is the first byte alone."""

    def access(self, thread: int, kind: int, address: int, nbytes: int = 1) -> None:
        """A thread accesses bytes. Raises AssertionError for a data race."""
        clock = self.clocks[thread]
        if kind == ACQUIRE and address in self.released:
            clock[:] = map(max, clock, self.released[address])
        now = clock[thread]
        known = self.bytes.get(address)
        if known is not None and known.begin == address and known.end == address + nbytes:
            parts = [known]
        else:
            parts = self._parts(address, address + nbytes)
        for each in parts:
            seen = each.seen
            if seen[kind].get(thread) == now:  # an unordered access that came since has found the one before
                continue
            for other_kind in _CONFLICTS[kind]:
                for other, when in seen[other_kind].items():
                    assert when <= clock[other], (
                        f"a data race at {each.begin:#x}: {self._name(other)} {_NAMES[other_kind]}, "
                        f"{self._name(thread)} {_NAMES[kind]}"
                    )
            if kind == WRITE:
                for dates in seen:
                    dates.clear()
            seen[kind][thread] = now
        if kind == RELEASE:
            self.released[address] = clock.copy()
            clock[thread] += 1

    def _parts(self, begin: int, end: int) -> list[_Bytes]:
        """What is known of these bytes and of no others: it is cut where it is known of others, too."""
        found, at = list[_Bytes](), begin
        while at < end:
            known = self.bytes.get(at)
            if known is None:
                stop = next((i for i in range(at, end) if i in self.bytes), end)
                known = self._keep(at, stop, ({}, {}, {}, {}))
            if known.begin < at:
                known = self._cut(known, at)
            if known.end > end:
                self._cut(known, end)
            found.append(known)
            at = known.end
        return found

    def _cut(self, known: _Bytes, at: int) -> _Bytes:
        """The second part."""
        end, known.end = known.end, at
        reads, writes, acquires, releases = map(dict, known.seen)
        return self._keep(at, end, (reads, writes, acquires, releases))

    def _keep(self, begin: int, end: int, seen: tuple[dict[int, int], ...]) -> _Bytes:
        made = _Bytes(begin, end, seen)
        self.bytes.update(dict.fromkeys(range(begin, end), made))
        return made

    def join(self, block: int) -> None:
        """All threads of a block have come to a barrier: what each has done happens before what any of them does next."""
        members = range(block * self.threads, (block + 1) * self.threads)
        latest = [max(times) for times in zip(*(self.clocks[t] for t in members), strict=True)]
        for thread in members:
            self.clocks[thread] = latest.copy()
            self.clocks[thread][thread] += 1

    def _name(self, thread: int) -> str:
        return f"thread {thread % self.threads} of block {thread // self.threads}"


def check_scope(address: int) -> None:
    """A `.gpu` access: the word is of this GPU alone."""
    assert not any(begin <= address < end for begin, end in SHARED_WITH_OTHERS.items()), (
        f"a .gpu access to {address:#x}, which the host or another process uses, too"
    )
