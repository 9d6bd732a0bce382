"""The page docs/guides/numpy.md, from the table of functions and its cases: `python -m tests.docs.numpy_page` writes it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from funccoll.ops import FUNCTIONS
from funccoll.ops.registry import INSTEAD, qualified_name
from funccoll.primitives.elementwise import UFUNCS
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.derivative_cases import section
from tests.support.cases.numpy_cases import SMOOTH

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "numpy.md"
HEAD = """# NumPy in traced functions

After this page you know which functions of NumPy you can call in a traced function, and what to write in place of the others.
`python -m tests.docs.numpy_page` writes this page from the table of functions (`funccoll.supported_functions()`) and from the
cases that test it. You call NumPy's own functions, on traced arrays as on others:

```python
import numpy as np, funccoll as fc

print(fc.grad(lambda x: np.sum(np.sort(x)[-3:]))(np.array([3.0, 1.0, 2.0, 5.0])))
```

```text
[1. 0. 1. 1.]
```

A function without a note takes all of NumPy's arguments but `out=` (use the returned value), and but `order=`, `subok=`,
`copy=` and `device=`, which describe an array's memory. Values are NumPy's own to the bit. If the last column says *rounding*,
they are equal up to a few roundings, because they are computed in other steps (sum, prod, mean, var, std: only with `where=`).
If a function has a gradient, you can differentiate it any number of times.

Shapes are known while tracing. If a shape would depend on values, the function raises an error that says what to write.

## What NumPy cannot dispatch

| in place of | write |
|---|---|
| `np.array([x, 1.0])` with a traced x | `fc.asarray([x, 1.0])`, or `np.array([x, 1.0], like=x)` |
| `np.full(shape, x)` | `fc.full(shape, x)`, or `np.full(shape, x, like=x)` |
| `table[i]` of a NumPy array with a traced i | `fc.asarray(table)[i]` |
| `np.take(table, i)` | `np.take(fc.asarray(table), i)` |
| `a[i] = x`, `a[i] += x` | `a = fc.at(a)[i].set(x)`, `.add(x)`; also `.multiply`, `.min`, `.max`, and `.get(mode)` |
| `np.float32(x)` | `x.astype(np.float32)` |
| `np.unique(x)` | `fc.unique(x, size=n)` |
| `x.sort()` | `np.sort(x)`; the k largest: `fc.top_k(x, k)` |
| `if x > 0` | `np.where(x > 0, a, b)`, or `fc.cond(x > 0, f, g, *args)` |
| `while x > 0`, `for i in range(n)` | `fc.while_loop(test, body, init)`, `fc.fori_loop(0, n, body, init)` |
"""


def arguments_of(function: Callable[..., Any]) -> set[str]:
    """The names of a function's arguments; none where Python cannot tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return set()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return {"*"}
    return {p.name for p in parameters}


EVERYWHERE = {"out", "order", "subok", "copy", "device", "like", "prototype"}


def left_out(function: Callable[..., Any], traced: Callable[..., Any]) -> list[str]:
    """NumPy's arguments that the traced form does not take."""
    theirs, ours = arguments_of(function), arguments_of(traced)
    return [] if "*" in ours | theirs else sorted(theirs - ours - EVERYWHERE)


def remark(traced: Callable[..., Any]) -> str:
    """What a traced form's docstring says beyond the function's name."""
    words = " ".join((traced.__doc__ or "").split())
    words = re.sub(r"^np\.[\w.]+\s*[.:,;]?\s*", "", words)
    return (words[:1].upper() + words[1:]).replace("|", "\\|")


def notes(function: Callable[..., Any], traced: Callable[..., Any]) -> str:
    """The note on a function."""
    missing = left_out(function, traced)
    parts = [remark(traced)]
    if missing:
        parts.append(f"Without {', '.join(f'`{m}=`' for m in missing)}.")
    return " ".join(p if p.endswith(".") else f"{p}." for p in parts if p)


def page() -> str:
    """The text of the page."""
    rounded = {c.function for c in CASES if not c.exact}
    smooth = {c.function for c in CASES if c.grad == SMOOTH}
    lines = [HEAD, "## Functions", "", "| function | notes | gradient | values |", "|---|---|---|---|"]
    for function in sorted(FUNCTIONS, key=qualified_name):
        gradient = "yes" if function in smooth else "—"
        bits = "rounding" if function in rounded else ""
        lines.append(f"| `{qualified_name(function)}` | {notes(function, FUNCTIONS[function])} | {gradient} | {bits} |")
    names = lambda ufuncs: ", ".join(f"`{n}`" for n in sorted({f.__name__ for f in ufuncs}))
    lines += [
        "",
        "## Ufuncs",
        "",
        "With NumPy's broadcasting and promotion (NEP 50), and `dtype=`; without `out=` and `where=`.",
        "",
        f"With gradients: {names(u for u in [*UFUNCS, np.matmul, np.divmod, np.modf] if u in smooth)}; and `vecdot`, `matvec`, "
        "`vecmat` where NumPy has them.",
        "",
        f"Without, or with 0 everywhere: {names(u for u in UFUNCS if u not in smooth)}.",
        "",
        "Methods: `.outer` of all; `.reduce` of add, multiply, maximum, minimum, fmax, fmin, logical_and, logical_or and "
        "logaddexp; `.accumulate` of add, multiply, maximum and minimum; in place of `np.add.at(x, i, v)` stands "
        "`fc.at(x)[i].add(v)`.",
        "",
        *section(),
        "## Not traced, with an expression that computes the same",
        "",
        "The error of each names the expression, too. n is a number that is known.",
        "",
        "| function | write |",
        "|---|---|",
        *(f"| `np.{name}` | `{expression}` |" for name, expression in sorted(INSTEAD.items())),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
