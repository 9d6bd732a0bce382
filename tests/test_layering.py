"""The rules of ARCHITECTURE's module table, read from the source: who imports whom, and what importing does."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import funccoll

ROOT = Path(funccoll.__file__).parent

ORDER = (
    ("_version",), ("errors",), ("mesh",), ("types",), ("ir",), ("primitives",), ("ops",), ("tracing",), ("collectives",),
    ("autodiff",), ("control", "nn", "random"), ("passes",), ("schedules",), ("kernels",), ("arrays",), ("runtime",),
    ("compiler",), ("parallel", "optim"), ("api",), ("torch", "jax", "distributed"), ("cli",), ("__main__",),
)  # fmt: skip
"""A module imports only from lines above its own; within a package, and within one line, as it likes."""
LAYER = {name: number for number, names in enumerate(ORDER) for name in names}

# Leaf helpers: they import the values that they show or rename, and every layer may import them where it is needed.
LEAVES = {"display": {"types"}, "tree": set()}
# The exceptions, each with its reason: (importer, imported).
LAZY = {
    ("mesh", "display"): "_repr_html_, only in a notebook",
    ("ir", "display"): "_repr_html_, only in a notebook",
    ("arrays", "display"): "_repr_html_, only in a notebook",
}

OPTIONAL = {
    "numba": ("kernels/", "schedules/model/simulate.py"),
    "mpi4py": ("runtime/mpi.py",),
    "cupy": ("runtime/nccl.py", "runtime/cuda.py"),
    "torch": ("torch/", "cli.py"),
    "jax": ("jax/", "cli.py"),
    "rich": ("cli.py",),
    "sklearn": ("cli.py",),
    "matplotlib": ("cli.py",),
    "pandas": (),
    "scipy": (),
    "tqdm": (),
}
"""Optional library -> the only files that may import it."""


@dataclass(frozen=True)
class Import:
    """One import statement: of what, at which line, whether inside a function, whether for type checkers only."""

    target: str
    line: int
    lazy: bool
    typing: bool


def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    """Every import in a module's source, absolute names, wherever it stands."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, lazy: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(a.name, node.lineno, lazy, typing) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            target = ".".join(filter(None, [base, node.module]))
            # `from . import a, b` names modules; `from .a import f` names a.
            names = [f"{target}.{a.name}" for a in node.names] if node.level and not node.module else [target]
            if target == "funccoll":
                names = [f"funccoll.{a.name}" for a in node.names]
            found.extend(Import(n, node.lineno, lazy, typing) for n in names)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                visit(child, inside, True)
            for child in node.orelse:
                visit(child, inside, typing)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, inside, typing)

    visit(ast.parse(source), False, False)
    return found


def top(module: str) -> str:
    """`funccoll.ops.linalg` -> `ops`; the package itself -> ``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def layering_errors(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of funccoll's own modules in one source."""
    errors = []
    mine = top(module)
    for found in imports_of(source, module, is_package):
        if found.target.split(".")[0] != "funccoll" or found.typing or not mine:
            continue
        theirs = top(found.target)
        where = f"{module}:{found.line} imports {found.target}"
        if mine == theirs:
            continue
        if mine in LEAVES:
            if theirs not in LEAVES[mine]:
                errors.append(f"{where}: a leaf helper imports only {sorted(LEAVES[mine])}")
        elif theirs in LEAVES:
            if LAYER[mine] < LAYER["arrays"] + 1 and not (found.lazy and (mine, theirs) in LAZY):
                errors.append(f"{where}: only lazily, and only where LAZY says why")
        elif mine not in LAYER or theirs not in LAYER:
            errors.append(f"{where}: {mine if mine not in LAYER else theirs!r} has no place in ORDER")
        elif LAYER[theirs] > LAYER[mine] or (LAYER[theirs] == LAYER[mine] and mine in ("torch", "jax", "distributed")):
            errors.append(f"{where}: {theirs} stands below {mine}")
    return errors


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
    for node in ast.walk(ast.parse(source)):
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

FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = ("funccoll", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# ---------------------------------------------------------------- the package


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_keeps_the_rules(path):
    source, relative = path.read_text(), path.relative_to(ROOT).as_posix()
    errors = [
        *layering_errors(source, name_of(path), path.name == "__init__.py"), *optional_errors(source, relative),
        *state_errors(source, relative), *effect_errors(source, relative),
    ]  # fmt: skip
    assert not errors, "\n".join(errors)


def test_every_module_has_a_place():
    tops = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES} - {"__init__"}
    assert tops <= set(LAYER) | set(LEAVES), tops - set(LAYER) - set(LEAVES)


def test_the_exceptions_are_all_used():
    used = {
        (top(name_of(p)), top(i.target)) for p in FILES for i in imports_of(p.read_text(), name_of(p), p.name == "__init__.py")
        if i.lazy and top(i.target) in LEAVES
    }  # fmt: skip
    assert set(LAZY) <= used


