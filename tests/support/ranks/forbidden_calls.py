"""System calls that this process may not make, as in a sandbox: by seccomp, which lasts until the process ends."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

NUMBERS = {
    "x86_64": {"memfd_create": 319, "eventfd2": 290, "clone": 56, "clone3": 435},
    "aarch64": {"memfd_create": 279, "eventfd2": 19, "clone": 220, "clone3": 435},
}.get(platform.machine(), {})
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # <sys/prctl.h>, <linux/seccomp.h>
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # <linux/filter.h>
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def forbid(names, error):
    """Let these calls fail with an error number."""
    numbers = [NUMBERS[name] for name in names]
    rules = [(_LOAD, 0, 0, 0)]
    rules += [(_JUMP_IF_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    rules += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = _Program(len(rules), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
