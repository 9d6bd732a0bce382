"""Debugging: values that a compiled program computes, printed, passed to a function, or examined in a debugger."""

from __future__ import annotations

import os
import signal
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TextIO

import numpy as np
import optree

from . import config
from .compiler.codegen.non_finite import NonFinite
from .compiler.debug_modes import MODES
from .core.interpreter import Traced, bind
from .errors import TraceError, UnsupportedError, is_own
from .job import job_context
from .ops.registry import as_traceable
from .primitives.debugging import DevicePlace, debug_report_p
from .tracing.trace import label_of, require_function

__all__ = ["breakpoint", "callback", "disable_jit", "nans", "print"]


def __dir__() -> list[str]:
    return __all__


# ---------------------------------------------------------------- values


class _ReportArguments:
    """Arguments of a report: arrays, which the program computes, and other values as they are while tracing."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], traced_alone: bool = False):
        both: Any = (args, dict(kwargs))
        self.leaves, self.tree = optree.tree_flatten(both, none_is_leaf=True)
        is_array = lambda x: isinstance(x, Traced) or (not traced_alone and hasattr(x, "__array__"))
        self.places = [i for i, x in enumerate(self.leaves) if is_array(x)]
        self.operands = [as_traceable(self.leaves[i]) for i in self.places]
        for i in self.places:
            self.leaves[i] = None  # a traced array would keep its trace alive

    def with_values(self, values: Sequence[Any]) -> Any:
        """Return the positional and keyword arguments with these values for the arrays."""
        leaves = list(self.leaves)
        for i, value in zip(self.places, values, strict=True):
            leaves[i] = value
        return self.tree.unflatten(leaves)


def _prefix(place: DevicePlace | None) -> str:
    """Return the device that reports. In a job of processes without a common mesh, it is the process."""
    if place is not None:
        return f"{place}: "
    job = job_context.current()
    return f"rank {job.rank}: " if job is not None and len(job.hosts) > 1 else ""


def _printed_prefix(place: DevicePlace | None) -> str:
    """Return the prefix of a line of output, without the rank if a launcher such as `funccoll run` adds that."""
    prefix, job = _prefix(place), job_context.current()
    if job is None or not config.REPORTS.read():
        return prefix
    rest = prefix.removeprefix(f"rank {job.rank}")  # on a mesh of some of the processes, a device has another rank
    return prefix if rest[:1] not in (":", " ") else rest.removeprefix(": ").removeprefix(" ")


# ---------------------------------------------------------------- print


class _Formatter(string.Formatter):
    """`str.format` that applies a format to each element of an array."""

    def check_unused_args(self, used_args: Any, args: Any, kwargs: Any) -> None:
        unused = [f"argument {i}" for i in range(len(args)) if i not in used_args] + [k for k in kwargs if k not in used_args]
        if unused:
            raise KeyError(f"does not show {', '.join(unused)}")

    def get_value(self, key: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_value(key, args, kwargs)
        except (KeyError, IndexError):
            raise KeyError(f"shows {{{key}}}, which is not among its arguments") from None

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, np.ndarray) and value.ndim:
            every: Any = {"all": lambda x: self.format_field(x, format_spec)}
            return np.array2string(value, formatter=every) if format_spec else str(value)
        if isinstance(value, (np.ndarray, np.generic)):
            value = value[()] if isinstance(value, np.ndarray) else value
            if format_spec:
                value = value.item()
        return format(value, format_spec)


class _StandIn:
    """A value that is not known yet, while a format is checked."""

    def __getattr__(self, name: str) -> _StandIn:
        return self

    def __getitem__(self, key: Any) -> _StandIn:
        return self

    def __format__(self, spec: str) -> str:
        return ""


_FORMATTER = _Formatter()


class _Print:
    """The report of `print`."""

    per_element = False

    def __init__(self, fmt: str, arguments: _ReportArguments):
        self.fmt, self.arguments = fmt, arguments
        self.__qualname__ = repr(fmt)

    def __call__(self, values: Sequence[np.ndarray], place: DevicePlace | None) -> None:
        args, kwargs = self.arguments.with_values([x[()] for x in values])
        text, prefix = _FORMATTER.vformat(self.fmt, args, kwargs), _printed_prefix(place)
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in text.split("\n")))  # at once: processes share a terminal
        sys.stdout.flush()


def print(fmt: str, *args: Any, ordered: bool = True, **kwargs: Any) -> None:
    """Print values each time the program runs.

    Each device prints its own values on its process's standard output, after its rank, and its coordinates if the mesh has
    several axes. A single device has no prefix. Under `funccoll run`, which puts the rank before each line, the rank is left
    out.

    Prints are never removed. Each device's come in the order in which they were traced, also in loops and in branches of
    `fc.cond` that are taken. Devices of one process print one after another; the lines of several processes have no order.
    Gradients print once, in the forward computation; the rules of a `fc.custom_vjp` may print cotangents. `fc.vmap` prints a
    whole batch at once. A print changes no bits and communicates nothing, so ranks may have different prints. Outside of traced
    functions it prints at once.

    Args:
        fmt: A format of `str.format`. A spec such as `:.3f` is applied to each element of an array.
        *args: What `{}` shows: arrays, pytrees of them, and anything else.
        ordered: Accepted as in JAX; it changes nothing.
        **kwargs: What `{name}` shows.

    Raises:
        TraceError: If the format does not fit the arguments.
        UnsupportedError: If the program runs on a GPU.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> def double(x):
        ...     fc.debug.print("x = {x:.1f}", x=x)
        ...     return 2 * x
        >>> y = fc.jit(double, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(np.array([1.0, 2.0]))
        rank 0: x = [1.0]
        rank 1: x = [2.0]

    References:
        JAX's `debug.print`.
    """
    if not isinstance(fmt, str):
        raise TraceError(f"fc.debug.print(fmt, ...): the format is a string such as 'loss {{x}}', not {type(fmt).__name__}.")
    if "Tracer(" in fmt:
        raise TraceError(
            f"fc.debug.print({fmt!r:.60}): the text holds a traced array, which has no value while the function is traced. "
            'Leave the f in front of it out and pass the value: fc.debug.print("x {x}", x=x).'
        )
    arguments = _ReportArguments(args, kwargs)
    shown: Any = arguments.with_values([_StandIn()] * len(arguments.operands))
    try:
        _FORMATTER.vformat(fmt, *shown)
    except KeyError as error:
        raise TraceError(
            f"fc.debug.print({fmt!r:.60}) {error.args[0]}. Each argument has its place in the format: "
            'fc.debug.print("loss {x} of {}", n, x=x); a brace that is text is written twice.'
        ) from None
    except ValueError as error:
        raise TraceError(f"fc.debug.print({fmt!r:.60}): {error}. A brace that is text is written twice, {{{{ }}}}.") from None
    bind(debug_report_p, *arguments.operands, report=_Print(fmt, arguments))


# ---------------------------------------------------------------- callback


class _Callback:
    """The report of `callback`."""

    per_element = True

    def __init__(self, fn: Callable[..., Any], arguments: _ReportArguments):
        self.fn, self.arguments = fn, arguments
        self.__qualname__ = label_of(fn)

    def __call__(self, values: Sequence[np.ndarray], place: DevicePlace | None) -> None:
        args, kwargs = self.arguments.with_values([np.array(x, order="C") for x in values])
        self.fn(*args, **kwargs)


def callback(fn: Callable[..., Any], *args: Any, ordered: bool = True, **kwargs: Any) -> None:
    """Call a Python function with NumPy arrays each time the program runs, for its effect.

    It is called once for each device with that device's values, in each process for its own devices, so it must not call
    collectives. Pass `fc.axis_index` of an axis to know the device. `fc.vmap` calls it for each element of the batch. An
    exception in `fn` is raised by the step, with your line. For order, gradients, loops and GPUs see `fc.debug.print`. If you
    need a result, use `fc.pure_callback`.

    Args:
        fn: The function. It gets copies, which it may keep or write to; its result is dropped.
        *args: Arrays, pytrees of them, and anything else.
        ordered: Accepted as in JAX; it changes nothing.
        **kwargs: The same by name.

    Example:
        >>> seen = []
        >>> def double(x):
        ...     fc.debug.callback(seen.append, x)
        ...     return 2 * x
        >>> y = fc.jit(double)(np.array([1.0, 2.0]))
        >>> seen
        [array([1., 2.])]

    References:
        JAX's `debug.callback`.
    """
    require_function("fc.debug.callback", fn)
    arguments = _ReportArguments(args, kwargs)
    bind(debug_report_p, *arguments.operands, report=_Callback(fn, arguments))


# ---------------------------------------------------------------- breakpoint


class _Breakpoint:
    """The report of `breakpoint`."""

    per_element = False

    def __init__(self, rank: int | None, frame: FrameType, arguments: _ReportArguments):
        self.rank, self.arguments = rank, arguments
        self.file, self.line, self.function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        self.names = frame.f_globals
        self.__qualname__ = "all ranks" if rank is None else f"rank {rank}"

    def __call__(self, values: Sequence[np.ndarray], place: DevicePlace | None) -> None:
        job = job_context.current()
        here = place.rank if place is not None else job.rank if job is not None else 0
        if self.rank not in (None, here):
            return
        import bdb  # 10 ms, with pdb
        import pdb

        _, local = self.arguments.with_values([np.array(x, order="C")[()] for x in values])
        waiting = ""
        if job is not None and len(job.hosts) > 1:
            waiting = (
                f" The others wait in their next collective, for {job.timeout:.0f} s: set FUNCCOLL_TIMEOUT or "
                "fc.init(timeout=...) to more before a longer look."
            )
        title = f"fc.debug.breakpoint: {_prefix(place) or 'one device: '}c goes on, q ends the program.{waiting}\n"
        with _prompt_files(here) as files:

            class Prompt(pdb.Pdb):
                def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
                    stack = super().get_stack(f, t)[0]
                    if config.TRACEBACK.read() != "full":
                        stack = [(frame, line) for frame, line in stack if not is_own(frame.f_code.co_filename)]
                    return stack, len(stack) - 1

            debugger = Prompt(stdin=files.get("stdin"), stdout=files.get("stdout"), nosigint=True)
            debugger.stdout.write(title)
            debugger.stdout.flush()

            def hold() -> bool:
                frame = sys._getframe(1)
                local.pop("__hold__")
                debugger.reset()
                debugger.interaction(frame, None)
                if debugger.quitting:
                    local["__quit__"] = bdb.BdbQuit
                return debugger.quitting

            # A frame at the user's line, with the values as its variables. The exception also comes from there.
            text = "\n" * (self.line - 1) + "if __hold__(): raise __quit__"
            local["__hold__"] = hold
            exec(compile(text, self.file, "exec").replace(co_name=self.function), self.names, local)


@contextmanager
def _prompt_files(rank: int) -> Iterator[dict[str, TextIO]]:
    """Return input and output of a prompt: the standard ones, or the terminal if a launcher took these."""
    try:
        given = os.fstat(sys.stdin.fileno())
        null = os.stat(os.devnull)
        usable = (given.st_dev, given.st_ino) != (null.st_dev, null.st_ino)
        usable = usable and (not sys.stdin.isatty() or sys.stdout.isatty())
    except (AttributeError, ValueError, OSError):  # none, closed, or a notebook's
        usable = sys.stdin is not None and not sys.stdin.closed
    if usable:
        yield {}
        return
    try:
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        before = os.tcgetpgrp(terminal)
    except OSError:
        raise UnsupportedError(
            f"fc.debug.breakpoint on rank {rank}: the process has neither an input nor a terminal for a prompt. Start the job "
            "by `funccoll run` in a terminal, or use fc.debug.print."
        ) from None
    # Ranks of a launcher run in the background. A terminal stops such processes if they read it or take it over.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        os.tcsetpgrp(terminal, os.getpgrp())
        with os.fdopen(os.dup(terminal), "r") as stdin, os.fdopen(os.dup(terminal), "w") as stdout:
            yield {"stdin": stdin, "stdout": stdout}
    finally:
        os.tcsetpgrp(terminal, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(terminal)


def breakpoint(rank: int | None = 0) -> None:
    """Stop each time the program comes to this line, and open a pdb prompt with the values of your variables.

    `p x` prints a value, `c` continues, and `q` raises BdbQuit. You cannot step through lines, because the function is
    compiled; in `fc.debug.disable_jit` you can. Arrays in variables may be in pytrees. The prompt uses the standard input and
    output, or the terminal if a launcher such as `funccoll run` has taken these. For order, loops, gradients, vmap and GPUs see
    `fc.debug.print`.

    In a job the other ranks continue, and wait in their next collective. They raise CollectiveTimeout after 600 s, or what
    FUNCCOLL_TIMEOUT or `fc.init(timeout=)` says: set a longer time before a long look.

    Args:
        rank: The device that stops; None stops on each in turn.

    Raises:
        UnsupportedError: When the program runs, if the process has no input.

    References:
        JAX's `debug.breakpoint`.
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or rank < 0):
        raise TraceError(f"fc.debug.breakpoint(rank={rank!r}): it is the rank of a device, such as 0, or None for all of them.")
    frame = sys._getframe(1)
    arguments = _ReportArguments((), frame.f_locals, traced_alone=True)
    bind(debug_report_p, *arguments.operands, report=_Breakpoint(rank, frame, arguments))


