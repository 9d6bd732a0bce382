"""The exceptions of funccoll, and what a traceback shows of them.

Each class also derives from the built-in that a NumPy or JAX user would catch (`ValueError`, `TypeError`, ...), so existing
handlers keep working. A message says what is wrong, where (`file:line` of your call), which shapes and axes, and what to do.
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
    "CheckpointError",
    "CollectiveTimeout",
    "ConcretizationError",
    "DTypeError",
    "DeletedArrayError",
    "DeviceError",
    "DrawingError",
    "EqualRowsWarning",
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
    "NonFiniteGradientError",
    "OutSpecsError",
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
    """Return the last line of the user's code in a traceback. A FunccollError has its own source, which may be earlier."""
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

    If the exception is not funccoll's, such as NumPy's for a singular matrix, it gets the line as a note.
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
    """Base of all errors of funccoll. Catch it to handle any of them.

    `error.source` is your line (`file`, `line`, `function`), or None.
    """

    def __init__(self, message: str, source: Source | None = None):
        self.source = source if source is not None else current_source()
        super().__init__(f"{message}\n{self.source.as_note}" if self.source else message)

    def __reduce__(self) -> Any:
        return _restore, (type(self), self.args[0], self.source, getattr(self, "rank", None))


def _restore(kind: type[FunccollError], text: str, source: Source | None, rank: int | None) -> FunccollError:
    """Return an error as it was raised in another process."""
    error = kind.__new__(kind, text)
    error.args, error.source = (text,), source
    if isinstance(error, (CollectiveTimeout, PeerFailure)):
        error.rank = rank
    return error


class user_frames:
    """Context manager, decorator: cuts funccoll's own frames (about thirty) out of an exception's traceback (`hide_frames`).

    Set FUNCCOLL_TRACEBACK=full in the environment to keep them.

    Args:
        every: Cut the frames of any exception, around code that runs none of the user's.
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
        """Decorate a function. If its own call fails (a missing argument), the traceback has no frame of ours, either."""
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
    """True for a file of funccoll, or code that it generated."""
    return filename.startswith((PACKAGE, "<funccoll "))


def _comes_from_user(error: BaseException) -> bool:
    """True if the user's code, or what it called, raised the exception, with funccoll in the middle of the traceback."""
    trace, users = error.__traceback__, False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        users = not is_own(file) and (users or is_users(file))
        trace = trace.tb_next
    return users


def hide_frames(error: BaseException, every: bool = False) -> None:
    """Cut funccoll's own frames out of an exception's traceback, unless the exception may be a bug of funccoll.

    It is not a bug if the exception is a FunccollError, if NumPy raised it in an operation and it has a note with the user's
    line (IndexError, LinAlgError, ZeroDivisionError), or if the user's code raised it. With `every`, none is.
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
    """A mesh cannot exist or does not fit the job, or it lacks an axis.

    Compare the axis names and sizes with the mesh's, which the message shows. In a job the product of the sizes is the number
    of processes. Collectives need a function traced with a mesh.
    """


class DeviceError(FunccollError, RuntimeError):
    """A GPU is missing or lacks something, or arrays are on other devices than the operation needs.

    `funccoll doctor` says what GPUs need. Move arrays with `fc.device_put(x, mesh, spec, device=...)`.
    """


class ShardingError(FunccollError, ValueError):
    """A partition spec does not fit its mesh or its array.

    Each axis of the spec must divide the dimension that it splits, and the spec has at most as many entries as the array has
    dimensions. Pad the array, choose another axis, or write None for a dimension that stays whole.
    """


class ShapeError(FunccollError, ValueError):
    """Shapes, dimensions or indices do not fit the operation.

    The message has the shapes; reshape, pad or index the array so that they agree.
    """


class DTypeError(FunccollError, TypeError):
    """The operation has no meaning for the element type.

    Convert the array with `.astype(...)`. Gradients need floats, means need floats, and bitwise reductions need integers or
    booleans.
    """


class VaryingError(FunccollError, TypeError):
    """A value varies over a mesh axis and must not, or does not vary and must.

    If a loss or result must be equal on all devices, reduce it, for example with `fc.all_reduce(x, axis, op="mean")`. If a
    collective would combine copies of one value, drop the collective, or mark the copies with `fc.pvary(x, axis)`.
    """

    equal_operand: tuple[str, str] | None = None
    """The words of an error about a collective's operand that is equal on all devices, and the axes. fc.jit may know more."""
    operands: Sequence[Any] = ()
    """The operands of that collective: a loop may know where they come from."""


