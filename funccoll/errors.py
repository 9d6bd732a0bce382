"""The exceptions of funccoll, and what a traceback shows of them.

Each class also derives from the built-in that a NumPy or JAX user would catch (`ValueError`,
`TypeError`, ...), so existing handlers keep working. A message says what is wrong, where
(`file:line` of the user's call), which shapes and axes, and what to do.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from . import config
from .user_lines import (
    PACKAGE,
    SCOPE,
    SOURCE,
    Source,
    call_path,
    current_source,
    globals_at,
    is_attributed,
    is_users,
    scope_of,
    traced_source,
    user_source,
    warn_at,
)

__all__ = [
    "SCOPE",
    "CalibrationError",
    "CollectiveTimeout",
    "ConcretizationError",
    "DTypeError",
    "DeletedArrayError",
    "DeviceError",
    "DrawingError",
    "FunccollError",
    "InPlaceError",
    "LaunchError",
    "LaunchTimeout",
    "LeakedTracerError",
    "MeshError",
    "MissingMethodError",
    "MissingPackageError",
    "ModuleError",
    "NonFiniteError",
    "PeerFailure",
    "PlannedError",
    "PlannedNameError",
    "ProfileError",
    "ProgramMismatch",
    "PytreeError",
    "RendezvousError",
    "ScheduleError",
    "ShapeError",
    "ShardingError",
    "Source",
    "TraceError",
    "UnevenBatchesError",
    "UnsupportedError",
    "VaryingError",
    "argument_remedy",
    "at_source",
    "call_path",
    "current_source",
    "globals_at",
    "hide_frames",
    "is_attributed",
    "is_own",
    "is_users",
    "raised_at",
    "registration_remedy",
    "scope_of",
    "system_reason",
    "traced_source",
    "user_frames",
    "user_source",
    "warn_at",
    "without_value",
]

Params = ParamSpec("Params")
R = TypeVar("R")

_OF_OPERATIONS = (IndexError, ValueError, ArithmeticError)
"""Exceptions that NumPy raises for values that an operation does not take; LinAlgError is a ValueError."""


def raised_at(error: BaseException) -> Source | None:
    """Return the last line of the user's in an exception's traceback; the source of a FunccollError, which may be earlier."""
    if isinstance(error, FunccollError) and error.source is not None:
        return error.source
    trace, found = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code.co_filename):
            found = Source(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next
    return found


class at_source:
    """Context manager: operations and errors inside are attributed to this source.

    An exception that is not funccoll's (NumPy's for a singular matrix) gets the line as a note.
    """

    __slots__ = ("source", "token")

    def __init__(self, source: Source | None):
        self.source = source

    def __enter__(self) -> None:
        self.token = SOURCE.set(self.source)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        SOURCE.reset(self.token)
        if self.source and isinstance(error, Exception) and not isinstance(error, FunccollError):
            if self.source.as_note not in getattr(error, "__notes__", ()):
                error.add_note(self.source.as_note)


class FunccollError(Exception):
    """Base of every error of funccoll. `source` is the user's line, or None."""

    def __init__(self, message: str, source: Source | None = None):
        self.source = source if source is not None else current_source()
        super().__init__(f"{message}\n{self.source.as_note}" if self.source else message)

    def __reduce__(self) -> Any:
        return _restore, (type(self), self.args[0], self.source, getattr(self, "rank", None))


def _restore(kind: type[FunccollError], text: str, source: Source | None, rank: int | None) -> FunccollError:
    """An error as it was raised in another process."""
    error = kind.__new__(kind, text)
    error.args, error.source = (text,), source
    if isinstance(error, (CollectiveTimeout, PeerFailure)):
        error.rank = rank
    return error


