"""`fc.launch`: a function in several processes of this machine, for notebooks and tests.

Each process is spawned, not forked, and runs `serve` below. It inherits memory files (memfd): one with the function and the
arguments, and one for its result or exception. One byte in a pipe reports the reply, and its kind.
"""

from __future__ import annotations

import linecache
import mmap
import os
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import BytesIO, FileIO
from types import CodeType
from typing import Any, ClassVar, TypeVar, cast

import cloudpickle

from ..errors import LaunchError, LaunchTimeout, PeerFailure, system_reason
from .host import PEER_FAILURE_EXIT_CODE, dying_with_parent
from .processes import GRACE, Job, environment, interpreter, new_run, outcome

__all__ = ["launch"]

R = TypeVar("R")

# Runs before funccoll can be imported, which may only be found on the parent's sys.path.
_BOOT = (
    "import mmap, pickle, sys; task = mmap.mmap(int(sys.argv[1]), 0, access=mmap.ACCESS_READ); "
    "sys.path[:] = pickle.load(task); from funccoll.job.launch import serve; "
    "serve(task, *map(int, sys.argv[2:]))"
)
_RETURNED, _RAISED, _FOLLOWED = b"1", b"0", b"2"  # the last: raised a PeerFailure


def launch(fn: Callable[..., R], n: int, *args: Any, timeout: float | None = None, grace: float = GRACE) -> list[R]:
    """Run `fn(*args)` in new processes that form one job, and return their results by rank.

    Use it in a notebook or a script. Functions of a notebook, lambdas and closures work: cloudpickle sends them with the global
    variables that they use. What the processes print appears here, each line with its rank in front: `[1] ...`.

    Args:
        fn: The function. In it `fc.rank()` and `fc.world_size()` tell its place.
        n: The number of processes.
        *args: Its arguments, equal in all processes.
        timeout: Seconds until all are stopped. None waits without limit.
        grace: Seconds that the other ranks get to end by themselves if one fails. Their `except` and `finally` blocks run in
            that time.

    Returns:
        A list with the result of each rank. Results must be picklable.

    Raises:
        LaunchError: If a process dies, or something cannot be sent.
        LaunchTimeout: After `timeout` seconds.
        Exception: What the first failing rank raised, with a note that has its rank and traceback. The others have ended by
            then, or were stopped by SIGTERM, and by SIGKILL 5 s later.

    Example:
        A sum over four processes::

            def total():
                mesh = fc.make_mesh({"data": 4})
                add = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
                return add(np.arange(4.0)).local

            fc.launch(total, 4)  # [array([6.]), array([6.]), array([6.]), array([6.])]
    """
    name = getattr(fn, "__qualname__", repr(fn))
    if not callable(fn) or not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise LaunchError(
            f"fc.launch(fn, n, *args) takes a function and a number of processes, at least 1; it got {name} and {n!r}."
        )
    run, said = new_run(), dict[int, bytes]()
    with ExitStack() as stack:
        task = _memory_file(stack)
        _write_task(task, name, fn, args)
        replies = [_memory_file(stack) for _ in range(n)]
        pipes = [_pipe(stack) for _ in range(n)]
        succeeded = lambda rank, code: code == 0 and said.get(rank) == _RETURNED
        job = stack.enter_context(Job(_show, timeout, succeeded, lambda rank, code: said.get(rank) == _FOLLOWED, grace))

        def hear(rank: int, word: bytes) -> None:
            said[rank] = word
            if word == _RAISED:
                job.fail(rank)

        for rank, (reader, writer) in enumerate(pipes):
            descriptors = (task, replies[rank], writer.fileno())
            command = [*interpreter(), "-P", "-c", _BOOT, *map(str, (*descriptors, os.getpid(), rank, n))]
            job.start(command, environment(rank, n, run, job.port_for_torch), pass_fds=descriptors)
            writer.close()
            job.listen(rank, reader.fileno(), lambda word, rank=rank: hear(rank, word))
        job.wait()
        if job.failure is not None:
            rank, code = job.failure
            unfinished = [r for r in range(n) if r not in said]
            report = replies[rank] if rank is not None and said.get(rank) in (_RAISED, _FOLLOWED) else None
            raise _failure(f"fc.launch({name}, {n})", rank, code, timeout, unfinished, report)
        return [_unpickled(reply) for reply in replies]


def _memory_file(stack: ExitStack) -> int:
    """A new file in memory, without a name: nothing is left behind."""
    try:
        descriptor = os.memfd_create("funccoll", os.MFD_CLOEXEC)
    except OSError as error:
        raise LaunchError(f"fc.launch cannot make a file in memory (memfd_create): {system_reason(error)}.") from None
    stack.callback(os.close, descriptor)
    return descriptor


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    reader, writer = os.pipe()
    return stack.enter_context(FileIO(reader, "rb")), stack.enter_context(FileIO(writer, "wb"))