class OutSpecsError(VaryingError, ValueError):
    """A result varies over a mesh axis, and its out_spec claims that it is equal along it.

    Name the axis in `out_specs`, or reduce or gather the result over it. With `fc.AUTO` the program must say how a result is
    split; if it does not, write the spec.
    """


class PytreeError(FunccollError, ValueError):
    """Two pytrees that should have the same structure do not.

    The message names the first place at which they differ. Specs must be a prefix of the arguments, branches and loop bodies
    must return one structure, and classes must be registered (`fc.tree.register`).
    """


class TraceError(FunccollError, TypeError):
    """A function cannot be traced because of an argument or of its result.

    Pass arrays, numbers and pytrees of them, return arrays, and make other values static arguments of `fc.jit`.
    """


class ConcretizationError(TraceError):
    """Python asked for the value of a traced array, as in `if`, `float()` or `range()`.

    While tracing, an array has a shape and dtype, and no value. Use `fc.cond`, `np.where` or `fc.fori_loop`, or make the
    argument static. `fc.debug.disable_jit` runs the function with values.
    """


class InPlaceError(TraceError):
    """Code assigns into a traced array, which never changes.

    Use the returned value instead: `x = fc.at(x)[index].set(value)`, or `y = np.add(x, v)` in place of `out=`.
    """


class LeakedTracerError(TraceError):
    """A traced array is used after the function that made it was traced.

    A global, an attribute or a closure kept it. Return the value from the function, and pass it as an argument.
    """


class UnsupportedError(TraceError):
    """funccoll cannot trace a NumPy function, method or option.

    The message names an expression that computes the same, if there is one. `fc.supported_functions()` lists what can be
    traced; `fc.pure_callback` calls anything else.
    """


class MissingMethodError(UnsupportedError, AttributeError):
    """A traced array or an Array lacks a method or attribute that NumPy's, torch's or JAX's arrays have.

    The message names the equivalent. For an Array, `np.asarray(arr)` has all of NumPy's.
    """


class ScheduleError(FunccollError, ValueError):
    """A communication schedule does not exist for this collective or number of devices, or is wrong.

    `fc.schedules.algorithms(kind, p)` lists the algorithms that support p devices. Pass `algorithm=None` to let the compiler
    choose.
    """


class RendezvousError(FunccollError, RuntimeError):
    """The processes of a job did not find each other, or this process has left the job, or was never a rank of it.

    Look for an earlier error of the missing ranks. Start all of them with one launcher (`funccoll run -n`, `torchrun`,
    `mpirun`); `fc.init(rendezvous_timeout=...)` waits longer.
    """


class LaunchError(FunccollError, RuntimeError):
    """`fc.launch` could not start its processes, send them work, or receive all results.

    The message has the cause. The function and its arguments must be picklable by cloudpickle, and so must the results.
    """


class LaunchTimeout(LaunchError, TimeoutError):
    """The processes of `fc.launch` did not finish in time.

    They are stopped. Pass a longer `timeout`, or look for a rank that waits.
    """


class CalibrationError(FunccollError, RuntimeError):
    """`funccoll tune` could not measure this host, or could not keep what it measured.

    The message has the cause, such as a directory that cannot be written. Without a machine profile the cost model uses its
    presets.
    """


class CollectiveTimeout(FunccollError, TimeoutError):
    """A rank waited too long in a collective; the message says where every rank is.

    Look at the line of the rank that others wait for (`error.rank`): it may hang, be stopped in a debugger, or only be slow.
    `fc.init(timeout=...)` or FUNCCOLL_TIMEOUT allows more seconds.
    """

    rank: int | None = None
    """The rank that it waited for."""


class ProgramMismatch(FunccollError, RuntimeError):
    """Processes of a job run different programs, or are in different collectives at the same time.

    The message says what each rank does, and at which line. All ranks must call the same jitted functions in the same order,
    with arguments of the same shapes and dtypes. Decide from values that are equal on all ranks.
    """