# ---------------------------------------------------------------- modes


class nans:
    """Raise NonFiniteError after the first operation that makes a NaN or an infinity.

    The error names the operation, your line, the device, and the range of each operand, or that it has a NaN already. The
    search begins with the call and ends with the block. Without a block it goes on until `fc.debug.nans(False)`. It applies to
    all threads of the process. In a job you can enter it on all ranks or on some, because the programs are the same. The
    environment variable FUNCCOLL_DEBUG=nans begins it with the process; commas combine words, as in FUNCCOLL_DEBUG=nans,detail.

    Jitted functions are compiled anew, and each of their results is read once more. Gradients that are not jitted are searched
    too, but not by the environment variable. Nothing is searched on GPUs; outside of jitted functions and gradients, use
    NumPy's np.errstate.

    Args:
        enabled: False ends the search.
        infs: True also raises for an infinity that is made of finite operands.

    Raises:
        NonFiniteError: A FloatingPointError, from the call of the jitted function.

    Example:
        >>> with fc.debug.nans():
        ...     fc.jit(np.log)(-1.0)
        Traceback (most recent call last):
        funccoll.errors.NonFiniteError: NaN from log: its result f64[]. Operand 0 (x of log) is f64[], -1...

    References:
        JAX's `debug_nans`.
    """

    def __init__(self, enabled: bool = True, *, infs: bool = True):
        self._before = MODES.search(NonFinite(infs) if enabled else None)

    def __enter__(self) -> nans:
        return self

    def __exit__(self, *error: object) -> None:
        MODES.search(self._before)