def _write_task(descriptor: int, name: str, fn: Callable[..., object], args: Sequence[object]) -> None:
    with open(descriptor, "wb", closefd=False) as file:
        pickle.dump(sys.path, file)
        pickle.dump(_sources(), file)
        try:
            _CodePickler(file).dump((fn, args))
        except Exception as error:  # pickling runs any object's code
            raise LaunchError(
                f"fc.launch cannot send {name} or its arguments to other processes: {error}. A function takes along its "
                "closure and the global variables that it uses: make locks, open files, threads and the like inside it."
            ) from error


def _reduce_code(code: CodeType) -> Any:
    return _code_of_file, (code.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](code)[:2])


def _code_of_file(filename: str, make: Callable[..., CodeType], parts: Sequence[Any]) -> CodeType:
    return make(*parts).replace(co_filename=filename)


class _CodePickler(cloudpickle.Pickler):
    """cloudpickle's Pickler, except that code keeps the name of its file for errors. cloudpickle 3.1.3 writes
    "<dynamic-code>"."""

    dispatch_table: ClassVar = ChainMap[Any, Any]({CodeType: _reduce_code}, cast(Any, cloudpickle.Pickler.dispatch_table))


def _sources() -> dict[str, Any]:
    """Entries of `linecache` for code without a file, such as a notebook's cells: tracebacks there show lines, too."""
    known = [(name, entry) for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)]
    return {name: (entry[0], None, entry[2], name) for name, entry in known}


def serve(task: mmap.mmap, reply: int, pipe: int, parent: int, rank: int, n: int) -> None:
    """Run a launched process: call the function in `task`, write its result or exception to `reply`, and write to `pipe`."""
    dying_with_parent(parent)()
    os.set_inheritable(reply, False)
    os.set_inheritable(pipe, False)
    with open(reply, "wb") as file:
        word, trouble = _RETURNED, ""
        try:
            try:
                linecache.cache.update(pickle.load(task))
                fn, args = pickle.load(task)
                task.close()
            except (ImportError, AttributeError) as error:
                error.add_note(
                    "The function is imported by name in a launched process, and that failed. Make its module importable "
                    "there, or send the module's code: cloudpickle.register_pickle_by_value(module)."
                )
                raise
            value = fn(*args)
            try:
                _CodePickler(file).dump(value)
            except Exception as error:  # pickling runs any object's code
                what = f"a result of type {type(value).__name__} cannot be sent back"
                raise TypeError(f"{what}: {error}; return arrays and plain values") from error
        except BaseException as error:
            word = _FOLLOWED if isinstance(error, PeerFailure) else _RAISED
            file.seek(0)
            file.truncate()
            file.write(_pickled_error(error))
            trouble = "".join(traceback.format_exception(error))
    os.write(pipe, word)
    os.close(pipe)
    if trouble:
        _tell_peers(trouble)  # after the parent, which must learn of the cause before its consequences
        sys.exit(1 if word == _RAISED else PEER_FAILURE_EXIT_CODE)


def _tell_peers(text: str) -> None:
    from .job_context import current

    world = current()
    if world is not None:
        world.watch.report(text)


def _pickled_error(error: BaseException) -> bytes:
    """(exception or None, its message, its traceback as text), pickled."""
    shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:  # our own frames add nothing
        shown = shown.tb_next
    words = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_exception(type(error), error, shown)).rstrip()
    told = pickle.dumps((None, words, text))
    if not isinstance(error, Exception):  # SystemExit and KeyboardInterrupt would end the parent
        return told
    try:
        _CodePickler(file := BytesIO()).dump((error, words, text))
        pickle.loads(data := file.getvalue())  # exceptions with arguments of their own often cannot be unpickled
    except Exception:  # an exception can be of any class, and its pickling may do and raise anything
        return told
    return data


def _failure(
    call: str, rank: int | None, code: int | None, timeout: float | None, unfinished: list[int], report: int | None
) -> Exception:
    """The exception for the job's first failure: the rank's own if it reported one."""
    if rank is None:
        return LaunchTimeout(
            f"{call}: after {timeout} s {_ranks(unfinished)} had not returned, and all were stopped. Allow more with timeout=, "
            "or find what they wait for."
        )
    if report is not None:
        error, words, text = _unpickled(report)
        if error is None:
            error = LaunchError(f"{call}: rank {rank} left the function by {words}; the others were stopped.")
        error.add_note(f"Rank {rank} raised it; its traceback:\n{text}")
        return error
    assert code is not None
    when = "before it returned" if rank in unfinished else "after it had returned"
    return LaunchError(f"{call}: rank {rank} {outcome(code)} {when}; the others were stopped.")


def _ranks(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _unpickled(descriptor: int) -> Any:
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return pickle.load(file)


def _show(stream: int, lines: bytes) -> None:
    """Print through sys.stdout and sys.stderr, which notebooks and pytest replace."""
    file = sys.stdout if stream == 1 else sys.stderr
    if file is None:  # closed (`>&-`)
        return
    text, encoding = lines.decode(errors="replace"), getattr(file, "encoding", None) or "utf-8"
    file.write(text.encode(encoding, "backslashreplace").decode(encoding))  # a console's may be ASCII
    file.flush()
