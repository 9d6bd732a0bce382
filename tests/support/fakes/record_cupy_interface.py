"""Record CuPy's interface, for its fake: `python record_cupy_interface.py` where CuPy can be imported; it needs no GPU.

It writes cupy_interface.json: the names of functions with their parameters, the loops of ufuncs, the members of ndarray.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("cupy_interface.json")


def parameters(function: Any) -> list[str] | None:
    """Names of the parameters, "*" before those that are keywords only, each with "=" where it has a default."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    found: list[str] = []
    for p in signature.parameters.values():
        if p.kind is p.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        name = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        found.append(name + ("" if p.default is p.empty else "="))
    return found


def from_docstring(method: Any) -> list[str] | None:
    """The same of a compiled method, whose docstring begins with its call."""
    match = re.match(r"\w+\.\w+\((?:self(?:, )?)?(.*)\)", (method.__doc__ or "").split("\n")[0])
    if match is None:
        return None
    words = [w.split() for w in filter(None, match[1].split(", "))]
    return [w[-1].split("=")[0] + ("=" if "=" in w[-1] else "") for w in words]


def ufunc(function: Any) -> dict[str, Any]:
    """The loops of a ufunc in CuPy's order, those that only raise, and what its `at` does."""
    refused = [f"{t}" for t, op in zip(function.types, function._ops.ops, strict=True) if op.error_func is not None]
    return {"types": function.types, "refused": refused, "at": function._scatter_op}


def main() -> None:
    import cupy  # pyright: ignore[reportMissingImports]
    from cupy._sorting import search  # pyright: ignore[reportMissingImports]
    from cupyx.scipy import special  # pyright: ignore[reportMissingImports]

    public = {n: getattr(cupy, n) for n in sorted(dir(cupy)) if not n.startswith("_")}
    ufuncs = {n: f for n, f in public.items() if isinstance(f, cupy.ufunc)}
    called = {n: f for n, f in public.items() if callable(f) and not isinstance(f, type) and n not in ufuncs}
    members = {n: getattr(cupy.ndarray, n) for n in sorted(dir(cupy.ndarray))}
    recorded = {
        "version": cupy.__version__,
        "ufuncs": {n: ufunc(f) for n, f in ufuncs.items()},
        "functions": {n: parameters(f) for n, f in called.items()},
        "ndarray": {n: from_docstring(m) if callable(m) else None for n, m in members.items()},
        "others": {"where": ufunc(search._where_ufunc), "erf": ufunc(special.erf)},
    }
    sections = (
        f'"{name}": {{\n' + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "\n}"
        if isinstance(part, dict)
        else f'"{name}": {json.dumps(part)}'
        for name, part in recorded.items()
    )
    FILE.write_text("{\n" + ",\n".join(sections) + "\n}\n")


if __name__ == "__main__":
    main()