class user_frames:
    """Context manager, decorator: cuts funccoll's own frames (about thirty) out of an exception's traceback (`hide_frames`).

    every: those of any exception, around what runs no code of the user's.
    Set FUNCCOLL_TRACEBACK=full in the environment to keep them.
    """

    __slots__ = ("every",)

    def __init__(self, every: bool = False):
        self.every = every

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: object, traceback: TracebackType | None) -> None:
        if isinstance(error, BaseException):
            hide_frames(error, self.every)

    def __call__(self, fn: Callable[Params, R]) -> Callable[Params, R]:
        """Decorate a function: of an exception of its own call (a missing argument) no frame of ours is seen, either."""
        every = self.every

        @functools.wraps(fn)
        def shown(*args: Params.args, **kwargs: Params.kwargs) -> R:
            try:  # without an exception it costs nothing, where `with` would
                return fn(*args, **kwargs)
            except BaseException as error:
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame
                hide_frames(error, every)
                raise

        return shown


def is_own(filename: str) -> bool:
    """True for a file of funccoll's, or code that it has generated."""
    return filename.startswith((PACKAGE, "<funccoll "))


def _comes_from_user(error: BaseException) -> bool:
    """True for an exception of the user's code, or of what that called, when funccoll is in the middle of the traceback."""
    trace, users = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        users = not is_own(file) and (users or is_users(file))
        trace = trace.tb_next
    return users


def hide_frames(error: BaseException, every: bool = False) -> None:
    """Cut funccoll's own frames out of an exception's traceback, unless it may be a fault of funccoll.

    It is not if the exception is a FunccollError; if NumPy raised it in an operation, and it has a note with the user's line
    (IndexError, LinAlgError, ZeroDivisionError); or if code of the user's raised it, which funccoll has called. every: any is.
    """
    noted = isinstance(error, _OF_OPERATIONS) and any(note.startswith("  at ") for note in getattr(error, "__notes__", ()))
    if isinstance(error, FunccollError):
        hidden = lambda filename: not is_users(filename)
    elif isinstance(error, Exception) and (noted or every or _comes_from_user(error)):  # Ctrl-C shows where a call hangs
        hidden = is_own
    else:
        return
    if config.TRACEBACK.read() == "full":
        return
    traceback, frames = error.__traceback__, []
    while traceback is not None:
        if not hidden(traceback.tb_frame.f_code.co_filename):
            frames.append(traceback)
        traceback = traceback.tb_next
    shown = None
    for t in reversed(frames):
        shown = TracebackType(shown, t.tb_frame, t.tb_lasti, t.tb_lineno)
    error.__traceback__ = shown


class MeshError(FunccollError, ValueError):
    """A mesh that cannot exist or does not fit the job, or an axis that the mesh does not have."""


class DeviceError(FunccollError, RuntimeError):
    """A GPU that is not there or lacks something, or arrays on other devices than the operation needs."""


class ShardingError(FunccollError, ValueError):
    """A partition spec that does not fit its mesh or its array."""


class ShapeError(FunccollError, ValueError):
    """Shapes, dimensions or indices that do not fit the operation."""


class DTypeError(FunccollError, TypeError):
    """An element type the operation has no meaning for."""


class VaryingError(FunccollError, TypeError):
    """A value varies over a mesh axis where it must not, or does not where it must."""

    equal_operand: tuple[str, str] | None = None
    """Where a collective has an operand that is equal on all devices: these words, and the axes. fc.jit may know the reason."""
    operands: Sequence[Any] = ()
    """The operands of that collective: a loop may know where they come from."""


class OutSpecsError(VaryingError, ValueError):
    """A result varies over a mesh axis over which its out_spec says that it is equal."""


class PytreeError(FunccollError, ValueError):
    """Two pytrees that should have the same structure do not."""


class TraceError(FunccollError, TypeError):
    """A function that cannot be traced, because of an argument or of its result."""


class ConcretizationError(TraceError):
    """Python asked for the value of a traced array (`if`, `float()`, `range()`, ...)."""


class InPlaceError(TraceError):
    """An assignment into a traced array."""


class LeakedTracerError(TraceError):
    """A traced array is used after the function that made it was traced."""


class UnsupportedError(TraceError):
    """A NumPy function, method or option that funccoll cannot trace."""


class MissingMethodError(UnsupportedError, AttributeError):
    """A method or attribute that NumPy arrays have and traced ones do not."""


class ScheduleError(FunccollError, ValueError):
    """A communication schedule that does not exist for this collective or size."""


class RendezvousError(FunccollError, RuntimeError):
    """The processes of a job did not find each other, or this one has left the job, or was never a rank of it."""


