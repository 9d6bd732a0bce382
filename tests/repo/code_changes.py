"""Single small changes of the package's code, drawn by a seed."""

from __future__ import annotations

import ast
import random
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path, PurePath

COMPARISONS = {
    ast.Lt: ("<", "<=", ">"),
    ast.LtE: ("<=", "<", ">="),
    ast.Gt: (">", ">=", "<"),
    ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*", "%"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "|"),
}
SWAPS_SAY_NOTHING = {"max", "min", "isinstance", "issubclass", "hasattr", "getattr"}  # the same, or an error at once
TEXTS = {"__repr__", "__str__", "__format__", "_repr_html_"}  # functions that only say something


@dataclass(frozen=True)
class Mutant:
    """One change of one file: the lines (numbered from `line` on) before and after."""

    path: str
    before: str
    after: str
    line: int = 0
    kind: str = ""

    def __str__(self) -> str:
        if not self.path:
            return "the unchanged tree"
        same = _alike(self.before, self.after)
        tail = _alike(self.before[same:][::-1], self.after[same:][::-1])
        short = [" ".join(t[max(0, same - 24) : len(t) - max(0, tail - 16)].split()) for t in (self.before, self.after)]
        return f"{self.path}:{self.line} {self.kind}: {short[0]} -> {short[1]}"


