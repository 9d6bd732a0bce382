"""Waits of ranks for each other in a job on several hosts. A rank cannot read them all in memory, so the others report them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

__all__ = ["Progress", "Wait", "find_cycle"]

_LONGEST = 256
"""Length of the longest cycle that is searched for."""
_FEW = 16
"""Ranks of a call up to which all are asked. In larger calls only the ranks waited for now are asked, and those on the path."""


class Wait(NamedTuple):
    """A wait of a thread in a call of a communicator. `tag` names the communicator on all ranks."""

    rank: int
    """The rank for which it waits now."""
    tag: int
    needs: Mapping[int, int]
    """By rank, the count that its counter must reach in that communicator before the thread can leave the call."""


class Progress(NamedTuple):
    """The progress of a rank in a communicator: its counter there, and the wait of the thread that would advance it."""

    counter: int
    wait: Wait | None
    """None if that thread does not wait, or is unknown. The wait may be over: then what it needs has come."""

    def told(self) -> list[Any]:
        """Itself as an answer to another rank."""
        return [self.counter, self.wait and [self.wait.rank, self.wait.tag, list(self.wait.needs.items())]]

    @staticmethod
    def of(told: Any) -> Progress:
        """Read an answer."""
        counter, wait = told
        return Progress(counter, wait and Wait(wait[0], wait[1], dict(map(tuple, wait[2]))))


Look = Callable[[int, Collection[int]], Mapping[int, Progress]]
"""A function from a communicator's tag and some ranks to the progress of those that answer."""


def find_cycle(rank: int, wait: Wait, first: Mapping[int, Progress], look: Look) -> list[int]:
    """A cycle of ranks that wait for each other, found by following waits from one rank to the next.

    `first` is the progress of the ranks for which this one waits. Returns [] if there is no cycle.

    A thread in one call cannot enter another before it leaves the first. It cannot leave the first before others have entered
    it. So a cycle is a deadlock even though its waits are read one after the other. Read each wait before the counter.
    """
    seen = {(rank, wait.tag)}

    def extend(path: list[tuple[int, Wait]], found: Mapping[int, Progress]) -> list[int]:
        needs = path[-1][1].needs
        for other, (counter, blocked) in found.items():
            if blocked is None or counter >= needs[other]:
                continue
            node = other, blocked.tag
            begin = next((i for i, (on_path, waits) in enumerate(path) if (on_path, waits.tag) == node), None)
            if begin is not None:
                return [on_path for on_path, _ in path[begin:]]
            if node not in seen and len(path) < _LONGEST:
                seen.add(node)
                longer = [*path, (other, blocked)]
                asked = {rank for rank in (blocked.rank, *(on_path for on_path, _ in path)) if rank in blocked.needs}
                if cycle := extend(longer, look(blocked.tag, asked if len(blocked.needs) > _FEW else {*blocked.needs})):
                    return cycle
        return []

    return extend([(rank, wait)], first)