class disable_jit:
    """Run jitted functions eagerly: each operation runs with its line, on all devices of this process.

    So a debugger can step through your function. An array shows the value of each device. Python's `if`, `float()` and
    `np.asarray` take values that are equal on all devices; a step that uses them works only in this mode. Loops and branches
    run as Python's, unless devices decide differently. Functions that are differentiated (by `fc.grad`, `fc.vjp`, `fc.jvp`, in
    checkpoints) have values too. Those of `fc.vmap` have none, because their arrays are elements of a batch.

    Results may differ from the compiled function's in the last bits: gradients of loops sum in the order of the unrolled loop,
    powers of 3 and 4 are NumPy's, and a sum of a transposed array may have another order.

    The mode begins with the call and ends with the block; without a block it goes on until `fc.debug.disable_jit(False)`. It
    applies to all threads of the process. In a job all ranks must enter it. Donated arguments are kept. A gradient around a
    jitted function runs that function compiled.

    Args:
        disable: False ends the mode.

    Raises:
        DeviceError: From a call with arguments on a GPU.

    Example:
        >>> @fc.jit
        ... def sign(x):
        ...     return 1 if x > 0 else -1  # an error while tracing: x has no value
        >>> with fc.debug.disable_jit():
        ...     print(sign(3.0))
        1

    References:
        JAX's `disable_jit`.
    """

    def __init__(self, disable: bool = True):
        self._before = MODES.run_eagerly(disable)

    def __enter__(self) -> disable_jit:
        return self

    def __exit__(self, *error: object) -> None:
        MODES.run_eagerly(self._before)
