"""Agreements: barriers of the host before collectives that run elsewhere, or in groups, so that ranks compare what they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.mesh import ReplicaGroups
from ...runtime.collective_call import NOTHING, CollectiveCall
from ...schedules.schedule import build

__all__ = ["Agreement"]


@dataclass(frozen=True)
class Agreement(CollectiveCall):
    """A barrier of the hosts. A rank enters it when it is about to run `agreed` elsewhere, or in groups of the ranks. It is
    described as that collective."""

    agreed: CollectiveCall | None = None

    @staticmethod
    def to(calls: Sequence[CollectiveCall], groups: ReplicaGroups | None = None) -> Agreement:
        """The agreement to collectives over the same groups, of all their ranks or of `groups`. All that determines them is
        compared."""
        first = calls[0]
        key = " ".join(f"{call.key} {call.hash(())}" for call in calls)
        among, agreed = groups or first.groups, first.agreed if isinstance(first, Agreement) else first
        barrier = build("barrier", among.size)
        return Agreement(among, barrier, "or", (NOTHING,), key, first.source, program=first.program, agreed=agreed)

    @property
    def kind(self) -> str:
        """See `CollectiveCall`."""
        assert self.agreed is not None
        return f"the agreement to {self.agreed.kind}"

    @property
    def fields(self) -> tuple[str, ...]:
        """See `CollectiveCall`."""
        assert self.agreed is not None
        return self.agreed.fields
