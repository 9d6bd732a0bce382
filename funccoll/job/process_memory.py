"""Memory of other processes, read by the system (`process_vm_readv`), and the permissions for it."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

__all__ = ["let_siblings_read", "read", "refusal", "yama_scope"]

_PR_SET_PTRACER = 0x59616D61  # <linux/prctl.h>
_RELATIVES = 1  # Yama's ptrace_scope: a process may be read by its ancestors, and by those that it names


class _Range(ctypes.Structure):
    """`struct iovec` of <sys/uio.h>."""

    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def read(pid: int, address: int, nbytes: int) -> bytes:
    """Read memory of a process. Raises OSError if the system denies it, or there is none."""
    libc, found = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(nbytes)
    readv = libc.process_vm_readv
    readv.restype = ctypes.c_ssize_t
    readv.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    mine, theirs = _Range(ctypes.addressof(found), nbytes), _Range(address, nbytes)
    done = readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
    if done != nbytes:
        error = ctypes.get_errno() if done < 0 else errno.EFAULT
        raise OSError(error, os.strerror(error))
    return found.raw


def yama_scope() -> int:
    """The value of the security module Yama's ptrace_scope; 0 without it."""
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0


def let_siblings_read() -> None:
    """Allow this process's parent, and what the parent has started, to read its memory. Yama otherwise allows only ancestors.

    This is the narrowest permission that lets ranks of one launcher read each other.
    """
    if yama_scope() == _RELATIVES and os.getppid() > 1:
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def refusal(error: int) -> str:
    """The system's reason in words: the error, and what is behind it."""
    name = errno.errorcode.get(error, str(error))
    if error == errno.EPERM and (scope := yama_scope()):
        return f"refused by Yama ({name}; /proc/sys/kernel/yama/ptrace_scope is {scope})"
    if error in (errno.EPERM, errno.ENOSYS, errno.EACCES):
        return f"refused ({name}): by a seccomp filter, a namespace, or between users"
    return f"fails: {os.strerror(error)} ({name})"
