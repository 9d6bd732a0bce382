"""`fc.profile`: record what this process does within a `with` statement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..job.job_context import current_job
from ..runtime import recorder

__all__ = ["profile"]


@contextmanager
def profile(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Record every call of a compiled function on this process: each instruction's start and end, with your file:line.

        with fc.profile("profiles"):
            for batch in batches:
                params = step(params, batch)

    In a job every rank records itself, so all of them should enter it; nothing is communicated. Each use makes a new folder in
    `directory`, the same on all ranks when all have come as often, and yields its path. `funccoll profile DIRECTORY` merges the
    ranks and prints where their time went, `funccoll.profiling.Profile.load(directory)` reads the same. All threads of the
    process are recorded. FUNCCOLL_PROFILE=directory in the environment does it for whole processes.

    What is written takes 32 bytes for each instruction (about 30 in a small collective between 4 ranks), and never more memory
    than 256 KiB for each thread. When the disk is full recording stops with a warning, and the program goes on. A process that
    is killed loses the last quarter of a second.

    Raises: ProfileError, before anything runs, when `directory` cannot be written, or a profile is being recorded already.
    """
    spec = current_job()
    made = recorder.begin(directory, spec.rank, spec.world, spec.run)
    try:
        yield made.folder
    finally:
        recorder.end(made)
