"""Docstrings of public names: sections in Google style that name exactly the parameters, and examples that run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.schedules.registry import _ALGORITHMS
from tests.repo.layers import FILES

MODULES: dict[str, str] = {
    "": "funccoll",
    "checkpoint_policies": "funccoll.transforms.autodiff.checkpoint_policies",
    "comm_hooks": "funccoll.parallel.comm_hooks",
    "debug": "funccoll.debug",
    "draw": "funccoll.draw",
    "errors": "funccoll.errors",
    "linalg": "funccoll.linalg",
    "nn": "funccoll.nn",
    "optim": "funccoll.optim",
    "profiling": "funccoll.profiling",
    "random": "funccoll.random",
    "schedules": "funccoll.schedules",
    "special": "funccoll.special",
    "torch": "funccoll.torch",
    "tree": "funccoll.tree",
}
"""A public module, as users write it after `fc.` -> where it is."""
SECTIONS = ("Args", "Returns", "Yields", "Raises", "Example", "Note", "References")
NEVER_CALLED: dict[str, str] = {
    "Array": "device_put, from_local and functions of jit make them",
    "Future": "all_reduce_start and its like make them",
    "Mesh": "make_mesh makes them",
    "ProcessGroup": "group and split make them",
    "Work": "start makes them",
    "profiling.Blame": "Profile has them",
    "profiling.Cause": "Profile has them",
    "profiling.Profile": "profile and runs_of make them",
    "profiling.Timeline": "Profile has them",
    "schedules.Proof": "Schedule.prove makes them",
    "schedules.Schedule": "build makes them",
    "schedules.Streams": "Schedule.lower makes them",
    "torch.GradBucket": "DistributedDataParallel makes them",
}
"""Classes that users do not construct, so that their parameters need no Args: name -> where objects come from."""
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


# ---------------------------------------------------------------- reading docstrings


@dataclass(frozen=True)
class Public:
    """A public function or class: its docstring, the parameters of a call, and whether a call returns something to say."""

    doc: str
    parameters: tuple[str, ...] = ()
    returns: bool = False
    is_error: bool = False


def sections(doc: str) -> dict[str, str]:
    """Section -> text; "" has what stands before the first. A title is a capitalized word with a colon, alone in its line."""
    found, title = {"": ""}, ""
    for line in doc.splitlines():
        if match := re.fullmatch(r"([A-Z][A-Za-z]+(?: [A-Za-z]+)?):", line):
            title = match[1]
        found[title] = found.get(title, "") + line + "\n"
    return found


def args(text: str) -> list[str]:
    """The names that an Args section explains: lines of its first indentation, such as `x: ...`, `a, b: ...`, `*args: ...`."""
    names = []
    for line in text.splitlines()[1:]:
        if match := re.match(r" {4}(\S.*?)(?: \(.*?\))?: ", line + " "):
            names += [name.strip().strip("`*\\") for name in match[1].split(",")]
    return names


def faults(public: Public) -> list[str]:
    """What is wrong with a docstring."""
    doc = inspect.cleandoc(public.doc)
    if not doc:
        return ["there is no docstring"]
    found = sections(doc)
    wrong = [f"{title}: is not a section of {', '.join(SECTIONS)}" for title in found if title and title not in SECTIONS]
    wrong += [f"{word}: stands alone in its line" for word in re.findall(rf"(?m)^({'|'.join(SECTIONS)}): ", doc)]
    expected = [name.strip("*") for name in public.parameters]
    explained = args(found.get("Args", ""))
    if explained != expected:
        wrong.append(f"Args: explains {explained}, the parameters are {expected}")
    if public.parameters and public.returns and not {"Returns", "Yields"} & found.keys():
        wrong.append("Returns: is missing")
    if public.is_error and len(re.findall(r"\.(?:\s|$)", doc)) < 2:
        wrong.append("an error's docstring has its cause and the remedy, in two sentences at least")
    return wrong


# ---------------------------------------------------------------- the public names


def public_names() -> Iterator[tuple[str, str, Any]]:
    """(module, name, value) of all public functions and classes; of funccoll.torch, which is not imported, its syntax."""
    for module, path in MODULES.items():
        if module == "torch":
            for name, node in torch_nodes():
                yield module, name, node
            continue
        namespace = importlib.import_module(path)
        for name in namespace.__all__:
            value = getattr(namespace, name)
            is_public = inspect.isclass(value) or inspect.isfunction(value)
            if module == "errors":  # the others are for other modules of funccoll
                is_public = inspect.isclass(value) and issubclass(value, (Exception, Warning))
            is_ours = getattr(value, "__module__", "").startswith("funccoll")  # fc.tree has some of optree's
            if is_public and is_ours and not (module and getattr(fc, name, None) is value):
                yield module, name, value


def torch_nodes() -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """(name, definition) of the public names of funccoll.torch, read from its sources."""
    folder = Path(fc.__path__[0]) / "torch"
    tree = ast.parse((folder / "__init__.py").read_text())
    assigned = next(node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            for statement in ast.parse((folder / f"{node.module}.py").read_text()).body:
                if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                    if statement.name in ast.literal_eval(assigned.value):
                        yield statement.name, statement


def from_value(value: Any) -> Public:
    """A function or class that is imported."""
    doc = value.__doc__ or ""
    is_class = inspect.isclass(value)
    if is_class and issubclass(value, (Exception, Warning)):
        return Public(doc, is_error=True)
    signature = inspect.signature(value)
    shown = tuple(name for name in signature.parameters if not name.startswith("_"))
    return Public(doc, shown, not is_class and signature.return_annotation not in (None, "None", signature.empty))


def from_node(node: ast.FunctionDef | ast.ClassDef) -> Public:
    """A function or class that is read from its source."""
    doc, function = ast.get_docstring(node) or "", node
    if isinstance(node, ast.ClassDef):
        methods = [s for s in node.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
        if not methods:
            return Public(doc)
        function = methods[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    own = ["cls"] if "classmethod" in map(ast.unparse, function.decorator_list) else []
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    shown = tuple(a.arg for a in every if a and a.arg not in ("self", *own) and not a.arg.startswith("_"))
    returned = ast.unparse(function.returns) if function.returns else "None"
    return Public(doc, shown, isinstance(node, ast.FunctionDef) and returned != "None")


def described(module: str, name: str, value: Any) -> Public:
    """What is public of a name; a class that users do not construct has no parameters to explain."""
    public = from_node(value) if isinstance(value, (ast.FunctionDef, ast.ClassDef)) else from_value(value)
    if f"{module}.{name}".lstrip(".") in NEVER_CALLED:
        public = Public(public.doc)
    return public


# ---------------------------------------------------------------- the tests


@pytest.mark.parametrize("module", MODULES)
def test_docstrings_explain_what_a_call_takes(module):
    """Args names exactly the parameters, Returns is there, and no other section."""
    wrong = {name: faults(described(module, name, value)) for at, name, value in public_names() if at == module}
    errors = [f"fc.{module}{'.' * bool(module)}{n}: {'; '.join(f)}" for n, f in wrong.items() if f]
    assert not errors, "\n".join(errors)


def test_no_docstring_explains_parameters_that_are_not_there():
    """Of private functions and methods, too, whose Args need not name all parameters; in the order of the parameters."""
    errors = []
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "    Args:\n" in source else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names = from_node(node).parameters
                explained = args(sections(ast.get_docstring(node) or "").get("Args", ""))
                if names and explained != [name for name in names if name in explained]:
                    errors.append(f"{path}:{node.lineno}: Args explains {explained}, the parameters are {[*names]}")
    assert not errors, "\n".join(errors)


def test_classes_that_are_not_constructed_are_public():
    names = {f"{module}.{name}".lstrip(".") for module, name, _ in public_names()}
    assert NEVER_CALLED.keys() <= names, NEVER_CALLED.keys() - names


def examples(module: str) -> Iterator[doctest.DocTest]:
    """The examples of a public module, its functions, and its classes with their methods."""
    finder = doctest.DocTestFinder()
    namespace, path = {"np": np, "fc": fc, "P": P}, MODULES[module]
    text = importlib.import_module(path).__doc__ or ""
    yield doctest.DocTestParser().get_doctest(text, namespace, path, path, 0)
    for at, name, value in public_names():
        if at == module:
            # `module=False`: methods too that are defined in another module
            yield from finder.find(value, f"{path}.{name}", module=False, globs=namespace)


@pytest.mark.parametrize("module", [module for module in MODULES if module != "torch"])
def test_examples_of_docstrings_run(module, monkeypatch):
    for kind, found in _ALGORITHMS.items():
        monkeypatch.setitem(_ALGORITHMS, kind, dict(found))  # examples register some
    run_examples(examples(module))


def run_examples(tests: Iterator[doctest.DocTest]) -> None:
    """Run examples; fail with what doctest reports."""
    runner, reports = doctest.DocTestRunner(verbose=False, optionflags=OPTIONS), []
    for test in tests:
        runner.run(test, out=reports.append)
    assert not reports, "".join(reports)


# ---------------------------------------------------------------- the checks themselves can fail

RIGHT = """Return the sum.