class PeerFailure(FunccollError, RuntimeError):
    """Another process of the job died, raised an exception or left, so this collective can never finish.

    Fix the failure of that rank (`error.rank`); the message has its traceback if it raised one. This process cannot continue
    with collectives.
    """

    rank: int | None = None
    """The rank that failed; None in errors that follow an earlier failure."""


class UnevenBatchesError(FunccollError, RuntimeError):
    """Devices have different numbers of batches and must not; it is raised on all processes at the same step.

    Give each device as many batches, or pass `like=` to `fc.uneven_batches` for a device that has none.
    """


class MissingPackageError(FunccollError, ImportError):
    """A part of funccoll needs a package that is not installed.

    The message has the command that installs it.
    """


class NonFiniteError(FunccollError, FloatingPointError):
    """An operation made a NaN or an infinity in `fc.debug.nans`.

    The message names your line, the operation and the range of its operands. Fix that line, or pass `infs=False` if infinities
    are intended.
    """


class ModuleError(FunccollError, RuntimeError):
    """A torch module, or a backward pass through it, cannot be trained by several processes as it is.

    The message names the parameters and the ranks. Every rank must use the same parameters in each backward pass.
    """


class DrawingError(FunccollError, ValueError):
    """A drawing cannot be made or saved.

    The message names the object, option or kind of file that is not supported, and those that are.
    """


class DeletedArrayError(FunccollError, RuntimeError):
    """Code uses an Array whose memory was donated to a jitted function.

    Use the result of that function, copy the Array before the call with `np.array`, or leave it out of `donate_argnums`.
    """


class CheckpointError(FunccollError, ValueError):
    """A checkpoint cannot be read, or does not fit what it is loaded into.

    The message names the first array that is missing, unknown, or of another shape or dtype. Load it into the model and
    optimizer that saved it.
    """


class ProfileError(FunccollError, ValueError):
    """A profile cannot be recorded, or cannot be read.

    Choose a directory that can be written and holds no other profile, and one that `fc.profile` or FUNCCOLL_PROFILE wrote to
    read it.
    """


class EqualRowsWarning(UserWarning):
    """In the first step of an `fc.DataParallel` all processes pass the same rows. Each process passes its own.

    So the processes train on copies of the same rows. Pass `rows[fc.rank() :: fc.world_size()]`, or an Array of all rows.
    """


class NonFiniteGradientError(FunccollError, FloatingPointError):
    """Gradients have NaN or infinity, with `check_finite=True`; the step changed nothing.

    The message names the parameters. Skip the batch on all ranks with `skip_if`, or find the operation with `fc.debug.nans`.
    """


class PlannedError(FunccollError, NotImplementedError):
    """This version does not have a documented feature yet.

    The message says what to use today.
    """


class PlannedNameError(PlannedError, AttributeError):
    """Code asked for a public name that is planned.

    The message says what to use today. It is an AttributeError, so `hasattr` returns False.
    """


_LIMITS = {
    errno.EFBIG: "`ulimit -f` limits the size of files",
    errno.EMFILE: "`ulimit -n` limits the open files of a process",
    errno.EDQUOT: "a quota limits this user's files",
}


def system_reason(error: OSError) -> str:
    """Return the system's reason for an error, with the limit that was reached, if known."""
    limit = _LIMITS.get(error.errno or 0)
    return f"{error.strerror or error}{f' ({limit})' if limit else ''}"


def without_value(x: object) -> str:
    """Return words for a value that is not an array: a short one as it is, of another only its type."""
    shown, kind = repr(x), type(x).__name__
    return f"{shown} of type {kind}" if len(shown) <= 60 and "\n" not in shown else f"of type {kind}"


def argument_remedy(value: Any) -> str:
    """Return sentences that say what to pass to a jitted function instead of a value that is not an array.

    A static argument whose hash is its identity stays the same after an assignment to its attributes, and nothing is traced
    anew. So for instances of a class it is not the remedy.
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
    """Return a sentence that says how instances of a class that is not registered become pytrees; "" for others."""
    cls = type(value)
    if not hasattr(cls, "__dataclass_fields__") and not hasattr(cls, "__attrs_attrs__"):
        return ""
    return f" fc.tree.register({cls.__name__}) makes pytrees of its instances (a subclass is registered by itself)."
