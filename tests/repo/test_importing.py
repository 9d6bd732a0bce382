"""Effects of importing the package: the optional libraries that each module loads, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.repo.layers import FOLDERS, OPTIONAL, ROOT, imports_of


def optional_errors(source: str, path: str) -> list[str]:
    """Imports of optional libraries where they have no place; `path` is relative to the package."""
    errors = []
    for found in imports_of(source, "funccoll." + path[:-3].replace("/", "."), path.endswith("__init__.py")):
        library = found.target.split(".")[0]
        allowed = OPTIONAL.get(library)
        if allowed is None or found.typing:
            continue
        if not any(path == a or (a.endswith("/") and path.startswith(a)) for a in allowed):
            errors.append(f"{path}:{found.line} imports {library}, which belongs in {allowed}")
    return errors


def state_errors(source: str, path: str) -> list[str]:
    """Global statements, and `except ImportError: pass`."""
    errors = []
    for node in ast.walk(ast.parse(source)) if "global " in source or "ImportError" in source else ():
        if isinstance(node, ast.Global):
            errors.append(f"{path}:{node.lineno} has a global statement: {', '.join(node.names)}")
        if isinstance(node, ast.ExceptHandler) and node.type is not None and len(node.body) == 1:
            if "ImportError" in ast.unparse(node.type) and isinstance(node.body[0], ast.Pass):
                errors.append(f"{path}:{node.lineno} swallows an ImportError")
    return errors


def effect_errors(source: str, path: str) -> list[str]:
    """Statements at module level that do more than define: bare calls that are not registrations, loops with I/O, prints."""
    errors = []
    for node in ast.parse(source).body:
        for inner in ast.walk(node) if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) else ():
            if isinstance(inner, ast.Call):
                name = ast.unparse(inner.func)
                if name in FORBIDDEN_CALLS or name.startswith(FORBIDDEN_PREFIXES):
                    if name != "logging.getLogger":
                        errors.append(f"{path}:{inner.lineno} calls {name} when it is imported")
            if isinstance(inner, ast.Subscript) and ast.unparse(inner.value) == "os.environ":
                errors.append(f"{path}:{inner.lineno} reads or writes os.environ when it is imported")
    return errors


FORBIDDEN_CALLS = {"print", "open", "exec", "eval", "os.getenv", "os.system", "os.fork", "atexit.register", "signal.signal"}

FORBIDDEN_PREFIXES = ("os.environ.", "logging.", "warnings.", "np.random.", "np.seterr")


# ---------------------------------------------------------------- the package


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_file_keeps_the_rules(folder):
    errors = []
    for path in FOLDERS[folder]:
        source, relative = path.read_text(), path.relative_to(ROOT).as_posix()
        errors += [*optional_errors(source, relative), *state_errors(source, relative), *effect_errors(source, relative)]
    assert not errors, "\n".join(errors)


IMPORT = """
import os, sys, threading, signal, warnings
warnings.simplefilter("error")
before = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGINT), set(os.listdir("/proc/self/fd"))
import numpy as np
errors = np.geterr()
import funccoll
funccoll.jit  # which loads all public names
after = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGINT), set(os.listdir("/proc/self/fd"))
assert before == after, (before, after)
assert np.geterr() == errors
print(sorted(m for m in sys.modules if "." not in m))
"""


def test_importing_is_light_and_has_no_effects():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert "funccoll" in loaded and "numpy" in loaded
    heavy = {"numba", "llvmlite", "rich", "jax", "jaxlib", "torch", "sklearn", "mpi4py", "cupy", "matplotlib", "scipy"}
    heavy |= {"IPython", "jaxtyping", "hypothesis", "pytest"}
    assert not loaded & heavy, loaded & heavy
    assert done.stderr == "" and done.stdout.count("\n") == 1


def test_a_process_that_has_made_a_mesh_knows_neither_schedules_nor_kernels():
    source = (
        'import sys, funccoll; funccoll.make_mesh({"d": 2}); print(*(m for m in sys.modules if m.startswith(('
        '"funccoll.schedules", "funccoll.kernels.cpu", "funccoll.kernels.stream_interpreter"))))'
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_launcher_loads_nothing_that_its_processes_need():
    code = "import sys, funccoll.tools.cli, funccoll.tools.commands.run_command; print({m.split('.')[0] for m in sys.modules})"
    loaded = ast.literal_eval(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert "funccoll" in loaded
    assert not loaded & {"numpy", "optree", "ml_dtypes", "numba", "rich"}


def test_a_missing_torch_is_named_with_its_extra():
    code = "import sys; sys.modules['torch'] = None\nimport funccoll\nfunccoll.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingPackageError: funccoll.torch needs PyTorch: pip install 'funccoll[torch]'" in done.stderr, last


# ---------------------------------------------------------------- the checkers themselves can fail


def test_a_misplaced_optional_library_is_found():
    lazy = "def f():\n    import numba.cuda"
    assert optional_errors(lazy, "compiler/codegen/loop_code.py")
    assert optional_errors("from numba import njit", "compiler/jit.py")
    assert not optional_errors(lazy, "kernels/cpu.py") and not optional_errors(lazy, "schedules/model/event_loop.py")
    assert optional_errors("import mpi4py.MPI", "transports/shm/heap.py")
    assert not optional_errors("import mpi4py", "transports/mpi/mpi_transport.py")
    assert optional_errors("import torch", "parallel/buckets.py") and not optional_errors("import torch", "torch/ddp.py")
    assert optional_errors("import rich", "compiler/report.py") and not optional_errors("import rich", "tools/commands/a.py")


def test_state_and_effects_are_found():
    assert state_errors("def f():\n    global x\n    x = 1", "a.py")
    assert state_errors("try:\n    import numba\nexcept ImportError:\n    pass", "a.py")
    assert not state_errors("x = ContextVar('x')", "a.py")
    for source in ("print(1)", "x = os.getenv('A')", "x = os.environ['A']", "logging.basicConfig()", "np.random.seed(0)"):
        assert effect_errors(source, "a.py"), source
    for source in ("def f():\n    print(1)", "logger = logging.getLogger('funccoll')", "x = dict(a=1)"):
        assert not effect_errors(source, "a.py"), source
