"""The exceptions of funccoll, and the search for the line of the user's code that an error points at.

Each class also derives from the built-in that a NumPy or JAX user would catch (`ValueError`,
`TypeError`, ...), so existing handlers keep working. A message says what is wrong, where
(`file:line` of the user's call), which shapes and axes, and what to do.
"""

from __future__ import annotations

import errno
import functools
import os
import sys
import sysconfig
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from . import config

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

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of this installation."""
# Frames of libraries that call back into funccoll (NumPy's dispatch, optree's maps, functools), or raise for a traced array (as
# JAX), are not the user's.
_FOREIGN = tuple(
    f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("numpy", "scipy", "optree", "jaxtyping", "torch", "jax")
)
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_TYPED_IN = ("<stdin>", "<ipython", "<string>")  # Python's names for code without a file
_VERDICTS: dict[str, bool] = {}
_IN_SCOPE = ") in "
_OF_OPERATIONS = (IndexError, ValueError, ArithmeticError)
"""Exceptions that NumPy raises for values that an operation does not take; LinAlgError is a ValueError."""


@dataclass(frozen=True, slots=True)
class Source:
    """A place in the user's code. Prints as `train.py:12 (loss_fn)`, in a notebook as `In[5]:12 (loss_fn)`.

    In a `named_scope` it prints as `train.py:12 (loss_fn) in attention/scores`.
    """

    file: str
    line: int
    function: str
    scope: str = ""
    role: str = field(default="", compare=False)
    """The operand of an operation there in errors about its values: "a label of fc.nn.cross_entropy"."""

    def __str__(self) -> str:
        scope = f"{_IN_SCOPE}{self.scope}" if self.scope else ""
        return f"{_cell_name(self.file) or os.path.basename(self.file)}:{self.line} ({self.function}){scope[1:]}"

    @property
    def as_note(self) -> str:
        """The last line of an error's text, with the whole path: `  at /home/me/train.py:12 in loss_fn`."""
        return f"  at {_cell_name(self.file) or self.file}:{self.line} in {self.function}"


def _cell_name(file: str) -> str | None:
    """A notebook's cell as its margin names it, `In[5]`; `cell` in a process that is not its kernel; None for other files.

    Jupyter's kernel names a cell's file by its own process and a hash of the cell, which tell a reader nothing.
    """
    if not os.path.basename(os.path.dirname(file)).startswith("ipykernel_"):
        return None
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    found = shell.compile.format_code_name(file) if shell else None  # ("Cell", "In[5]")
    return found[1] if found else "cell"


def is_users(filename: str) -> bool:
    """True for a file of the user's: neither funccoll's nor a library's."""
    verdict = _VERDICTS.get(filename)
    if verdict is None:
        inside = filename.startswith(PACKAGE)
        foreign = any(part in filename for part in _FOREIGN)
        standard = filename.startswith(_STANDARD) and "site-packages" not in filename
        generated = filename.startswith("<") and not filename.startswith(_TYPED_IN)
        _VERDICTS[filename] = verdict = not (inside or foreign or standard or generated)
    return verdict


def user_source(depth: int = 0) -> Source | None:
    """Return the innermost frame that is neither funccoll's nor a library's: the line the user wrote.

    depth: frames, from the caller's outward, that are known not to be the user's.
    """
    frame = sys._getframe(1 + depth)
    while frame is not None:
        code = frame.f_code
        # Methods that dataclasses generate have no file either: their module shows that they are funccoll's.
        if is_users(code.co_filename) and not frame.f_globals.get("__name__", "").startswith("funccoll."):
            return _source(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def call_path() -> int:
    """Return a hash of the user's lines that call this, the innermost first: equal in processes that came the same way."""
    frame, found = sys._getframe(1), 0
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            found = zlib.crc32(f"{frame.f_code.co_filename}:{frame.f_lineno}".encode(), found)
        frame = frame.f_back
    return found


_source = functools.lru_cache(maxsize=1024)(Source)  # one object for a line that records many equations


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


# Set while rules run on the user's behalf, so that what they record or raise points at the user's line.
_SOURCE: ContextVar[Source | None] = ContextVar("funccoll_source", default=None)


class at_source:
    """Context manager: operations and errors inside are attributed to this source.

    An exception that is not funccoll's (NumPy's for a singular matrix) gets the line as a note.
    """

    __slots__ = ("source", "token")

    def __init__(self, source: Source | None):
        self.source = source

    def __enter__(self) -> None:
        self.token = _SOURCE.set(self.source)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        _SOURCE.reset(self.token)
        if self.source and isinstance(error, Exception) and not isinstance(error, FunccollError):
            if self.source.as_note not in getattr(error, "__notes__", ()):
                error.add_note(self.source.as_note)


def is_attributed() -> bool:
    """True while rules run on the user's behalf: what they record points at the operation that they are of."""
    return _SOURCE.get() is not None


def current_source() -> Source | None:
    """Return the user's line to which operations and errors are attributed now."""
    return _SOURCE.get() or user_source()


# The names of the scopes around what is traced now, the outermost first.
SCOPE: ContextVar[tuple[str, ...]] = ContextVar("funccoll_scope", default=())


def traced_source() -> Source | None:
    """Return the user's line of an operation that is traced now, with its named scope."""
    found = _SOURCE.get()
    if found is not None:
        return found
    found, scope = user_source(), SCOPE.get()
    return _source(found.file, found.line, found.function, "/".join(scope)) if found is not None and scope else found


def scope_of(text: str) -> str:
    """Return the named scope in the text of a Source; empty where there is none."""
    return text.partition(_IN_SCOPE)[2]


def globals_at(line: Source) -> dict[str, Any]:
    """Return the global names of the running function that a line is in; none where it does not run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != line.file:
        frame = frame.f_back
    return {} if frame is None else frame.f_globals


def warn_at(line: Source | None, kind: type[Warning], text: str, namespace: dict[str, Any] | None = None) -> None:
    """Warn of a line of the user's. Python keeps in `namespace`, the global names there, what it has shown."""
    found = (globals_at(line) if line else {}) if namespace is None else namespace
    warnings.warn_explicit(
        text, kind, line.file if line else "<unknown>", line.line if line else 1, found.get("__name__"),
        found.setdefault("__warningregistry__", {}),
    )  # fmt: skip


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
    errno.EFBIG: "`ulimit -f` limits the size of files", errno.EMFILE: "`ulimit -n` limits the open files of a process",
    errno.EDQUOT: "a quota limits this user's files",
}  # fmt: skip


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
