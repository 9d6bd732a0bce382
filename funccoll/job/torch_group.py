"""The default group of torch.distributed, if the program has made one: its rank and size, and words through its store.

This module never imports torch.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..core.host_identity import boot_id
from ..errors import RendezvousError
from .handshake import JobSpec
from .missing_ranks import absence, numbered
from .reports import EndedRanks

__all__ = ["TorchGroup", "agree_on_run", "default_group"]

_LATE = 5.0  # seconds that the others wait longer than rank 0, which knows which ranks are missing
_LONGEST_PAUSE = 0.02  # seconds between two looks at the store
_AGREEMENTS = itertools.count()  # each has its own keys: a store may outlive a group


class TorchGroup(NamedTuple):
    """This process in torch's default group."""

    rank: int
    world: int

    def __str__(self) -> str:
        return f"torch.distributed's group says that this is rank {self.rank} of {self.world}"


def default_group() -> TorchGroup | None:
    """Torch's default group; None if torch.distributed is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    is_initialized = getattr(distributed, "is_initialized", None)  # a torch without it, or one that is being imported
    if is_initialized is None or not is_initialized():
        return None
    assert distributed is not None
    return TorchGroup(distributed.get_rank(), distributed.get_world_size())


def agree_on_run(launched: JobSpec, timeout: float) -> JobSpec:
    """The job of all processes of the group, with a new name for the run. All of them call it.

    launched: this process's place, and the launcher's further words.

    Raises: RendezvousError if some have not come after `timeout` seconds. It names them.
    """
    store = _store(launched)
    try:
        prefix = _next_keys(store)
        look = _Looks(store, launched, timeout, prefix)
        store.set(f"{prefix}/{launched.rank}", json.dumps(_place()))
        if launched.rank == 0:
            try:
                places = look.places()
            except RendezvousError as error:
                store.set(f"{prefix}/run", json.dumps({"error": str(error).partition("\n  at ")[0]}))
                raise
            answer = {"run": secrets.token_hex(16), "places": places}
            store.set(f"{prefix}/run", json.dumps(answer))
        else:
            answer = look.answer()
    except RuntimeError as error:  # of the store: most often its server has ended
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"{TorchGroup(launched.rank, launched.world)}, and its store does not answer: {error}. Look for an error of rank 0 "
            "above."
        ) from error
    if "error" in answer:
        raise RendezvousError(answer["error"])
    local = launched.local or answer["places"].count(_place())
    return replace(launched, run=answer["run"], local=local)


def _store(launched: JobSpec) -> Any:
    distributed: Any = sys.modules["torch.distributed"]
    store = distributed.distributed_c10d._get_default_store()
    if store is None or distributed.get_backend() == "fake":
        raise RendezvousError(
            f"{TorchGroup(launched.rank, launched.world)}, and its backend {distributed.get_backend()!r} has no store by which "
            "processes could find each other. Initialize it with gloo or nccl, or destroy it to run alone."
        )
    return store


def _next_keys(store: Any) -> str:
    """Beginning of the keys of this agreement: not of one that rank 0 has answered before this rank came to it."""
    return next(prefix for prefix in (f"funccoll/{n}" for n in _AGREEMENTS) if not store.check([f"{prefix}/run"]))


def _place() -> str:
    """The identity of this machine and network namespace. Within it processes find each other's sockets."""
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return f"{boot_id() or platform.node()} {network}"


class _Looks:
    """Repeated looks at a store for what other ranks write."""

    def __init__(self, store: Any, job: JobSpec, timeout: float, prefix: str):
        self.store, self.job, self.timeout, self.prefix = store, job, timeout, prefix

    def places(self) -> list[str]:
        """The place of each rank, once all have come. Raises RendezvousError."""
        keys = [f"{self.prefix}/{rank}" for rank in range(self.job.world)]
        if not self._wait(keys, self.timeout, lambda ended: {r for r in ended if not self.store.check([keys[r]])}):
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RendezvousError(absence(f"{numbered(missing)} of {self.job.world} did not come", self.job, self.timeout))
        return [json.loads(self.store.get(key)) for key in keys]

    def answer(self) -> dict[str, Any]:
        """Rank 0's words. Raises RendezvousError."""
        key = f"{self.prefix}/run"
        if not self._wait([key], self.timeout + _LATE, lambda ended: ended & {0}):
            place = f", this is rank {self.job.rank} of {self.job.world}"
            raise RendezvousError(absence("rank 0 did not come", self.job, self.timeout, place))
        return json.loads(self.store.get(key))

    def _wait(self, keys: list[str], timeout: float, matters: Callable[[set[int]], set[int]]) -> bool:
        """Wait until the store has all keys. Returns False after `timeout` seconds. `matters`: the missing keys of ended
        ranks."""
        pause, end = 0.001, time.monotonic() + timeout
        with EndedRanks(os.environ if self.job.gives_grace else {}, self.job.rank) as ended:
            while not self.store.check(keys):
                if (ranks := ended.ranks()) and (missed := matters(ranks)):
                    causes = numbered(ended.causes(missed))
                    raise RendezvousError(absence(f"{causes} ended before the job could begin", self.job, None))
                if time.monotonic() > end:
                    return False
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
        return True
