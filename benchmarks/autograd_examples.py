"""The examples of HIPS/autograd, part of `autograd_suite`: each runs in its own process for a few gradients.

The process is `python autograd_examples.py funccoll|autograd SOURCE NAME`. With `funccoll` the imports of autograd get
`autograd_adapter`; with `autograd` the sdist's own package, whose first gradients ours must equal. Nothing of an example is
changed; figures are not shown, and MNIST, which the examples download, is random images of the same shape.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
GRADIENTS = 3
SECONDS = 240.0
NOT_EXAMPLES = ("__init__", "data", "data_mnist")


class Enough(BaseException):
    """Raised when an example has computed as many gradients as are compared."""


def names(source: Path) -> list[str]:
    """The examples, by their paths below examples/."""
    folder = source / "examples"
    paths = sorted(p.relative_to(folder) for p in folder.rglob("*.py"))
    return [str(p.with_suffix("")) for p in paths if p.stem not in NOT_EXAMPLES]


def _mnist() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (600, 28, 28)).astype(np.uint8), rng.integers(0, 10, 600).astype(np.uint8)
    return images[:500], labels[:500], images[500:], labels[500:]


def _use_funccoll(source: Path, evaluations: list[Any], counted: Any) -> None:
    import autograd_adapter

    autograd_adapter.EVALUATIONS = evaluations
    autograd_adapter._after_gradient = counted
    autograd_adapter.install()

    # The optimizers and the flattening are plain Python over `make_vjp` and NumPy: the sdist's own files.
    misc = source / "autograd" / "misc"
    files = {"misc": "flatten.py", "misc.flatten": "flatten.py", "misc.optimizers": "optimizers.py"}
    for name, leaf in ((f"autograd.{name}", leaf) for name, leaf in files.items()):
        file = misc / leaf
        module = autograd_adapter._module(name)
        exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
        if name == "autograd.misc.flatten":  # the package has the function under the module's name
            sys.modules["autograd.misc"].__dict__["flatten"] = module.__dict__["flatten"]


def _use_autograd(source: Path, evaluations: list[Any], counted: Any) -> None:
    sys.path.insert(0, str(source))
    import autograd
    import optree
    from autograd.tracer import isbox

    def recorded(operator: Any) -> Any:
        def wrapped(fn: Any, *args: Any, **kwargs: Any) -> Any:
            inner = operator(fn, *args, **kwargs)

            def call(*a: Any, **kw: Any) -> Any:
                result = inner(*a, **kw)
                gradient = result[1] if operator.__name__ == "value_and_grad" else result
                leaves = optree.tree_leaves(gradient)
                if not any(map(isbox, leaves)):
                    evaluations.append([np.asarray(leaf) for leaf in leaves])
                    counted()
                return result

            return call

        return wrapped

    for name in ("grad", "value_and_grad", "elementwise_grad"):
        setattr(autograd, name, recorded(getattr(autograd, name)))


def run_one(side: str, source: Path, name: str) -> dict[str, Any]:
    """Run an example in this process: how it ended, and its gradients."""
    import matplotlib

    matplotlib.use("Agg")
    evaluations: list[Any] = []

    def counted() -> None:
        if len(evaluations) >= GRADIENTS:
            raise Enough

    (_use_funccoll if side == "funccoll" else _use_autograd)(source, evaluations, counted)
    file = source / "examples" / f"{name}.py"
    sys.path[:0] = [str(file.parent), str(source / "examples")]
    import data_mnist

    data_mnist.mnist = _mnist
    np.random.seed(0)  # noqa: NPY002  (the examples draw from it)
    try:
        runpy.run_path(str(file), run_name="__main__")
        end, error = "ran to its end", ""
    except Enough:
        end, error = f"{GRADIENTS} gradients", ""
    except BaseException as caught:
        end, error = "failed", f"{type(caught).__name__}: {str(caught)[:300]}"
    digests = [[[list(g.shape), *(float(v) for v in _digest(g))] for g in leaves] for leaves in evaluations]
    return {"end": end, "error": error, "gradients": digests}


def _digest(gradient: np.ndarray) -> list[float]:
    """A few sums that differ where gradients differ."""
    flat = np.asarray(gradient, complex).ravel()
    weights = np.cos(np.arange(flat.size))
    return [np.linalg.norm(flat), np.sum(flat.real * weights), np.sum(flat.imag * weights)]


def _process(side: str, source: Path, name: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).absolute()), side, str(source.absolute()), name]
    with tempfile.TemporaryDirectory() as folder:  # examples write figures and data
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return {"end": "failed", "error": f"no {GRADIENTS} gradients in {SECONDS:.0f} s", "gradients": []}
    last = done.stdout.strip().splitlines()[-1:] or [""]
    if not last[0].startswith("{"):
        return {"end": "failed", "error": done.stderr[-300:], "gradients": []}
    return json.loads(last[0])


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
        for mine, its in zip(ours["gradients"], theirs["gradients"], strict=False):
            equal = len(mine) == len(its) and all(
                a[0] == b[0] and np.allclose(a[1:], b[1:], rtol=1e-5, atol=1e-7) for a, b in zip(mine, its, strict=True)
            )
            result["equal"] = result.get("equal", True) and equal
        results[name] = result
        print(name, result, file=sys.stderr, flush=True)
    runs = [name for name, result in results.items() if result["end"] != "failed" and result.get("equal", True)]
    return {"total": len(results), "run": len(runs), "results": results}


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "Agg")
    print(json.dumps(run_one(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
