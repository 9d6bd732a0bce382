"""Functions of a module's source by name: the code of each, what stands outside, and marks that say which are called."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
MARKS = "__marks__"
"""Name of what a marked function writes 1 to, at its number: bytes among Python's builtins."""


@dataclass
class Functions(ast.NodeVisitor):
    """The functions of a source by name, in their order: `Mesh.axis`, `jit.call` (within `jit`), `ADD.<lambda>`.

    A lambda within a function belongs to it. One outside is named after what its statement binds.
    """

    found: dict[str, Function | ast.Lambda] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    around: tuple[str, ...] = ()
    inside: bool = False

    def take(self, name: str, node: Function | ast.Lambda) -> None:
        self.found[f"{name}#{self.counts[name]}" if name in self.found else name] = node
        self.counts[name] += 1

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self.around = self.around, (*self.around, node.name)
        self.generic_visit(node)
        self.around = before

    def visit_FunctionDef(self, node: Function) -> None:
        self.take(".".join((*self.around, node.name)), node)
        before = self.around, self.inside
        self.around, self.inside = (*self.around, node.name), True
        self.generic_visit(node)
        self.around, self.inside = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        before = self.around
        if not self.inside:
            self.around = (*before, *sorted(bound_names(node))[:1])
        self.generic_visit(node)
        self.around = before

    visit_AnnAssign = visit_Assign

    def visit_Lambda(self, node: ast.Lambda) -> None:
        if not self.inside:
            self.take(".".join((*self.around, "<lambda>")), node)


def functions_of(tree: ast.Module) -> dict[str, Function | ast.Lambda]:
    visitor = Functions()
    visitor.visit(tree)
    return visitor.found


def bound_names(statement: ast.AST) -> set[str]:
    """The names that a statement binds where it stands, and not within a function."""
    found = {statement.name} if isinstance(statement, ast.ClassDef | Function) else set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
    return found


def _without_docstring(body: list[ast.stmt]) -> int:
    """The number of a body's first statement that is not its docstring."""
    first = body[0] if body else None
    return int(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str))


class _Emptied(ast.NodeTransformer):
    """Drops docstrings, and what belongs to a function within."""

    def visit_FunctionDef(self, node: Function) -> ast.AST:
        return ast.copy_location(ast.Name(node.name, ast.Load()), node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = node.body[_without_docstring(node.body) :]
        self.generic_visit(node)
        return node


class _EmptiedOutside(_Emptied):
    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return ast.Name("<lambda>", ast.Load())


def code_of(source: str) -> tuple[dict[str, str], Counter[str], dict[str, set[str]]]:
    """Of each function its code (not that of functions within, and no docstrings); the statements outside; what each binds."""
    tree = ast.parse(source)
    codes = {}
    for name, node in functions_of(tree).items():
        own = copy.deepcopy(node)
        if isinstance(own, ast.Lambda):
            codes[name] = ast.dump(own)
            continue
        own.body = own.body[_without_docstring(own.body) :]
        _Emptied().generic_visit(own)
        codes[name] = ast.dump(own)
    tree.body = tree.body[_without_docstring(tree.body) :]
    binds = {}
    outside = Counter[str]()

    def take(statement: ast.stmt) -> None:
        names = bound_names(statement)
        if isinstance(statement, ast.ClassDef):  # each statement of its body, and its head
            for child in statement.body[_without_docstring(statement.body) :]:
                if not isinstance(child, Function):
                    take(child)
            statement = ast.ClassDef(statement.name, statement.bases, statement.keywords, [], statement.decorator_list)
            names = {statement.name}
        text = ast.dump(_EmptiedOutside().visit(copy.deepcopy(statement)))
        outside[text] += 1
        binds.setdefault(text, set()).update(names)

    for statement in tree.body:
        if not isinstance(statement, Function):
            take(statement)
    return codes, outside, binds


def marked(source: str, first: int) -> ast.Module:
    """The module, each of whose functions writes 1 to MARKS when it is called: at `first` + its number among `functions_of`."""
    tree = ast.parse(source)
    for number, node in enumerate(functions_of(tree).values(), first):
        if isinstance(node, ast.Lambda):
            write = ast.parse(f"{MARKS}.__setitem__({number}, 1) or 0", mode="eval").body
            assert isinstance(write, ast.BoolOp)
            write.values[1] = node.body
            _place(write, node.body)
            node.body = write
        elif not any("njit" in ast.unparse(d) for d in node.decorator_list):  # Numba does not know what a mark is
            write = ast.parse(f"{MARKS}[{number}] = 1").body[0]
            at = _without_docstring(node.body)
            _place(write, node)
            node.body.insert(at, write)
    return ast.fix_missing_locations(tree)


def _place(node: ast.AST, where: ast.AST) -> None:
    """Give what stands in none of the source's lines the place of a node that does."""
    kept = set(ast.walk(where)) if isinstance(node, ast.BoolOp) else set()
    for child in ast.walk(node):
        if child not in kept:
            ast.copy_location(child, where)
