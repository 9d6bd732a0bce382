"""Imports between modules, within packages too: the source is held to the tables in `layers.py`."""

from __future__ import annotations

import ast

import pytest

from tests.repo import folders_page
from tests.repo.layers import (
    EXCEPTIONS,
    FILES,
    FOLDERS,
    LOADS_BY_NAME,
    MODULES,
    ORDERS,
    PLANNED,
    ROOT,
    Import,
    goes_upwards,
    imports_of,
    line_of,
    name_of,
)


def inner(module: str) -> str:
    """`funccoll.ops.linalg` -> `ops.linalg`; the package itself -> ``."""
    return module.partition(".")[2]


def upward_imports(source: str, module: str, is_package: bool = False) -> list[tuple[Import, str]]:
    """The imports of funccoll's own modules that go against the order, each with the reason; exceptions are among them."""
    found = []
    for statement in imports_of(source, module, is_package):
        if statement.target.split(".")[0] == "funccoll" and not statement.typing and inner(module):
            if reason := goes_upwards(inner(module), inner(statement.target)):
                found.append((statement, reason))
    return found


def layering_errors(source: str, module: str, is_package: bool = False) -> list[str]:
    """Import statements that ORDERS and EXCEPTIONS forbid, and imports by a name in a string."""
    errors = [
        f"{module}:{statement.line} imports {statement.target}: {reason}"
        for statement, reason in upward_imports(source, module, is_package)
        if (inner(module), inner(statement.target)) not in EXCEPTIONS
    ]
    for node in ast.walk(ast.parse(source)) if "import_module" in source or "__import__" in source else ():
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if called in ("importlib.import_module", "import_module", "__import__"):
            if (inner(module) or "__init__") not in LOADS_BY_NAME:
                errors.append(f"{module}:{node.lineno} imports by name, and LOADS_BY_NAME does not say why")
    return errors


# ---------------------------------------------------------------- the package


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_keeps_the_order(folder):
    errors = [
        error
        for path in FOLDERS[folder]
        for error in layering_errors(path.read_text(), name_of(path), path.name == "__init__.py")
    ]
    assert not errors, "\n".join(errors)


def test_every_module_has_one_place_and_every_place_a_module():
    modules = {inner(m) for m in MODULES} - {""}
    unplaced = {m for m in modules if line_of(m.rpartition(".")[0], m.rpartition(".")[2]) is None}
    assert not unplaced, f"modules without a place: {unplaced}"
    placed = [f"{package}.{child}".strip(".") for package, lines in ORDERS.items() for line in lines for child in line]
    assert len(placed) == len(set(placed))
    empty = {m for m in placed if not m.endswith("*")} - modules - PLANNED
    assert not empty, f"places without a module: {empty}"
    assert not PLANNED & modules, f"no longer planned: {PLANNED & modules}"


def test_the_exceptions_are_all_used():
    used = {
        (inner(name_of(path)), inner(statement.target))
        for path in FILES
        for statement, _ in upward_imports(path.read_text(), name_of(path), path.name == "__init__.py")
    }
    assert set(EXCEPTIONS) <= used, f"no longer needed: {set(EXCEPTIONS) - used}"
    by_name = {m for m in LOADS_BY_NAME if "import_module" not in source_of(m)}
    assert not by_name, f"no longer needed: {by_name}"


def source_of(module: str) -> str:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()


@pytest.mark.parametrize(("page", "head"), folders_page.TABLES.items(), ids=lambda x: getattr(x, "stem", ""))
def test_pages_have_the_folders(page, head):
    text = page.read_text(encoding="utf-8")
    assert folders_page.with_table(text, head) == text, "run python -m tests.repo.folders_page"


def test_folders_say_what_they_may_import():
    folders = [path for path in FILES if path.name == "__init__.py" and path.parent != ROOT]
    silent = [str(path.parent) for path in folders if "import" not in "".join(folders_page.paragraphs(path)[1:2])]
    assert not silent, f"their docstrings do not say, in a second paragraph, what they may import: {silent}"