Args:
    x: An array.
        Its second line has a colon: this is not a name.
    a, b (optional): Numbers.
    *rest: More.

Returns:
    An array.
"""


def test_a_right_docstring_has_no_faults():
    assert faults(Public(RIGHT, ("x", "a", "b", "rest"), returns=True)) == []


@pytest.mark.parametrize(
    ("doc", "parameters"),
    [
        ("", ()),
        ("Return the sum.", ("x",)),
        (RIGHT, ("x", "a", "rest")),
        (RIGHT, ("a", "x", "b", "rest")),
        (RIGHT, ("x", "a", "b", "rest", "axis")),
        (RIGHT.replace("Returns:", "Gives:"), ("x", "a", "b", "rest")),
        (RIGHT.replace("Returns:\n    An", "Returns: an"), ("x", "a", "b", "rest")),
    ],
)
def test_a_wrong_docstring_has_faults(doc, parameters):
    assert faults(Public(doc, parameters, returns=True))


def test_an_error_needs_a_remedy():
    assert faults(Public("Two sizes differ.", is_error=True))
    assert faults(Public("Two sizes differ. Make them equal.", is_error=True)) == []


def test_a_wrong_example_fails():
    def wrong():
        """A sum.

        >>> np.arange(3).sum()
        4
        """

    test = doctest.DocTestFinder().find(wrong, "wrong", module=ModuleType("m"), globs={"np": np})
    with pytest.raises(AssertionError, match="Expected"):
        run_examples(iter(test))
