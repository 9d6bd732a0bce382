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
    """Record every call of a compiled function on this process: the start and end of each instruction, with your file:line.

    In a job every rank records itself, so all of them should enter it; nothing is communicated. Each use makes a new folder in
    `directory`. The folder is the same on all ranks if all have entered equally often. All threads of the process are recorded.
    FUNCCOLL_PROFILE=directory in the environment records whole processes. `funccoll profile DIRECTORY` merges the ranks and
    prints where their time went; `funccoll.profiling.Profile.load(directory)` reads the same.

    Each instruction takes 32 bytes on disk; a small collective between 4 ranks has about 30. Recording needs at most 256 KiB of
    memory for each thread. If the disk is full, it stops with a warning, and the program continues. A process that is killed
    loses the last quarter of a second.

        with fc.profile("profiles"):
            for batch in batches:
                params = step(params, batch)

    Args:
        directory: The directory for the folders of all runs.

    Yields:
        The path of this run's folder.

    Raises:
        ProfileError: Before anything runs, if `directory` cannot be written, or this process is being recorded already.
    """
    spec = current_job()
    made = recorder.begin(directory, spec.rank, spec.world, spec.run)
    try:
        yield made.folder
    finally:
        recorder.end(made)
