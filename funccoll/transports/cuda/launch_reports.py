"""Reports of launches that ended early. The host reads them without waiting for the GPU.

A launch is asynchronous, so it cannot return its status in time. A block that ends early writes what it was doing into a word
of host memory. It also sets a word of the GPU, so that no later launch begins: its results could not be trusted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import Source
from ...kernels.kernel_context import WAITING, WORD

if TYPE_CHECKING:
    from .virtual_devices import Gpu

__all__ = ["LaunchReports", "LaunchedName", "Report"]

_BLOCK, _LAUNCH = 24, 40
"""The first bits of a label's block and launch; below them are 16 bits of the rank waited for, and 8 of the status."""


class LaunchedName(NamedTuple):
    """A launch as errors name it."""

    name: str
    source: Source | None
    blocks: int
    owner: Any = None
    """An object of the transport that goes with it."""


class Report(NamedTuple):
    """The end of the first block that did not finish, and the rank or device that it waited for."""

    launch: LaunchedName
    block: int
    status: int
    peer: int

    @property
    def waited(self) -> bool:
        """True for a block that ran out of patience, False for one that the failure word stopped."""
        return self.status == WAITING


class LaunchReports:
    """The reports of all launches of a transport: one word, for the first of them."""

    def __init__(self, gpu: Gpu):
        self._word, self._report = gpu.host_words(1)
        self._ended = gpu.zeros((1,), np.dtype(np.int64))
        self.ended = gpu.address(self._ended)
        """The address of the word that becomes nonzero when a launch has ended early."""
        self._launches: list[LaunchedName] = []

    def words(self, launch: LaunchedName) -> dict[int, int | list[int]]:
        """The context words with which a launch's blocks report."""
        label = len(self._launches) << _LAUNCH
        self._launches.append(launch)
        labels = [label + (block << _BLOCK) for block in range(launch.blocks)]
        return {WORD.ended: self.ended, WORD.report: self._report, WORD.label: labels}

    def found(self) -> Report | None:
        """The report, if there is one. What was enqueued before the stream was last synchronised has reported."""
        word = int(self._word[0])
        if not word:
            return None
        block = word >> _BLOCK & 0xFFFF
        return Report(self._launches[word >> _LAUNCH], block, word & 0xFF, word >> 8 & 0xFFFF)