def _alike(one: str, two: str) -> int:
    """How many characters are the same at the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))


@dataclass(frozen=True)
class Place:
    """Bytes of a file that can be changed, and the texts that may stand there instead."""

    path: str
    kind: str
    start: int
    end: int
    texts: tuple[str, ...]


class Places(ast.NodeVisitor):
    """Every place of a module that can be changed.

    Passed over: annotations, decorators, `if TYPE_CHECKING`, `__all__`, and what only makes texts. Python 3.11 does not say
    where the parts of an f-string are. An assertion, or `strict=True`, states what cannot happen: no test can tell
    a weaker one.
    """

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found = path, source, list[Place]()
        self.lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
        self.bound: Counter[str] | None = None  # how often the function around binds each name; None outside
        self.visit(ast.parse(source))
        self.found.sort(key=lambda p: (p.start, p.end, p.kind))

    def span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self.lines[node.lineno - 1], self.lines[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        return self.source[slice(*self.span(node))].decode()

    def add(self, kind: str, span: tuple[int, int], *texts: str) -> None:
        self.found.append(Place(self.path, kind, *span, texts))

    def operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, *new: str) -> None:
        """Between two operands stand the operator, parentheses, white space, and perhaps a comment."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = self.source[start:end].decode()
        found = re.search(r"\s+".join(map(re.escape, old.split())), between)
        if found and "#" not in between:
            self.add(kind, (start + found.start(), start + found.end()), *new)

    def condition(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Constant) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self.add("negated condition", self.span(test), f"not ({self.text(test)})")

    def pass_over(self, node: ast.AST) -> None:
        pass

    visit_JoinedStr = visit_Raise = visit_Assert = visit_arg = pass_over

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in TEXTS:
            return
        around, names = self.bound, [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self.bound = Counter([*names, *(a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg))])
        for child in (node.args, *node.body):
            self.visit(child)
        self.bound = around

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                self.visit(child)
        else:
            self.visit_While(node)

    def visit_While(self, node: ast.While | ast.If | ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.condition(test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self.add("dropped statement", self.span(node), "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == "__all__":
            return
        # Without its only assignment a name is an error at once.
        elsewhere = isinstance(target, ast.Name) and (self.bound or {}).get(target.id, 0) > 1
        if self.bound is not None and (elsewhere or isinstance(target, ast.Attribute | ast.Subscript)):
            self.add("dropped statement", self.span(node), "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("dropped statement", self.span(node), "pass")
        if type(node.op) in ARITHMETIC:
            old, *new = (f"{o}=" for o in ARITHMETIC[type(node.op)])
            self.operator("arithmetic", node.target, node.value, old, *new)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.add("returned None", self.span(node.value), "None")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for (left, right), op in zip(pairwise([node.left, *node.comparators]), node.ops):
            self.operator("comparison", left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self.operator("and, or", left, right, *(("and", "or") if isinstance(node.op, ast.And) else ("or", "and")))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        no_numbers = any(
            isinstance(x, ast.JoinedStr | ast.List | ast.Tuple) or (isinstance(x, ast.Constant) and isinstance(x.value, str))
            for x in (node.left, node.right)
        ) or (isinstance(node.op, ast.BitOr) and self.bound is None)  # a union of types
        if type(node.op) in ARITHMETIC and not no_numbers:
            self.operator("arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.add("removed not", self.span(node), self.text(node).removeprefix("not").lstrip())
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add("True, False", self.span(node), str(not node.value))
        elif isinstance(node.value, int):
            self.add("integer", self.span(node), str(node.value + 1), str(node.value - 1))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in filter(None, (node.lower, node.upper)):
            moved = [] if isinstance(bound, ast.Constant) else [f"{self.text(bound)} + 1", f"{self.text(bound)} - 1"]
            self.add("slice bound", self.span(bound), "", *moved)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        if name.endswith("Error"):
            return
        starred = any(isinstance(a, ast.Starred) for a in node.args)
        if len(node.args) == 2 and not node.keywords and not starred and name not in SWAPS_SAY_NOTHING:
            (start, stop), (begin, end) = map(self.span, node.args)
            first, second = map(self.text, node.args)
            self.add("swapped arguments", (start, end), second + self.source[stop:begin].decode() + first)
        self.generic_visit(node)


def change_place(source: bytes, place: Place, text: str) -> Mutant | None:
    """The mutant, or None when it does not compile, or means what the source means."""
    first = source.rfind(b"\n", 0, place.start) + 1
    last = source.index(b"\n", place.end)
    after = source[first : place.start] + text.encode() + source[place.end : last]
    changed = source[:first] + after + source[last:]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as `is 3`: every import would say it
            compile(changed, place.path, "exec")
    except SyntaxError:
        return None
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        return None
    line = source.count(b"\n", 0, first) + 1
    return Mutant(place.path, source[first:last].decode(), after.decode(), line, place.kind)


@cache
def places_of(path: str, source: bytes) -> list[Place]:
    return Places(path, source).found


def draw(tree: Path, seed: int, count: int) -> list[Mutant]:
    """That many mutants: each package has its share by its places, at least one, spread over its modules' length."""
    rng, sources, packages = random.Random(seed), dict[str, bytes](), dict[str, list[Place]]()
    for file in sorted((tree / "funccoll").rglob("*.py")):
        path = file.relative_to(tree).as_posix()
        sources[path] = file.read_bytes()
        if places := places_of(path, sources[path]):
            packages.setdefault(str(PurePath(path).parent), []).extend(places)
    shares = dict.fromkeys(packages, 1)
    for _ in range(count - len(packages)):
        shares[max(packages, key=lambda p: len(packages[p]) / (shares[p] + 1))] += 1
    drawn = []
    for package, places in packages.items():
        for i in range(shares[package]):
            stretch = places[len(places) * i // shares[package] : len(places) * (i + 1) // shares[package]]
            choices = ((p, rng.choice(p.texts)) for p in rng.sample(stretch, len(stretch)))
            drawn.append(next(m for p, text in choices if (m := change_place(sources[p.path], p, text))))
    return drawn[:count]


def apply(tree: Path, mutant: Mutant) -> None:
    """Change the file. The lines are looked for at their number, and anywhere else when they stand there only once."""
    if not mutant.path:
        return
    file = tree / mutant.path
    source = file.read_bytes().decode()
    at = sum(map(len, source.splitlines(keepends=True)[: mutant.line - 1])) if mutant.line else len(source)
    if not source.startswith(mutant.before, at):
        if source.count(mutant.before) != 1:
            raise SystemExit(f"{mutant}: these lines stand {source.count(mutant.before)} times in {file}.")
        at = source.index(mutant.before)
    file.write_bytes((source[:at] + mutant.after + source[at + len(mutant.before) :]).encode())
