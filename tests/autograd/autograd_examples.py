"""The examples of HIPS/autograd, part of `autograd_suite`: each runs in its own process for a few gradients.

The process is `python autograd_examples.py funccoll|autograd SOURCE NAME RESULT`. With `funccoll` the imports of autograd get
`autograd_adapter`; with `autograd` the sdist's own package, whose first gradients ours must equal. Of the examples only what
`EDITS` lists is changed; figures are not shown, and MNIST, which the examples download, is random images of the same shape.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import python_path

GRADIENTS = 3
SECONDS = 240
"""The processor time that an example has: on a shared machine a limit on the time of day would say what else runs."""
WAIT_S = 1800.0
NOT_EXAMPLES = ("__init__", "data", "data_mnist")
RECORDED = ("grad", "value_and_grad", "elementwise_grad", "hessian_vector_product")


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of an example's text."""

    example: str
    old: str
    new: str
    why: str
    sides: tuple[str, ...] = ("autograd", "funccoll")


HALVES = "np.linspace takes an integer: NumPy refuses a float since 1.18, and autograd fails here as well"
NO_SEED = "without a seed each run has weights of its own, and autograd differs from itself"
NO_VIEWS = "Python 3 does not add views of dicts: autograd fails here as well"
INDEXED = "NumPy cannot dispatch the index of an array of its own by a traced one: fc.asarray is the form of it"
EDITS = (
    *(
        Edit(example, "n_data / 2", "n_data // 2", HALVES)
        for example in ("bayesian_neural_net", "gaussian_process", "neural_net_regression")
    ),
    Edit("convnet", "npr.RandomState()", "npr.RandomState(0)", NO_SEED),
    Edit("rkhs", "d1.items() + d2.items()", "[*d1.items(), *d2.items()]", NO_VIEWS),
    *(
        Edit(example, line, f"{before}{line}{after}", INDEXED, ("funccoll",))
        for example in ("fluidsim/fluidsim", "fluidsim/wing")
        for before, line, after in (
            ("import funccoll as fc\n", "import autograd.numpy as np\n", ""),
            ("", "    rows, cols = f.shape\n", "    f = fc.asarray(f)\n"),
        )
    ),
)
"""All that is changed in the examples."""


class Enough(BaseException):
    """Raised when an example has computed as many gradients as are compared."""


