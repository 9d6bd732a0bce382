"""Names: none hides another, none stands for two things, and what is public has a docstring."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import pytest

import funccoll
from tests.repo.layers import FILES, MODULES, ROOT, name_of, statements

SHARED = {
    "array operations: NumPy's functions, the primitives that they bind, kernels": (
        {"ops.elementwise", "primitives.elementwise"},
        {"ops.indexing", "primitives.indexing"},
        {"linalg", "ops.linalg", "primitives.linalg"},
        {"ops.shaping", "primitives.shaping"},
        {"ops.decompositions", "primitives.decompositions"},
        {"ops.fourier", "primitives.fourier"},
        {"special", "primitives.special"},
        {"ops.sorting", "primitives.sorting"},
        {"ops.accumulations", "primitives.accumulations"},
        {"ops.reductions", "primitives.reductions", "kernels.reductions"},
        {"kernels.cuda", "transports.cuda"},
    ),
    "one collective: its primitive, its algorithms": (
        {"collectives.all_reduce", "schedules.library.all_reduce"},
        {"collectives.all_to_all", "schedules.library.all_to_all"},
    ),
    "the table of what is registered by name: NumPy's functions, algorithms": ({"ops.registry", "schedules.registry"},),
    "meshes, and where pickles of the first layout look for them": ({"mesh", "core.mesh"},),
    "what is native: machine code without Numba, collectives of NCCL itself": ({"kernels.native", "transports.nccl.native"},),
    "a package and its main class": ({"schedules.streams", "schedules.streams.streams"},),
}
"""The meaning that modules of one name share -> the modules. All other modules have names of their own."""


def shared_module_errors(modules: Iterable[str]) -> list[str]:
    """Names of several modules, but for those that SHARED allows to share them."""
    by_name: defaultdict[str, set[str]] = defaultdict(set)
    for module in modules:
        by_name[module.rpartition(".")[2]].add(module)
    allowed = [group for groups in SHARED.values() for group in groups]
    return [
        f"{', '.join(sorted(group))} share a name"
        for group in by_name.values()
        if len(group) > 1 and not any(group <= together for together in allowed)
    ]


def shared_class_errors(sources: Mapping[str, str]) -> list[str]:
    """Names of several classes, private and nested ones included."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    words = {module: re.findall(r"\bclass\s+(\w+)", source) for module, source in sources.items()}
    counts = Counter(name for names in words.values() for name in names)
    for module, source in sources.items():
        if all(counts[name] == 1 for name in words[module]):  # to parse all files takes a second
            continue
        for node in statements(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module}:{node.lineno}")
    return [f"class {name} is defined twice: {', '.join(where)}" for name, where in places.items() if len(where) > 1]


def hidden_module_errors(source: str, package: str, modules: Iterable[str]) -> list[str]:
    """Names in a package's __init__ that are the names of its modules, and mean something else."""
    own = {m.rpartition(".")[2] for m in modules if m.rpartition(".")[0] == package}
    errors = []

    def visit(node: ast.AST) -> None:
        names = []
        if isinstance(node, ast.ImportFrom):
            own_modules = node.level == 1 and not node.module  # `from . import a`
            names = [a.asname or a.name for a in node.names if not own_modules or a.asname not in (None, a.name)]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        errors.extend(f"{package}.__init__:{node.lineno} hides the module {name}" for name in names if name in own)
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)):  # names within them are their own
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(source))
    return errors


def modules_like_functions(package: str, modules: Iterable[str], functions: Iterable[str]) -> list[str]:
    """Modules directly in a package that have the name of a public function."""
    direct = {m for m in modules if m.rpartition(".")[0] == package}
    return sorted(m for m in direct if m.rpartition(".")[2] in set(functions))


def public_functions() -> set[str]:
    """The functions among funccoll's and schedules' public names."""
    spaces = (funccoll, funccoll.schedules)
    things = {name: getattr(space, name) for space in spaces for name in space.__all__}
    return {name for name, thing in things.items() if callable(thing) and not inspect.isclass(thing)}


def public_things() -> Iterable[tuple[str, object]]:
    for info in pkgutil.walk_packages([str(ROOT)], "funccoll."):
        if not set(info.name.split(".")) & {"torch", "jax", "cli", "__main__", "mpi", "nccl", "cuda", "gpu"}:
            module = importlib.import_module(info.name)
            yield info.name, module
            for name, thing in vars(module).items():
                mine = getattr(thing, "__module__", None) == info.name
                if mine and not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)):
                    yield f"{info.name}.{name}", thing


