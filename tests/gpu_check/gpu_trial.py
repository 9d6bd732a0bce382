"""One trial of `gpu.py` in a process of its own: `python gpu_trial.py MODULE:FUNCTION ARGUMENTS`, which are a JSON list.

What it finds goes to stdout, a line for each finding, as soon as it is known: a trial that is stopped has said it already.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "#finding "
"""The beginning of a line that is a finding."""
SKIPPED, FAILED = 3, 1
"""Exit codes of a trial."""
TRIAL = "FUNCCOLL_GPU_CHECK_TRIAL"
"""The variable that all processes of a trial have, with a value of its own."""
_DEADLINE, _REHEARSES = "FUNCCOLL_GPU_CHECK_DEADLINE", "FUNCCOLL_GPU_CHECK_REHEARSES"


class Skipped(Exception):
    """The reason why a trial cannot run here."""


def found(what: str, says: str = "", **data: Any) -> None:
    """Report a finding; `says` is its line.

    Data with a meaning: `failed`, what is wrong; `at`, the place in our code; `figure`, the summary has the line; `goal` and
    `met`; `counts`, the line of the part has it.
    """
    sys.stdout.write(f"\n{MARK}{json.dumps({'what': what, 'says': says, **data}, default=str)}\n")
    sys.stdout.flush()


def environment(seconds: float, rehearses: bool) -> dict[str, str]:
    """The environment of a trial that ends in so many seconds."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        _DEADLINE: str(time.time() + seconds),
        _REHEARSES: "1" if rehearses else "",
        TRIAL: uuid.uuid4().hex,
    }


def seconds_left() -> float:
    """Seconds until the watchdog ends this trial, less a few for its own end."""
    return max(1.0, float(os.environ.get(_DEADLINE) or time.time() + 480) - time.time() - 3)


def rehearses() -> bool:
    """True where virtual devices of the CPU stand in for a GPU: a trial of the trials."""
    return bool(os.environ.get(_REHEARSES))


def driver() -> str:
    """The driver's CUDA version, or the reason why there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no driver (libcuda.so.1)"
    version = ctypes.c_int()
    code = library.cuInit(0) or library.cuDriverGetVersion(ctypes.byref(version))
    return f"error {code}" if code else f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def require_gpu() -> Any:
    """Return CuPy, with a GPU that it can use. Raises: Skipped."""
    if driver().startswith(("no driver", "error")):
        raise Skipped(f"{driver()}: this machine has no NVIDIA GPU that can be used")
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise Skipped(f"CuPy: {error}; pip install 'funccoll[cuda13]'") from None


def require(name: str) -> Any:
    """Return an optional library. Raises: Skipped."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(f"without {name}: {error}") from None


def device() -> str:
    """The device of the trials' meshes: "cuda", or "cpu" in a rehearsal. Raises: Skipped where there is no GPU."""
    if rehearses():
        return "cpu"
    require_gpu()
    return "cuda"


def on_host(block: Any) -> Any:
    """An array as NumPy's; of CuPy's a copy, after all that was enqueued."""
    import numpy as np

    return block.get() if hasattr(block, "get") else np.asarray(block)


def compiled(jitted: Any) -> Any:
    """The program that a jitted function has compiled last."""
    return jitted.dispatcher.executables[-1]


def recording(jitted: Any) -> Any:
    """The `CapturedProgram` of a jitted function that was called; None on the CPU, and for a program that is one launch."""
    run = compiled(jitted)._generated.run
    return run if hasattr(run, "is_captured") else None


def graph_of(jitted: Any) -> str:
    """Words on whether calls of a jitted function replay a graph."""
    program = recording(jitted)
    if program is None:
        return "not recorded"
    return "captured" if program.is_captured else f"not captured: {program.why_not or 'not yet'}"


def beside(function: str, *arguments: Any, command: Sequence[str] = (), **variables: str) -> subprocess.Popen[str]:
    """Start a function of these modules in one more process, below `command` where one is given."""
    line = [*command, sys.executable, str(Path(__file__).resolve()), function, json.dumps(arguments)]
    return subprocess.Popen(
        line,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit code, output) of a process that ends by itself in the time that is left. Raises: TimeoutError with its output."""
    try:
        out, _ = process.communicate(timeout=seconds_left())
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        raise TimeoutError(f"a process that did not end: {out[-2000:]}") from None
    return process.returncode, out


def failure_in(out: str) -> str:
    """What the output of a process from `beside` says has failed; its last line where it says nothing."""
    lines = out.strip().splitlines()
    for line in reversed(lines):
        if line.startswith(MARK) and "failed" in (finding := json.loads(line.removeprefix(MARK))):
            return finding["failed"]
    return lines[-1] if lines else "it printed nothing"


def gpu_seconds(call: Callable[[], Any], times: int, rounds: int = 9) -> list[float]:
    """Seconds of one call, in each round of so many in a row, by events of the GPU; by the clock in a rehearsal."""
    call()
    if rehearses():
        taken = []
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(times):
                call()
            taken.append((time.perf_counter() - start) / times)
        return taken
    cupy, taken = require_gpu(), []
    for _ in range(rounds):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / times)
    return taken


def text_us(seconds: Sequence[float]) -> str:
    """Median and extremes, in microseconds."""
    values = [1e6 * s for s in seconds]
    return f"{statistics.median(values):.1f} µs ({min(values):.1f} to {max(values):.1f})"


def function_of(trial: str) -> Callable[..., Any]:
    """The function that `module:name` is, of a module beside this one; else of one on the path."""
    module, _, name = trial.partition(":")
    beside = f"tests.gpu_check.{module}"
    return getattr(importlib.import_module(beside if importlib.util.find_spec(beside) else module), name)


def place_of(error: BaseException) -> str:
    """The innermost line of this repository that an exception has passed."""
    contexts = traceback.extract_tb(error.__traceback__)
    return next(filter(None, (own_place(f.filename, f.lineno, f.name) for f in reversed(contexts))), "")


def own_place(path: str, line: object, function: str) -> str:
    """Words on a line of this repository; "" for one that is elsewhere, or in an environment within."""
    if not Path(path).is_relative_to(ROOT) or (place := Path(path).relative_to(ROOT)).parts[0].startswith("."):
        return ""
    return f"{place}:{line}, in {function}"


def main(function: str, arguments: str) -> int:
    """Run a trial. Its exception is printed, and is its last finding."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds_left())  # where it was, before the watchdog ends it
    # The trials' modules import this one by its name, and it has the name __main__.
    trial = importlib.import_module("tests.gpu_check.gpu_trial")
    try:
        trial.function_of(function)(*json.loads(arguments))
    except trial.Skipped as reason:
        found("skipped", str(reason), skipped=str(reason))
        return SKIPPED
    except Exception as error:
        traceback.print_exc()
        found("failed", failed=f"{type(error).__name__}: {error}"[:2000], at=place_of(error))
        return FAILED
    finally:
        faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