def message_of(error: BaseException | str) -> str:
    """The beginning of an error's message, with paths that do not depend on the machine."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return re.sub(r"/[^\s\"']*/(?=(benchmarks|funccoll|autograd|tests|examples|site-packages)/)", "", text)[:300]


def names(source: Path) -> list[str]:
    """The examples, by their paths below examples/."""
    folder = source / "examples"
    paths = sorted(p.relative_to(folder) for p in folder.rglob("*.py"))
    return [str(p.with_suffix("")) for p in paths if p.stem not in NOT_EXAMPLES]


def edited(source: Path, side: str, folder: Path) -> Path:
    """A copy of the examples in a folder, with the edits of one side."""
    copy = folder / "examples"
    shutil.copytree(source / "examples", copy, ignore=shutil.ignore_patterns("*.gif", "*.pdf"))
    for edit in EDITS:
        if side in edit.sides:
            file = copy / f"{edit.example}.py"
            text = file.read_text()
            if edit.old not in text:
                raise ValueError(f"{edit.example} has no {edit.old!r}: the list of edits is of another version.")
            file.write_text(text.replace(edit.old, edit.new))
    return copy


def _mnist() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (600, 28, 28)).astype(np.uint8), rng.integers(0, 10, 600).astype(np.uint8)
    return images[:500], labels[:500], images[500:], labels[500:]


def _use_funccoll(source: Path) -> None:
    from tests.autograd import autograd_adapter

    autograd_adapter.install()

    # The optimizers and the flattening are plain Python over `make_vjp` and NumPy: the sdist's own files.
    misc = source / "autograd" / "misc"
    files = {"misc.flatten": "flatten.py", "misc.optimizers": "optimizers.py"}
    for name, leaf in ((f"autograd.{name}", leaf) for name, leaf in files.items()):
        file = misc / leaf
        module = autograd_adapter.module(name)
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
        if name == "autograd.misc.flatten":  # the package has the function under the module's name
            sys.modules["autograd.misc"].__dict__["flatten"] = module.__dict__["flatten"]


def record(keep: Callable[[list[np.ndarray]], None]) -> None:
    """Have the package `autograd`, whichever it is, report the gradients and traces that it computes outside every trace."""
    import autograd
    import autograd.tracer
    import optree

    def report(result: Any) -> None:
        leaves = optree.tree_leaves(result)
        if any(map(autograd.tracer.isbox, leaves)):
            return
        arrays = [np.asarray(leaf) for leaf in leaves]
        if any(a.dtype == object for a in arrays):
            raise TypeError(f"this gradient is a {type(result).__name__}, and arrays are compared.")
        keep(arrays)

    def recorded(name: str, operator: Any) -> Any:
        def wrapped(fn: Any, *args: Any, **kwargs: Any) -> Any:
            inner = operator(fn, *args, **kwargs)

            def call(*args: Any, **kwargs: Any) -> Any:
                result = inner(*args, **kwargs)
                report(result[1] if name == "value_and_grad" else result)
                return result

            return call

        return wrapped

    for name in RECORDED:
        setattr(autograd, name, recorded(name, getattr(autograd, name)))
    trace = autograd.tracer.trace

    def traced(*args: Any) -> Any:
        value, node = trace(*args)
        report(value)
        return value, node

    autograd.tracer.trace = traced


def run_one(side: str, source: Path, name: str) -> dict[str, Any]:
    """Run an example in this process, in an empty folder: how it ended, and its gradients."""
    import matplotlib

    matplotlib.use("Agg")
    examples = edited(source, side, Path.cwd())
    evaluations: list[list[np.ndarray]] = []

    def keep(leaves: list[np.ndarray]) -> None:
        evaluations.append(leaves)
        if len(evaluations) >= GRADIENTS:
            raise Enough

    if side == "funccoll":
        _use_funccoll(source)
    else:
        sys.path.insert(0, str(source))
    file = examples / f"{name}.py"
    sys.path[:0] = [str(file.parent), str(examples)]
    import data_mnist

    data_mnist.mnist = _mnist
    record(keep)
    np.random.seed(0)  # noqa: NPY002  (the examples draw from it)
    try:
        runpy.run_path(str(file), run_name="__main__")
        end, error = "ran to its end", ""
    except Enough:
        end, error = f"{GRADIENTS} gradients", ""
    except BaseException as caught:
        end, error = "failed", message_of(caught)
    digests = [[[list(g.shape), *(float(v) for v in _digest(g))] for g in leaves] for leaves in evaluations]
    return {"end": end, "error": error, "gradients": digests}


def _digest(gradient: np.ndarray) -> list[float]:
    """A few sums that differ where gradients differ."""
    flat = np.asarray(gradient, complex).ravel()
    weights = np.cos(np.arange(flat.size))
    return [np.linalg.norm(flat), np.sum(flat.real * weights), np.sum(flat.imag * weights)]


def _process(side: str, source: Path, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:  # examples write figures and data
        result = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute()), side, str(source.absolute()), name, result]
        try:
            environment = {**os.environ, "PYTHONPATH": python_path()}
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {"end": "failed", "error": f"no {GRADIENTS} gradients in {WAIT_S:.0f} s", "gradients": []}
        if done.returncode == -signal.SIGXCPU:
            return {"end": "failed", "error": f"no {GRADIENTS} gradients in {SECONDS} s of processor time", "gradients": []}
        if not result.exists():
            return {"end": "failed", "error": message_of("".join(done.stderr.splitlines()[-1:])), "gradients": []}
        return json.loads(result.read_text())


def same(mine: list[Any], its: list[Any]) -> bool:
    """As many gradients on both sides, one at least, and the same digests."""
    if not its or [len(g) for g in mine] != [len(g) for g in its]:
        return False
    pairs = [pair for a, b in zip(mine, its, strict=True) for pair in zip(a, b, strict=True)]
    return all(a[0] == b[0] and np.allclose(a[1:], b[1:], rtol=1e-5, atol=1e-7) for a, b in pairs)


def run_all(source: Path, only: str) -> dict[str, Any]:
    """Each example on both sides: whether it runs, and whether its gradients are autograd's."""
    results = {}
    for name in names(source):
        if only and only not in name:
            continue
        ours, theirs = _process("funccoll", source, name), _process("autograd", source, name)
        result = {"end": ours["end"], "error": ours["error"], "gradients": len(ours["gradients"])}
        if theirs["end"] == "failed":
            result["autograd"] = theirs["error"]
        result["equal"] = same(ours["gradients"], theirs["gradients"])
        results[name] = result
        print(name, result, file=sys.stderr, flush=True)
    runs = [name for name, result in results.items() if result["end"] != "failed" and result["equal"]]
    edits = [dataclasses.asdict(edit) for edit in EDITS]
    return {"total": len(results), "run": len(runs), "results": results, "edits": edits}


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 10))
    Path(sys.argv[4]).write_text(json.dumps(run_one(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