# ---------------------------------------------------------------- the package


def test_modules_share_names_only_where_they_share_a_meaning():
    errors = shared_module_errors({m.partition(".")[2] for m in MODULES})
    assert not errors, "\n".join(errors)


def test_every_shared_name_is_in_use():
    known = {m.partition(".")[2] for m in MODULES}
    gone = {m for groups in SHARED.values() for group in groups for m in group} - known
    assert not gone, f"no longer shared: {gone}"


def test_no_two_classes_share_a_name():
    errors = shared_class_errors({name_of(path): path.read_text() for path in FILES})
    assert not errors, "\n".join(errors)


def test_no_package_hides_its_modules():
    packages = [path for path in FILES if path.name == "__init__.py"]
    errors = [error for path in packages for error in hidden_module_errors(path.read_text(), name_of(path), MODULES)]
    assert not errors, "\n".join(errors)


def test_no_public_name_hides_a_module():
    """`fc.x` is loaded from `api`; where it is also `funccoll/x.py`, it is that module."""
    for name in funccoll.__all__:
        if f"funccoll.{name}" in MODULES:
            assert getattr(funccoll, name) is importlib.import_module(f"funccoll.{name}"), name


@pytest.mark.parametrize("package", ["funccoll", "funccoll.schedules"])
def test_no_module_has_the_name_of_a_public_function(package):
    assert modules_like_functions(package, MODULES, public_functions()) == []


def test_contributing_names_what_there_is():
    """With the page of recipes. A path of a file that is still to be written has NAME in it."""
    text = "".join((ROOT.parent / page).read_text() for page in ("CONTRIBUTING.md", "docs/design/adding.md"))
    paths = set(re.findall(r"`([\w./]+(?:/|\.py|\.md))`", text))
    assert len(paths) > 40 and all((ROOT.parent / path).exists() for path in paths if "NAME" not in path), paths


def test_every_public_thing_has_a_docstring():
    bare = [name for name, thing in public_things() if not (thing.__doc__ or "").strip()]
    for name in funccoll.__all__:
        thing = getattr(funccoll, name)
        if callable(thing) and not (thing.__doc__ or "").strip():
            bare.append(f"funccoll.{name}")
    assert not bare, bare


# ---------------------------------------------------------------- the checkers themselves can fail


def test_modules_that_share_a_name_are_found():
    assert shared_module_errors({"a.plan", "b.plan", "c.other"}) == ["a.plan, b.plan share a name"]
    assert shared_module_errors({"ops.linalg", "primitives.linalg"}) == []
    assert shared_module_errors({"ops.linalg", "primitives.linalg", "kernels.linalg"})
    assert shared_module_errors({"ops.linalg", "compiler.linalg"})


def test_classes_that_share_a_name_are_found():
    (error,) = shared_class_errors({"a": "class Plan: ...", "b": "def f():\n    class Plan: ...", "c": "class Other: ..."})
    assert error == "class Plan is defined twice: a:1, b:2"
    assert shared_class_errors({"a": "class _Kind: ...", "b": "class _Kind: ..."})
    assert shared_class_errors({"a": "class Plan: ...\nPlan()", "b": "from .a import Plan"}) == []


def test_hidden_modules_are_found():
    modules = {"p", "p.jit", "p.other", "q.f"}
    for source in (
        "from .jit import jit",
        "from .other import x as jit",
        "from . import other as jit",
        "def jit(): ...",
        "class jit: ...",
        "jit = 1",
        "if True:\n    jit = 1",
    ):
        (error,) = hidden_module_errors(source, "p", modules)
        assert error.endswith("hides the module jit"), source
    for source in ("from . import jit", "from .jit import compile", "from .other import f", "def x():\n    jit = 1"):
        assert hidden_module_errors(source, "p", modules) == [], source


def test_modules_named_like_functions_are_found():
    modules = {"p.jit", "p.library.all_reduce", "p.grad"}
    assert modules_like_functions("p", modules, {"jit", "all_reduce"}) == ["p.jit"]
    assert {"jit", "all_reduce", "data_parallel", "build", "select"} <= public_functions()
    assert not {"Mesh", "errors"} & public_functions()