# ---------------------------------------------------------------- the checker itself can fail


BAD = {
    "from ..compiler.jit import jit": "compiler stands after core",
    "from .. import arrays": "arrays stands after core",
    "import funccoll.compiler.codegen.generated_program": "compiler stands after core",
    "from funccoll import tracing": "tracing stands after core",
    "def f():\n    from .types import ArrayType": "types stands after mesh",
    "if True:\n    try:\n        from .ir import bind\n    except ImportError:\n        raise": "ir stands after mesh",
    "from .nowhere import x": "'nowhere' has no place",
    "def f():\n    importlib.import_module('.ir', __package__)": "imports by name",
}


@pytest.mark.parametrize("source", BAD)
def test_a_wrong_import_is_found(source):
    (error,) = layering_errors(source, "funccoll.core.mesh")
    assert BAD[source] in error


WITHIN = [
    ("ops.registry", "from .linalg import matmul", "linalg stands after registry in ops"),
    ("ops.indexing", "def f():\n    from .shaping import reshape", "shaping stands beside indexing in ops"),
    ("ops.indexing", "from . import shaping", "shaping stands beside indexing in ops"),
    ("ops.indexing", "from . import call_function", "ops is a package around it"),
    ("schedules.proof.prove", "from ..streams.verify import verify", "streams stands after proof in schedules"),
    ("schedules.proof.prove", "from ..streams import verify", "streams stands after proof in schedules"),
    ("schedules.proof.prove", "from ... import schedules", "schedules is a package around it"),
    ("schedules.proof.prove", "from ...kernels.cpu import x", "kernels stands after schedules in funccoll"),
    ("schedules.proof.symbolic", "from . import prove", "prove stands after symbolic in schedules.proof"),
    ("collectives.record", "from .broadcast import x", "broadcast stands after record in collectives"),
    ("collectives.gather", "from .scatter import x", "scatter stands beside gather in collectives"),
    ("transports.shm.heap", "from .nowhere import x", "'nowhere' has no place in the order of transports.shm"),
    ("draw", "from .tools import x", "tools stands after draw in funccoll"),
    ("compiler.jit", "def f():\n    from ..tools.cli import main", "tools stands after compiler in funccoll"),
]


@pytest.mark.parametrize(("module", "source", "reason"), WITHIN)
def test_a_wrong_import_within_a_package_is_found(module, source, reason):
    (error,) = layering_errors(source, f"funccoll.{module}")
    assert reason in error


def test_right_imports_pass():
    for source in (
        "from ..errors import MeshError",
        "from .. import errors",
        "import numpy",
        "from funccoll.errors import MeshError",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..compiler.jit import jit",
        "def _repr_html_(self):\n    from .display import mesh_table",
    ):
        assert layering_errors(source, "funccoll.core.mesh") == []
    assert layering_errors("from ..core.ir import bind\nfrom .registry import near", "funccoll.ops.linalg") == []
    assert layering_errors("from .linalg import matmul", "funccoll.ops", True) == []
    assert layering_errors("from ..compiler.jit import jit", "funccoll.ops", True)
    assert layering_errors("from .compiler.jit import jit", "funccoll", True) == []


def test_typing_imports_are_told_apart():
    source = "if TYPE_CHECKING:\n    from .mesh import Mesh\nelse:\n    from .types import x\ndef f():\n    import numba"
    found = imports_of(source, "funccoll.core.display", False)
    assert [(i.target, i.lazy, i.typing) for i in found] == [
        ("funccoll.core.mesh", False, True),
        ("funccoll.core.types", False, False),
        ("numba", True, False),
    ]
    (executed,) = imports_of("if not TYPE_CHECKING:\n    from .types import x", "funccoll.core.display", False)
    assert not executed.typing