class LaunchError(FunccollError, RuntimeError):
    """Processes that fc.launch could not start, send work to or receive all results from."""


class LaunchTimeout(LaunchError, TimeoutError):
    """The processes of fc.launch did not finish in time."""


class CalibrationError(FunccollError, RuntimeError):
    """This host could not be measured, or what was measured could not be kept."""


class CollectiveTimeout(FunccollError, TimeoutError):
    """A rank waited too long in a collective; the message says where every rank is."""

    rank: int | None = None
    """The rank that it waited for."""


class ProgramMismatch(FunccollError, RuntimeError):
    """Two processes of a job are in different collectives at the same time."""


class PeerFailure(FunccollError, RuntimeError):
    """Another process of the job died, raised an exception or left, so this collective can never finish."""

    rank: int | None = None
    """The rank that did; None in what is raised after an earlier failure."""


class UnevenBatchesError(FunccollError, RuntimeError):
    """Devices have different numbers of batches where they must not; raised on all processes at the same step."""


class MissingPackageError(FunccollError, ImportError):
    """A part of funccoll which needs a package that is not installed."""


class NonFiniteError(FunccollError, FloatingPointError):
    """An operation made a NaN or an inf while `fc.debug.nans` looks for them."""


class ModuleError(FunccollError, RuntimeError):
    """A torch module, or a backward pass through it, which cannot be trained by several processes as it is."""


class DrawingError(FunccollError, ValueError):
    """A drawing that cannot be made or saved: of another kind of object, with unknown options, as an unknown kind of file."""


class DeletedArrayError(FunccollError, RuntimeError):
    """An Array whose buffers were donated to a jitted function."""


class CheckpointError(FunccollError, ValueError):
    """A checkpoint that cannot be read, or does not fit what it is loaded into."""


class ProfileError(FunccollError, ValueError):
    """A profile that cannot be recorded, or cannot be read."""


class NonFiniteGradientError(FunccollError, FloatingPointError):
    """Gradients with NaN or infinity, with `check_finite=True`."""


class PlannedError(FunccollError, NotImplementedError):
    """A documented feature that this version does not have yet."""


class PlannedNameError(PlannedError, AttributeError):
    """A planned public name that was asked for; being an AttributeError, `hasattr` is False."""


_LIMITS = {
    errno.EFBIG: "`ulimit -f` limits the size of files",
    errno.EMFILE: "`ulimit -n` limits the open files of a process",
    errno.EDQUOT: "a quota limits this user's files",
}


def system_reason(error: OSError) -> str:
    """The system's reason for an error, with the limit that has been reached, if it tells."""
    limit = _LIMITS.get(error.errno or 0)
    return f"{error.strerror or error}{f' ({limit})' if limit else ''}"


def without_value(x: object) -> str:
    """A value that is not an array, for a message: a short one as it is, of another its type alone."""
    shown, kind = repr(x), type(x).__name__
    return f"{shown} of type {kind}" if len(shown) <= 60 and "\n" not in shown else f"of type {kind}"


def argument_remedy(value: Any) -> str:
    """Sentences for errors about an argument of a jitted function which is not an array: what to pass.

    A static argument whose hash is its identity is the same one after an assignment to its attributes, and nothing is
    traced anew: it is not the remedy for instances of a class.
    """
    if registered := registration_remedy(value):
        return f"Pass arrays, numbers and pytrees.{registered}"
    cls = type(value)
    if cls.__module__ == "builtins" or cls.__hash__ is not object.__hash__ or not hasattr(value, "__dict__"):
        return "Pass arrays, numbers and pytrees; a text, a function or another constant is a static argument of fc.jit."
    return (
        f"Make pytrees of its instances (fc.tree.register({cls.__name__}, flatten, unflatten)), or jit a function of the "
        "arrays and numbers that it reads. As a static argument it would keep the attributes of the first call."
    )


def registration_remedy(value: Any) -> str:
    """A sentence for errors, which says how instances of a class that is not registered become pytrees; "" for others."""
    cls = type(value)
    if not hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__attrs_attrs__"):
        return ""
    return f" fc.tree.register({cls.__name__}) makes pytrees of its instances (a subclass is registered by itself)."