def public_things():
    for info in pkgutil.walk_packages([str(ROOT)], "funccoll."):
        if not set(info.name.split(".")) & {"torch", "jax", "cli", "__main__", "mpi", "nccl", "cuda"}:
            module = importlib.import_module(info.name)
            yield info.name, module
            for name, thing in vars(module).items():
                mine = getattr(thing, "__module__", None) == info.name
                if mine and not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)):
                    yield f"{info.name}.{name}", thing


def test_every_public_thing_has_a_docstring():
    bare = [name for name, thing in public_things() if not (thing.__doc__ or "").strip()]
    for name in funccoll.__all__:
        thing = getattr(funccoll, name)
        if callable(thing) and not (thing.__doc__ or "").strip():
            bare.append(f"funccoll.{name}")
    assert not bare, bare


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


@pytest.mark.processes
def test_importing_is_light_and_has_no_effects():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout))
    assert "funccoll" in loaded and "numpy" in loaded
    heavy = {"numba", "llvmlite", "rich", "jax", "jaxlib", "torch", "sklearn", "mpi4py", "cupy", "matplotlib", "scipy"}
    heavy |= {"IPython", "jaxtyping", "hypothesis", "pytest"}
    assert not loaded & heavy, loaded & heavy
    assert done.stderr == "" and done.stdout.count("\n") == 1


@pytest.mark.processes
def test_the_launcher_loads_nothing_that_its_processes_need():
    code = "import sys, funccoll.cli; print({m.split('.')[0] for m in sys.modules})"
    loaded = ast.literal_eval(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert "funccoll" in loaded
    assert not loaded & {"numpy", "optree", "ml_dtypes", "numba", "rich"}


# ---------------------------------------------------------------- the checkers themselves can fail


BAD = {
    "from .compiler.jit import jit": "compiler stands below mesh",
    "from . import arrays": "arrays stands below mesh",
    "import funccoll.runtime.codegen": "runtime stands below mesh",
    "from funccoll import tracing": "tracing stands below mesh",
    "def f():\n    from .types import ArrayType": "types stands below mesh",
    "if True:\n    try:\n        from .ir import bind\n    except ImportError:\n        raise": "ir stands below mesh",
    "from .display import mesh_table": "only lazily",
    "from .nowhere import x": "no place in ORDER",
}


@pytest.mark.parametrize("source", BAD)
def test_a_wrong_import_is_found(source):
    (error,) = layering_errors(source, "funccoll.mesh")
    assert BAD[source] in error


def test_right_imports_pass():
    for source in (
        "from .errors import MeshError", "from . import errors", "import numpy", "from funccoll.errors import MeshError",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .compiler.jit import jit",
        "def _repr_html_(self):\n    from .display import mesh_table",
    ):  # fmt: skip
        assert layering_errors(source, "funccoll.mesh") == []
    assert layering_errors("from ..ir import bind\nfrom .registry import near", "funccoll.ops.linalg") == []
    assert layering_errors("from ..tracing.trace import stage", "funccoll.ops.linalg")
    assert layering_errors("from .linalg import matmul", "funccoll.ops", True) == []
    assert layering_errors("from ..compiler.jit import jit", "funccoll.ops", True)
    assert layering_errors("from .mesh import Mesh", "funccoll.display")
    assert layering_errors("from .compiler.jit import jit", "funccoll", True) == []


def test_typing_imports_are_told_apart():
    source = "if TYPE_CHECKING:\n    from .mesh import Mesh\nelse:\n    from .types import x\ndef f():\n    import numba"
    found = imports_of(source, "funccoll.display", False)
    assert [(i.target, i.lazy, i.typing) for i in found] == [
        ("funccoll.mesh", False, True), ("funccoll.types", False, False), ("numba", True, False),
    ]  # fmt: skip


def test_a_misplaced_optional_library_is_found():
    lazy = "def f():\n    import numba.cuda"
    assert optional_errors(lazy, "runtime/codegen.py") and optional_errors("from numba import njit", "compiler/jit.py")
    assert not optional_errors(lazy, "kernels/cpu.py") and not optional_errors(lazy, "schedules/model/simulate.py")
    assert optional_errors("import mpi4py.MPI", "runtime/shm.py") and not optional_errors("import mpi4py", "runtime/mpi.py")
    assert optional_errors("import torch", "parallel/data.py") and not optional_errors("import torch", "torch/ddp.py")
    assert optional_errors("import rich", "compiler/report.py") and not optional_errors("import rich", "cli.py")


def test_state_and_effects_are_found():
    assert state_errors("def f():\n    global x\n    x = 1", "a.py")
    assert state_errors("try:\n    import numba\nexcept ImportError:\n    pass", "a.py")
    assert not state_errors("x = ContextVar('x')", "a.py")
    for source in ("print(1)", "x = os.getenv('A')", "x = os.environ['A']", "logging.basicConfig()", "np.random.seed(0)"):
        assert effect_errors(source, "a.py"), source
    for source in ("def f():\n    print(1)", "logger = logging.getLogger('funccoll')", "x = dict(a=1)"):
        assert not effect_errors(source, "a.py"), source
