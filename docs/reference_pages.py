"""The pages of the reference: functions by topic, environment variables, errors, and the command line, from the code."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
from pathlib import Path

import funccoll
from funccoll import config, errors

TOPICS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # page: (title, what it has, names of funccoll; a name with a dot is a module, of which all public names follow)
    "arrays": (
        "Meshes and arrays", "Devices with named axes, and arrays that are placed on them.",
        ("make_mesh", "abstract_mesh", "Mesh", "P", "Sharding", "Array", "ArrayType", "bfloat16", "asarray", "device_put",
         "from_local", "spec_like", "redistribute", "process_allgather"),
    ),
    "collectives": (
        "Collectives", "Pure functions over mesh axes, called in a function that `fc.jit` traces.",
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast", "reduce", "gather", "scatter",
         "barrier", "axis_index", "axis_size", "own_slice", "pvary"),
    ),
    "transformations": (
        "Transformations", "Functions of functions: compiled, differentiated, batched.",
        ("jit", "grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian", "vmap", "checkpoint",
         "checkpoint_name", "checkpoint_policies", "custom_vjp", "grad_hook", "stop_gradient", "custom_primitive",
         "pure_callback", "eval_shape", "clear_caches"),
    ),
    "control_flow": (
        "Loops and branches", "Control flow whose length or way depends on values.",
        ("scan", "fori_loop", "while_loop", "cond", "switch"),
    ),
    "numpy": (
        "Beside NumPy", "What NumPy lacks in a traced function; NumPy's own functions are called as they are.",
        ("at", "full", "top_k", "unique", "supported_functions", ".linalg", ".special", ".random"),
    ),
    "data_parallel": (
        "Data parallelism", "Training on several devices, with gradients reduced in buckets.",
        ("data_parallel", "DataParallel", "uneven_batches", ".comm_hooks"),
    ),
    "models": ("Model functions", "Layers and losses, and optimizers.", (".nn", ".optim")),
    "jobs": (
        "Processes", "Jobs of processes: starting, joining and leaving.", ("launch", "init", "finalize", "rank", "world_size"),
    ),
    "schedules": ("Schedules", "Communication schedules: built, proved, costed, simulated.", (".schedules", ".draw")),
    "looking": (
        "Debugging and profiling", "Values and times, seen.", ("profile", "named_scope", ".debug", ".profiling"),
    ),
    "trees": ("Pytrees", "Nested containers of arrays.", (".tree",)),
}  # fmt: skip
LEFT_OUT = {
    "AUTO", "errors", "FunccollError", "PlannedError", "PlannedNameError", "DTypePromotionWarning", "GlobalRandomWarning",
    "TracedRankWarning", "__version__",
}  # fmt: skip
"""Public names without an entry of their own: those of pages below."""
COMMANDS = ("run", "doctor", "tune", "schedule", "explain", "profile")


def write(folder: Path) -> None:
    """Write all pages that differ from what they should have."""
    folder.mkdir(exist_ok=True)
    pages = {name: _topic(*topic) for name, topic in TOPICS.items()}
    pages |= {"environment": _environment(), "errors": _errors(), "command_line": _command_line()}
    pages["index"] = _index(pages)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def described() -> set[str]:
    """The public names that the pages describe."""
    return {name.lstrip(".") for _, _, names in TOPICS.values() for name in names} | LEFT_OUT


def _directive(kind: str, name: str) -> str:
    return f"```{{eval-rst}}\n.. {kind}:: {name}\n```\n"


def _entry(module: str, name: str) -> str:
    thing = getattr(importlib.import_module(module), name)
    if inspect.ismodule(thing):
        return ""
    kind = "autoclass" if inspect.isclass(thing) else "autofunction" if callable(thing) else "autodata"
    return _directive(kind, f"{module}.{name}")


def _topic(title: str, about: str, names: tuple[str, ...]) -> str:
    parts = [f"# {title}\n\n{about}\n"]
    for name in names:
        if not name.startswith("."):
            parts.append(_entry("funccoll", name))
            continue
        found = getattr(funccoll, name[1:])
        head = (inspect.getdoc(found) or "").partition("\n\n")[0]
        parts.append(f"## `fc{name}`\n\n{head}\n")
        parts += [_entry(found.__name__, each) for each in found.__all__]
    return "\n".join(filter(None, parts))


def _environment() -> str:
    rows = [(str(v), v.default or "not set", v.meaning) for v in config.VARIABLES.values() if not v.own]
    table = "\n".join(f"| `{name}` | {default} | {meaning} |" for name, default, meaning in sorted(rows))
    own = ", ".join(f"`{v}`" for v in sorted(map(str, (v for v in config.VARIABLES.values() if v.own))))
    return (
        "# Environment variables\n\n"
        "`funccoll doctor` lists the ones that are set, and warns about names which look like one and are not.\n\n"
        f"| variable | default | meaning |\n|---|---|---|\n{table}\n\n"
        f"Launchers and ranks set these for each other: {own}.\n"
    )


def _errors() -> str:
    parts = [
        "# Errors\n\nEvery error of funccoll's names the line of your code, and says what to do. All are in `fc.errors`.\n"
    ]
    for name in errors.__all__:
        thing = getattr(errors, name)
        if inspect.isclass(thing) and issubclass(thing, (Exception, Warning)):
            parts.append(_directive("autoexception", f"funccoll.errors.{name}"))
    return "\n".join(parts)


def _command_line() -> str:
    parts = ["# Command line\n\n`funccoll COMMAND --help` prints these pages.\n"]
    for command in COMMANDS:
        main = importlib.import_module(f"funccoll.tools.commands.{command}_command").main
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            os.environ["NO_COLOR"] = "1"
            main(["--help"])
        parts.append(f"## `funccoll {command}`\n\n```text\n{text.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


def _index(pages: dict[str, str]) -> str:
    listed = "\n".join(pages)
    return f"# Reference\n\nThese pages are generated from the code.\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
