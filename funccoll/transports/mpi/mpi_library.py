"""MPI as plans use it: the addresses of its functions, its handles as integers, and requests that native code fills.

mpi4py keeps the handles in its own memory. A handle in MPI's ABI is a pointer in Open MPI and an int in MPICH.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ...kernels.kernel_context import LIBRARY_WORD as WORD

__all__ = ["MpiLibrary"]


class MpiLibrary:
    """A communicator of MPI for the messages of plans. `mpi` is `mpi4py.MPI`; its ranks are the job's.

    Its errors must be returned, not fatal.
    """

    def __init__(self, mpi: Any, communicator: Any, piece_bytes: int):
        self.piece_bytes, self.allows_threads = piece_bytes, mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self._mpi, self._communicator = mpi, communicator
        # the module itself: names are found in it and in the libraries it is linked with
        self._functions = ctypes.CDLL(mpi.__file__)
        self._datatypes: dict[tuple[int, int, int], Any] = {}
        self._null = self._handle(mpi.REQUEST_NULL)
        self.words = np.zeros(WORD.size, np.int64)
        for word, name in ((WORD.irecv, "MPI_Irecv"), (WORD.isend, "MPI_Isend"), (WORD.test, "MPI_Test")):
            self.words[word] = self._address(name)
        self.words[WORD.communicator] = self._handle(communicator)
        self.words[WORD.request_bytes] = mpi._sizeof(mpi.Request)
        largest = communicator.Get_attr(mpi.TAG_UB)
        self.words[WORD.tag_mask] = (1 << (largest + 1).bit_length() - 1) - 1
        assert mpi._sizeof(mpi.Status) <= 8 * 8, "a status fits"

    def _address(self, function: str) -> int:
        found = ctypes.cast(getattr(self._functions, function), ctypes.c_void_p).value
        assert found is not None
        return found

    def _handle(self, thing: Any) -> int:
        """A handle as an integer."""
        size = self._mpi._sizeof(type(thing))
        return int.from_bytes(ctypes.string_at(self._mpi._addressof(thing), size), "little")

    def datatype(self, nbytes: int, rows: int, stride: int) -> tuple[int, int]:
        """See `MessageLibrary`."""
        byte = self._mpi.BYTE
        if rows == 1:
            return nbytes, self._handle(byte)
        key = nbytes, rows, stride
        if key not in self._datatypes:
            self._datatypes[key] = byte.Create_hvector(rows, nbytes, stride).Commit()
        return 1, self._handle(self._datatypes[key])

    def requests(self, count: int) -> np.ndarray:
        """See `MessageLibrary`."""
        width = self._mpi._sizeof(self._mpi.Request)
        null = np.frombuffer(self._null.to_bytes(width, "little"), np.uint8)
        return np.tile(null, count)

    def error_text(self, code: int) -> str:
        """See `MessageLibrary`."""
        return str(self._mpi.Get_error_string(code))
